"""A request as the scheduler sees it, from its arrival to its last output.

The last token of a prompt is always computed, because the next one comes of its logits. Where the
cache has the whole prompt, the keys and values of that token are read like those of the others and
not written: its column holds the slot of the cached page, which is shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.managers.messages.io_struct import CachedTokensDetails, Stages
from sglang.srt.managers.scheduler.requests.progress import RequestProgress
from sglang.srt.managers.scheduler.requests.slots import RequestSlots
from sglang.srt.managers.scheduler.requests.spec import RequestSpec
from sglang.srt.mem_cache.tree.radix_key import RadixKey

_NOTHING_CACHED = CachedTokensDetails()


@dataclass(slots=True, eq=False)
class RequestReport:
    """What the client and the metrics are told about a request. Times are seconds."""

    arrival_time: float = 0.0
    """`time.monotonic()` at which the server process took it."""
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
        """Its first token is known. A request that is computed again has it already."""
        if self.stages.prefill is None:
            self.stages.prefill, self.stage_began = now - self.stage_began, now


@dataclass(slots=True, eq=False)
class Req:
    """One request. Where it is, `RequestQueues` knows."""

    spec: RequestSpec
    report: RequestReport = field(default_factory=RequestReport)
    progress: RequestProgress = field(init=False)
    slots: RequestSlots = field(init=False)
    _match_key: RadixKey | None = None

    def __post_init__(self) -> None:
        self.progress = RequestProgress(self.spec.origin_input_ids)
        self.slots = RequestSlots(self.spec, self.progress)

    @property
    def rid(self) -> str:
        return self.spec.rid

    @property
    def arrival_number(self) -> int:
        """See `policy.Arrival`."""
        return self.spec.arrival_number

    @property
    def turn(self) -> int:
        """See `policy.Arrival`."""
        return self.progress.turn

    @property
    def rest_new_tokens(self) -> int:
        """Tokens that it may still generate."""
        return self.spec.max_new_tokens - len(self.progress.output_ids)

    @property
    def ends_in_flight(self) -> bool:
        """Whether the steps in flight bring the last token that it may have."""
        progress = self.progress
        return len(progress.output_ids) + progress.num_in_flight >= self.spec.max_new_tokens

    @property
    def is_sampled_by_history(self) -> bool:
        """Whether the CPU must know its tokens to prepare the sampling of the next."""
        return self.progress.matcher is not None or self.spec.sampling_params.has_penalties

    @property
    def next_input_logprob(self) -> int | None:
        """Position whose logits give the next prompt logprob; None: no more are wanted."""
        spec = self.spec
        if spec.logprob_start_len < 0:
            return None
        position = spec.logprob_start_len + len(self.progress.input_logprobs)
        return position if position < len(spec.origin_input_ids) - 1 else None

    def match_key(self) -> RadixKey:
        """Tokens that may be looked up in the cache: all but those that give prompt logprobs. The
        same object until they are more, so that the tree may know it again."""
        wanted = self.next_input_logprob
        length = self.progress.num_tokens if wanted is None else wanted
        if self._match_key is None or len(self._match_key) != length:
            ids = self.progress.ids_between(0, length)
            self._match_key = RadixKey(ids, self.spec.extra_key)
        return self._match_key
