"""Passes Mooncake's log lines on to this process's log: one of each kind per period, with a count.

Mooncake logs to stderr with glog: three lines for each key of a store node that died, and a
meaningless error at each start. This module points glog's reference to `stderr` to a pipe, which a
thread reads. A full pipe loses lines, so the log never holds up a transfer. The line of a fatal
error goes to the true stderr before the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from sglang.srt.utils.loaded_libraries import open_loaded, replace_imports
from sglang.srt.utils.logging_utils import RateLimitedLogger

logger = logging.getLogger(__name__)

_LINE: Final = re.compile(r"([IWEF])\d{4} \S+ +\d+ ([\w.]+:\d+)\] (.*)")
_LEVELS: Final = {
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "F": logging.CRITICAL,
}
_MEANINGLESS: Final = (
    # Logged at each start of an engine or client, which looks itself up before it is registered.
    "Local segment descriptor not found",
    "Logging before InitGoogleLogging() is written to STDERR",
)
_CONSEQUENCES: Final = re.compile(
    r"completed with task failures|transfer_read_failed|Transfer failed for key"
    r"|failed for key.*TRANSFER_FAIL|failed to read READ status"
)
"""Lines about each read of a peer that is gone. The engine counts such reads; a line of another
kind names the peer."""
_NO_PEER: Final = re.compile(r"connection to (\S+) failed: ([^(]+?) \(")
_PIPE_BYTES: Final = 1 << 20
_F_SETPIPE_SZ: Final = 1031
_UNBUFFERED: Final = 2
_STDERR: Final = 2
_GATHER_S: Final = 0.2
_Failure: Final = ctypes.CFUNCTYPE(None)


@functools.cache
def mooncake_log() -> MooncakeLog:
    """The log of this process. It is never freed: the libraries' tables point to it."""
    return MooncakeLog()


class MooncakeLog:
    """A pipe in place of `stderr`, and the thread `mooncake-log` that reads it."""

    def __init__(self) -> None:
        self._passed = RateLimitedLogger(logger)
        self._read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.fcntl(write_end, _F_SETPIPE_SZ, _PIPE_BYTES)
        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        self.stream = ctypes.c_void_p(libc.fdopen(write_end, b"w"))
        """C's `FILE *` of the pipe."""
        # Each line is one write, which is done whole or not at all.
        libc.setvbuf(self.stream, None, _UNBUFFERED, ctypes.c_size_t(0))
        self._stderr = ctypes.addressof(ctypes.c_void_p.in_dll(libc, "stderr"))
        self._fail = _Failure(self._end_process)
        self._pending = b""
        threading.Thread(target=self._run, name="mooncake-log", daemon=True).start()

    def redirect(self, libraries: str) -> int:
        """Redirect the log of the loaded libraries whose paths begin with `libraries`. Returns the
        number of references to `stderr` that this call redirected. Idempotent."""
        ours = ctypes.addressof(self.stream)
        count = replace_imports(libraries, self._stderr, ours)
        glog = open_loaded(libraries, "libglog")
        if count and glog is not None:
            # Threads of Mooncake go on to log while the interpreter ends.
            atexit.register(replace_imports, libraries, ours, self._stderr)
            glog["_ZN6google22InstallFailureFunctionEPFvvE"](self._fail)
        return count

    def _end_process(self) -> None:
        """Runs in the thread of a fatal error, instead of glog's `abort`."""
        try:
            os.write(_STDERR, self._pending + self._read())
        finally:
            os.abort()

    def _run(self) -> None:
        while True:
            select.select([self._read_end], [], [])
            # Lines that come together are counted as one.
            time.sleep(_GATHER_S)
            self._pending += self._read()
            lines, _, rest = self._pending.rpartition(b"\n")
            self.pass_on(lines.decode(errors="replace").splitlines())
            self._pending = rest

    def _read(self) -> bytes:
        parts = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._read_end, _PIPE_BYTES):
                parts.append(part)
        return b"".join(parts)

    def pass_on(self, lines: Sequence[str]) -> None:
        """Log `lines`; those from the same place of Mooncake's code become one."""
        numbers: Counter[str] = Counter()
        firsts: dict[str, tuple[int, str]] = {}
        for line in lines:
            match = _LINE.match(line)
            if not line.strip() or any(words in line for words in _MEANINGLESS):
                continue
            level, place, text = logging.WARNING, "", line
            if match is not None:
                level, place, text = _LEVELS[match[1]], match[2], match[3]
            if level < logging.WARNING:
                logger.log(level, "Mooncake, %s: %s", place, text)
                continue
            if _CONSEQUENCES.search(text):
                logger.debug("Mooncake, %s: %s", place, text)
                continue
            if peer := _NO_PEER.search(text):
                text = (
                    f"no connection to {peer[1]} ({peer[2]}): a store node or a server there is "
                    "gone, and what is read from it is missing"
                )
            numbers[place] += 1
            firsts.setdefault(place, (level, text))
        for place, (level, text) in firsts.items():
            more = f" ({numbers[place]} such lines at once)" if numbers[place] > 1 else ""
            self._passed.log(level, place, "Mooncake, %s: %s%s", place or "further", text, more)
