"""Log set-up as text or JSON, and a logger that limits repeated lines."""

from __future__ import annotations

import datetime
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS: Final = ("text", "json")


class _EngineHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """The engine's handler on the root logger; its type differs from the embedding program's."""


class _JsonFormatter(logging.Formatter):
    """A JSON object for each record, in one line: `time` (ISO 8601, UTC), `level`, `process`,
    `logger`, `message`; `exception` with the traceback; and what a call gives as
    `extra={"fields": {...}}`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            **getattr(record, "fields", {}),
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def logs_json() -> bool:
    """True if `configure_logger` has set up JSON lines."""
    handlers = logging.getLogger().handlers
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in handlers)


def configure_logger(level: str, prefix: str = "", style: str = "text") -> None:
    """Send this process's log to stderr, as lines `[time prefix] message` or JSON objects.

    Another call replaces level, prefix and style. Handlers of the embedding program stay.

    Args:
        level: One of `LOG_LEVELS`, any case.
        prefix: Name of this process, e.g. `scheduler`; empty for the server process.
        style: One of `LOG_FORMATS`.

    Raises:
        ValueError: `level` or `style` is unknown.
    """
    if level.lower() not in LOG_LEVELS:
        raise ValueError(f"log level {level!r}: choose one of {', '.join(LOG_LEVELS)}")
    if style not in LOG_FORMATS:
        raise ValueError(f"log format {style!r}: choose one of {', '.join(LOG_FORMATS)}")
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _EngineHandler):
            root.removeHandler(handler)
    handler = _EngineHandler(sys.stderr)
    tag = f" {prefix}" if prefix else ""
    formatter = logging.Formatter(
        f"[%(asctime)s{tag}] %(levelname).1s %(message)s", "%Y-%m-%d %H:%M:%S"
    )
    handler.setFormatter(_JsonFormatter(prefix or "server") if style == "json" else formatter)
    # Python's own warnings are lines of text otherwise.
    logging.captureWarnings(style == "json")
    root.addHandler(handler)
    root.setLevel(level.upper())
    # The HTTP libraries log each request of a client in this process. torch logs about its caches
    # when a process ends early. Such lines are useful for debugging only.
    for name in ("httpx", "httpcore", "torch"):
        logging.getLogger(name).setLevel(
            logging.DEBUG if level.lower() == "debug" else logging.WARNING
        )


@dataclass(slots=True)
class _Window:
    started: float
    suppressed: int = 0


class RateLimitedLogger:
    """Logs at most one line per kind and period; the next line has the number of omitted ones.

    A kind is a short constant (`"l3-miss"`), never text from a request, because memory grows with
    the number of kinds. Any thread may call it; the lock is not held while a line is written.
    """

    def __init__(
        self,
        logger: logging.Logger,
        period: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wrap `logger`; `period` is in seconds of `clock`."""
        self._logger = logger
        self._period = period
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}

    def log(self, level: int, kind: str, message: str, *args: object) -> bool:
        """Log `message % args` unless `kind` was logged less than a period ago. Returns whether a
        line was written."""
        if not self._logger.isEnabledFor(level):
            return False
        now = self._clock()
        with self._lock:
            window = self._windows.get(kind)
            if window is not None and self._is_recent(window, now):
                window.suppressed += 1
                return False
            suppressed = window.suppressed if window is not None else 0
            self._windows[kind] = _Window(started=now)
        if suppressed:
            message += f" ({suppressed} more like it since the last such line)"
        self._logger.log(level, message, *args)
        return True

    def suppresses(self, level: int, kind: str) -> bool:
        """True if a line of `kind` would not be written now. For lines that are costly to compose,
        or tell a state or sums: a caller that asks first omits nothing that would be counted."""
        if not self._logger.isEnabledFor(level):
            return True
        with self._lock:
            return self._is_recent(self._windows.get(kind), self._clock())

    def _is_recent(self, window: _Window | None, now: float) -> bool:
        """True if the window's line was written less than a period ago."""
        return window is not None and now - window.started < self._period

    def info(self, kind: str, message: str, *args: object) -> bool:
        return self.log(logging.INFO, kind, message, *args)

    def warning(self, kind: str, message: str, *args: object) -> bool:
        return self.log(logging.WARNING, kind, message, *args)

    def error(self, kind: str, message: str, *args: object) -> bool:
        return self.log(logging.ERROR, kind, message, *args)
