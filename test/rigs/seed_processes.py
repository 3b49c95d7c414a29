"""Seeds of a random driver, each in a process of its own, several at once."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Final

DEFAULT_SECONDS: Final = 1200.0
"""Limit of all seeds together."""
_MOST_S_OF_A_SEED: Final = 300.0
"""Limit of a process; a seed takes seconds."""
_COUNT: Final = re.compile(r" *(\d+) (.+)")


@dataclass(slots=True)
class _Child:
    """A process that runs one seed."""

    seed: int
    command: list[str]
    output: IO[str]
    process: subprocess.Popen[str]
    until: float
    """Time at which it is ended, in `time.monotonic()` seconds."""

    @classmethod
    def start(cls, seed: int, command: list[str]) -> _Child:
        # The output goes to a file: a pipe that nobody reads would stop the process.
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `kill`
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
        return cls(seed, command, output, process, time.monotonic() + _MOST_S_OF_A_SEED)

    def has_ended(self) -> bool:
        """True if it has ended; ends it if its time is up."""
        if time.monotonic() > self.until:
            self.process.kill()
            self.process.wait()
        return self.process.poll() is not None

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()


def run_in_processes(
    seeds: Sequence[int],
    command_of: Callable[[int], list[str]],
    processes: int,
    seconds: float,
) -> int:
    """Run each seed in a process of its own, until one fails or the time is up.

    Prints a line for each seed as it ends: the one of its process that begins with `seed N:`. For a
    failed seed prints all that its process said, and the command that repeats it. Then prints the
    sums of the counts.

    Args:
        seeds: Seeds in the order in which they begin.
        command_of: The command that runs a seed.
        processes: Processes at a time.
        seconds: Limit of all runs.

    Returns:
        An exit status: 0 if all seeds passed, 1 if one failed, 2 if some did not end in time.
    """
    counts: Counter[str] = Counter()
    waiting, running = list(seeds), list[_Child]()
    until, num_passed, status = time.monotonic() + seconds, 0, 0
    try:
        while (waiting or running) and not status and time.monotonic() < until:
            while waiting and len(running) < processes:
                seed = waiting.pop(0)
                running.append(_Child.start(seed, command_of(seed)))
            ended = [one for one in running if one.has_ended()]
            for one in ended:
                running.remove(one)
                said = one.said()
                if one.process.returncode:
                    print(f"seed {one.seed}: FAILED with status {one.process.returncode}\n{said}")
                    print(f"to repeat: {shlex.join(one.command)}", flush=True)
                    status = 1
                else:
                    num_passed += 1
                    first = f"seed {one.seed}:"
                    print(next(line for line in said.splitlines() if line.startswith(first)))
                    counts += Counter(_counts_in(said))
                one.kill()
            sys.stdout.flush()
            if not ended:
                time.sleep(0.05)
    finally:
        for one in running:
            one.kill()
    for what, count in sorted(counts.items()):
        print(f"{count:10} {what}")
    print(f"{num_passed} of {len(seeds)} seeds passed")
    return status or (2 if num_passed < len(seeds) else 0)


def _counts_in(said: str) -> dict[str, int]:
    """The counts that a process has printed, a line for each."""
    found = (_COUNT.fullmatch(line) for line in said.splitlines())
    return {match[2]: int(match[1]) for match in found if match}


def parse_seeds(text: str) -> range:
    """`A-B`, both included. Raises ValueError."""
    first, _, last = text.partition("-")
    return range(int(first), int(last) + 1)


def add_seed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of runs in processes."""
    parser.add_argument(
        "--seeds", type=parse_seeds, help="A-B: run these seeds, each in a process of its own"
    )
    parser.add_argument("--processes", type=int, default=1, help="with --seeds: at a time [1]")
