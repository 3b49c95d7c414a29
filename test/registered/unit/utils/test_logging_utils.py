"""Logging: repeated set-up leaves one handler; one line per kind and period."""

from __future__ import annotations

import datetime
import json
import logging
import warnings

import pytest

from sglang.srt.utils.logging_utils import RateLimitedLogger, configure_logger, logs_json
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def test_configuring_twice_replaces_only_the_engines_handler() -> None:
    root = logging.getLogger()
    other = logging.NullHandler()
    root.addHandler(other)
    configure_logger("info", "a")
    count = len(root.handlers)
    configure_logger("WARNING", "b")
    assert len(root.handlers) == count
    assert other in root.handlers
    assert root.level == logging.WARNING


def test_line_has_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logger("info", "scheduler")
    logging.getLogger("x").info("tier %d", 2)
    line = capsys.readouterr().err
    assert " scheduler] I tier 2" in line


def test_json_lines_hold_one_object_each(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logger("info", "scheduler 0", "json")
    assert logs_json()
    log = logging.getLogger("x")
    log.info("tier %d:\n%s", 2, "\x1b[31m\u2028", extra={"fields": {"rid": "a", "level": "forged"}})
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log.exception("it failed")
    RateLimitedLogger(log).warning("kind", "seldom")
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == text.count("\n") == 4
    first = lines[0]
    assert first["message"] == "tier 2:\n\x1b[31m\u2028"
    assert (first["level"], first["process"], first["logger"]) == ("info", "scheduler 0", "x")
    assert first["rid"] == "a"
    assert datetime.datetime.fromisoformat(first["time"]).tzinfo is not None
    assert lines[1]["exception"].endswith("RuntimeError: broken")
    assert "old" in lines[3]["message"]
    configure_logger("info")
    assert not logs_json()


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'xml': choose one of text, json"):
        configure_logger("info", style="xml")


def test_libraries_log_warnings_only_except_at_debug() -> None:
    for level in ("debug", "info"):
        configure_logger(level)
        for name in ("httpx", "torch._subclasses.fake_tensor"):
            assert logging.getLogger(name).isEnabledFor(logging.INFO) == (level == "debug")


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud': choose one of debug, info"):
        configure_logger("loud")


def test_a_kind_is_logged_once_a_period(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    limited = RateLimitedLogger(logging.getLogger("t"), period=10.0, clock=lambda: now)
    with caplog.at_level(logging.INFO):
        assert limited.warning("miss", "miss of %s", "a")
        assert not limited.warning("miss", "miss of %s", "b")
        assert not limited.warning("miss", "miss of %s", "c")
        assert limited.info("late", "late")  # another class is not held back
        now = 10.0
        assert limited.warning("miss", "miss of %s", "d")
        now = 20.0
        assert limited.warning("miss", "miss of %s", "e")
    assert caplog.messages == [
        "miss of a",
        "late",
        "miss of d (2 more like it since the last such line)",
        "miss of e",
    ]


def test_a_line_that_nobody_composes_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    logger = logging.getLogger("t3")
    limited = RateLimitedLogger(logger, period=10.0, clock=lambda: now)
    with caplog.at_level(logging.INFO):
        assert not limited.suppresses(logging.INFO, "status")
        assert limited.info("status", "first")
        assert limited.suppresses(logging.INFO, "status")
        assert limited.suppresses(logging.DEBUG, "other"), "nobody hears it"
        now = 10.0
        assert not limited.suppresses(logging.INFO, "status")
        assert limited.info("status", "second")
    assert caplog.messages == ["first", "second"]


def test_a_disabled_level_starts_no_period(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("t2")
    limited = RateLimitedLogger(logger, period=10.0, clock=lambda: 0.0)
    logger.setLevel(logging.WARNING)
    assert not limited.info("k", "quiet")
    logger.setLevel(logging.INFO)
    with caplog.at_level(logging.INFO):
        assert limited.info("k", "heard")
