"""Reports of benchmarks: figures with the command, the commit and the machine that gave them."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

_REPOSITORY = Path(__file__).resolve().parent


def provenance() -> dict[str, Any]:
    """Date, command, commit and hardware of this run."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "hardware": hardware(),
    }


def commit() -> str:
    """Short hash of the source tree's commit, with `-dirty` after uncommitted changes."""
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
    """CPU model, usable cores, memory in GB (10^9 bytes), and Python version."""
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


def writable_file(path: str) -> str:
    """A type for `argparse` that checks, before any measurement, that the file can be written."""
    try:
        with Path(path).open("ab"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: cannot be written: {error.strerror}") from None


def _from_numpy(value: Any) -> Any:
    return value.tolist()


def append(record: Mapping[str, Any], path: str | Path | None) -> None:
    """Append `record` as one line of JSON to the file `path`, if given."""
    if path is None:
        return
    with Path(path).open("ab") as file:
        file.write(msgspec.json.encode(record, enc_hook=_from_numpy) + b"\n")
