"""Bars on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from sglang.srt.utils import progress
from sglang.srt.utils.progress import progress_bar
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


class Stderr(io.StringIO):
    """Takes the place of standard error."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def run(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool, steps: int) -> tuple[str, list[str]]:
    """Run a bar for some steps; its output on standard error, and the lines that it says."""
    stderr, lines = Stderr(is_terminal), list[str]()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress_bar(lines.append, desc="work", total=steps, unit="piece") as bar:
        for _ in range(steps):
            bar.update()
    return stderr.getvalue(), lines


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    written, lines = run(monkeypatch, is_terminal=True, steps=4)
    assert "\rwork: 100%|" in written
    assert lines == []


def test_a_file_has_a_line_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 1e-9)
    written, lines = run(monkeypatch, is_terminal=False, steps=4)
    assert written == ""
    assert lines[0].startswith("work:  25% 1/4 [")
    assert lines[-1].startswith("work: 100% 4/4 [")
    assert not any("\r" in line or "\n" in line for line in lines)


def test_a_file_has_nothing_of_what_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, is_terminal=False, steps=1000) == ("", [])


def test_what_is_disabled_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr, lines = Stderr(True), list[str]()
    monkeypatch.setattr(sys, "stderr", stderr)
    progress_bar(lines.append, desc="work", total=1, disable=True).update()
    assert (stderr.getvalue(), lines) == ("", [])
