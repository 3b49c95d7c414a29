"""Attention to a window and to compressed rows on CUDA: FlashMLA's kernel for prefills of many
tokens.

The kernel reads one tensor of keys, and for each token a list of their indices. Each layer makes
this tensor: windows before the step, keys of the step, rows of its requests. Hundreds of tokens
read each key, so the copy costs little. All else is `CompressedTritonBackend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.attention.compressed_backend import CompressedAttention, row_buffers
from sglang.srt.layers.attention.compressed_triton_backend import CompressedTritonBackend
from sglang.srt.layers.attention.flashmla_library import (
    MULTIPLE,
    beside_each_other,
    load_kernel,
    refusal_of,
)
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    ForwardBatch,
    ForwardMode,
    Segment,
)
from sglang.srt.layers.triton_ops.compressed.attention import QueryTokens
from sglang.srt.layers.triton_ops.compressed.rotated_norm import rotate_back_
from sglang.srt.mem_cache.device.state_spec import PoolName

_FEWEST_TOKENS: Final = 512
"""Fewest tokens of a step. Fewer gain less than the launches and the copies cost."""
_ROWS_PER_TOKEN: Final = 128
"""Most rows that are copied for each token of a step."""
_COPY_BYTES: Final = 256 << 20
"""Upper bound, in bytes, of the copied keys, and of the indices."""


class _Rows(NamedTuple):
    """The rows of a step's requests, the same for all layers of a kind."""

    items: torch.Tensor
    """int64 `[n]`: the pool's items, request after request."""
    numbers: torch.Tensor | None
    """int32 `[bs, longest context]`: in the place of slots, the indices of rows times their tokens.
    None: tokens see all rows."""
    indices: torch.Tensor | None
    """int32 `[num_tokens, width]`: window and rows that each token sees; None: it chooses."""


class _Plan:
    """Where a prefill's keys are. Keys are those of the windows before it (`bs * window`), of its
    tokens, and rows."""

    def __init__(self, segments: Sequence[Segment], window: int) -> None:
        self.segments, self.window = segments, window
        last = segments[-1]
        self.num_tokens = last.begin + last.new
        self.rows: dict[tuple[int, bool], _Rows | None] = {}
        """By ratio, and whether rows are chosen; None: there are too many."""
        self.windows: tuple[torch.Tensor, torch.Tensor] | None = None
        """int64 `[bs * window]`: rows of all rings; int32 `[num_tokens, window]`: the keys of
        tokens' windows, -1: none. None: not made yet."""

    @property
    def num_keys(self) -> int:
        """Keys before the rows."""
        return len(self.segments) * self.window + self.num_tokens


class CompressedFlashMLABackend(CompressedTritonBackend):
    """See the module.

    Raises:
        ValueError: See `load_kernel`.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(config)
        self._kernel = load_kernel()
        (self._ring,) = config.specs[PoolName.SWA].buffers
        self._plan: _Plan | None = None
        """None: a step of few tokens."""

    def warm_up(self) -> None:
        """Raises:
        ValueError: The GPU does not run the kernel.
        """
        super().warm_up()
        device, dtype, dim = self._config.device, self._config.dtype, self._ring.shape[-1]
        query = torch.zeros((1, self._config.num_heads, dim), dtype=dtype, device=device)
        indices = torch.zeros((1, 1, MULTIPLE), dtype=torch.int32, device=device)
        try:
            self._kernel(query, query[:, :1].contiguous(), indices, 1.0, dim, None, None)
        except RuntimeError as error:
            raise refusal_of(device, error) from error

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._plan = None
        if forward_batch.forward_mode is ForwardMode.EXTEND:
            plan = _Plan(forward_batch.segments(), self._ring.shape[-2])
            if plan.num_tokens >= _FEWEST_TOKENS:
                self._plan = plan

    def init_forward_metadata_extend_graph(
        self, forward_batch: ForwardBatch, num_tokens: int, num_requests: int
    ) -> None:
        super().init_forward_metadata_extend_graph(forward_batch, num_tokens, num_requests)
        self._plan = None

    def _attend(
        self,
        inputs: AttentionInputs,
        ring: torch.Tensor,
        queries: QueryTokens,
        layer: CompressedAttention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        plan = None if batch.forward_mode.is_decode() else self._plan
        if plan is None or queries.tokens is not None:
            return super()._attend(inputs, ring, queries, layer, batch)
        is_chosen, rows, keys = inputs.index_query is not None, None, None
        at = layer.ratio, is_chosen
        if layer.rows_pool is not None:
            if at not in plan.rows:
                plan.rows[at] = self._plan_rows(plan, layer.ratio, is_chosen, queries, batch)
            if plan.rows[at] is None:
                return super()._attend(inputs, ring, queries, layer, batch)
            rows, keys = row_buffers(layer, batch)
        of_rings, indices = self._windows(plan, queries, batch)
        begin, known = plan.num_keys, plan.rows.get(at)
        size = begin + (0 if known is None else len(known.items))
        dim = ring.shape[-1]
        kv = torch.empty((size, 1, dim), dtype=ring.dtype, device=ring.device)
        torch.index_select(ring.view(-1, 1, dim), 0, of_rings, out=kv[: len(of_rings)])
        kv[len(of_rings) : begin] = inputs.k
        if known is not None:
            assert rows is not None, "the layer has rows"
            torch.index_select(rows.unsqueeze(1), 0, known.items, out=kv[begin:])
            if known.indices is not None:
                indices = known.indices
            else:
                assert keys is not None and inputs.index_query is not None
                chosen = self._choose(
                    inputs.index_query, keys, layer.ratio, batch, None, known.numbers
                )
                indices = beside_each_other(indices, chosen)
        else:
            indices = beside_each_other(indices)
        out, *_ = self._kernel(
            inputs.q, kv, indices.unsqueeze(1), layer.scaling, dim, layer.sinks, None
        )
        assert inputs.rotation is not None, "outputs are rotated back"
        rotate_back_(out, inputs.rotation)
        return out.flatten(1)

    def _windows(
        self, plan: _Plan, queries: QueryTokens, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `_Plan.windows`."""
        if plan.windows is None:
            window, size = plan.window, len(plan.segments) * plan.window
            owners, prefixes = queries.requests, queries.prefixes
            assert owners is not None and prefixes is not None, "it is a prefill"
            known = self._runtime.stage_to_device(
                torch.tensor([one.prefix for one in plan.segments])
            )
            places = torch.arange(window, device=known.device)
            of_rings = queries.slots[:, None] * window + (known[:, None] + places) % window
            tokens = torch.arange(plan.num_tokens, device=known.device)
            position = queries.positions[:, None] - window + 1 + places
            old = owners[:, None] * window + position - prefixes[:, None] + window
            new = (size + tokens)[:, None] - window + 1 + places
            seen = torch.where(position >= prefixes[:, None], new, old)
            plan.windows = of_rings.flatten(), seen.masked_fill_(position < 0, -1).int()
        return plan.windows

    def _plan_rows(
        self,
        plan: _Plan,
        ratio: int,
        is_chosen: bool,
        queries: QueryTokens,
        batch: ForwardBatch,
    ) -> _Rows | None:
        counts = np.array([(one.prefix + one.new) // ratio for one in plan.segments])
        num_rows, widest = int(counts.sum()), int(counts.max())
        key_bytes = self._ring.shape[-1] * self._ring.dtype.itemsize
        too_wide = not is_chosen and plan.num_tokens * (plan.window + widest) * 4 > _COPY_BYTES
        if too_wide or num_rows > min(
            plan.num_tokens * _ROWS_PER_TOKEN, _COPY_BYTES // key_bytes - plan.num_keys
        ):
            return None
        begins = np.cumsum(counts) - counts
        requests = np.repeat(np.arange(len(counts)), counts)
        of_rows = np.stack((requests, np.arange(num_rows) - begins[requests]))
        owner, place = self._runtime.stage_to_device(torch.from_numpy(of_rows.astype(np.int64)))
        table = batch.req_to_token_pool.req_to_token
        items = table[batch.req_pool_indices[owner], place * ratio].to(torch.int64) // ratio
        first = self._runtime.stage_to_device(torch.from_numpy(begins + plan.num_keys))
        if is_chosen:
            each = torch.arange(batch.longest_context, device=table.device)
            return _Rows(items, (first[:, None] * ratio + each).int(), None)
        assert queries.requests is not None, "it is a prefill"
        seen = ((queries.positions + 1) // ratio)[:, None]
        each = torch.arange(widest, device=table.device)
        read = torch.where(each < seen, first[queries.requests][:, None] + each, -1)
        windows = self._windows(plan, queries, batch)[1]
        return _Rows(items, None, beside_each_other(windows, read.int()))
