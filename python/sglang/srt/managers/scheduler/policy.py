"""Order and admission of requests: decisions over plain numbers, the same on every rank.

This module touches no pool, tree, clock or socket. `managers/scheduler/prefill.py` and
`managers/scheduler/decode.py` carry the decisions out. Counts are tokens.

Source: the scheduler of SGLang (github.com/sgl-project/sglang, `managers/schedule_policy.py`) for
the rule of how much output to expect (`NewTokenEstimate` and `MAX_RESERVED_NEW_TOKENS`, upstream's
SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION) and for `LPM_MAX_WAITING`. The code is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeVar

LPM_MAX_WAITING: Final = 128
"""Most waiting requests that are ordered by prefix: matching more costs more than it gains."""
LPM_MAX_OVERTAKEN: Final = 128
"""Later requests that may overtake a request; equal to `LPM_MAX_WAITING`. Requests that share a
prefix in use go first, and a request that shares none still gets its turn."""
MAX_RESERVED_NEW_TOKENS: Final = 4096
"""Most output tokens to reserve slots for. Outputs rarely reach their limit; reserving for more
would leave slots idle."""
MAX_PREFILLS_IN_A_ROW: Final = 8
"""Most prefills in a row while requests decode, if a target allows more than one."""
MAX_DECODE_STEPS_A_PREFILL: Final = 64
"""Most decode steps for each prefill of the last row while prompts wait. It bounds the delay of
prompts where decoding alone misses the target."""


class SchedulePolicy(str, Enum):
    FCFS = "fcfs"
    """First come, first served."""
    LPM = "lpm"
    """Longest prefix match first, so that cached pages are used before they are evicted. A request
    that `LPM_MAX_OVERTAKEN` later ones have overtaken is overdue: it goes before all that are
    not."""


class Arrival(Protocol):
    """Facts of a request that ordering uses."""

    @property
    def arrival_number(self) -> int:
        """Place in the order of arrival. A retracted request keeps it."""

    @property
    def turn(self) -> int:
        """The value of `num_admitted` at which all requests that were ahead of this one on arrival
        have been admitted."""


R = TypeVar("R", bound=Arrival)


def order_waiting(
    policy: SchedulePolicy,
    waiting: Collection[R],
    matched_tokens: Callable[[R], int],
    num_admitted: int,
) -> list[R]:
    """The waiting requests, next first.

    Args:
        policy: The configured order; `lpm` becomes `fcfs` while more than `LPM_MAX_WAITING` wait.
        waiting: Requests.
        matched_tokens: Tokens of a request that are cached; only called for `lpm`.
        num_admitted: Requests admitted since the start. `lpm` uses it to bound how many later
            requests overtake a request: at most `LPM_MAX_OVERTAKEN`, plus the number that were
            ahead of it on arrival, plus the batch under construction. The bound counts requests,
            not seconds, because ranks must agree.
    """
    if policy is SchedulePolicy.FCFS or len(waiting) > LPM_MAX_WAITING or len(waiting) < 2:
        return sorted(waiting, key=lambda req: req.arrival_number)

    def rank(req: R) -> tuple[bool, int, int]:
        if num_admitted - req.turn >= LPM_MAX_OVERTAKEN:
            return False, 0, req.arrival_number
        return True, -matched_tokens(req), req.arrival_number

    return sorted(waiting, key=rank)


def ceil_to_page(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    page_size: int
    max_running_requests: int
    max_queued_requests: int
    max_prefill_tokens: int
    """Prompt tokens computed in one prefill batch."""
    chunk_tokens: int | None
    """Prompt tokens of one pass, whole pages; None: prompts are not cut."""
    pool_tokens: int
    """Slots of the device pool."""
    decode_tokens: int = 1
    """Tokens of a request for which a decode step needs slots."""
    context_len: int
    """Tokens of one request, prompt and output together."""

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the longest request that can run alone."""
        return min(self.context_len, self.pool_tokens - self.decode_tokens + 1)

    @property
    def max_input_tokens(self) -> int:
        """The longest prompt that leaves room for one new token."""
        return self.max_request_tokens - 1


class AddOutcome(Enum):
    """Answer of `PrefillAdder.plan` to one request."""

    ADDED = "added"
    """The whole rest of the prompt is computed now."""
    CHUNKED = "chunked"
    """Only a first part of the prompt is computed now; no request can be added after it."""
    NO_MEMORY = "no memory"
    """The pool has no room for the request beside the running ones."""
    NO_BUDGET = "no budget"
    """This batch is full; the next one has room."""


@dataclass(frozen=True, slots=True)
class AddPlan:
    """An answer, and with ADDED or CHUNKED the prompt tokens to compute now."""

    outcome: AddOutcome
    extend_tokens: int = 0

    @property
    def is_admitted(self) -> bool:
        return self.outcome in (AddOutcome.ADDED, AddOutcome.CHUNKED)


class PrefillAdder:
    """Budgets of one prefill batch. `plan` asks, `commit` takes. `num_running` requests decode, or
    their prompt is being computed; they are expected to need `reserved_tokens` slots yet."""

    def __init__(self, limits: BatchLimits, num_running: int, reserved_tokens: int) -> None:
        self._limits = limits
        self._num_running = num_running
        self._reserved = reserved_tokens
        self._budget = limits.max_prefill_tokens
        if limits.chunk_tokens is not None:
            self._budget = min(self._budget, limits.chunk_tokens)
        self._num_added = 0

    def plan(self, rest: int, load: int, new_tokens: int, free_tokens: int) -> AddPlan:
        """Decide whether a waiting request may join.

        Args:
            rest: Prompt tokens after the cached ones. 0: the last token is computed nevertheless,
                and needs no slot.
            load: Tokens cached on the host, which need device slots before they are loaded.
            new_tokens: Slots to expect for its output.
            free_tokens: Slots that are free or can be evicted, after locking the pages it reuses.
        """
        if self._num_running + self._num_added >= self._limits.max_running_requests:
            return AddPlan(AddOutcome.NO_BUDGET)
        need = load + ceil_to_page(rest + new_tokens, self._limits.page_size)
        if need > free_tokens - self._reserved:
            return AddPlan(AddOutcome.NO_MEMORY)
        return self.plan_extend(max(rest, 1))

    def commit(self, plan: AddPlan, reserve: int) -> None:
        """Take the tokens that `plan` granted; `reserve`: slots that the request will need after
        this step."""
        assert plan.is_admitted
        self._num_added += 1
        # A cached token that is computed again may be one too many.
        self._budget = max(0, self._budget - plan.extend_tokens)
        self._reserved += reserve
        if plan.outcome is AddOutcome.CHUNKED:
            self._budget = 0

    def plan_extend(self, rest: int) -> AddPlan:
        """Decide how many of the `rest` tokens of a prompt are computed now. Its slots count when
        it is added, not for its later parts."""
        if rest <= self._budget:
            return AddPlan(AddOutcome.ADDED, rest)
        if self._limits.chunk_tokens is None:
            # A prompt that exceeds the budget of a batch has a batch to itself.
            is_first = self._num_added == 0
            return AddPlan(AddOutcome.ADDED, rest) if is_first else AddPlan(AddOutcome.NO_BUDGET)
        # A cut at a page boundary lets the tree take over all computed pages.
        part = self._budget // self._limits.page_size * self._limits.page_size
        if part == 0:
            return AddPlan(AddOutcome.NO_BUDGET)
        return AddPlan(AddOutcome.CHUNKED, part)


class BatchPolicy:
    """Decides whether a prefill or a decode step comes next, if both are possible.

    Without a target they alternate, so that neither starves. If there is a target, prefills run in
    a row, then decode steps. The steps end when the mean time between tokens, measured from the
    start of the row, has fallen to the target. If the prefills took `p` seconds and a step takes
    `d`, that is after `p / (target - d)` steps. A target makes tokens faster and first tokens
    slower. Prefills run in a row because requests that are prefilled together decode together:
    steps are fuller, and fewer.

    Args:
        target: Mean seconds between two tokens of a request; None: alternate.
    """

    def __init__(self, target: float | None) -> None:
        self._target = target
        self._row_began = 0.0
        self._prefills = 0
        self._decode_steps = 1

    def may_prefill(self, now: float) -> bool:
        """True if a prefill may come next; `now`: seconds of the tick, the same on every rank."""
        steps = self._decode_steps
        if self._target is None:
            return steps > 0
        if steps == 0:
            return self._prefills < MAX_PREFILLS_IN_A_ROW
        if steps >= self._prefills * MAX_DECODE_STEPS_A_PREFILL:
            return True
        return now - self._row_began <= self._target * steps

    def on_prefill(self, now: float) -> None:
        if self._decode_steps:
            self._row_began, self._prefills, self._decode_steps = now, 0, 0
        self._prefills += 1

    def on_decode(self) -> None:
        self._decode_steps += 1


class NewTokenEstimate:
    """The share of `max_new_tokens` that requests are expected to generate.

    It starts high, falls with each decode step, and jumps back up when requests were retracted. It
    depends on counts of steps and tokens alone, so that all ranks agree.

    Source: SGLang, for the start (0.7, SGLANG_INIT_NEW_TOKEN_RATIO), the linear decay (600 steps,
    SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS) and the scaling by --schedule-conservativeness. SGLang's
    estimate falls to 0.14 of the start, this one to 0.2.
    """

    _START = 0.7
    _FLOOR_SHARE = 0.2
    _STEPS_TO_FLOOR = 600

    def __init__(self, conservativeness: float) -> None:
        """`conservativeness`: factor of the start; above 1 admits fewer requests, below 1 more."""
        self._ceiling = min(1.0, self._START * conservativeness)
        self._floor = self._ceiling * self._FLOOR_SHARE
        self._decay = (self._ceiling - self._floor) / self._STEPS_TO_FLOOR
        self.ratio = self._ceiling

    def on_decode_step(self) -> None:
        """A decode step found enough slots."""
        self.ratio = max(self._floor, self.ratio - self._decay)

    def on_retraction(self, generated: int, wanted: int) -> None:
        """Slots ran out when the requests that decode had `generated` of `wanted` tokens."""
        observed = generated / wanted if wanted else 1.0
        self.ratio = min(1.0, max(self._ceiling, observed))

    def reserve(self, new_tokens: int) -> int:
        """Slots to keep for a request that may generate `new_tokens` more; at least one."""
        return max(1, round(min(new_tokens, MAX_RESERVED_NEW_TOKENS) * self.ratio))


def pages_to_decode(seq_lens: Sequence[int], page_size: int, width: int = 1) -> int:
    """New pages for `width` more tokens of each request; `seq_lens`: lengths before them."""
    # `left`: slots of its last page that a request has not used.
    return sum(
        1 + (width - 1 - left) // page_size
        for length in seq_lens
        if (left := -length % page_size) < width
    )


def states_to_load(free: int, evictable: int, spare: int) -> int:
    """Most states that may be loaded for a request that needs a slot to run on too. Arguments are
    slots, as `Snapshots` counts them."""
    return max(0, free + evictable + spare - 1)


def newest(requests: Sequence[R]) -> R:
    """The request that is retracted first when slots run out: the last to arrive."""
    return max(requests, key=lambda req: req.arrival_number)
