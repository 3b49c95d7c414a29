"""Attention to a window and to compressed rows on CUDA: Triton kernels over rings and rows.

No launch of a decode step depends on lengths, and no step waits for the device, so graphs can
capture decode steps and short prefills. In a captured step the indexer always chooses; a token that
sees fewer rows than it may choose gets them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.compressed_backend import (
    CompressedAttention,
    LayerRows,
    StoresRows,
    row_buffers,
)
from sglang.srt.layers.attention.window_backend import refuse_drafts, ring_buffers
from sglang.srt.layers.compressed.group_plan import states_of
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
    IndexQuery,
    Segment,
)
from sglang.srt.layers.linear_attention.extend_plan import ShortPlan
from sglang.srt.layers.rotary_embedding import Rotation
from sglang.srt.layers.triton_ops.attention.indexer_scores import index_scores
from sglang.srt.layers.triton_ops.attention.indexer_topk import choose_slots
from sglang.srt.layers.triton_ops.attention.window_decode import RingStep
from sglang.srt.layers.triton_ops.attention.window_extend import RingTokens, store_in_rings
from sglang.srt.layers.triton_ops.compressed.attention import (
    QueryTokens,
    RowLists,
    compressed_attention,
    warm_up_compressed_joins,
)
from sglang.srt.layers.triton_ops.compressed.groups import (
    GroupBuffers,
    GroupWeights,
    RowKind,
    StepRequests,
    store_groups,
)
from sglang.srt.mem_cache.device.state_spec import PoolName

LONG_TOKENS: Final = 256
"""Requests with more new tokens choose rows by themselves, so that several of their tokens share
the reading of keys."""
SCORE_BYTES: Final = 256 << 20
"""Upper bound, in bytes, of the indexer's scores computed at a time."""


class _Run(NamedTuple):
    """Consecutive tokens of a prefill that choose rows together."""

    tokens: slice
    longest: int
    """Upper bound of the tokens that one of them sees."""
    one_list: bool
    """True if they are of one request."""


class _Prefill(NamedTuple):
    """A prefill, the same for all layers."""

    owners: torch.Tensor
    """int64 `[2, num_tokens]`: each token's request, and tokens of the request before the step."""
    rings: RingTokens
    runs: list[_Run]
    most_new: int
    """Most new tokens of a request."""


class CompressedTritonBackend(AttentionBackend, StoresRows):
    """See the module. It stores keys and rows by itself. It verifies no drafts."""

    can_be_captured = True
    captures_extend = True

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config
        self._runtime = device_runtime(config.device)
        self._prefill: _Prefill | None = None
        self._captured: dict[tuple[int, int], _Prefill] = {}
        """Captured prefills, by numbers of tokens and requests."""
        self._starts: Mapping[int, Rotation] = {}
        """Angles of the first position of each token's group, by ratio."""
        self._lens = torch.empty(0)
        """int64 `[num_tokens]`: tokens that each token sees."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        refuse_drafts(forward_batch)
        if forward_batch.forward_mode is not ForwardMode.EXTEND:
            return
        states, num_new = states_of(forward_batch), forward_batch.extend_seq_lens_cpu
        assert num_new is not None, "the maker of the batch gave it"
        segments = forward_batch.segments()
        plan = ShortPlan.of(num_new, states.track_lens_cpu, forward_batch.input_ids.device)
        self._prefill = _Prefill(
            self._runtime.stage_to_device(_owners(segments)),
            RingTokens(seq_lens=forward_batch.seq_lens, **plan._asdict()),
            _runs(segments),
            max(num_new),
        )

    def init_forward_metadata_extend_graph(
        self, forward_batch: ForwardBatch, num_tokens: int, num_requests: int
    ) -> None:
        size = num_tokens, num_requests
        if forward_batch.is_captured:
            plan, table = states_of(forward_batch).plan, forward_batch.req_to_token_pool
            assert isinstance(plan, ShortPlan), "captured prefills are short"
            longest = table.req_to_token.shape[1]
            self._captured[size] = _Prefill(
                torch.zeros((2, num_tokens), dtype=torch.int64, device=self._config.device),
                RingTokens(seq_lens=forward_batch.seq_lens, **plan._asdict()),
                [_Run(slice(0, num_tokens), longest, num_requests == 1)],
                num_tokens,
            )
        self._prefill = found = self._captured[size]
        # A token after the step's own is the first of a request without a prefix: it sees itself.
        padded = torch.zeros((2, num_tokens), dtype=torch.int64)
        own = _owners(forward_batch.segments())
        padded[:, : own.shape[1]] = own
        found.owners.copy_(self._runtime.stage_to_device(padded))

    def warm_up(self) -> None:
        """Run the kernels that join parts of contexts."""
        config = self._config
        (ring,) = config.specs[PoolName.SWA].buffers
        out = torch.empty(1, dtype=config.dtype, device=config.device)
        warm_up_compressed_joins(config.num_heads, ring.shape[-1], out)

    def graph_bytes(self, num_tokens: int, context_len: int) -> int:
        keys = self._config.specs.get(PoolName.INDEXER)
        return 0 if keys is None else 4 * num_tokens * context_len // keys.stride

    def plan_rows(
        self,
        forward_batch: ForwardBatch,
        positions: torch.Tensor,
        starts: Mapping[int, Rotation],
    ) -> None:
        is_decode = forward_batch.forward_mode.is_decode()
        self._lens = forward_batch.seq_lens if is_decode else positions + 1
        self._starts = starts

    def store_rows(self, kinds: Sequence[LayerRows], batch: ForwardBatch) -> None:
        states = states_of(batch)
        prefill = None if batch.forward_mode.is_decode() else self._prefill
        step = StepRequests(
            lens=batch.seq_lens,
            owners=batch.req_pool_indices,
            slots=states.slots,
            loc=batch.out_cache_loc,
            read_slots=states.read_slots,
            bounds=None if prefill is None else prefill.rings.bounds,
            most_new=1 if prefill is None else prefill.most_new,
            track_slots=states.track_slots,
            track_lens=None if prefill is None else prefill.rings.track_lens,
        )
        store_groups([self._row_kind(kind, batch) for kind in kinds], step)

    def _row_kind(self, kind: LayerRows, batch: ForwardBatch) -> RowKind:
        """The buffers of rows and of tokens."""
        tokens, compressor, pool = kind
        options = compressor.options
        assert batch.pools is not None, "the runner sets it before the model runs"
        rows, kept = batch.pools[pool], None
        if options.overlap_pool is not None:
            kept = compressor.buffer(options.overlap_pool, batch)
        weights = GroupWeights(
            position=compressor.position.weight,
            norm=compressor.norm.weight,
            eps=options.eps,
            angles=self._starts[options.ratio],
        )
        buffers = GroupBuffers(
            rows=rows.parts[0][rows.place_to_write(compressor.layer_id)],
            opened=compressor.buffer(options.open_pool, batch),
            kept=kept,
        )
        return RowKind(tokens, weights, buffers)

    def forward(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        assert isinstance(layer, CompressedAttention), f"{layer} has no rows"
        ring, _ = ring_buffers(layer, forward_batch)
        states, batch = states_of(forward_batch), forward_batch
        is_decode, prefill = batch.forward_mode.is_decode(), self._prefill
        if is_decode:
            queries = QueryTokens(positions=batch.positions, slots=states.slots)
        else:
            assert prefill is not None, "the step was planned"
            requests, prefixes = prefill.owners
            queries = QueryTokens(
                positions=batch.positions,
                slots=states.read_slots,
                requests=requests,
                prefixes=prefixes,
                tokens=inputs.rows,
            )
        out = self._attend(inputs, ring, queries, layer, batch)
        if prefill is not None and not is_decode:
            k = inputs.k
            rings = RingStep(k=ring, v=ring, slots=states.slots, first_slots=states.first_slots)
            store_in_rings(k, k, rings, prefill.rings, states.track_slots)
        return out

    def _attend(
        self,
        inputs: AttentionInputs,
        ring: torch.Tensor,
        queries: QueryTokens,
        layer: CompressedAttention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """See `compressed_attention`."""
        assert inputs.rotation is not None, "outputs are rotated back"
        return compressed_attention(
            inputs.q,
            inputs.k,
            ring,
            queries,
            self._rows_of(inputs, layer, batch),
            inputs.rotation,
            layer.scaling,
            layer.sinks,
        )

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self.forward(inputs, layer, forward_batch)

    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        raise AssertionError("one kernel stores and attends: see `forward`")

    def _rows_of(
        self, inputs: AttentionInputs, layer: CompressedAttention, batch: ForwardBatch
    ) -> RowLists | None:
        """The rows that the tokens of a step read; None: the layer has none. A context that is too
        short for a row has a list too, so that lengths select no kernel."""
        if layer.rows_pool is None:
            return None
        rows, keys = row_buffers(layer, batch)
        if inputs.index_query is None:
            table = batch.req_to_token_pool.req_to_token
            return RowLists(rows=rows, table=table, ratio=layer.ratio, lists=batch.req_pool_indices)
        assert keys is not None, "the layer has an indexer"
        chosen = self._choose(inputs.index_query, keys, layer.ratio, batch, inputs.rows)
        return RowLists(rows=rows, table=chosen, ratio=layer.ratio)

    def _choose(
        self,
        index: IndexQuery,
        keys: torch.Tensor,
        ratio: int,
        batch: ForwardBatch,
        only: torch.Tensor | None,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The items of the rows that tokens choose, int32 `[n, topk]`.

        Args:
            index: Queries of all tokens of the step.
            keys: The indexer's keys of all items.
            only: Tokens that choose, one of each request; None: all.
            numbers: Used in the place of slots, for a prefill: int32 `[bs, longest context]`.
        """
        lens, lists = self._lens, batch.req_pool_indices
        runs = [_Run(slice(0, len(lists)), batch.longest_context, one_list=False)]
        if only is not None:
            index, lens = index.of(only), lens[only]
        elif not batch.forward_mode.is_decode():
            assert self._prefill is not None, "the step was planned"
            runs, lists = self._prefill.runs, lists[self._prefill.owners[0]]
        table = batch.req_to_token_pool.req_to_token
        named = table, lists
        if numbers is not None:
            assert self._prefill is not None, "the step was planned"
            named = numbers, self._prefill.owners[0]
        shape = (len(lens), index.topk)
        chosen = torch.empty(shape, dtype=torch.int32, device=keys.device)
        for run in runs:
            longest = run.longest // ratio
            if not longest:
                continue
            step = max(1, SCORE_BYTES // (4 * longest))
            for begin in range(run.tokens.start, run.tokens.stop, step):
                own = slice(begin, min(begin + step, run.tokens.stop))
                asked, of_own = index.of(own), (table, lists[own], lens[own])
                scores = index_scores(
                    *(asked.q, asked.weights, keys, *of_own, longest),
                    one_list=run.one_list,
                    stride=ratio,
                )
                names, rows = named
                choose_slots(
                    *(scores, names, rows[own], lens[own], index.topk),
                    out=chosen[own],
                    stride=ratio,
                )
        return chosen


def _owners(segments: list[Segment]) -> torch.Tensor:
    """int64 `[2, num_tokens]` on the CPU; see `_Prefill.owners`."""
    counts = [segment.new for segment in segments]
    requests = np.repeat(np.arange(len(segments)), counts)
    prefixes = np.repeat([segment.prefix for segment in segments], counts)
    return torch.from_numpy(np.stack((requests, prefixes)).astype(np.int64))


def _runs(segments: list[Segment]) -> list[_Run]:
    """Runs of all tokens: a long request is one, and so are short ones side by side."""
    runs: list[_Run] = []
    for one in segments:
        longest, is_long = one.prefix + one.new, one.new > LONG_TOKENS or len(segments) == 1
        if is_long or not runs or runs[-1].one_list:
            runs.append(_Run(slice(one.begin, one.end), longest, is_long))
        else:
            begin = runs[-1].tokens.start
            longest = max(longest, runs[-1].longest)
            runs[-1] = _Run(slice(begin, one.end), longest, one_list=False)
    return runs
