"""Scripts with the arguments of a command, in processes forked from one that has imported torch.

A small run of a benchmark takes less time than its imports. All else is as for a command:
arguments, output, exit status.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from sglang.srt.utils.process import kill_process_tree

_PRELOAD = ["rigs.servers.forked_servers", "rigs.servers.forked_scripts"]
"""Modules to import first; the first one imports all that the engine does."""


def run_script(path: Path, *flags: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `path` as a program, with one thread of torch, and wait for its end.

    Raises:
        subprocess.TimeoutExpired: After `timeout` seconds; it is killed with its children.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = context.Process(target=_run, args=(str(path), flags, str(out), str(err)))
        # The forked process would import this one's program, a test file.
        with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            assert process.pid is not None
            kill_process_tree(process.pid)
            process.join()
            raise subprocess.TimeoutExpired([str(path), *flags], timeout)
        return subprocess.CompletedProcess(
            [str(path), *flags], process.exitcode, out.read_text(), err.read_text()
        )


def _run(path: str, flags: tuple[str, ...], out: str, err: str) -> None:
    for stream, name in ((sys.stdout, out), (sys.stderr, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), stream.fileno())
    torch.set_num_threads(1)
    sys.argv = [path, *flags]
    # Modules beside the script are found, as when Python runs a script.
    sys.path[0] = os.path.dirname(path)
    runpy.run_path(path, run_name="__main__")
