"""A request as the scheduler sees it, from its arrival to its last output.

The last token of a prompt is always computed, because the next token is sampled from its logits. If
the cache has the whole prompt, that token's keys and values are read from the cached page and not
written: its column holds a slot of the page, which is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.layers.penalties import TokenHistory
from sglang.srt.mem_cache.tree.radix_key import RadixKey, TokenArray, token_array
from sglang.srt.mem_cache.tree.session_hints import Session
from sglang.srt.messages.cache_report import CacheReport
from sglang.srt.messages.io_struct import (
    CachedTokensDetails,
    FinishReason,
    Stages,
    TokenizedGenerateReqInput,
    TopLogprobs,
    Verifications,
)

if TYPE_CHECKING:
    from sglang.srt.constrained.grammar import GrammarMatcher, GrammarTicket
    from sglang.srt.managers.scheduler.requests.stop_finder import StopFinder
    from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.tree.tree_node import TreeNode


@dataclass(slots=True, eq=False)
class RequestProgress:
    """Progress of a request. Counts are tokens."""

    prompt_ids: TokenArray
    """The prompt, which never changes."""
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    """Logprobs of the prompt's tokens after `logprob_start_len` that are computed so far."""
    input_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    cached_on_arrival: int = 0
    """Tokens of the prompt that L1 and L2 had on arrival."""
    kv_committed_len: int = 0
    """Tokens whose keys and values are in the pool."""
    num_in_flight: int = 0
    """Tokens after the committed ones that decode steps in flight compute. They have slots; the CPU
    does not know yet whether the request ends before them."""
    finish_reason: FinishReason | None = None
    """Reason why it ended; set by `RequestQueues`."""
    to_abort: FinishReason | None = None
    """Reason why it ends before the next step; set by `RequestQueues`."""
    stop_finder: StopFinder | None = None
    """Search for stop strings and patterns, up to the end of `output_ids`; None: the request has
    none, or no output yet."""
    grammar_ticket: GrammarTicket | None = None
    """Set while its grammar compiles: it cannot be scheduled."""
    matcher: GrammarMatcher | None = None
    """Matcher of its grammar, which has accepted `output_ids`; a retracted request keeps it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far. A prefill computes all of them."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def uncommitted_tokens(self) -> int:
        """Tokens of prompt and output that a prefill still has to compute."""
        return self.num_tokens - self.kv_committed_len

    @property
    def next_seq_len(self) -> int:
        """Context length before the next decode step."""
        return self.kv_committed_len + self.num_in_flight

    def ids_between(self, begin: int, end: int) -> TokenArray:
        """Tokens `[begin, end)` of prompt and output. A range inside the prompt is a view."""
        prompt_len = len(self.prompt_ids)
        if end <= prompt_len:
            return self.prompt_ids[begin:end]
        output = token_array(self.output_ids[max(0, begin - prompt_len) : end - prompt_len])
        if begin >= prompt_len:
            return output
        return np.concatenate([self.prompt_ids[begin:], output])


NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True, eq=False)
class RequestSlots:
    """Resources that a request holds. The tree and the row pool get only this part: it is a
    `CacheableRequest`, for which the other parts are read-only.

    Invariant between two steps: columns `[0, kv_committed_len)` of the row hold slots with the keys
    and values of `kv_committed_ids`; the `num_in_flight` columns after them hold the slots that a
    step in flight fills; and the row has no others.
    """

    spec: TokenizedGenerateReqInput
    progress: RequestProgress
    req_pool_idx: int | None = None
    prefix_indices: torch.Tensor = NO_SLOTS
    cache_protected_len: int = 0
    last_node: TreeNode = field(init=False)
    mamba_track_slot: torch.Tensor | None = None
    mamba_last_track_seqlen: int | None = None
    snapshot_slot: torch.Tensor | None = None
    """int64 `[1]` on the CPU: slot of the next snapshot of a decode step; `mamba_track_slot` has
    the last snapshot. The two slots take turns."""
    snapshot_in_flight: int | None = None
    """Tokens of the snapshot that a decode step in flight writes to `snapshot_slot`; None: none is
    in flight."""
    history: TokenHistory | None = None
    """Token counts, on the device while the request runs; None: it has no penalties."""
    rid: str = field(init=False)
    extra_key: str | None = field(init=False)
    priority: int = field(init=False)
    session: Session | None = field(init=False)
    """The session whose prefix it keeps; None: it names none."""

    def __post_init__(self) -> None:
        spec, progress = self.spec, self.progress
        self.rid, self.extra_key, self.priority = spec.rid, spec.extra_key, spec.priority
        name = spec.session_id
        self.session = None if name is None else Session.of(spec.extra_key, name)
        if spec.sampling_params.has_penalties:
            self.history = TokenHistory(progress.prompt_ids, progress.output_ids)

    @property
    def kv_committed_len(self) -> int:
        return self.progress.kv_committed_len

    @property
    def kv_committed_ids(self) -> TokenArray:
        return self.progress.ids_between(0, self.kv_committed_len)

    @property
    def row(self) -> int:
        """`req_pool_idx` of a request that has one."""
        assert self.req_pool_idx is not None, f"request {self.rid} has no row"
        return self.req_pool_idx

    def own_slots(self, pool: ReqToTokenPool) -> torch.Tensor:
        """int64: slots that the request owns itself; they follow the tree's in its row."""
        if self.req_pool_idx is None:
            return NO_SLOTS
        row = pool.req_to_token[self.req_pool_idx]
        return row[self.cache_protected_len : self.progress.next_seq_len].to(torch.int64)


_NOTHING_CACHED = CachedTokensDetails()


@dataclass(slots=True, eq=False)
class RequestReport:
    """Figures of a request for the client and the metrics. Times are seconds."""

    match_s: float | None = None
    """Seconds of looking its prompt up on arrival; None: it was not."""
    queue_time: float = 0.0
    """Seconds from its arrival to its first prefill."""
    was_scheduled: bool = False
    cached_tokens_details: CachedTokensDetails = _NOTHING_CACHED
    """Cached tokens by tier that its first prefill found."""
    cache: CacheReport | None = None
    """Report on these for the client; complete once it was scheduled. None: not asked for."""
    verifications: Verifications | None = None
    """Verifications so far, or None before the first."""
    num_sent: int = 0
    """Number of `output_ids` that were sent to the detokenizer."""
    stages: Stages = field(default_factory=Stages)
    """Durations of the stages that are over."""
    stage_began: float = 0.0
    """`time.monotonic()` at which the stage that is not over began, once it was scheduled."""
    l3_wait_began: float | None = None
    """Rank 0's time at which its turn came while its read from L3 ran; None: it does not wait for
    one."""


@dataclass(slots=True, eq=False)
class Req:
    """One request. `RequestQueues` knows its state."""

    spec: TokenizedGenerateReqInput
    """The request as it came. It never changes."""
    max_new_tokens: int
    """Limit of new tokens, cut to the room of the context and the pool."""
    stop_token_ids: frozenset[int] = frozenset()
    """End-of-sequence and stop tokens, unless the request ignores the former."""
    arrival_number: int = 0
    """See `policy.Arrival`."""
    turn: int = 0
    """See `policy.Arrival`; set by `RequestQueues`."""
    report: RequestReport = field(default_factory=RequestReport)
    rid: str = field(init=False)
    is_probe: bool = field(init=False)
    """True for a health check, which is neither counted nor cached."""
    is_computed_elsewhere: bool = False
    """True if another server computes its prompt; the role sets it on arrival."""
    decodes_elsewhere: bool = False
    """True if another server reads its computed prompt, and decodes; the role sets it on arrival.
    The request stays held here, and its pages where they are."""
    progress: RequestProgress = field(init=False)
    slots: RequestSlots = field(init=False)
    _match_key: RadixKey | None = None

    def __post_init__(self) -> None:
        self.rid = self.spec.rid
        self.is_probe = self.rid.startswith(HEALTH_CHECK_RID_PREFIX)
        self.progress = RequestProgress(self.spec.input_ids)
        self.slots = RequestSlots(self.spec, self.progress)

    @classmethod
    def of(
        cls,
        message: TokenizedGenerateReqInput,
        *,
        arrival_number: int,
        max_request_tokens: int,
        eos_token_ids: Sequence[int],
    ) -> Req:
        """The request of `message`, whose prompt is shorter than `max_request_tokens`."""
        params = message.sampling_params
        # A prefill always samples a token; a request that wants none does not get it.
        most = max(1, min(params.max_new_tokens, max_request_tokens - len(message.input_ids)))
        stops = () if params.ignore_eos else (*eos_token_ids, *(params.stop_token_ids or ()))
        return cls(message, most, frozenset(stops), arrival_number)

    @property
    def rest_new_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.max_new_tokens - len(self.progress.output_ids)

    def ends_in_flight(self, width: int) -> bool:
        """True if a step in flight, of `width` tokens a request, surely samples its last allowed
        token."""
        progress = self.progress
        return len(progress.output_ids) + progress.num_in_flight // width >= self.max_new_tokens

    @property
    def is_sampled_by_history(self) -> bool:
        """True if sampling its next token needs the tokens before it on the CPU."""
        return self.progress.matcher is not None or self.spec.sampling_params.has_penalties

    @property
    def next_input_logprob(self) -> int | None:
        """Position whose logits give the next prompt logprob; None: no prompt logprob is left to
        compute."""
        spec = self.spec
        if spec.logprob_start_len < 0:
            return None
        position = spec.logprob_start_len + len(self.progress.input_logprobs)
        return position if position < len(spec.input_ids) - 1 else None

    def match_key(self) -> RadixKey:
        """Tokens to look up in the cache: those before the first that gives a prompt logprob. The
        same object is returned until there are more tokens, so that the tree can reuse its work."""
        wanted = self.next_input_logprob
        length = self.progress.num_tokens if wanted is None else wanted
        if self._match_key is None or len(self._match_key) != length:
            ids = self.progress.ids_between(0, length)
            self._match_key = RadixKey(ids, self.spec.extra_key)
        return self._match_key
