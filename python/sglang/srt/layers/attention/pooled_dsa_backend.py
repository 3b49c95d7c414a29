"""DSA over groups of tokens in plain torch: an indexer has one key for each group.

A token chooses `topk` tokens as whole groups, among those whose last token is not after it. It sees
the tokens of its open group too. A context in which that is everything is read as a whole.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.dsa_backend import (
    GATHER_BYTES,
    DSATorchNativeBackend,
    Pools,
    attend_rows,
    choose_tokens,
    index_scores,
)
from sglang.srt.layers.attention.slot_plan import VIEW_BYTES
from sglang.srt.layers.forward_batch_info import IndexQuery
from sglang.srt.layers.mla.latent_attention import LatentAttention
from sglang.srt.mem_cache.device.state_spec import PoolName


class PooledDSABackend(DSATorchNativeBackend):
    """See the module."""

    def __init__(self, config: AttentionConfig, *, view_bytes: int = VIEW_BYTES) -> None:
        super().__init__(config, view_bytes=view_bytes)
        self._ratio = config.specs[PoolName.INDEXER].stride
        self.unchosen = self._ratio - 1

    def _attend_chosen(
        self,
        request: int,
        q: torch.Tensor,
        layer: LatentAttention,
        pools: Pools,
        index: IndexQuery,
    ) -> torch.Tensor:
        slots, ratio = self._context(request).slots, self._ratio
        device, first = slots.device, len(slots) - len(q)
        items = slots[ratio - 1 :: ratio] // ratio
        keys = None if pools.index_keys is None else pools.index_keys[items]
        in_group, in_tail = (torch.arange(size, device=device) for size in (ratio, ratio - 1))
        width = index.topk + self.unchosen
        step = max(1, GATHER_BYTES // (width * layer.mla.kv_lora_rank * q.itemsize))
        outs = []
        for begin in range(0, len(q), step):
            block = slice(begin, min(begin + step, len(q)))
            own = index.of(block)
            ends = torch.arange(first + begin + 1, first + block.stop + 1, device=device)
            counts = ends // ratio
            if keys is None:
                assert own.chosen is not None
                chosen = own.chosen
            else:
                seen = keys[: (first + block.stop) // ratio]
                scores = index_scores(own, seen, positions=counts - 1)
                chosen = items[choose_tokens(scores, index.topk // ratio)]
                if own.chosen is not None:
                    own.chosen.copy_(chosen)
            tail = counts.unsqueeze(1) * ratio + in_tail
            mask = torch.zeros(len(tail), width, dtype=q.dtype, device=device)
            mask[:, index.topk :].masked_fill_(tail >= ends.unsqueeze(1), -torch.inf)
            tokens = (chosen.long().unsqueeze(-1) * ratio + in_group).flatten(1)
            read = torch.cat([tokens, slots[tail.clamp(max=len(slots) - 1)]], dim=1)
            outs.append(attend_rows(q[block], pools.rows, read, layer, mask))
        return torch.cat(outs)
