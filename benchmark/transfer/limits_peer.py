"""The peer of `transfer limits`: a process with an engine, and a segment of a store.

Usage: FILE_FOR_FACTS MASTER. It stays until it is killed.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Final

import numpy as np

from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_library import (
    load_mooncake,
    load_transfer_engine,
)

METADATA: Final = "P2PHANDSHAKE"
PEER_BYTES: Final = 256 * MIB
SEGMENT_BYTES: Final = 768 * MIB


def serve(facts: Path, master: str) -> None:
    """Write address and session to `facts`, and wait."""
    store = load_mooncake().MooncakeDistributedStore()
    assert store.setup(LOOPBACK, METADATA, SEGMENT_BYTES, 16 * MIB, "tcp", "", master) == 0
    engine = load_transfer_engine().TransferEngine()
    assert engine.initialize(LOOPBACK, METADATA, "tcp", "") == 0
    memory = np.zeros(PEER_BYTES, np.uint8)
    assert engine.batch_register_memory([memory.ctypes.data], [PEER_BYTES]) == 0
    session = f"{LOOPBACK}:{engine.get_rpc_port()}"
    written = facts.with_suffix(".new")
    written.write_text(json.dumps({"session": session, "address": memory.ctypes.data}))
    written.rename(facts)
    signal.pause()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
