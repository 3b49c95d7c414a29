"""A request as the scheduler sees it, and the batch whose tensors one forward takes.

Invariant between two steps: columns `[0, kv_committed_len)` of a request's row hold slots with the
keys and values of `kv_committed_ids`; the `num_in_flight` columns after them hold those that a step
in flight fills; and it has no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.managers.io_struct import (
    CachedTokensDetails,
    FinishReason,
    TokenizedGenerateReqInput,
    TopLogprobs,
)
from sglang.srt.managers.schedule_policy import ceil_to_page
from sglang.srt.mem_cache.radix_key import RadixKey, TokenArray, token_array
from sglang.srt.model_executor.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    compute_extend_positions,
)
from sglang.srt.utils.device import on_device

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMatcher
    from sglang.srt.constrained.ticket import GrammarTicket
    from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
    from sglang.srt.mem_cache.tree_node import TreeNode
    from sglang.srt.sampling.sampling_params import SamplingParams

_NO_SLOTS = torch.empty(0, dtype=torch.int64)
_NOTHING_CACHED = CachedTokensDetails()


@dataclass(slots=True, eq=False)
class Req:
    """One request from its arrival to its last output. A `CacheableRequest`."""

    rid: str
    origin_input_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    arrival_number: int
    max_new_tokens: int
    """What the client asked for, cut to what the context and the pool can hold."""
    stop_token_ids: frozenset[int] = frozenset()
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    extra_key: str | None = None
    priority: int = 0
    sample_of: str | None = None
    """The request that computes the same prompt first; None once there is no use in waiting."""
    is_probe: bool = False
    """A health check: neither counted nor cached."""

    # Progress
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    """Of the prompt's tokens after `logprob_start_len`, as far as they are computed."""
    input_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    kv_committed_len: int = 0
    """Tokens whose keys and values are in the pool."""
    num_in_flight: int = 0
    """Tokens after those that have slots and that decode steps under way compute: whether they
    are wanted, the CPU does not know yet."""
    finish_reason: FinishReason | None = None
    to_abort: FinishReason | None = None
    """Set when the request shall end before the next step."""
    num_sent: int = 0
    """Of `output_ids`, those that left for the detokenizer."""

    # Constrained decoding
    grammar_ticket: GrammarTicket | None = None
    """Set while its grammar compiles: it cannot be scheduled."""
    matcher: GrammarMatcher | None = None
    """Has accepted `output_ids`; a retracted request keeps it."""

    # Where its slots are; see CacheableRequest
    req_pool_idx: int | None = None
    prefix_indices: torch.Tensor = _NO_SLOTS
    cache_protected_len: int = 0
    last_node: TreeNode = field(init=False)
    _prompt: TokenArray | None = None
    """`origin_input_ids`, once they have been needed as an array."""

    # What the client and the metrics are told
    cached_tokens_details: CachedTokensDetails = _NOTHING_CACHED
    was_scheduled: bool = False
    arrival_time: float = 0.0
    queue_time: float = 0.0
    last_token_time: float = 0.0

    @classmethod
    def from_message(
        cls,
        message: TokenizedGenerateReqInput,
        *,
        arrival_number: int,
        max_request_tokens: int,
        eos_token_ids: Sequence[int],
        is_probe: bool = False,
    ) -> Req:
        """A request that has just arrived; its prompt is shorter than `max_request_tokens`."""
        params = message.sampling_params
        # A prefill brings a token in any case; a request that wants none does not get it.
        most = max(1, min(params.max_new_tokens, max_request_tokens - len(message.input_ids)))
        stops = () if params.ignore_eos else (*eos_token_ids, *(params.stop_token_ids or ()))
        return cls(
            rid=message.rid,
            origin_input_ids=message.input_ids,
            sampling_params=params,
            seed=message.seed,
            arrival_number=arrival_number,
            max_new_tokens=most,
            stop_token_ids=frozenset(stops),
            stream=message.stream,
            return_logprob=message.return_logprob,
            top_logprobs_num=message.top_logprobs_num,
            logprob_start_len=message.logprob_start_len,
            extra_key=message.extra_key,
            priority=message.priority,
            sample_of=message.sample_of,
            is_probe=is_probe,
            arrival_time=message.created_time,
        )

    @property
    def all_ids(self) -> list[int]:
        """Prompt and output so far: what a prefill computes."""
        return self.origin_input_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        """Length of `all_ids`."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def kv_committed_ids(self) -> TokenArray:
        """Tokens whose keys and values are in the pool: prompt, then output."""
        return self._first_ids(self.kv_committed_len)

    @property
    def rest_new_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def ends_in_flight(self) -> bool:
        """Whether the step that computes it now brings the last token that it may have."""
        return len(self.output_ids) + self.num_in_flight >= self.max_new_tokens

    @property
    def is_sampled_by_history(self) -> bool:
        """Whether the CPU must know its tokens to prepare the sampling of the next."""
        return self.matcher is not None or self.sampling_params.has_penalties

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused when the request was first scheduled."""
        details = self.cached_tokens_details
        return details.device + details.host + details.storage

    @property
    def next_input_logprob(self) -> int | None:
        """Position whose logits give the next prompt logprob; None: no more are wanted."""
        if self.logprob_start_len < 0:
            return None
        position = self.logprob_start_len + len(self.input_logprobs)
        return position if position < len(self.origin_input_ids) - 1 else None

    def match_key(self) -> RadixKey:
        """What may be looked up in the cache: the last token is always computed, and so is what
        gives logprobs."""
        length, wanted = self.num_tokens - 1, self.next_input_logprob
        return RadixKey(
            self._first_ids(length if wanted is None else min(length, wanted)), self.extra_key
        )

    def _first_ids(self, length: int) -> TokenArray:
        """The first of `all_ids`; the prompt is converted once."""
        if self._prompt is None:
            self._prompt = token_array(self.origin_input_ids)
        rest = length - len(self._prompt)
        if rest <= 0:
            return self._prompt[:length]
        return np.concatenate([self._prompt, token_array(self.output_ids[:rest])])

    def own_slots(self, pool: ReqToTokenPool) -> torch.Tensor:
        """int64: the slots that it owns itself, which are those after the tree's."""
        if self.req_pool_idx is None:
            return _NO_SLOTS
        row = pool.req_to_token[self.req_pool_idx]
        end = self.kv_committed_len + self.num_in_flight
        return row[self.cache_protected_len : end].to(torch.int64)


def release_slots(req: Req, tree: BasePrefixCache, pools: BatchPools) -> None:
    """Hand a request's slots to the tree (those of a probe are freed), its row to the pool.

    Slots of a decode step in flight are freed too. That is no race: whatever uses them next is
    queued behind that step.
    """
    rows, allocator = pools.req_to_token_pool, pools.allocator
    begin = ceil_to_page(req.kv_committed_len, allocator.page_size)
    end = req.kv_committed_len + req.num_in_flight
    if begin < end:
        allocator.free_in_order(rows.req_to_token[_row(req), begin:end].to(torch.int64))
    tree.cache_finished_req(req, is_insert=not req.is_probe)
    rows.free(req)
    req.kv_committed_len = 0
    req.prefix_indices = _NO_SLOTS


@dataclass(slots=True)
class PrefillWork:
    """What one request computes in one prefill batch; its row holds the slots already."""

    req: Req
    extend_len: int
    """Tokens after `req.kv_committed_len`."""
    out_slots: torch.Tensor
    """int64 `[extend_len]` on the device."""
    is_last_chunk: bool = field(init=False)
    """Whether the step samples this request's next token."""

    def __post_init__(self) -> None:
        self.is_last_chunk = self.req.kv_committed_len + self.extend_len == self.req.num_tokens


@dataclass(slots=True, kw_only=True)
class ModelWorkerBatch:
    """Everything the worker needs for one step; nothing of it changes while it runs."""

    forward: ForwardBatch
    sampling_info: SamplingBatchInfo
    seeds: torch.Tensor
    """int64 `[bs]` on the device."""
    steps: torch.Tensor
    """int64 `[bs]` on the device: tokens that each request generated before this one."""
    hicache_consumer_index: int = -1
    """The load from L2 that this step must wait for, layer by layer."""


@dataclass(slots=True, kw_only=True)
class BatchPools:
    """Where batches get their rows and slots."""

    req_to_token_pool: ReqToTokenPool
    allocator: BaseTokenToKVPoolAllocator
    token_to_kv_pool: KVCache
    device: torch.device

    def int64(self, values: Sequence[int]) -> torch.Tensor:
        """`values` as an int64 tensor on the device, in order with the current stream."""
        return on_device(values, self.device, torch.int64)


def _top_logprobs_nums(reqs: Sequence[Req]) -> tuple[bool, list[int] | None]:
    """Whether any request wants logprobs, and how many of the most likely tokens each wants."""
    if not any(req.return_logprob for req in reqs):
        return False, None
    nums = [req.top_logprobs_num if req.return_logprob else 0 for req in reqs]
    return True, nums if any(nums) else None


def _input_logprobs_of(work: PrefillWork) -> tuple[int, list[int]]:
    """Of the tokens that `work` computes, the first that gives a prompt logprob; and the tokens
    whose logprobs these are."""
    req = work.req
    begin = req.kv_committed_len
    end = min(begin + work.extend_len, len(req.origin_input_ids) - 1)
    wanted = req.next_input_logprob
    if wanted is None or wanted >= end:
        return work.extend_len, []
    assert wanted >= begin, "what gives logprobs is never taken from the cache"
    return wanted - begin, req.origin_input_ids[wanted + 1 : end + 1]


def make_prefill_batch(
    works: Sequence[PrefillWork],
    pools: BatchPools,
    sampling_info: SamplingBatchInfo,
    hicache_consumer_index: int,
) -> ModelWorkerBatch:
    """The tensors of a prefill step.

    Where all but the last token of every prompt is cached, that is a decode step: attention takes
    all requests at once, and on CUDA a captured graph is replayed (in which nothing can wait for a
    load from L2).
    """
    prefix_lens = [work.req.kv_committed_len for work in works]
    extend_lens = [work.extend_len for work in works]
    seq_lens = [p + e for p, e in zip(prefix_lens, extend_lens, strict=True)]
    input_ids: list[int] = []
    for work, begin, end in zip(works, prefix_lens, seq_lens, strict=True):
        input_ids.extend(work.req.all_ids[begin:end])
    reqs = [work.req for work in works]
    rows = [_row(req) for req in reqs]
    return_logprob, top_nums = _top_logprobs_nums(reqs)
    inputs = [_input_logprobs_of(work) for work in works] if return_logprob else []
    if not any(ids for _, ids in inputs):
        inputs = []
    is_decode = max(extend_lens) == 1 and not inputs and hicache_consumer_index == -1
    return ModelWorkerBatch(
        forward=ForwardBatch(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND,
            input_ids=pools.int64(input_ids),
            positions=compute_extend_positions(prefix_lens, extend_lens, pools.device),
            req_pool_indices=pools.int64(rows),
            req_pool_indices_cpu=rows,
            seq_lens=pools.int64(seq_lens),
            seq_lens_cpu=seq_lens,
            out_cache_loc=torch.cat([work.out_slots for work in works]),
            req_to_token_pool=pools.req_to_token_pool,
            token_to_kv_pool=pools.token_to_kv_pool,
            extend_prefix_lens_cpu=prefix_lens,
            extend_seq_lens_cpu=extend_lens,
            return_logprob=return_logprob,
            top_logprobs_nums=top_nums,
            extend_logprob_start_lens_cpu=[start for start, _ in inputs] or None,
            extend_input_logprob_token_ids_cpu=[ids for _, ids in inputs] or None,
        ),
        sampling_info=sampling_info,
        seeds=pools.int64([req.seed for req in reqs]),
        steps=pools.int64([len(req.output_ids) for req in reqs]),
        hicache_consumer_index=hicache_consumer_index,
    )


def _row(req: Req) -> int:
    assert req.req_pool_idx is not None, f"request {req.rid} has no row"
    return req.req_pool_idx


class DecodeBatch:
    """The requests that decode, and their tensors, which each step moves on by one token.

    Tensors are made anew only when requests join or leave. A step never writes into a tensor that
    it handed out, so that the next step may be prepared while one runs. Its input tokens then
    are those that the running one samples, which only the device knows.
    """

    def __init__(self, pools: BatchPools) -> None:
        self.reqs: list[Req] = []
        self._pools = pools
        self._is_stale = False
        self._return_logprob = False
        self._top_logprobs_nums: list[int] | None = None
        self._seq_lens_cpu: list[int] = []
        self._rows_of_last_step: list[Req] = []
        self._seq_lens = self._input_ids = self._last_loc = _NO_SLOTS
        self._rows = self._seeds = self._steps = _NO_SLOTS

    def __len__(self) -> int:
        return len(self.reqs)

    def add(self, reqs: Sequence[Req]) -> None:
        """Let requests join; each has a row and exactly one token without keys and values."""
        self.reqs.extend(reqs)
        self._is_stale = self._is_stale or bool(reqs)

    def keep(self, reqs: list[Req]) -> None:
        """Let all but `reqs` leave."""
        if len(reqs) != len(self.reqs):
            self.reqs = reqs
            self._is_stale = True

    @property
    def is_stale(self) -> bool:
        """Whether requests joined or left since the last step: what is kept per row is void."""
        return self._is_stale

    def next_seq_lens(self) -> list[int]:
        """Context lengths before the next step."""
        return [req.kv_committed_len + req.num_in_flight for req in self.reqs]

    def prepare(self) -> bool:
        """Give each request the slot of its next token. False (nothing changed): too few free."""
        if self._is_stale:
            self._rebuild()
        seq_lens_cpu = [length + 1 for length in self._seq_lens_cpu]
        seq_lens = self._seq_lens + 1
        slots = self._pools.allocator.alloc_decode(seq_lens, seq_lens_cpu, self._last_loc)
        if slots is None:
            return False
        self._pools.req_to_token_pool.write((self._rows, self._seq_lens), slots)
        self._seq_lens, self._seq_lens_cpu, self._last_loc = seq_lens, seq_lens_cpu, slots
        return True

    def worker_batch(self, sampling_info: SamplingBatchInfo) -> ModelWorkerBatch:
        """The prepared step."""
        return ModelWorkerBatch(
            forward=ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                input_ids=self._input_ids,
                positions=self._seq_lens - 1,
                req_pool_indices=self._rows,
                seq_lens=self._seq_lens,
                seq_lens_cpu=self._seq_lens_cpu,
                out_cache_loc=self._last_loc,
                req_to_token_pool=self._pools.req_to_token_pool,
                token_to_kv_pool=self._pools.token_to_kv_pool,
                return_logprob=self._return_logprob,
                top_logprobs_nums=self._top_logprobs_nums,
            ),
            sampling_info=sampling_info,
            seeds=self._seeds,
            steps=self._steps,
        )

    def advance(self, next_token_ids: torch.Tensor) -> None:
        """The step is launched: int64 `[bs]` on the device is the input of the next one."""
        self._input_ids = next_token_ids
        self._steps = self._steps + 1
        self._rows_of_last_step = self.reqs.copy()
        for req in self.reqs:
            req.num_in_flight += 1

    def _rebuild(self) -> None:
        pools, reqs = self._pools, self.reqs
        self._seq_lens_cpu = self.next_seq_lens()
        self._seq_lens = pools.int64(self._seq_lens_cpu)
        self._rows = pools.int64([_row(req) for req in reqs])
        self._input_ids = self._last_tokens()
        self._seeds = pools.int64([req.seed for req in reqs])
        self._steps = pools.int64([len(req.output_ids) + req.num_in_flight for req in reqs])
        last = pools.req_to_token_pool.req_to_token[self._rows, self._seq_lens - 1]
        self._last_loc = last.to(torch.int64)
        self._return_logprob, self._top_logprobs_nums = _top_logprobs_nums(reqs)
        self._is_stale = False

    def _last_tokens(self) -> torch.Tensor:
        """int64 `[bs]`: each request's newest token, taken from the step in flight where the CPU
        does not know it yet."""
        known = [req.output_ids[-1] for req in self.reqs if not req.num_in_flight]
        known_ids = self._pools.int64(known)
        if len(known) == len(self.reqs):
            return known_ids
        place_in_step = {id(req): place for place, req in enumerate(self._rows_of_last_step)}
        places: list[int] = []
        num_known = 0
        for req in self.reqs:
            if req.num_in_flight:
                places.append(place_in_step[id(req)])
            else:
                places.append(len(self._rows_of_last_step) + num_known)
                num_known += 1
        tokens = torch.cat([self._input_ids, known_ids])
        return tokens.index_select(0, self._pools.int64(places))
