"""A cache rig whose model keeps marks beside its keys and values: two kinds of state, one tree."""

from __future__ import annotations

import torch

from rigs.caches.cache_rig import CacheRig, RigRequest, expected_kv
from rigs.caches.marks_pool import MarksPool, page_marks
from sglang.srt.mem_cache.device.pool_registry import ModelPools

MARK_LAYERS = (1, 3)
NUM_LAYERS = 5
"""Keys and values in layers 0 to 2, marks in 1 and 3, nothing in 4."""


class MarksRig(CacheRig):
    """A `CacheRig` on the CPU that computes a mark for each page and layer from all tokens up to
    the page's end, and checks the marks that it reuses."""

    def model_pools(self) -> ModelPools:
        self.marks = MarksPool(page_marks(*MARK_LAYERS), self.pool.size, self.page_size)
        return ModelPools.of([self.pool, self.marks], NUM_LAYERS)

    def spoil(self) -> None:
        """Overwrite every mark on the device."""
        self.marks.marks[:, 1:].fill_(-1)

    def _compute(self, request: RigRequest) -> None:
        super()._compute(request)
        ids, known = request.kv_committed_ids, request.cache_protected_len
        assert request.req_pool_idx is not None
        row = self.rows.req_to_token[request.req_pool_idx, : len(ids)].long()
        pages = row[self.page_size - 1 :: self.page_size] // self.page_size
        ends = expected_kv(ids, request.extra_key)[self.page_size - 1 :: self.page_size].long()
        reused = known // self.page_size
        for layer in MARK_LAYERS:
            own = self.marks.wait_for_layer(layer)
            wanted = 1000 * ends + layer
            assert torch.equal(self.marks.marks[own, pages[:reused]], wanted[:reused]), layer
            self.marks.marks[own, pages[reused:]] = wanted[reused:]
