"""Times and host memory of hits in L3, with L2 as a cache and as buffers of several sizes.

A real engine's tiers without a model, over the file backend or a real Mooncake store on this
machine over TCP. A prompt is written and leaves L1 and L2; another request then reads it to L1,
tick after tick. `hit` is the time from its arrival until L1 has all of it, which is its first token
without the rest of the prompt; `rate` is its bytes by that. `limit` is the rate of the same reads
into an L2 that holds the whole prompt twice.

About 60 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from benchmark.command import Command
from benchmark.report import Report
from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool

_PAGE: Final = 16
_LAYERS: Final = 16
_HEADS: Final = 8
_DIM: Final = 128
_PAGE_BYTES: Final = _PAGE * _LAYERS * _HEADS * _DIM * 2 * 2
_TICK_S: Final = 0.001
_LONGEST_S: Final = 60.0


class Tiers(CacheRig):
    """Tiers with pages of 1 MiB, whose contents nobody computes."""

    def make_pool(self, size: int) -> MHATokenToKVPool:
        return MHATokenToKVPool(size, _PAGE, torch.bfloat16, _HEADS, _DIM, _LAYERS, "cpu")

    def use_slots(self, row: torch.Tensor, known: int, wanted: torch.Tensor) -> None:
        """Leave the pages as they are."""

    def hit_seconds(self, ids: list[int]) -> tuple[float, int, int]:
        """Seconds until L1 has the prefix of a prompt, its tokens, and the most tokens in L2."""
        began, most = time.monotonic(), 0
        self.arrive("read", ids)
        while not self.may_admit("read"):
            self.tick()
            most = max(most, self._used())
            assert time.monotonic() < began + _LONGEST_S, "the read does not end"
            time.sleep(_TICK_S)
        request, reused = self.admit("read", ids)
        self.hi.verify_load(self.hi.newest_load)
        seconds = time.monotonic() - began
        most = max(most, self._used())
        self.finish(request)
        self.settle()
        return seconds, reused.total, most

    def _used(self) -> int:
        return self.hi.host_pool.size - self.hi.host_pool.available_size()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", nargs="+", default=["file", "mooncake"])
    parser.add_argument("--prompt-pages", type=int, default=192)
    parser.add_argument("--buffer-pages", type=int, nargs="+", default=[8, 32, 64, 128, 384])
    parser.add_argument("--repeats", type=int, default=5)


@contextlib.contextmanager
def store(backend: str) -> Iterator[dict[str, Any]]:
    """A store on this machine; the value is the extra config of its engines."""
    extra: dict[str, Any] = {"prefetch_threshold": _PAGE}
    with contextlib.ExitStack() as stack:
        if backend == "file":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-"))
            stack.enter_context(envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(folder))
        else:
            cluster = stack.enter_context(MooncakeCluster(segment_size="2gb"))
            extra |= {
                "master_server_address": cluster.master.address,
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": 0,
                "protocol": "tcp",
            }
        yield extra


def measure(
    backend: str, extra: dict[str, Any], mode: str, l2_pages: int, args: argparse.Namespace
) -> tuple[list[float], dict[str, float]]:
    """Seconds of each hit, and figures that do not vary."""
    l1_pages = 2 * args.prompt_pages
    settings = HiCacheSettings(
        hicache_host_memory_mode=mode,
        hicache_ratio=(l2_pages + 0.5) / l1_pages,
        hicache_storage_backend=backend,
        hicache_storage_backend_extra_config=json.dumps(extra),
    )
    rig = Tiers(
        l1_pages=l1_pages,
        page_size=_PAGE,
        settings=settings,
        dtype=torch.bfloat16,
        weights_identity=f"{mode} {l2_pages}",  # Finds what it has written itself.
    )
    try:
        tokens = args.prompt_pages * _PAGE
        ids = [*range(tokens), 7]
        began = time.monotonic()
        rig.run(ids)
        rig.settle()
        figures = {"write_seconds": time.monotonic() - began}
        seconds: list[float] = []
        most = 0
        for _ in range(args.repeats):
            rig.hi.evict(EvictParams(num_tokens=rig.allocator.size))
            rig.hi.evict_host(rig.hi.host_pool.size)
            one, found, used = rig.hit_seconds(ids)
            assert found == tokens, f"{found} of {tokens} tokens were found"
            seconds.append(one)
            most = max(most, used)
        figures["host_gb"] = rig.hi.cache_controller.mem_pool_host.nbytes / 1e9
        figures["most_host_pages"] = most / _PAGE
    finally:
        rig.close()
    return seconds, figures


def run(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(1)
    gb = args.prompt_pages * _PAGE_BYTES / 1e9
    for backend in args.backends:
        with store(backend) as extra:
            limit: float | None = None
            cases = [("cache", 2 * args.prompt_pages)]
            cases += [("buffer_only", pages) for pages in args.buffer_pages]
            for mode, pages in cases:
                case = {"backend": backend, "mode": mode, "l2_pages": pages}
                seconds, figures = measure(backend, extra, mode, pages, args)
                rate = gb / statistics.median(seconds)
                limit = limit or rate
                report.add("hit", statistics.median(seconds), "s", case, seconds=seconds)
                report.add("rate", rate, "GB/s", case, limit=limit)
                report.add("host_memory", figures["host_gb"], "GB", case)
                report.add("most_pages_in_l2", figures["most_host_pages"], "pages", case)
                report.add("write", figures["write_seconds"], "s", case)


COMMAND: Final = Command(
    run=run,
    add_options=add_options,
    quick={"backends": ["file"], "prompt_pages": 16, "buffer_pages": [8], "repeats": 1},
)
