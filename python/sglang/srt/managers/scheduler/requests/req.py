"""A request as the scheduler sees it, from its arrival to its last output.

The last token of a prompt is always computed, because the next token is sampled from its logits. If
the cache has the whole prompt, that token's keys and values are read from the cached page and not
written: its column holds a slot of the page, which is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.messages.io_struct import (
    CachedTokensDetails,
    Stages,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler.requests.progress import RequestProgress
from sglang.srt.managers.scheduler.requests.slots import RequestSlots
from sglang.srt.mem_cache.tree.radix_key import RadixKey

_NOTHING_CACHED = CachedTokensDetails()


@dataclass(slots=True, eq=False)
class RequestReport:
    """Figures of a request for the client and the metrics. Times are seconds."""

    queue_time: float = 0.0
    """Seconds from its arrival to its first prefill."""
    was_scheduled: bool = False
    cached_tokens_details: CachedTokensDetails = _NOTHING_CACHED
    """Cached tokens by tier that its first prefill found."""
    num_sent: int = 0
    """Number of `output_ids` that were sent to the detokenizer."""
    stages: Stages = field(default_factory=Stages)
    """Durations of the stages that are over."""
    stage_began: float = 0.0
    """`time.monotonic()` at which the stage that is not over began, once it was scheduled."""

    def end_prefill(self, now: float) -> None:
        """Its first token is known. Only the first prefill of a request counts."""
        if self.stages.prefill is None:
            self.stages.prefill, self.stage_began = now - self.stage_began, now


@dataclass(slots=True, eq=False)
class Req:
    """One request. Where it is, `RequestQueues` knows."""

    spec: TokenizedGenerateReqInput
    """The request as it came. It never changes."""
    max_new_tokens: int
    """Limit of new tokens, cut to the room of the context and the pool."""
    stop_token_ids: frozenset[int] = frozenset()
    """End-of-sequence and stop tokens, unless the request ignores the former."""
    arrival_number: int = 0
    """See `policy.Arrival`."""
    report: RequestReport = field(default_factory=RequestReport)
    is_probe: bool = field(init=False)
    """True for a health check, which is neither counted nor cached."""
    progress: RequestProgress = field(init=False)
    slots: RequestSlots = field(init=False)
    _match_key: RadixKey | None = None

    def __post_init__(self) -> None:
        self.is_probe = self.spec.rid.startswith(HEALTH_CHECK_RID_PREFIX)
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
    def rid(self) -> str:
        return self.spec.rid

    @property
    def turn(self) -> int:
        """See `policy.Arrival`."""
        return self.progress.turn

    @property
    def rest_new_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.max_new_tokens - len(self.progress.output_ids)

    @property
    def ends_in_flight(self) -> bool:
        """Whether a step in flight samples its last allowed token."""
        progress = self.progress
        return len(progress.output_ids) + progress.num_in_flight >= self.max_new_tokens

    @property
    def is_sampled_by_history(self) -> bool:
        """Whether sampling its next token needs the tokens before it on the CPU."""
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
