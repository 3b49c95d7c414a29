"""Batches: the tensors of one forward, made from the requests that it computes, and its pools."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    StateBatch,
)
from sglang.srt.managers.scheduler.requests.req import NO_SLOTS, Req
from sglang.srt.managers.scheduler.verification import (
    Behind,
    Verification,
    moved_back,
    newest_tokens,
)

if TYPE_CHECKING:
    from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.managers.scheduler.requests.request_queues import RequestQueues
    from sglang.srt.managers.scheduler.snapshots import Snapshots
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.device.memory_pool import KVCache, ReqToTokenPool


@dataclass(slots=True, kw_only=True)
class BatchPools:
    """Pools from which batches get their rows and slots."""

    req_to_token_pool: ReqToTokenPool
    allocator: BaseTokenToKVPoolAllocator
    token_to_kv_pool: KVCache
    device: torch.device

    def columns(self, *columns: Sequence[int] | npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
        """Each column as an int64 tensor on the device, in order with the current stream, all in
        one upload: on a GPU each upload costs the CPU 0.05 ms. The tensors share memory and must
        not be written to.

        Each begins at a multiple of 16 bytes, as a new tensor does: Triton would compile kernels
        anew for other addresses.
        """
        sizes = [len(column) for column in columns]
        parts = [part for size in sizes for part in (size, size % 2)]
        flat, begin = np.zeros(sum(parts), dtype=np.int64), 0
        for column, size in zip(columns, sizes, strict=True):
            flat[begin : begin + size] = column
            begin += size + size % 2
        staged = device_runtime(self.device).stage_to_device(torch.from_numpy(flat))
        return tuple(staged.split_with_sizes(parts)[::2])


@dataclass(slots=True)
class PrefillWork:
    """The part of a prompt that one prefill batch computes. Its row has the slots already."""

    req: Req
    extend_len: int
    """Tokens after the committed ones."""
    out_slots: torch.Tensor
    """int64 `[extend_len]` on the device: where their keys and values are stored. A token whose
    keys and values are cached has slot 0, the padding."""
    first_state: int = 0
    """The slot of the recurrent state at the end of its cached prefix, pinned until the step is
    launched; 0: it continues from its own."""
    track_slot: int = 0
    """The slot that takes a snapshot; 0: no snapshot is taken."""
    track_len: int = 0
    """After how many of the new tokens it is taken."""
    end_slot: int = 0
    """The slot that takes the state behind all of them; 0: none."""
    is_last_chunk: bool = field(init=False)
    """True if the step samples this request's next token."""
    end: int = field(init=False)
    """Tokens of the request whose keys and values are in the pool after the step."""

    def __post_init__(self) -> None:
        self.end = self.req.progress.kv_committed_len + self.extend_len
        self.is_last_chunk = self.extend_len == self.req.progress.uncommitted_tokens

    @property
    def is_again(self) -> bool:
        """True if the one token is the last of a prompt that is wholly cached."""
        return self.end == self.req.slots.cache_protected_len


@dataclass(slots=True, kw_only=True)
class ModelWorkerBatch:
    """The inputs of the worker for one step. They do not change while the step runs."""

    forward: ForwardBatch
    sampling_info: SamplingBatchInfo
    seeds: torch.Tensor
    """int64 `[rows]` on the device; a row is a token to sample."""
    steps: torch.Tensor
    """int64 `[rows]` on the device: tokens that the row's request generated before this one."""
    hicache_consumer_index: int = -1
    """The load from L2 that this step must wait for, layer by layer."""
    verified: Verification | None = None
    """None if the step verifies no drafts."""

    def take_up(self) -> None:
        """Go on where a verification in flight ends, if the step was made before its end. For the
        worker, before it runs the step. Queues work on the device."""
        if self.verified is not None and self.verified.behind is not None:
            self.steps, self.verified = moved_back(self.forward, self.steps, self.verified)


def _top_logprobs_nums(reqs: Sequence[Req]) -> tuple[bool, list[int] | None]:
    """True if any request wants logprobs; and the number of top logprobs of each request, None if
    no request wants top logprobs."""
    if not any(req.spec.return_logprob for req in reqs):
        return False, None
    nums = [req.spec.top_logprobs_num if req.spec.return_logprob else 0 for req in reqs]
    return True, nums if any(nums) else None


def _input_logprobs_of(work: PrefillWork) -> tuple[int, list[int]]:
    """The tokens of `work` that give prompt logprobs: the place of the first, and the tokens after
    them, whose logprobs these are."""
    prompt_ids = work.req.spec.input_ids
    begin = work.req.progress.kv_committed_len
    end = min(begin + work.extend_len, len(prompt_ids) - 1)
    wanted = work.req.next_input_logprob
    if wanted is None or wanted >= end:
        return work.extend_len, []
    assert wanted >= begin, "what gives logprobs is never taken from the cache"
    return wanted - begin, prompt_ids[wanted + 1 : end + 1].tolist()


def _repeated(values: list[int] | None, width: int) -> list[int] | None:
    return None if values is None else [value for value in values for _ in range(width)]


def _num_output(req: Req) -> int:
    """Number of the request's output tokens if all tokens in flight are accepted."""
    return len(req.progress.output_ids) + req.progress.num_in_flight


def make_prefill_batch(
    works: Sequence[PrefillWork],
    pools: BatchPools,
    sampling_info: SamplingBatchInfo,
    hicache_consumer_index: int,
) -> ModelWorkerBatch:
    """The tensors of a prefill step.

    A batch in which each request computes one token runs as a decode step: attention takes all
    requests at once, and on CUDA one graph is replayed. The exceptions are a batch that waits for a
    load from L2, which has a graph for each layer and waits for the layer's load in between, and
    one that continues from states of the tree, which graphs of decode steps cannot read.
    """
    prefix_lens = [work.req.progress.kv_committed_len for work in works]
    extend_lens = [work.extend_len for work in works]
    seq_lens = [p + e for p, e in zip(prefix_lens, extend_lens, strict=True)]
    new_ids = np.concatenate(
        [
            work.req.progress.ids_between(begin, end)
            for work, begin, end in zip(works, prefix_lens, seq_lens, strict=True)
        ]
    )
    reqs = [work.req for work in works]
    out_slots = [work.out_slots for work in works]
    rows = [req.slots.row for req in reqs]
    return_logprob, top_nums = _top_logprobs_nums(reqs)
    inputs = [_input_logprobs_of(work) for work in works] if return_logprob else []
    if not any(ids for _, ids in inputs):
        inputs = []
    reads_tree = hicache_consumer_index != -1 or any(work.first_state for work in works)
    is_decode = max(extend_lens) == 1 and not inputs and not reads_tree
    state_slots = _state_slots(works, pools.req_to_token_pool, is_decode=is_decode)
    input_ids, rows_on_device, seq_lens_on_device, seeds, steps, positions, *rest = pools.columns(
        new_ids,
        rows,
        seq_lens,
        [req.spec.seed for req in reqs],
        [len(req.progress.output_ids) for req in reqs],
        np.concatenate(list(map(np.arange, prefix_lens, seq_lens))),
        [end - 1 for end in itertools.accumulate(extend_lens)],
        *state_slots,
    )
    last_rows, *states = rest
    return ModelWorkerBatch(
        forward=ForwardBatch(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=rows_on_device,
            req_pool_indices_cpu=rows,
            seq_lens=seq_lens_on_device,
            seq_lens_cpu=seq_lens,
            out_cache_loc=out_slots[0] if len(works) == 1 else torch.cat(out_slots),
            req_to_token_pool=pools.req_to_token_pool,
            token_to_kv_pool=pools.token_to_kv_pool,
            last_rows_in=last_rows,
            states=_states_of(states, [work.track_len for work in works]) if states else None,
            extend_prefix_lens_cpu=prefix_lens,
            extend_seq_lens_cpu=extend_lens,
            return_logprob=return_logprob,
            top_logprobs_nums=top_nums,
            extend_logprob_start_lens_cpu=[start for start, _ in inputs] or None,
            extend_input_logprob_token_ids_cpu=[ids for _, ids in inputs] or None,
        ),
        sampling_info=sampling_info,
        seeds=seeds,
        steps=steps,
        hicache_consumer_index=hicache_consumer_index,
    )


def _state_slots(
    works: Sequence[PrefillWork], pool: ReqToTokenPool, *, is_decode: bool
) -> list[list[int]]:
    """Slots of recurrent states in a prefill, which may run as a decode step. In this order: of
    each request the running state, the one that it reads and its snapshot; sources and targets of
    copies after the step. All but the first are empty if no request has any. No lists: the model
    keeps no states."""
    running = [slot for work in works if (slot := pool.state_of(work.req.slots.row)) is not None]
    if not running:
        return []
    read, copies, tracks = list[int](), list[tuple[int, int]](), [work.track_slot for work in works]
    of_works = list(zip(works, running, strict=True))
    if any(work.first_state for work in works):
        read = [work.first_state or own for work, own in of_works]
        copies = [(work.first_state, own) for work, own in of_works if work.is_again]
    if is_decode:
        copies = [(own, slot) for own, slot in zip(running, tracks, strict=True) if slot]
    copies += [(own, work.end_slot) for work, own in of_works if work.end_slot]
    if is_decode or not any(tracks):
        tracks = []
    return [running, read, tracks, [one for one, _ in copies], [other for _, other in copies]]


def _states_of(uploaded: Sequence[torch.Tensor], track_lens: list[int]) -> StateBatch:
    """The states of `_state_slots`, int64 each on the device."""
    running, read, tracks, sources, targets = uploaded
    return StateBatch(
        slots=running,
        first_slots=read if read.numel() else None,
        copied=(sources, targets) if sources.numel() else None,
        track_slots=tracks if tracks.numel() else None,
        track_lens_cpu=track_lens if tracks.numel() else None,
    )


def _decoded(
    states: StateBatch, tracks: Sequence[int], pools: BatchPools
) -> tuple[torch.Tensor, torch.Tensor]:
    """`StateBatch.copied`. Snapshots of the requests go to the slots `tracks`; 0: no snapshot."""
    tracked = [row for row, slot in enumerate(tracks) if slot]
    rows, targets = pools.columns(tracked, [tracks[row] for row in tracked])
    return states.slots[rows], targets


class DecodeBatch:
    """The requests of the next decode step, and their tensors. Each step advances them by a token,
    or verifies drafts: then `width` tokens of each request are computed, and the results say by how
    many it advances.

    Without drafts, tensors are made anew only when requests join or leave. A step never writes into
    a tensor that it handed out, so that the next step may be prepared while one runs. The input
    tokens of the next step are sampled by the running one, so only the device knows them.
    """

    def __init__(self, pools: BatchPools, width: int = 1) -> None:
        """`width`: tokens of each request in a step; above 1, all but the newest are drafts."""
        self.reqs: list[Req] = []
        self.width = width
        self._pools = pools
        self.is_stale = False
        """True if requests joined or left since the last step, so that tensors by row are void."""
        self._num_joined = 0
        self.has_joined = False
        """True if requests may have joined since the last step."""
        self._return_logprob = False
        self._top_logprobs_nums: list[int] | None = None
        self._seq_lens_cpu: list[int] = []
        self._rows_of_last_step: list[Req] = []
        self._accepted: torch.Tensor | None = None
        """int64 `[rows]` on the device: accepted drafts of the last step; None: it had none."""
        self._input_ids = self._last_loc = self._rows = self._seeds = NO_SLOTS
        self._counts = NO_SLOTS.expand(2, 0)
        """int64 `[2, bs]`: each request's `_seq_lens`, and the tokens that it generated before the
        prepared step; a step that verifies drafts has the first row alone."""
        self._positions = NO_SLOTS
        """int64 `[bs * width]`: positions of the tokens of a prepared step."""
        self._behind: Behind | None = None
        """The verification in flight that a prepared one follows."""
        self._states: StateBatch | None = None

    def update(self, queues: RequestQueues, *, in_flight: bool) -> None:
        """Take the requests that decode, from the same `queues` in each call. Each has a row, and
        exactly one token without keys and values that no step in flight computes. Requests that
        surely end with a step `in_flight` are left out."""
        reqs = list(queues.decoding)
        if in_flight:
            reqs = [req for req in reqs if not req.ends_in_flight(self.width)]
        # A request that left comes back only by joining again.
        if queues.num_joined != self._num_joined or len(reqs) != len(self.reqs):
            self.has_joined |= queues.num_joined != self._num_joined
            self._num_joined = queues.num_joined
            self.reqs = reqs
            self.is_stale = True

    def change_width(self, width: int) -> None:
        """Compute `width` tokens of each request from the next step on. No step is in flight."""
        self.width, self.is_stale = width, True

    @property
    def _seq_lens(self) -> torch.Tensor:
        """int64 `[bs]` on the device: tokens with slots."""
        return self._counts[0]

    def next_seq_lens(self) -> list[int]:
        if self.is_stale or self.width > 1:
            return [req.progress.next_seq_len for req in self.reqs]
        return self._seq_lens_cpu

    def prepare(self) -> bool:
        """Give each request the slots of its next tokens. False: too few are free, and nothing
        changed."""
        if self.is_stale or self.width > 1:
            self._rebuild()
        if self.width > 1:
            return self._prepare_verification()
        seq_lens_cpu = [length + 1 for length in self._seq_lens_cpu]
        places, counts = self._seq_lens, self._counts + 1
        slots = self._pools.allocator.alloc_decode(counts[0], seq_lens_cpu, self._last_loc)
        if slots is None:
            return False
        self._pools.req_to_token_pool.write((self._rows, places), slots)
        self._positions, self._counts = places, counts
        self._seq_lens_cpu, self._last_loc = seq_lens_cpu, slots
        return True

    def _prepare_verification(self) -> bool:
        """`prepare` of a step that verifies drafts."""
        width, before_cpu = self.width, self._seq_lens_cpu
        seq_lens_cpu = [length + width for length in before_cpu]
        seq_lens = self._seq_lens + width
        slots = self._pools.allocator.alloc_extend(
            self._seq_lens, before_cpu, seq_lens, seq_lens_cpu, self._last_loc,
            width * len(self.reqs),
        )  # fmt: skip
        if slots is None:
            return False
        rows = np.repeat([req.slots.row for req in self.reqs], width)
        places, rows_of_tokens = self._pools.columns(self._in_turn(before_cpu), rows)
        self._pools.req_to_token_pool.write((rows_of_tokens, places), slots)
        self._positions, self._counts = places, seq_lens.unsqueeze(0)
        self._seq_lens_cpu, self._last_loc = seq_lens_cpu, slots
        return True

    def _in_turn(self, firsts: Sequence[int]) -> npt.NDArray[np.int64]:
        """int64 `[bs * width]`: for each token of a request one more than for the one before it;
        `firsts`, `[bs]`: for the first."""
        begins = np.asarray(firsts, dtype=np.int64)
        return (begins[:, None] + np.arange(self.width)).ravel()

    def worker_batch(
        self, sampling_info: SamplingBatchInfo, snapshots: Snapshots | None = None
    ) -> ModelWorkerBatch:
        """The prepared step, which is going to be launched. `snapshots` chooses the requests that
        leave a snapshot; None: none does."""
        states, left = self._states, None
        if states is not None and snapshots is not None:
            left = snapshots.in_decoding(self.reqs, self._seq_lens_cpu, self.width)
        if self.width > 1:
            return self._verification(sampling_info, left)
        if states is not None and left is not None:
            decoded = _decoded(states, left[0], self._pools)
            states = dataclasses.replace(states, copied=decoded)
        return ModelWorkerBatch(
            forward=ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                input_ids=self._input_ids,
                positions=self._positions,
                req_pool_indices=self._rows,
                seq_lens=self._seq_lens,
                seq_lens_cpu=self._seq_lens_cpu,
                out_cache_loc=self._last_loc,
                req_to_token_pool=self._pools.req_to_token_pool,
                token_to_kv_pool=self._pools.token_to_kv_pool,
                states=states,
                return_logprob=self._return_logprob,
                top_logprobs_nums=self._top_logprobs_nums,
            ),
            sampling_info=sampling_info,
            seeds=self._seeds,
            steps=self._counts[1],
        )

    def _verification(
        self, sampling_info: SamplingBatchInfo, left: tuple[list[int], list[int]] | None
    ) -> ModelWorkerBatch:
        """`worker_batch` of a step that verifies drafts; `left`: see `Snapshots.in_decoding`."""
        width, pools, bs = self.width, self._pools, len(self.reqs)
        before = [length - width for length in self._seq_lens_cpu]
        # Penalties and grammars need the tokens before, and drafts are not yet such tokens.
        most = [0 if req.is_sampled_by_history else width - 1 for req in self.reqs]
        most_accepted, seeds, steps, *snapshots = pools.columns(
            most,
            np.repeat([req.spec.seed for req in self.reqs], width),
            self._in_turn([_num_output(req) for req in self.reqs]),
            *(left or ()),
        )
        return ModelWorkerBatch(
            forward=ForwardBatch(
                forward_mode=ForwardMode.TARGET_VERIFY,
                input_ids=self._input_ids,
                positions=self._positions,
                req_pool_indices=self._rows,
                req_pool_indices_cpu=[req.slots.row for req in self.reqs],
                seq_lens=self._seq_lens,
                seq_lens_cpu=self._seq_lens_cpu,
                out_cache_loc=self._last_loc,
                req_to_token_pool=pools.req_to_token_pool,
                token_to_kv_pool=pools.token_to_kv_pool,
                states=self._states,
                extend_prefix_lens_cpu=before,
                extend_seq_lens_cpu=[width] * bs,
                return_logprob=self._return_logprob,
                top_logprobs_nums=_repeated(self._top_logprobs_nums, width),
            ),
            sampling_info=sampling_info,
            seeds=seeds,
            steps=steps,
            verified=Verification(
                most_accepted, (snapshots[0], snapshots[1]) if left else None, self._behind
            ),
        )

    def advance(self, next_token_ids: torch.Tensor, accepted: torch.Tensor | None = None) -> None:
        """Note that the step was launched.

        Args:
            next_token_ids: int64 `[bs * width]` on the device: the token after each of its tokens.
            accepted: int64 `[bs]` on the device: accepted drafts; None: the step verifies none.
        """
        self.has_joined = False
        for req in self.reqs:
            req.progress.num_in_flight += self.width
        self._input_ids, self._accepted = next_token_ids, accepted
        self._rows_of_last_step = self.reqs.copy()

    def _rebuild(self) -> None:
        pools, reqs, last_step = self._pools, self.reqs, self._rows_of_last_step
        parts = [req.progress for req in reqs]
        self._seq_lens_cpu = self.next_seq_lens()
        num_rows, row_of = len(last_step), {req: row for row, req in enumerate(last_step)}
        counts, self._rows, self._seeds, known, places = pools.columns(
            [*self._seq_lens_cpu, *(_num_output(req) - 1 for req in reqs)],
            [req.slots.row for req in reqs],
            [req.spec.seed for req in reqs],
            [0 if part.num_in_flight else part.output_ids[-1] for part in parts],
            [row_of[req] if req.progress.num_in_flight else num_rows for req in reqs],
        )
        self._counts, self._behind = counts.view(2, -1), None
        if any(part.num_in_flight for part in parts):
            if self._accepted is None:
                known = newest_tokens(self._input_ids, places, known)
            else:
                self._behind = Behind(self._input_ids, self._accepted, places)
        self._input_ids = known
        if pools.req_to_token_pool.mamba_pool is not None:
            self._states = StateBatch.running(pools.req_to_token_pool, self._rows)
        last = pools.req_to_token_pool.req_to_token[self._rows, self._seq_lens - 1]
        self._last_loc = last.to(torch.int64)
        self._return_logprob, self._top_logprobs_nums = _top_logprobs_nums(reqs)
        self.is_stale = False
