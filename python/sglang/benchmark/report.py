"""What makes a figure evidence: the command, the commit and the machine that gave it.

Every benchmark prints its results through `emit`, one JSON object a line, so that files of results
can be read by one reader and appended to.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

_REPOSITORY = Path(__file__).resolve().parent


def provenance(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Date, command, commit and hardware of this run.

    Args:
        argv: As `sys.argv`, whose default it is.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *(sys.argv if argv is None else argv)]),
        "commit": commit(),
        "hardware": hardware(),
    }


def commit() -> str:
    """Short hash of the source tree's commit, `-dirty` appended where it was changed since."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude", "*"],
            cwd=_REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def hardware() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory in GB (10^9 bytes), Python."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def emit(record: Mapping[str, Any], path: str | Path | None = None) -> None:
    """Print `record` as one line of JSON, and append it to the file `path` where one is given.

    Raises:
        OSError: `path` cannot be written.
    """
    line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    sys.stdout.write(line.decode())
    sys.stdout.flush()
    append(record, path)


def writable_file(path: str) -> str:
    """`path`, for `argparse`: a file that cannot be written is found before anything is measured.

    Raises:
        argparse.ArgumentTypeError: It cannot be written.
    """
    try:
        with Path(path).open("ab"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot be written: {error.strerror}") from None


def append(record: Mapping[str, Any], path: str | Path | None) -> None:
    """Append `record` to the JSON lines of `path`, if there is one; print nothing."""
    if path is None:
        return
    with Path(path).open("ab") as file:
        file.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
