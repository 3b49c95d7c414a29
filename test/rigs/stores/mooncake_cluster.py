"""A real Mooncake Store for tests: one master and any number of store nodes, over TCP.

with MooncakeCluster(num_nodes=3, segment_size="64mb") as cluster:
    server = popen_launch_server(model, url, timeout, env=cluster.engine_env(), ...)
    cluster.nodes[1].kill()
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from rigs.stores.store_processes import ObservedMaster, SuspendableNode
from sglang.srt.environ import parse_size


class MooncakeCluster:
    """Context manager: all processes serve inside it, and end with it.

    `master` and `nodes[i]` have `kill`, `stop`, `suspend`, `resume`, `restart` and `log_tail`.
    """

    def __init__(
        self,
        num_nodes: int = 1,
        segment_size: str = "128mb",
        master_flags: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Describe the cluster.

        Args:
            num_nodes: Store nodes; 0 if the engines lend the memory.
            segment_size: Memory of each node, e.g. `128mb`.
            master_flags: Further flags of `mooncake_master`.
        """
        self._stack = ExitStack()
        self.log_dir = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-"))
        )
        self.master = ObservedMaster(self.log_dir, flags=master_flags)
        self.nodes = [
            SuspendableNode(
                self.master,
                self.log_dir,
                segment_bytes=parse_size(segment_size),
                name=f"store_node_{index}",
            )
            for index in range(num_nodes)
        ]

    def __enter__(self) -> MooncakeCluster:
        with ExitStack() as starting:
            starting.callback(self._stack.close)
            for process in (self.master, *self.nodes):
                starting.callback(process.kill)
                process.start()
            # All processes have started; `__exit__` ends them.
            self._stack = starting.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def engine_env(self) -> dict[str, str]:
        """Environment for an engine that uses this store and lends no memory to it."""
        return self.master.engine_env()

    def capacity_bytes(self) -> int:
        """Memory of the mounted segments, as the master reports it."""
        return int(self.master.metric("master_total_capacity_bytes"))
