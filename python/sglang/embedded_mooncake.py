"""A Mooncake Store on this machine: master and store nodes as child processes.

`serve_embedded` starts a master and a node; tests start clusters. Each process has a handle and a
log file, and ends when the thread that started it ends. Master and nodes listen on the loopback
interface only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from sglang.mooncake_node import lends
from sglang.srt.environ import child_environment
from sglang.srt.utils.network import can_connect, get_free_ports
from sglang.srt.utils.process import die_with_parent, silent_cause, stop_process

LOOPBACK: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 60.0
"""Seconds until a child must serve, on a busy machine; most need a second or two."""


class ChildStartError(RuntimeError):
    """A child process did not start. The message is one line with the cause."""


class ManagedProcess:
    """A child process that can be started, stopped and killed.

    Not thread-safe: one thread owns it, and the child ends with that thread.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready: Callable[[], bool],
        log_dir: Path | None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Describe the child; `start` starts it.

        Args:
            name: Name in messages, and of the log file in `log_dir`.
            ready: Returns whether the child serves; polled until it returns True.
            log_dir: An existing directory; None: the child uses its owner's output.
            env: Added to this process's environment.
        """
        self.name = name
        self.log_path = log_dir / f"{name}.log" if log_dir is not None else None
        self._command = list(command)
        self._ready = ready
        self._env = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def is_running(self) -> bool:
        """True if the child was started and has not ended. A suspended child counts as running."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout: float = START_TIMEOUT_S) -> None:
        """Start the child and wait until it serves. Raises ChildStartError if the child ended, or
        did not serve within `timeout` seconds. It does not run then."""
        assert not self.is_running(), f"{self.name} runs already"
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log_path.open("ab")) if self.log_path else None
            self._process = subprocess.Popen(
                self._command,
                env=child_environment(self._env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
                # Ctrl-C must reach only the owner, which ends its children in order.
                start_new_session=True,
                # The store must not outlive a killed parent.
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        deadline = time.monotonic() + timeout
        while True:
            # Check the process before the port, because another process may use the port.
            status = self._process.poll()
            if status is not None:
                raise ChildStartError(self.last_words())
            if self._ready():
                return
            if time.monotonic() > deadline:
                self.kill()
                raise ChildStartError(
                    f"{self.name} did not serve within {timeout:.0f} s, "
                    f"see {self.log_path or 'above'}"
                )
            time.sleep(0.02)

    def stop(self, timeout: float = 10.0) -> int | None:
        """Send SIGTERM, and SIGKILL after `timeout` seconds. Returns the exit status, None if the
        child was never started. Idempotent."""
        return None if self._process is None else stop_process(self._process, timeout)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """How the child ended, which it has, and the cause."""
        assert self._process is not None, f"{self.name} was not started"
        status = self._process.poll()
        cause = silent_cause(status) or self.log_tail(1) or "see above"
        return f"{self.name} ended with status {status} ({cause})"

    def log_tail(self, lines: int = 20) -> str:
        """The last non-empty lines that the child wrote."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        text = self.log_path.read_text(errors="replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


def binary(name: str) -> str:
    """Path of a program of Mooncake's package. Raises ChildStartError if the package lacks it."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / name
        if binary.exists():
            # Not the script of that name beside Python, which would add a process in between.
            return str(binary)
    raise ChildStartError(f"the mooncake package with its {name} is missing; run `make setup`")


class MooncakeMaster(ManagedProcess):
    """`mooncake_master` on the loopback interface. It knows where objects are, but holds none."""

    def __init__(
        self,
        log_dir: Path,
        *,
        rpc_port: int | None = None,
        flags: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Describe the master.

        Args:
            rpc_port: None chooses a free port.
            flags: Further flags, e.g. `{"default_kv_lease_ttl": 500}` (ms).
        """
        free_port, self.metrics_port = get_free_ports(2)
        self.rpc_port = rpc_port or free_port
        self.address = f"{LOOPBACK}:{self.rpc_port}"
        settings: dict[str, str | int | float] = {
            "rpc_address": LOOPBACK,
            "rpc_port": self.rpc_port,
            "metrics_host": LOOPBACK,
            "metrics_port": self.metrics_port,
            "logtostderr": "true",
            **(flags or {}),
        }
        super().__init__(
            "mooncake_master",
            [binary("mooncake_master"), *(f"--{key}={value}" for key, value in settings.items())],
            ready=lambda: (
                can_connect(LOOPBACK, self.rpc_port) and can_connect(LOOPBACK, self.metrics_port)
            ),
            log_dir=log_dir,
        )

    def engine_env(self) -> dict[str, str]:
        """Environment for an engine that uses this store and lends no memory to it."""
        return {
            "MOONCAKE_MASTER": self.address,
            "MOONCAKE_MASTER_METRICS_PORT": str(self.metrics_port),
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_LOCAL_HOSTNAME": LOOPBACK,
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
        }


class StoreNode(ManagedProcess):
    """A process that lends memory to the store, so that objects outlive engines."""

    def __init__(
        self, master: MooncakeMaster, log_dir: Path, *, segment_bytes: int, name: str = "store_node"
    ) -> None:
        """Describe a node of `master`'s store that holds up to `segment_bytes` of objects."""
        super().__init__(
            name,
            [sys.executable, "-m", "sglang.mooncake_node"],
            ready=lambda: lends(self.pid) in self.log_tail(),
            log_dir=log_dir,
            env=master.engine_env()
            | {
                "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(segment_bytes),
                "MOONCAKE_CLIENT": "",
                "MOONCAKE_STANDALONE_STORAGE": "",
            },
        )
