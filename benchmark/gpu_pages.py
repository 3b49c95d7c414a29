"""KV pages from one GPU to another by the Transfer Engine, against a peer copy in the same run.

    python benchmark/gpu_pages.py [--tokens 8192 32768] [--protocol nvlink_intra] [--json FILE]

Two processes with a pool of Qwen3-8B's shape each, pages of 64 tokens. The second reads pages of
the first as a decode server does: `run` is one run of pages on both sides, `scattered` pages in
random order on both. The bytes are compared afterwards. `target`: 0.80 of the peer copy for a run.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from sglang.benchmark.report import emit, provenance
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.protocol import Offer
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import TransferOp
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.distributed.torch_rank_group import TorchRankGroup
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.test.models.qwen3_8b import KV_BYTES
from sglang.test.schedulers.rank_processes import run_ranks

PAGE: Final = 64
REPEATS: Final = 7
LAYERS, KV_HEADS, HEAD_DIM = 36, 8, 128
TARGET: Final = 0.8
EXPECTED_GB_S: Final = {"run": 340.0, "scattered": 25.0}
"""A run of 8,192 tokens is 72 blocks of 16 MB, a page 72 of 128 KB."""


def peer_copy_gb_s(num_bytes: int) -> float:
    """One large copy from the other GPU, by this process."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize("cuda:1")
        begun = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize("cuda:1")
        seconds.append(time.perf_counter() - begun)
    return num_bytes / sorted(seconds)[len(seconds) // 2] / 1e9


def measure(protocol: str, sizes: list[int]) -> list[dict[str, Any]]:
    """One rank's part: the first has the pages, the second reads them."""
    os.environ["MOONCAKE_PROTOCOL"] = protocol
    ranks = TorchRankGroup.of_world()
    device = f"cuda:{ranks.rank}"
    mark_device_set(device)
    tokens = 2 * max(sizes)
    pool = MHATokenToKVPool(tokens, PAGE, torch.bfloat16, KV_HEADS, HEAD_DIM, LAYERS, device)
    tensors = [buffer for part in pool.parts for buffer in part]
    if ranks.rank == 0:
        for buffer in tensors:
            buffer.normal_()
    torch.cuda.synchronize()
    engine = MooncakeTransferEngine(LOOPBACK, ranks.rank)
    found = device_runtime(device).allocations_of(tensors)
    engine.batch_register(list(found), list(found.values()))
    geometry = PoolGeometry.of([pool], "dummy")
    told = geometry.offer("source", engine.get_session_id())
    offer = msgspec.msgpack.decode(
        ranks.broadcast(msgspec.msgpack.encode(told) if ranks.rank == 0 else None), type=Offer
    )
    rows: list[dict[str, Any]] = []
    for size in sizes if ranks.rank == 1 else ():
        limit = peer_copy_gb_s(size * KV_BYTES)
        rng = np.random.default_rng(size)
        one_run = np.arange(1, size // PAGE + 1)
        scattered = [rng.permutation(tokens // PAGE)[: size // PAGE] + 1 for _ in range(2)]
        for name, there, here in (("run", one_run, one_run), ("scattered", *scattered)):
            seconds = []
            for _ in range(REPEATS):
                begun = time.perf_counter()
                blocks = geometry.blocks(offer, there.tolist(), here.tolist())
                transfer = engine.transfer(offer.session_id, TransferOp.READ, blocks, timeout=60)
                seconds.append(time.perf_counter() - begun)
                assert transfer.is_done, transfer.error
            speed = size * KV_BYTES / sorted(seconds)[REPEATS // 2] / 1e9
            rows.append(
                {"tokens": size, "pages": name, "blocks": len(blocks), "gb_s": round(speed, 1),
                 "first_s": round(seconds[0], 4), "peer_copy_gb_s": round(limit, 1),
                 "of_limit": round(speed / limit, 3)}
            )  # fmt: skip
    ranks.reduce_min(torch.zeros(1, dtype=torch.int64))  # Until both have come here.
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--protocol", default="nvlink_intra")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for row in run_ranks(2, measure, args.protocol, args.tokens, device="cuda")[1]:
        record = {"benchmark": "gpu_pages", "protocol": args.protocol, **row, "target": TARGET}
        emit(record | {"expected_gb_s": EXPECTED_GB_S[row["pages"]], **provenance()}, args.json)


if __name__ == "__main__":
    main()
