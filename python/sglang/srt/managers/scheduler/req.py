"""A request as the scheduler sees it, from its arrival to its last output.

Invariant between two steps: columns `[0, kv_committed_len)` of a request's row hold slots with the
keys and values of `kv_committed_ids`; the `num_in_flight` columns after them hold those that a step
in flight fills; and it has no others.

The last token of a prompt is always computed, because the next one comes of its logits. Where the
cache has the whole prompt, the keys and values of that token are read like those of the others and
not written: its column holds the slot of the cached page, which is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.layers.penalties import TokenHistory
from sglang.srt.managers.messages.io_struct import (
    CachedTokensDetails,
    FinishReason,
    TokenizedGenerateReqInput,
    TopLogprobs,
)
from sglang.srt.mem_cache.tree.radix_key import RadixKey, TokenArray, token_array

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMatcher
    from sglang.srt.constrained.ticket import GrammarTicket
    from sglang.srt.managers.scheduler.stop_finder import StopFinder
    from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.tree.tree_node import TreeNode
    from sglang.srt.sampling.sampling_params import SamplingParams

NO_SLOTS = torch.empty(0, dtype=torch.int64)
_NOTHING_CACHED = CachedTokensDetails()


@dataclass(slots=True, eq=False)
class Req:
    """One request from its arrival to its last output. A `CacheableRequest`."""

    rid: str
    origin_input_ids: TokenArray
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
    turn: int = 0
    """See `schedule_policy.Arrival`."""
    cached_on_arrival: int = 0
    """Tokens of the prompt that L1 and L2 had then."""
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
    stop_finder: StopFinder | None = None
    """Has taken in `output_ids`, where there are stop strings or patterns to look for."""

    # Constrained decoding
    grammar_ticket: GrammarTicket | None = None
    """Set while its grammar compiles: it cannot be scheduled."""
    matcher: GrammarMatcher | None = None
    """Has accepted `output_ids`; a retracted request keeps it."""

    # Where its slots are; see CacheableRequest
    req_pool_idx: int | None = None
    prefix_indices: torch.Tensor = NO_SLOTS
    cache_protected_len: int = 0
    last_node: TreeNode = field(init=False)
    history: TokenHistory = field(init=False)
    """Counted by penalties, on the device while it runs."""

    # What the client and the metrics are told
    cached_tokens_details: CachedTokensDetails = _NOTHING_CACHED
    was_scheduled: bool = False
    arrival_time: float = 0.0
    queue_time: float = 0.0
    last_token_time: float = 0.0

    def __post_init__(self) -> None:
        self.history = TokenHistory(self.origin_input_ids, self.output_ids)

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
            origin_input_ids=token_array(message.input_ids),
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
    def num_tokens(self) -> int:
        """Prompt and output so far: what a prefill computes."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def row(self) -> int:
        """`req_pool_idx` of a request that has one."""
        assert self.req_pool_idx is not None, f"request {self.rid} has no row"
        return self.req_pool_idx

    @property
    def kv_committed_ids(self) -> TokenArray:
        """Tokens whose keys and values are in the pool: prompt, then output."""
        return self.first_ids(self.kv_committed_len)

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
    def next_input_logprob(self) -> int | None:
        """Position whose logits give the next prompt logprob; None: no more are wanted."""
        if self.logprob_start_len < 0:
            return None
        position = self.logprob_start_len + len(self.input_logprobs)
        return position if position < len(self.origin_input_ids) - 1 else None

    def match_key(self) -> RadixKey:
        """What may be looked up in the cache: all, but for what gives prompt logprobs."""
        wanted = self.next_input_logprob
        return RadixKey(
            self.first_ids(self.num_tokens if wanted is None else wanted), self.extra_key
        )

    def first_ids(self, length: int) -> TokenArray:
        """The first tokens of prompt and output."""
        return self.ids_between(0, length)

    def ids_between(self, begin: int, end: int) -> TokenArray:
        """Tokens `[begin, end)` of prompt and output. Those of the prompt alone are a view."""
        prompt_len = len(self.origin_input_ids)
        if end <= prompt_len:
            return self.origin_input_ids[begin:end]
        output = token_array(self.output_ids[max(0, begin - prompt_len) : end - prompt_len])
        if begin >= prompt_len:
            return output
        return np.concatenate([self.origin_input_ids[begin:], output])

    def own_slots(self, pool: ReqToTokenPool) -> torch.Tensor:
        """int64: the slots that it owns itself, which are those after the tree's."""
        if self.req_pool_idx is None:
            return NO_SLOTS
        row = pool.req_to_token[self.req_pool_idx]
        end = self.kv_committed_len + self.num_in_flight
        return row[self.cache_protected_len : end].to(torch.int64)
