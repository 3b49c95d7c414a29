"""Runs of a random driver: one seed after another, and what all of them did."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rigs.seed_processes import (
    DEFAULT_SECONDS,
    add_seed_arguments,
    run_in_processes,
)


@dataclass(slots=True)
class Outcome:
    """Counts of events in one run, to check that it was not idle."""

    steps: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def describe(self) -> str:
        """A line about what the seed chose, if it is of interest."""
        return ""


def run_for(
    seconds: float,
    first_seed: int,
    run_seed: Callable[[int], Outcome],
    *,
    most_failures: int = 5,
) -> tuple[Counter[str], list[int]]:
    """Run one seed after another for `seconds`, at least one.

    Prints a line for each seed, and the cause of each failure.

    Returns:
        The counts of all runs, and the failed seeds.
    """
    counts: Counter[str] = Counter()
    failed: list[int] = []
    began, seed = time.monotonic(), first_seed
    while seed == first_seed or (
        time.monotonic() - began < seconds and len(failed) < most_failures
    ):
        # Printed before the run, because a failing copy ends the process.
        print(f"seed {seed}:", end=" ", flush=True)
        try:
            outcome = run_seed(seed)
        except Exception:  # noqa: BLE001 - reported; the next seed still runs
            failed.append(seed)
            print("FAILED", flush=True)
            traceback.print_exc(file=sys.stdout)
        else:
            said = f"{outcome.steps} steps in {outcome.seconds:.1f} s", outcome.describe()
            print("; ".join(filter(None, said)), flush=True)
            counts["steps"] += outcome.steps
            counts.update(outcome.counts)
        counts["seeds"] += 1
        seed += 1
    return counts, failed


def assert_random_work(
    seconds: float, run_seed: Callable[[int], Outcome], happened: Sequence[str]
) -> None:
    """Run drawn seeds for `seconds`: none fails, and each count of `happened` is above 10."""
    torch.set_num_threads(1)
    counts, failed = run_for(seconds, secrets.randbits(31), run_seed)
    print_counts(counts)
    assert not failed
    for what in happened:
        assert counts[what] > 10, what


def print_counts(counts: Counter[str]) -> None:
    """Print a line for each count, by name."""
    print("\n".join(f"{n:10} {what}" for what, n in sorted(counts.items())))


def main(
    doc: str | None,
    module: str,
    steps_per_seed: int,
    run_seed: Callable[[int, int], Outcome],
    argv: Sequence[str] | None = None,
) -> int:
    """The command line of a driver: exit status 1 if a seed failed.

    Args:
        doc: Docstring of the driver.
        module: Name of the driver's module.
        steps_per_seed: Default of the command line.
        run_seed: Takes a seed and the steps; raises for any wrong result.
        argv: Words after the program's name.
    """
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False)
    parser.add_argument("--seed", type=int, help="the only or first seed [random]")
    parser.add_argument(
        "--seconds", type=float, help="run seeds for this time; a limit with --seeds"
    )
    parser.add_argument("--steps", type=int, default=steps_per_seed, help="steps of each seed")
    parser.add_argument("--most-failures", type=int, default=5, help="failures to end at [5]")
    add_seed_arguments(parser)
    args = parser.parse_args(argv)
    if args.seeds is not None:
        begin = [sys.executable, "-m", module, "--steps", str(args.steps)]
        return run_in_processes(
            args.seeds,
            lambda seed: [*begin, "--seed", str(seed)],
            args.processes,
            args.seconds or DEFAULT_SECONDS,
        )
    torch.set_num_threads(1)
    seed = secrets.randbits(31) if args.seed is None else args.seed
    counts, failed = run_for(
        args.seconds or 0.0,
        seed,
        lambda one: run_seed(one, args.steps),
        most_failures=args.most_failures,
    )
    print_counts(counts)
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0
