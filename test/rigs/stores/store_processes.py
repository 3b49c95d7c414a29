"""Processes of a Mooncake Store that tests suspend, restart and ask for what they hold."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from pathlib import Path
from typing import Final

from sglang.embedded_mooncake import (
    LOOPBACK,
    START_TIMEOUT_S,
    ManagedProcess,
    MooncakeMaster,
    StoreNode,
    binary,
)
from sglang.srt.utils.network import can_connect, get_free_ports

_SUSPEND_TIMEOUT_S: Final = 30.0


class SuspendableProcess(ManagedProcess):
    """A child process that can also be suspended and restarted."""

    def suspend(self) -> None:
        """Send SIGSTOP. After the return the child keeps its connections, but does not answer."""
        os.kill(self.pid, signal.SIGSTOP)
        # Sending the signal returns before it has reached every thread.
        deadline = time.monotonic() + _SUSPEND_TIMEOUT_S
        while not _is_suspended(self.pid):
            assert time.monotonic() < deadline, f"{self.name} does not stop"
            time.sleep(0.001)

    def resume(self) -> None:
        """Send SIGCONT, if the child runs."""
        if self.is_running():
            os.kill(self.pid, signal.SIGCONT)

    def stop(self, timeout: float = 10.0) -> int | None:
        """Resume a suspended child, then stop it like the base class."""
        self.resume()
        return super().stop(timeout)

    def restart(self, timeout: float = START_TIMEOUT_S) -> None:
        """Kill the child if it runs, and start it again on the same ports."""
        self.kill()
        self.start(timeout)


def _is_suspended(pid: int) -> bool:
    """True if all threads of a process are stopped."""
    try:
        states = [
            task.read_text().rpartition(")")[2].split()[0]
            for task in Path(f"/proc/{pid}/task").glob("*/stat")
        ]
    except FileNotFoundError:
        return False  # A thread ended meanwhile; the caller polls again.
    return set(states) == {"T"}


class ObservedMaster(SuspendableProcess, MooncakeMaster):
    """A master that tells what the store holds."""

    def keys(self) -> list[str]:
        """Keys of all objects in the store but the servers' notes."""
        keys = self._get("/get_all_keys").splitlines()
        return [key for key in keys if key and "/notes/" not in key]

    def metric(self, name: str) -> float:
        """Value of one of the master's Prometheus gauges or counters.

        Raises:
            KeyError: The master has no such metric.
        """
        for line in self._get("/metrics").splitlines():
            if line.startswith(f"{name} "):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def _get(self, path: str) -> str:
        url = f"http://{LOOPBACK}:{self.metrics_port}{path}"
        with urllib.request.urlopen(url, timeout=10) as response:
            body: bytes = response.read()
        return body.decode()


class SuspendableNode(SuspendableProcess, StoreNode):
    """A store node that can be suspended."""


class StandaloneClient(SuspendableProcess):
    """`mooncake_client`: lends memory as a node does, and copies pages for engines on this host.

    The L2 of an engine that attaches to it (`MOONCAKE_CLIENT`) is shared memory, so that pages move
    at the speed of a copy. The objects outlive the engine.
    """

    def __init__(
        self,
        master: MooncakeMaster,
        log_dir: Path,
        *,
        segment_bytes: int,
        name: str = "mooncake_client",
    ) -> None:
        """Describe a client of `master`'s store that holds up to `segment_bytes` of objects."""
        self._master = master
        (self.port,) = get_free_ports(1)
        settings: dict[str, str | int] = {
            "host": LOOPBACK,
            "port": self.port,
            "global_segment_size": f"{segment_bytes} B",
            "local_buffer_size": "0",
            "master_server_address": master.address,
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "threads": 8,
        }
        super().__init__(
            name,
            [binary("mooncake_client"), *(f"--{key}={value}" for key, value in settings.items())],
            ready=lambda: can_connect(LOOPBACK, self.port),
            log_dir=log_dir,
            # The default of MC_STORE_MEMCPY depends on the wheel and on the host's devices.
            env={"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_STORE_MEMCPY": "1"},
        )

    def engine_env(self) -> dict[str, str]:
        """Environment for an engine that attaches to this client."""
        return self._master.engine_env() | {"MOONCAKE_CLIENT": f"{LOOPBACK}:{self.port}"}
