"""Runs of seeds in separate processes: the output, early ends of the others, and the result."""

from __future__ import annotations

import sys
import time

import pytest

from rigs import seed_processes
from rigs.seed_processes import parse_seeds, run_in_processes
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

NEVER = "import time; time.sleep(600)"


def running(program: str, *others: str) -> list[list[str]]:
    """A command for each seed; all further seeds run the last program."""
    return [[sys.executable, "-c", one] for one in (program, *others)]


def run(commands: list[list[str]], count: int, seconds: float = 60.0) -> int:
    last = len(commands) - 1
    return run_in_processes(
        range(count), lambda seed: commands[min(seed, last)], processes=4, seconds=seconds
    )


def test_each_seed_has_a_line_and_counts_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [
        [sys.executable, "-c", f"print('begins\\nseed {seed}: fine\\n       {seed} ticks of it')"]
        for seed in range(5)
    ]
    assert run_in_processes(range(5), commands.__getitem__, processes=2, seconds=60.0) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:5]) == [f"seed {seed}: fine" for seed in range(5)]
    assert lines[5:] == ["        10 ticks of it", "5 of 5 seeds passed"]


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("print('what it said'); raise SystemExit(3)", "3"),
        ("import os; print('what it said', flush=True); os.abort()", "-6"),
    ],
    ids=["exit", "signal"],
)
def test_the_first_failure_ends_all_and_says_how_to_repeat_it(
    program: str, status: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert run(running(program, NEVER), count=9) == 1
    assert time.monotonic() - began < 60
    said = capsys.readouterr().out
    assert f"seed 0: FAILED with status {status}\nwhat it said\n" in said
    assert f"to repeat: {sys.executable} -c " in said
    assert said.endswith("0 of 9 seeds passed\n")


def test_seeds_that_are_not_through_in_time_are_no_success(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(running(NEVER), count=3, seconds=0.2) == 2
    assert capsys.readouterr().out == "0 of 3 seeds passed\n"


def test_a_seed_that_hangs_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(seed_processes, "_MOST_S_OF_A_SEED", 0.2)
    assert run(running(NEVER), count=1) == 1
    assert "seed 0: FAILED with status -9" in capsys.readouterr().out


def test_seeds_are_named_by_the_first_and_the_last() -> None:
    assert list(parse_seeds("3-5")) == [3, 4, 5]
    with pytest.raises(ValueError):
        parse_seeds("3")
