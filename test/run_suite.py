"""Runs the test files of suites, and summarizes the results.

    python test/run_suite.py --hw cpu --suite base-a-test-cpu [--suite base-b-test-cpu]

The `register_*_ci` calls in `test/registered` (see `sglang.test.ci.ci_register`) define the suites.
They are read from the syntax tree, without imports. Unit suites run in a few parts, other
files in one process each: one after the other, or `--at-once` of them together, of all suites.
One of these computes the unit suites while the others wait for servers. Files registered as
`alone` come last. The output of processes that run together is printed when they end. `--preload`
forks the processes from one that has imported torch.
`--check` runs a command beside the files, such as the linter; it counts as one test. The summary
names the files with the most CPU time. The last line is `N passed, N failed`, in tests; the exit
status is 0 only if nothing failed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rigs.step_processes import ForkedPython, StartedCommand, preload
from rigs.tree_clock import TreeClock
from sglang.srt.utils.process import kill_process_tree

REPO: Final = Path(__file__).resolve().parents[1]
UNIT_SUITES: Final = frozenset({"base-a-test-cpu"})
"""Suites whose files start no processes: one pytest runs many of them and imports torch once."""
PROCESSES: Final = min(2, os.cpu_count() or 1)
"""Processes of a unit suite at the same time. More would cost more imports than they save."""
PARTS: Final = 5 * PROCESSES
"""Parts of a unit suite, each in a process and within its time. Short ones leave a short end, in
which one process runs by itself."""
_PYTEST: Final = (sys.executable, "-m", "pytest", "-q")
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
"""Environment of processes that share cores: torch's threads wait for each other by spinning."""

SAMPLE_S: Final = 2.0
"""Interval at which the CPU time of a process is read. Reading it takes milliseconds."""
NUM_SLOWEST: Final = 10
"""Files that the summary names."""

_REGISTER: Final = re.compile(r"register_(cpu|cuda|npu)_ci")
_PARAMETERS: Final = ("est_time", "suite", "nightly", "disabled")
_WORDS: Final = (*_PARAMETERS, "alone")
"""`_PARAMETERS` may be given by place."""
_COUNT: Final = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
_CPU: Final = re.compile(r"(\d+\.\d) CPU seconds: (\S+)")
"""Line that `test/registered/conftest.py` prints for each file of a process."""
_SUMMARY: Final = re.compile(r"(\d+ \w+,? ?)+.* in [\d.]+s")


class CollectionError(Exception):
    """Test files with a missing or malformed registration; one line for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One `register_*_ci` call."""

    path: Path
    hw: str
    suite: str
    est_time: float
    nightly: bool
    disabled: str | None
    alone: bool

    @property
    def is_alone(self) -> bool:
        """True if no other file may run beside it: devices are not shared, and what runs for a
        night measures."""
        return self.alone or self.nightly or self.hw != "cpu"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of one process. Counts are tests."""

    name: str
    status: int
    seconds: float
    cpu: float = 0.0
    """CPU seconds of the process and its descendants."""
    cpu_by_file: dict[str, float] = field(default_factory=dict)
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """A process to run."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    is_forked: bool = False
    """True if the command, of this Python, runs in a `ForkedPython`."""
    is_check: bool = False
    """True if it counts as one test, which passes with exit status 0."""
    is_busy: bool = False
    """True if it computes all the time, unlike files that wait for their servers."""


@dataclass(slots=True)
class _Problems:
    lines: list[str] = field(default_factory=list)

    def add(self, path: Path, text: str) -> None:
        self.lines.append(f"{path}: {text}")


def collect(root: Path) -> list[Registration]:
    """Every registration under `root`, in path order.

    Raises:
        CollectionError: A test file has no registration, or a malformed one.
    """
    problems = _Problems()
    found: list[Registration] = []
    for path in sorted(root.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        found += _registrations(path, tree, problems)
    if problems.lines:
        raise CollectionError("\n".join(problems.lines))
    return found


def _registrations(path: Path, tree: ast.Module, problems: _Problems) -> list[Registration]:
    calls = [
        (match[1], node.value)
        for node in tree.body
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and (match := _REGISTER.fullmatch(node.value.func.id))
    ]
    if not calls:
        problems.add(path, "not registered: call register_cpu_ci(...) at module level")
    found = []
    for hw, call in calls:
        try:
            found.append(_registration(path, hw, call))
        except (ValueError, TypeError, KeyError) as error:
            problems.add(path, f"line {call.lineno}: {error}")
    return found


def _registration(path: Path, hw: str, call: ast.Call) -> Registration:
    if len(call.args) > len(_PARAMETERS):
        raise ValueError(f"at most {len(_PARAMETERS)} positional arguments")
    try:
        values: dict[str, Any] = {
            **dict(zip(_PARAMETERS, map(ast.literal_eval, call.args), strict=False)),
            **{word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg},
        }
    except ValueError:
        raise ValueError("arguments must be literals") from None
    stage, runner = values.pop("stage", None), values.pop("runner_config", None)
    suite = values.get("suite")
    if suite is None and stage and runner:
        suite = f"{stage}-test-{runner}"
    elif not suite or stage or runner:
        raise ValueError("give `suite`, or `stage` with `runner_config`")
    unknown = set(values) - set(_WORDS)
    if unknown:
        raise ValueError(f"unknown arguments {sorted(unknown)}")
    if "est_time" not in values:
        raise ValueError("`est_time` is missing")
    return Registration(
        path=path,
        hw=hw,
        suite=suite,
        est_time=float(values["est_time"]),
        nightly=bool(values.get("nightly", False)),
        disabled=values.get("disabled"),
        alone=bool(values.get("alone", False)),
    )


def partition(files: Sequence[Registration], index: int, size: int) -> list[Registration]:
    """Part `index` of `size` parts of about equal estimated time; the same on every machine.

    Raises:
        ValueError: `index` is not below `size`.
    """
    if not 0 <= index < size:
        raise ValueError(f"partition {index} of {size}: count from 0")
    loads = [0.0] * size
    mine: list[Registration] = []
    # Longest first onto the least loaded part: at most 4/3 of the best possible.
    for file in sorted(files, key=lambda f: (-f.est_time, str(f.path))):
        target = loads.index(min(loads))
        loads[target] += file.est_time
        if target == index:
            mine.append(file)
    return [file for file in files if file in mine]


def run_process(step: Step, timeout: float, *, is_shown: bool = True) -> tuple[Outcome, list[str]]:
    """Run a step; its outcome, with the counts of pytest's summary, and its output.

    After `timeout` seconds the process and all its descendants are killed.

    Args:
        step: Step to run.
        timeout: Seconds.
        is_shown: Print the output as it comes; that of a forked process is never shown.
    """
    start = time.monotonic()
    process = (
        ForkedPython(step.command[1:], REPO)
        if step.is_forked
        else StartedCommand(step.command, step.env, REPO, is_shown=is_shown)
    )
    note = ""
    clock = TreeClock(process.pid)
    try:
        status = _wait(process, timeout, clock)
    except subprocess.TimeoutExpired:
        note = f"killed after {timeout:.0f} s"
    finally:
        if process.returncode is None:
            # While its id is still its own: children in sessions of their own go too.
            kill_process_tree(process.pid)
            status = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        lines = process.lines()
    seconds = time.monotonic() - start
    outcome = Outcome(name=step.name, status=status, seconds=seconds, cpu=clock.seconds, note=note)
    by_file = {match[2]: float(match[1]) for match in map(_CPU.fullmatch, lines) if match}
    outcome.cpu_by_file = by_file or {step.name: clock.seconds}
    if step.is_check and status == 0:
        outcome.passed = 1
    else:
        _count(lines, outcome)
    return outcome, lines


def _wait(process: ForkedPython | StartedCommand, timeout: float, clock: TreeClock) -> int:
    """The exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
    end = time.monotonic() + timeout
    while True:
        try:
            return process.wait(min(SAMPLE_S, max(end - time.monotonic(), 0.0)))
        except subprocess.TimeoutExpired:
            clock.sample()
            if time.monotonic() >= end:
                raise


def _count(lines: Sequence[str], outcome: Outcome) -> None:
    summary = next((line for line in reversed(lines) if _SUMMARY.search(line)), "")
    for number, word in _COUNT.findall(summary):
        kind = "failed" if word.startswith(("failed", "error")) else word
        setattr(outcome, kind, getattr(outcome, kind) + int(number))
    if outcome.status != 0 and not outcome.failed:
        outcome.failed = 1
        outcome.note = outcome.note or f"exit status {outcome.status}"
    elif outcome.status == 0 and not outcome.passed + outcome.skipped:
        outcome.failed = 1
        outcome.note = "ran no tests"


def _plan(
    suite: str, files: Sequence[Registration], at_once: int, forks: bool
) -> tuple[list[Step], list[Step]]:
    """The processes that run `files` of `suite`: those that may share the machine, and others.

    Forked processes have the environment of the one that was preloaded.
    """
    files = [file for file in files if file.suite == suite]
    if suite in UNIT_SUITES and len(files) > 1:
        return _unit_steps(suite, files, is_forked=forks), []
    # The longest first, so that none runs by itself at the end.
    env = ONE_THREAD if at_once > 1 else {}
    shared = sorted((f for f in files if not f.is_alone), key=lambda f: -f.est_time)
    alone = [file for file in files if file.is_alone]
    return (
        [_file_step(file, env, is_forked=forks) for file in shared],
        [_file_step(file, env if forks else {}, is_forked=forks) for file in alone],
    )


def _file_step(file: Registration, env: Mapping[str, str], is_forked: bool = False) -> Step:
    path = os.path.relpath(file.path, REPO)
    return Step(path, [*_PYTEST, path], env, is_forked)


def _unit_steps(suite: str, files: Sequence[Registration], *, is_forked: bool) -> list[Step]:
    parts = [part for index in range(PARTS) if (part := partition(files, index, PARTS))]
    return [
        Step(
            f"{suite} {number}/{len(parts)}, {len(part)} files",
            [*_PYTEST, "--durations=5", *(os.path.relpath(file.path, REPO) for file in part)],
            ONE_THREAD if len(parts) > 1 else {},
            is_forked,
            is_busy=True,
        )
        for number, part in enumerate(parts, start=1)
    ]


def _run_together(
    steps: Sequence[Step], timeout: float, keep_going: bool, at_once: int
) -> list[Outcome]:
    """Run `steps`, at most `at_once` at the same time.

    While both kinds are left, one of the processes is a busy step: it uses the time in which the
    others wait. A command by itself shows its output as it comes, others show theirs when they end.
    """
    is_one = min(len(steps), at_once) == 1
    prints = threading.Lock()
    has_failed = threading.Event()

    def run(step: Step) -> Outcome:
        if has_failed.is_set() and not keep_going:
            return _not_run(step)
        is_live = is_one and not step.is_forked
        if is_live:
            print(f"--- {step.name}", flush=True)
        outcome, lines = run_process(step, timeout, is_shown=is_live)
        if outcome.failed:
            has_failed.set()
        if not is_live:
            with prints:
                print(f"--- {step.name}", *lines, sep="\n", flush=True)
        return outcome

    left = list(range(len(steps)))
    outcomes: dict[int, Outcome] = {}
    takes = threading.Lock()

    def run_steps(is_busy: bool) -> None:
        while True:
            with takes:
                if not left:
                    return
                number = next((one for one in left if steps[one].is_busy == is_busy), left[0])
                left.remove(number)
            outcomes[number] = run(steps[number])

    with ThreadPoolExecutor(at_once) as pool:
        for lane in [pool.submit(run_steps, nth == 0) for nth in range(at_once)]:
            lane.result()
    return [outcomes[number] for number in range(len(steps))]


def _not_run(step: Step) -> Outcome:
    return Outcome(name=step.name, status=0, seconds=0, failed=1, note="not run")


def run_files(
    files: Sequence[Registration],
    timeout: float,
    keep_going: bool,
    at_once: int = 1,
    forks: bool = False,
    checks: Sequence[str] = (),
) -> list[Outcome]:
    """Run `files`, suite by suite; stop at the first failing process unless `keep_going`.

    Files that run alone come last.

    Args:
        files: Files of any suites.
        timeout: Seconds for each process.
        keep_going: Start the rest after a failure.
        at_once: Processes at the same time, of all suites. A unit suite has `PROCESSES` even if
            this is 1.
        forks: Fork the processes from one that has imported torch.
        checks: Commands without arguments that begin first, beside the files if `at_once` allows.
    """
    if forks:
        preload(ONE_THREAD if at_once > 1 else {})
    suites = dict.fromkeys(file.suite for file in files)
    plans = {suite: _plan(suite, files, at_once, forks) for suite in suites}
    groups = [(1, [Step(check, [check], is_check=True, is_busy=True) for check in checks])]
    groups += [(PROCESSES if s in UNIT_SUITES else 1, shared) for s, (shared, _) in plans.items()]
    if at_once > 1:
        # All suites together: no core waits for the last process of one.
        groups = [(at_once, [step for _, steps in groups for step in steps])]
    groups += [(1, [step]) for _, alone in plans.values() for step in alone]
    outcomes: list[Outcome] = []
    for most, steps in groups:
        if not keep_going and any(outcome.failed for outcome in outcomes):
            outcomes += map(_not_run, steps)
        else:
            outcomes += _run_together(steps, timeout, keep_going, most)
    return outcomes


def _summarise(outcomes: Sequence[Outcome], disabled: Sequence[Registration]) -> int:
    print("\n  passed  failed skipped   seconds     CPU s  file")
    for o in outcomes:
        note = f"  ({o.note})" if o.note else ""
        print(
            f"{o.passed:8}{o.failed:8}{o.skipped:8}{o.seconds:10.1f}{o.cpu:10.1f}  {o.name}{note}"
        )
    for file in disabled:
        print(f"disabled: {file.path.name}: {file.disabled}")
    by_file = [pair for o in outcomes for pair in o.cpu_by_file.items()]
    print("most CPU seconds:")
    for name, seconds in sorted(by_file, key=lambda pair: -pair[1])[:NUM_SLOWEST]:
        print(f"{seconds:8.1f}  {name}")
    failed = sum(o.failed for o in outcomes)
    print(f"{sum(o.passed for o in outcomes)} passed, {failed} failed")
    return 1 if failed else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run test suites.", allow_abbrev=False)
    parser.add_argument("--hw", choices=("cpu", "cuda", "npu"), required=True)
    parser.add_argument("--suite", required=True, action="append", help="may be repeated")
    parser.add_argument(
        "--collect-only", action="store_true", help="only list the files, without running them"
    )
    parser.add_argument("--nightly", action="store_true", help="also run the nightly files")
    parser.add_argument("--timeout-per-file", type=float, default=1200, help="seconds [1200]")
    parser.add_argument("--continue-on-error", action="store_true")
    parser.add_argument(
        "--at-once", type=int, default=1, help="files of other suites at the same time [1]"
    )
    parser.add_argument(
        "--preload", action="store_true", help="fork from a process that has imported torch"
    )
    parser.add_argument(
        "--check", action="append", default=[], help="also run this command; may be repeated"
    )
    parser.add_argument("--auto-partition-id", type=int, default=0)
    parser.add_argument("--auto-partition-size", type=int, default=1)
    parser.add_argument("--root", type=Path, default=REPO / "test" / "registered")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if all passed, 1 if a test failed, 2 if the collection failed."""
    args = _arguments(argv)
    try:
        registered = collect(args.root)
        there = {f.suite for f in registered if f.hw == args.hw}
        for suite in args.suite:
            if suite not in there:
                raise CollectionError(f"no {args.hw} suite {suite!r}; there are {sorted(there)}")
        wanted = [
            f
            for suite in args.suite
            for f in registered
            if f.hw == args.hw and f.suite == suite and (args.nightly or not f.nightly)
        ]
        part = partition(
            [f for f in wanted if f.disabled is None],
            args.auto_partition_id,
            args.auto_partition_size,
        )
    except (CollectionError, ValueError, SyntaxError) as error:
        print(f"collection failed:\n{error}")
        return 2
    if args.collect_only:
        print("\n".join(f"{f.suite}: {os.path.relpath(f.path, args.root)}" for f in part))
        return 0
    outcomes = run_files(
        part,
        args.timeout_per_file,
        args.continue_on_error,
        at_once=max(1, args.at_once),
        forks=args.preload,
        checks=args.check,
    )
    return _summarise(outcomes, [f for f in wanted if f.disabled is not None])


if __name__ == "__main__":
    raise SystemExit(main())
