"""Collectives of a step of several ranks over gloo: DP groups that share experts, and plain tensor
parallelism.

The ranks are processes with a scheduler and a tiny model with experts each, all stepped together.
Counts are calls and bytes of one rank, by collective; bytes are those of the rank's own input.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

from benchmark.command import Command
from benchmark.report import Report
from rigs.groups.counted_steps import counts_of, save_model


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])


def run(args: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory))
        for size in args.ranks:
            layouts = [(1, 1), (1, size), (size, 1), (size, size)]
            layouts += [(size // 2, size)] if size > 2 else []
            for dp_size, ep_size in layouts:
                found = counts_of(Path(directory), size, dp_size, ep_size)
                for what, counts in found.items():
                    case = {"ranks": size, "groups": dp_size, "ep": ep_size, "step": what}
                    for name, (calls, num_bytes) in counts.items():
                        report.add(f"{name}_calls", calls, "1/step", case)
                        report.add(f"{name}_bytes", num_bytes, "bytes/step", case)


COMMAND: Final = Command(run=run, add_options=add_options, quick={"ranks": [2]})
