"""A server of two machines: node 0 has the HTTP server, node 1 has ranks alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedProcess, ForkedServer
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.test_utils import await_health, kill_process_tree, new_log_path

END_S: Final = 40.0
"""Seconds in which both end at the latest; they need ten on a machine that does nothing else."""
_START_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a node runs.

    Attributes:
        host: Its address, as `--host`.
        env: Added to the environment.
        namespace: Path of its network namespace; None: that of the tests.
    """

    host: str = "127.0.0.1"
    env: Mapping[str, str] = field(default_factory=dict)
    namespace: str | None = None


class Nodes:
    """Starts both nodes, without waiting for them.

    Args:
        flags: Those of both; `more_of_1` are for node 1 alone, where `model_of_1` is another copy.
        meeting: Host of `--dist-init-addr`, with a port if it is not one of the tests' machine.

    Attributes:
        server: Node 0's endpoints.
        first, second: The processes.
    """

    def __init__(
        self,
        model: str | Path,
        flags: Sequence[str],
        *more_of_1: str,
        model_of_1: Path | None = None,
        machines: tuple[Machine, Machine] = (Machine(), Machine()),
        meeting: str | None = None,
    ) -> None:
        meeting = meeting or f"127.0.0.1:{get_free_port()}"
        both = (*flags, "--nnodes", "2", "--dist-init-addr", meeting)
        here, there = machines
        self.server = ForkedServer(
            *both, model=str(model), env=here.env, host=here.host, namespace=here.namespace
        )
        self.first = self.server.launch()
        more = ["--host", there.host, *more_of_1]
        self.second = ForkedProcess(
            ["--model-path", str(model_of_1 or model), *both, "--node-rank", "1", *more],
            new_log_path(),
            env=there.env,
            namespace=there.namespace,
        )

    def await_ready(self) -> list[psutil.Process]:
        """Wait until they serve; their children."""
        await_health(self.first, self.server.url, _START_S)
        assert wait_until(lambda: "rank 1 serves" in self.second.log_tail(), _START_S)
        return [
            child
            for node in (self.first, self.second)
            for child in psutil.Process(node.pid).children(recursive=True)
        ]

    def ends(self) -> tuple[int, int]:
        """The exit statuses of both."""
        begin = time.monotonic()
        statuses = self.first.wait(END_S), self.second.wait(END_S)
        print(f"both have ended after {time.monotonic() - begin:.1f} s")
        return statuses

    def kill(self) -> None:
        """End both, with all of their processes. Idempotent."""
        for node in (self.first, self.second):
            if node.poll() is None:
                kill_process_tree(node.pid)
                node.wait()


def state_of(server: EngineServer) -> dict[str, Any]:
    """The internal state of a server's first rank, from `/server_info`."""
    state: dict[str, Any] = server.request("GET", "/server_info").body["internal_states"][0]
    return state
