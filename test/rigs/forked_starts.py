"""Starts of `launch_server` that end at once, forked from a process that has imported its modules.

The imports take 1.3 CPU seconds, the checks of a start some milliseconds. The process has imported
neither torch nor the module that starts processes. All else is as for the command: arguments,
output, exit status.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Final, Self

import msgspec

from sglang.srt.environ import child_environment


class Start(msgspec.Struct):
    """A start to make; its output goes to the file `output`."""

    flags: list[str]
    env: dict[str, str]
    output: str


_DECODER: Final = msgspec.json.Decoder(Start)


class ForkedStarts:
    """Context manager around the process.

    Args:
        env: Added to its environment, and so to that of all starts.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=child_environment(self._env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self, flags: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
        """Exit status and output of a start, with `env` added to its environment."""
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        with tempfile.NamedTemporaryFile() as output:
            start = Start(list(flags), dict(env), output.name)
            pipes[0].write(msgspec.json.encode(start) + b"\n")
            pipes[0].flush()
            return int(pipes[1].readline()), output.read().decode()


def _serve() -> None:
    from sglang import launch_server
    from sglang.srt.entrypoints import engine_processes, http_server

    assert engine_processes and http_server
    assert sys.modules.keys().isdisjoint({"torch", "multiprocessing.popen_spawn_posix"})
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            start = _DECODER.decode(line)
            out = os.open(start.output, os.O_WRONLY | os.O_APPEND)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(out, stream.fileno())
            os.environ.update(start.env)  # noqa: TID251 - of a child
            sys.path[1:1] = start.env.get("PYTHONPATH", "").split(":")
            raise SystemExit(launch_server.main(start.flags))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
