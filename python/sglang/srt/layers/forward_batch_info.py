"""Input of one forward pass: plain data, made by the scheduler.

Units: a slot is the index of one token's keys and values in the device pool. `bs` is the
number of requests in the batch, `num_tokens` the number of tokens computed in this step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from sglang.srt.hardware_backend.device_runtime import Event, on_device
from sglang.srt.layers.triton_ops.arguments import RoundedRows, ScaledWeight
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool

if TYPE_CHECKING:
    from sglang.srt.distributed.tensor_group import TensorGroup
    from sglang.srt.layers.attention_kind import AttentionKind
    from sglang.srt.mem_cache.device.memory_pool import KVCache, ReqToTokenPool
    from sglang.srt.mem_cache.device.state_spec import PoolName


class ForwardMode(IntEnum):
    """Kind of a step: prefill or decode."""

    EXTEND = 1
    """Prefill: each request computes its tokens after those that the pool holds."""
    DECODE = 2
    """Each request computes one token."""
    TARGET_VERIFY = 3
    """Verification of drafts: an extend step with equally many tokens of each request, which needs
    the logits of all. States stay as they are until the accepted tokens are known."""

    def is_extend(self) -> bool:
        return self is not ForwardMode.DECODE

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE


class Segment(NamedTuple):
    """One request of an extend step; its new tokens begin at the step's token `begin`."""

    row: int
    """The request's row of `req_to_token`."""
    begin: int
    """Index in the step of its first new token."""
    prefix: int
    """Tokens that the pool already holds."""
    new: int
    """New tokens, at least 1."""

    @property
    def end(self) -> int:
        """Index in the step after its last new token."""
        return self.begin + self.new


@dataclass(slots=True, kw_only=True)
class StateBatch:
    """Slots of recurrent states that a step uses. Tensors are on the model's device."""

    slots: torch.Tensor
    """int64 `[bs]`: slot of each request's running state, which the step overwrites. A request
    without a prefix starts from a zeroed state."""
    first_slots: torch.Tensor | None = None
    """Extend only: int64 `[bs]`, slots of the states that the step continues from; None: `slots`. A
    cached prefix's state belongs to the tree and is only read."""
    copied: tuple[torch.Tensor, torch.Tensor] | None = None
    """Slots of states, and slots to which they are copied after the step, int64 `[n]` each; None:
    none is. A decode step leaves its snapshots so. A prefill restores the states of requests whose
    one token was part of the state that they continue from."""
    track_slots: torch.Tensor | None = None
    """Extend only: int64 `[bs]`, the slot for a snapshot of each request's state; 0 (padding): no
    snapshot. None: no request has one."""
    track_lens_cpu: list[int] | None = None
    """Extend only, with `track_slots`: new tokens of each request before its snapshot; 0: no
    snapshot. Later tokens continue from the snapshot as stored."""
    verify: object | None = None
    """Verification only: `VerifyBuffers`, in which delta-net layers keep their inputs until
    `commit_verified`. They leave the running states as they are."""
    plan: object | None = None
    """Extend only: the plan that layers of linear attention share. The first of them makes it; see
    `extend_plan_of` and `kernel_plan_of`."""
    groups: object | None = None
    """The `StepGroups` of layers that compress groups of tokens, which the model makes."""

    @property
    def read_slots(self) -> torch.Tensor:
        """int64 `[bs]`: slots of the states that the step continues from."""
        return self.slots if self.first_slots is None else self.first_slots

    @classmethod
    def running(cls, pool: ReqToTokenPool, rows: torch.Tensor) -> StateBatch | None:
        """The running states of the requests at `rows` (int64 `[bs]` on the device); None: the
        model keeps none."""
        slots = pool.state_slots(rows)
        return None if slots is None else cls(slots=slots)


class IndexQuery(NamedTuple):
    """An indexer's queries for some tokens; they choose which tokens of the contexts are read."""

    q: torch.Tensor
    """`[num_tokens, heads, head_dim]` of the indexer."""
    weights: torch.Tensor
    """fp32 `[num_tokens, heads]`: scaled factors of each head's positive products with keys."""
    topk: int
    """Tokens to choose; contexts of at most `topk` tokens are read as a whole."""
    chosen: torch.Tensor | None = None
    """int32 `[num_tokens, topk]`: slots of the chosen tokens, for layers that share the choice; of
    chosen groups of tokens one number each, the slots divided by the size of a group. The backend
    fills it, except for tokens that read their whole context; None: no layer shares it."""
    is_known: bool = False
    """True if an earlier layer has filled `chosen`; the queries are not used again."""

    def of(self, tokens: slice | torch.Tensor) -> IndexQuery:
        """The queries of some of the tokens: a slice, or indices (int64 `[n]`). A slice has a view
        of `chosen`, indices have a copy."""
        chosen = None if self.chosen is None else self.chosen[tokens]
        return self._replace(q=self.q[tokens], weights=self.weights[tokens], chosen=chosen)


class AttentionInputs(NamedTuple):
    """What a layer gives its attention backend; documented in `RadixAttention.forward`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    save_kv_cache: bool = True
    rows: torch.Tensor | None = None
    index_query: IndexQuery | None = None
    """`index` there."""
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    """A `Rotation`."""


class AttentionLayer(Protocol):
    """The part of a `RadixAttention` that backends read; documented there."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    layer_id: int
    kind: AttentionKind
    sinks: torch.Tensor | None


class Attention(Protocol):
    """What a layer uses of an `AttentionBackend`; documented there."""

    rotates_in_decoding: bool

    def forward(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor: ...

    def forward_decode_gated(
        self,
        q: torch.Tensor,
        gates: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor | None: ...

    def forward_decode_rounded(
        self,
        q: torch.Tensor,
        weight: ScaledWeight,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
    ) -> RoundedRows | None: ...


@dataclass(frozen=True, slots=True)
class RunEdges:
    """Indices of hidden states at the edges of a rank's runs, for a draft layer."""

    starts: torch.Tensor
    """int64 `[runs]`: index of each run's first token among the rank's tokens."""
    before: torch.Tensor
    """int64 `[runs]`: index of the state before each run. Indices below `bs` mean the state before
    that request's first new token; the gathered states follow, from `bs` on."""
    last: torch.Tensor
    """int64 `[bs]`: index of the state at each request's last token, among the gathered ones."""


@dataclass(frozen=True, slots=True)
class ContextShare:
    """One rank's share of a split prefill, and its exchange with the other ranks."""

    whole: ForwardBatch
    """The step as the scheduler made it, but without `capture_hidden`, for its logits."""
    group: TensorGroup
    here: torch.Tensor
    """int64 `[padded]`: slots of this rank's tokens, padded with slot 0 to the same length on all
    ranks."""
    everywhere: torch.Tensor
    """int64 `[size * padded]`: `here` of all ranks, one after the other."""
    rows: torch.Tensor
    """int64 `[n]`: indices of the hidden states that the ranks gather, among those that the model
    gives on this rank."""
    places: torch.Tensor
    """int64 `[n]`: indices of these states among the gathered ones."""
    num_places: int
    """Gathered states."""
    num_wanted: int
    """Gathered states that the logits of the whole step need; they come first, in its order."""
    edges: RunEdges | None
    """Edges of the runs, or None if the step does not capture hidden states."""

    def share_stored(self, layer_id: int, pools: Mapping[PoolName, BaseDevicePool]) -> None:
        """Exchange what the ranks have stored for a layer, so that every rank's pools have all of
        it."""
        buffers = [
            part[pool.wait_for_layer(layer_id)]
            for pool in pools.values()
            if isinstance(pool, PagedDevicePool) and layer_id in pool.spec.layers
            for part in pool.parts
        ]
        own = [buffer.index_select(0, self.here).flatten(1).view(torch.uint8) for buffer in buffers]
        gathered = self.group.all_gather(torch.cat(own, dim=1)).flatten(0, 1)
        parts = torch.split(gathered, [part.shape[1] for part in own], dim=1)
        for buffer, raw in zip(buffers, parts, strict=True):
            rows = raw.contiguous().view(buffer.dtype).view(-1, *buffer.shape[1:])
            buffer.index_copy_(0, self.everywhere, rows)

    def gather_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Gather the hidden states that all ranks need: `[num_places, hidden_size]`.

        Args:
            hidden: `[rows, hidden_size]`: this rank's hidden states of `rows_for_logits`, or of all
                its tokens if the step captures them.
        """
        wanted = hidden.new_zeros(self.num_places, hidden.shape[1])
        wanted.index_copy_(0, self.places, hidden.index_select(0, self.rows))
        return self.group.all_reduce(wanted)  # Each row is zero on all ranks but one.


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A step that all DP groups run together. Fields have a number for each group, in order."""

    tokens: tuple[int, ...]
    """Tokens that it computes; 0: it has no work."""
    rows: tuple[int, ...]
    """Tokens that it computes in the model's last layer; see `ForwardBatch.rows_for_logits`."""
    graph_rows: int | None = None
    """Requests of the largest group, for which all groups replay a captured decode step, or all a
    captured verification; None: no group replays any."""
    drafts: tuple[int, ...] = ()
    """Tokens of each pass of the draft layer before the step; 0: the group verifies no drafts.
    Empty: no group does."""


@dataclass(kw_only=True)
class ForwardBatch:
    """One step's input. Tensors are on the model's device, `*_cpu` fields are Python lists.

    The slots of request i's context are
    `req_to_token_pool.req_to_token[req_pool_indices[i], :seq_lens[i]]`, the new ones included.
    The maker of a batch writes them there before the forward.
    """

    forward_mode: ForwardMode
    input_ids: torch.Tensor
    """int64 `[num_tokens]`; in an extend step the new tokens of every request, concatenated."""
    positions: torch.Tensor
    """int64 `[num_tokens]`: position of each token in its context, from 0."""
    req_pool_indices: torch.Tensor
    """int64 `[bs]`: rows of `req_to_token_pool`."""
    seq_lens: torch.Tensor
    """int64 `[bs]`: context lengths, the tokens of this step included."""
    seq_lens_cpu: list[int]
    out_cache_loc: torch.Tensor
    """int64 `[num_tokens]`: slots that take the new keys and values. Slot 0 (padding) for a token
    whose keys and values are in the pool already; attention finds them by the request's row."""
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVCache
    req_pool_indices_cpu: list[int] | None = None
    """Extend only: `req_pool_indices` as a list."""
    capture_hidden: bool = False
    """True if the step returns the hidden states of all its tokens, which a draft layer reads."""
    extend_prefix_lens_cpu: list[int] | None = None
    """Extend only: tokens of each request that the pool already holds."""
    extend_seq_lens_cpu: list[int] | None = None
    """Extend only: new tokens of each request, at least 1 each."""
    return_logprob: bool = False
    """True if any request wants logprobs of its output."""
    top_logprobs_nums: list[int] | None = None
    """Number of most likely tokens whose logprobs each request wants; None: all zero."""
    extend_logprob_start_lens_cpu: list[int] | None = None
    """Extend only: for each request, the first new token whose logits give a prompt logprob; the
    number of its new tokens if it wants none. None: no request wants any."""
    extend_input_logprob_token_ids_cpu: list[list[int]] | None = None
    """Set together with `extend_logprob_start_lens_cpu`: for each request, the token that follows
    each of these new tokens, whose logprob is wanted."""
    logits_out: torch.Tensor | None = None
    """Buffer for this rank's logits, fp32 `[bs, width]` (`VocabLogits.part`); None: a new tensor.
    For captured graphs."""
    last_rows_in: torch.Tensor | None = None
    """Extend only: int64 `[bs]`, what `last_rows` returns; None: it uploads them itself."""
    is_captured: bool = False
    """True while a graph is captured: the kernels are replayed for other steps, with lengths other
    than `seq_lens_cpu`."""
    on_layer: Callable[[int], None] | None = None
    """Called with each layer's number before its attention is launched. For captured graphs."""
    states: StateBatch | None = None
    """Slots of recurrent states; None: the model has none."""
    context_share: ContextShare | None = None
    """Extend only, set by the runner: this batch is one rank's share of a step, and each run of
    tokens counts as a request. None: this is the whole step."""
    token_contexts: tuple[torch.Tensor, torch.Tensor] | None = None
    """Verification only: see `contexts_of_tokens`, whose first call sets it."""
    index: IndexQuery | None = None
    """Queries of the last layer with an indexer whose choice later layers share. Set by it."""
    attn_backends: Mapping[AttentionKind, Attention] | None = None
    """The backend of each kind of the model's layers. Set by the runner, which owns them."""
    pools: Mapping[PoolName, BaseDevicePool] | None = None
    """The pools of all state, including `token_to_kv_pool`. Set by the runner."""
    stores_only: bool = False
    """True if attention stores what it caches of the tokens, and computes nothing for them."""
    groups: GroupStep | None = None
    """The step of all DP groups, of which this batch is one group's part; None: no other group
    takes part, or all have as many tokens."""
    mostly_done: Event | None = None
    """Recorded when about three quarters of the layers are done; None: nothing waits for that."""

    @property
    def batch_size(self) -> int:
        """Requests in the batch."""
        return len(self.seq_lens_cpu)

    @property
    def most_new_tokens(self) -> int:
        """Most tokens of a request in the step; for a captured step, over all replays. In decode
        steps and verifications, all requests have as many."""
        if self.extend_seq_lens_cpu is not None:
            return max(self.extend_seq_lens_cpu)
        return len(self.input_ids) // self.batch_size

    @property
    def longest_context(self) -> int:
        """Upper bound of the context lengths, in tokens; for a captured step, over all replays."""
        if self.is_captured:
            return self.req_to_token_pool.req_to_token.shape[1]
        return max(self.seq_lens_cpu)

    def segments(self) -> list[Segment]:
        """Extend only: the requests in the order of their tokens."""
        rows, prefix_lens = self.req_pool_indices_cpu, self.extend_prefix_lens_cpu
        counts = self.extend_seq_lens_cpu
        assert rows is not None
        assert prefix_lens is not None
        assert counts is not None
        begins = itertools.accumulate(counts, initial=0)
        # One begin more than requests: the end.
        return list(map(Segment, rows, begins, prefix_lens, counts))

    def contexts_of_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Verification only: rows of `req_to_token` and lengths of the contexts that tokens see,
        int64 `[num_tokens]` each. Attention treats each token as a request that decodes. Only the
        device computes them."""
        if self.token_contexts is None:
            width = self.most_new_tokens
            lens = torch.arange(1 - width, 1, device=self.seq_lens.device) + self.seq_lens[:, None]
            rows = self.req_pool_indices.repeat_interleave(width, output_size=lens.numel())
            self.token_contexts = rows, lens.flatten()
        return self.token_contexts

    def begin_layer(self, layer_id: int) -> None:
        """Note that a layer's attention is about to be launched."""
        if self.on_layer is not None:
            self.on_layer(layer_id)
        if self.mostly_done is not None:
            layers = self.token_to_kv_pool.spec.layers
            # Not the last layer of several: it may be a draft layer, which runs in another pass.
            if layer_id == layers[3 * (len(layers) - 1) // 4]:
                self.mostly_done.record()

    def rows_for_logits(self) -> torch.Tensor | None:
        """Indices of the step's tokens whose logits are needed.

        Returns:
            int64 `[bs]` on the model's device: the last token of each request. None: all tokens,
            as in a decode step or a verification, or if logprobs of prompt tokens are wanted.
        """
        return None if self.needs_all_rows else self.last_rows()

    def rows_to_compute(self) -> torch.Tensor | None:
        """Indices of the tokens that the last layer computes: those of `rows_for_logits`. None: all
        tokens, also if the step captures hidden states."""
        return None if self.capture_hidden else self.rows_for_logits()

    @property
    def needs_all_rows(self) -> bool:
        """True if the logits of all tokens are needed; see `rows_for_logits`."""
        is_prefill = self.forward_mode is ForwardMode.EXTEND
        return not is_prefill or self.extend_logprob_start_lens_cpu is not None

    def last_rows(self) -> torch.Tensor:
        """Extend only: index in the step of each request's last token, int64 `[bs]`."""
        if self.last_rows_in is not None:
            return self.last_rows_in
        assert self.extend_seq_lens_cpu is not None
        ends = itertools.accumulate(self.extend_seq_lens_cpu)
        return on_device([end - 1 for end in ends], self.input_ids.device)


def compute_extend_positions(
    prefix_lens_cpu: list[int], extend_seq_lens_cpu: list[int], device: torch.device | str
) -> torch.Tensor:
    """Positions of an extend step's tokens, request by request.

    Returns:
        int64 `[sum(extend_seq_lens_cpu)]` on `device`.
    """
    if not prefix_lens_cpu:
        return torch.empty(0, dtype=torch.int64, device=device)
    positions = [
        torch.arange(prefix, prefix + num_new, dtype=torch.int64, device=device)
        for prefix, num_new in zip(prefix_lens_cpu, extend_seq_lens_cpu, strict=True)
    ]
    return positions[0] if len(positions) == 1 else torch.cat(positions)
