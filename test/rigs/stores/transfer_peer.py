"""A process with a Transfer Engine and memory that others read and write, for tests and benchmarks.

    with TransferPeer(num_bytes=64 << 20) as peer:
        engine.transfer(peer.session_id, TransferOp.WRITE, [Block(ptr, peer.address, 4096)], ...)

`python -m rigs.stores.transfer_peer FILE BYTES BACKEND` is that process; FILE gets its address.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from rigs.stores.store_processes import SuspendableProcess
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import TransferBackend
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.nixl_transfer_engine import NixlTransferEngine
from sglang.srt.distributed.device_context import mark_device_set

_TCP: Final = {"MOONCAKE_PROTOCOL": "tcp"}


class TransferPeer(SuspendableProcess):
    """Context manager: within it the process runs. Its memory is zero at first.

    `kill`, `suspend` and `resume` are those of `SuspendableProcess`.

    Args:
        over: `MOONCAKE` or `NIXL`.
        env: Settings of the transport.
    """

    def __init__(
        self,
        num_bytes: int,
        over: TransferBackend = TransferBackend.MOONCAKE,
        env: Mapping[str, str] = _TCP,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="transfer-peer-")
        folder = Path(self._folder.name)
        self._facts = folder / "facts.json"
        module = "rigs.stores.transfer_peer"
        super().__init__(
            "transfer_peer",
            [sys.executable, "-m", module, str(self._facts), str(num_bytes), over],
            ready=self._facts.exists,
            log_dir=folder,
            env=dict(env),
        )

    @property
    def session_id(self) -> str:
        """Session id at which the peer is reached."""
        return str(json.loads(self._facts.read_text())["session_id"])

    @property
    def address(self) -> int:
        """Address of the peer's memory."""
        return int(json.loads(self._facts.read_text())["address"])

    def __enter__(self) -> TransferPeer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._folder.cleanup()


def main(facts: Path, num_bytes: int, over: str) -> None:
    """Serve until killed."""
    mark_device_set("cpu")
    memory = np.zeros(num_bytes, np.uint8)
    engine: MooncakeTransferEngine | NixlTransferEngine
    if over == TransferBackend.NIXL:
        import rigs.disaggregation.nixl_package  # noqa: F401 - finds the package

        engine = NixlTransferEngine(LOOPBACK)
    else:
        engine = MooncakeTransferEngine(LOOPBACK)
    engine.batch_register([memory.ctypes.data], [num_bytes])
    written = facts.with_suffix(".new")
    written.write_text(
        json.dumps({"session_id": engine.get_session_id(), "address": memory.ctypes.data})
    )
    written.rename(facts)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
