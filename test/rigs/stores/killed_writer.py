"""Begins to put objects to a Mooncake Store, and is killed before it has put them.

    python -m rigs.stores.killed_writer MASTER BYTES KEY...

Prints what Mooncake answered. No engine: Mooncake alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from mooncake.store import MooncakeDistributedStore


def leave_unfinished(master: str, num_bytes: int, *keys: str) -> None:
    """Let a process begin to put `keys`, of `num_bytes` each, and die meanwhile."""
    command = [sys.executable, "-m", __name__, master, str(num_bytes), *keys]
    writer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert writer.returncode == -signal.SIGKILL, writer.stderr
    assert writer.stdout.split() == ["0"] * len(keys), "begun"


def main(master: str, num_bytes: int, *keys: str) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", master) == 0
    print(*store.batch_put_session_start(list(keys), [num_bytes] * len(keys)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
