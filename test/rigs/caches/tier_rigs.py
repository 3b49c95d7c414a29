"""Rigs of two and three tiers over the file backend, and a backend that fails in every way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from sglang.srt.mem_cache.hicache_storage import CacheOutcome, StorageUnavailable


def two_tiers(l1_pages: int = 8, **settings: Any) -> CacheRig:
    return CacheRig(l1_pages=l1_pages, settings=HiCacheSettings(**settings))


def three_tiers(l1_pages: int = 8, prefetch_threshold: int = 4, **settings: Any) -> CacheRig:
    extra = {"prefetch_threshold": prefetch_threshold}
    return two_tiers(
        l1_pages,
        hicache_storage_backend="file",
        hicache_storage_backend_extra_config=json.dumps(extra),
        **settings,
    )


def other_prompts(rig: CacheRig, count: int = 3) -> None:
    """Push everything else out of L1."""
    for index in range(count):
        rig.run(range(1000 * (index + 1), 1000 * (index + 1) + 16))
        rig.settle()


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until `condition` holds, without a tick."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class FlakyStorage:
    """Wraps the real backend of a rig; `mode` says how calls behave."""

    def __init__(self, rig: CacheRig) -> None:
        attached = rig.hi.store.attached
        assert attached is not None
        assert attached.client is not None
        self.real = attached.client
        self.mode = "ok"
        self.calls: list[str] = []
        self.goes_on = threading.Event()
        attached.client = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        call = getattr(self.real, name)

        def wrapped(*args: object, **kwargs: object) -> object:
            self.calls.append(name)
            if self.mode == "down" and name.startswith(("batch", "probe", "prompts")):
                raise StorageUnavailable("the store is down")
            if self.mode == "hangs" and name.startswith(("prompts_exist", "batch_set")):
                assert self.goes_on.wait(30)
            if self.mode == "refuses" and name.startswith("batch_set"):
                return {"kv": [CacheOutcome.FAILED] * len(args[0][0].keys)}  # type: ignore[index]
            result = call(*args, **kwargs)
            if self.mode == "hole" and name.startswith("batch_get"):
                result["kv"][2] = CacheOutcome.DAMAGED
            if self.mode == "terse" and name.startswith("batch_get"):
                # A hole that is not reported: three results for four pages.
                self.real.pool("kv").scatter_pages(
                    args[0][0].host_indices[4:8],  # type: ignore[index]
                    torch.zeros((1, self.real.pool("kv").page_bytes), dtype=torch.uint8),
                )
                del result["kv"][1]
            if self.mode == "full" and name.startswith("batch_set"):
                result["kv"][1] = CacheOutcome.FAILED
            return result

        return wrapped
