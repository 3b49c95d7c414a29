"""A Mooncake Store on this host for servers with HiCache."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import torch

from benchmark.report import Report
from rigs.models.qwen3_8b import KV_BYTES
from rigs.servers.engine_server import EngineServer
from rigs.stores.store_processes import StandaloneClient
from sglang.embedded_mooncake import MooncakeMaster
from sglang.srt.distributed.device_communicators.mooncake_library import load_mooncake
from sglang.srt.mem_cache.host.host_memory import MooncakeHostTensorAllocator

WORKING_SET: Final = 20 * 10 * 2048
"""Tokens of all conversations of `gpu-hicache turns`."""
STORE_BYTES: Final = int(1.3 * WORKING_SET * KV_BYTES)
"""The store evicts when it is 95% full, and rounds object sizes up. A store of 1.1 times the
working set lost the first pages of some conversations, which makes their later pages useless."""
L3: Final = ("--hicache-storage-backend", "mooncake")
_TOUCH_BYTES: Final = 32 << 20


class Store:
    """A Mooncake Store on this host, and the environment for engines that use it."""

    def __init__(self, *, standalone: bool, stack: ExitStack, num_bytes: int = STORE_BYTES) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        master = MooncakeMaster(folder)
        stack.callback(master.kill)
        master.start()
        self.is_standalone, self._num_bytes = standalone, num_bytes
        if not standalone:
            self.env = master.engine_env() | {
                "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(num_bytes),
                "MC_STORE_MEMCPY": "1",
            }
            return
        client = StandaloneClient(master, folder, segment_bytes=num_bytes)
        stack.callback(client.kill)
        client.start(timeout=120)
        self.env = client.engine_env()

    def touch(self, report: Report) -> None:
        """Write all memory of the client once, as in a store that has served for long.

        The kernel's first allocation of a page takes longer than a copy into it.
        """
        client = load_mooncake().MooncakeDistributedStore()
        assert client.setup_dummy(0, 16 << 20, self.env["MOONCAKE_CLIENT"]) == 0
        block = MooncakeHostTensorAllocator().allocate((_TOUCH_BYTES,), torch.uint8)
        assert client.register_buffer(block.data_ptr(), block.nbytes) == 0

        def put(index: int) -> int:
            buffers = [[block.data_ptr()]], [[block.nbytes]]
            code: int = client.batch_put_from_multi_buffers([f"touch/{index}"], *buffers)[0]
            return code

        begun = time.monotonic()
        count = int(0.93 * self._num_bytes) // _TOUCH_BYTES
        with ThreadPoolExecutor(16) as pool:
            failed = sum(code != 0 for code in pool.map(put, range(count)))
        seconds = time.monotonic() - begun
        removed = client.remove_by_regex("^touch/", True)
        client.close()
        rate = count * _TOUCH_BYTES / seconds / 1e9
        report.add("touch_store", rate, "GB/s", failed=failed, removed=removed)


def clear_store(server: EngineServer, report: Report) -> None:
    server.flush(timeout=120)
    begun = time.monotonic()
    reply = server.request("POST", "/hicache/storage-backend/clear", admin=True)
    assert reply.status == 200, reply
    report.add("clear_store", time.monotonic() - begun, "s")


def add_store_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store",
        choices=("standalone", "own"),
        default="standalone",
        help="standalone: a `mooncake_client` process holds the objects and shares the engine's "
        "L2; own: the engine's segment holds them, so that one server fills the store and reads "
        "it after a flush",
    )


@contextmanager
def local_store(kind: str, report: Report) -> Iterator[Store]:
    """A store of a kind of `--store`, whose memory has been written."""
    with ExitStack() as stack:
        store = Store(standalone=kind == "standalone", stack=stack)
        if store.is_standalone:
            store.touch(report)
        yield store
