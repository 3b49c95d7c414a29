"""Benchmarks with the arguments of a command, in processes forked from one that has imported torch.

A small run of a benchmark takes less time than its imports. All else is as for a command:
arguments, output, exit status.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from rigs.shared_processes import SharedProcess, without_program
from rigs.step_processes import fork_a_fork_server
from sglang.srt.utils.process import kill_process_tree

_PRELOAD: Final = ["rigs.servers.forked_servers", "rigs.servers.forked_benchmarks"]
"""Modules to import first; the first one imports all that the engine does."""
_ROOT: Final = Path(__file__).parents[3]
_SCHEMA: Final = set("date commit host device command arguments case metric value unit".split())
_TIMEOUT_S: Final = 540.0


def run(*words: str, status: int = 0) -> list[dict[str, Any]]:
    """The cases of a benchmark that must exit with `status`, each with its figures by metric.

    The keys `expected` and `details` of a case have those of its metrics.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        done = run_forked("benchmark", *words, "--output-file", str(path))
        assert done.returncode == status, done.stderr[-2000:]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    cases: list[dict[str, Any]] = []
    last = None
    for line in lines:
        assert line.keys() >= _SCHEMA
        if line["case"] != last:
            last = line["case"]
            cases.append({**last, "expected": {}, "details": {}})
        found, metric = cases[-1], line["metric"]
        assert metric not in found, "the case does not tell two figures apart"
        found[metric] = line["value"]
        found["expected"][metric] = line.get("expected")
        found["details"][metric] = line.get("details", {})
    return cases


def run_forked(module: str, *words: str, cwd: Path = _ROOT) -> subprocess.CompletedProcess[str]:
    """Run `python -m module` with `words` in `cwd`, with one thread of torch, to its end.

    Raises:
        subprocess.TimeoutExpired: After `_TIMEOUT_S`; it is killed with its children.
    """
    multiprocessing.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = SharedProcess(target=_run, args=(module, words, cwd, out, err))
        with without_program():
            process.start()
        process.join(_TIMEOUT_S)
        if process.exitcode is None:
            assert process.pid is not None
            kill_process_tree(process.pid)
            process.join()
            raise subprocess.TimeoutExpired(words, _TIMEOUT_S)
        return subprocess.CompletedProcess(
            words, process.exitcode, out.read_text(), err.read_text()
        )


def _run(module: str, words: tuple[str, ...], cwd: Path, out: Path, err: Path) -> None:
    os.chdir(cwd)
    for stream, name in ((sys.stdout, out), (sys.stderr, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream.fileno())
    torch.set_num_threads(1)
    sys.argv = [module, *words]
    # Packages in the working directory are found, as when Python runs a module there.
    sys.path[0] = str(cwd)
    fork_a_fork_server()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
