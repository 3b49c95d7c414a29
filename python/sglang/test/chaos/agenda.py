"""The pure parts of a run under chaos: which faults come when, and what the answers prove.

A fault *excuses* the doors that it closes: a request through such a door may fail while the fault
lasts, and shortly after it. Every other failure breaks a rule.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from sglang.srt.arg_groups.disaggregation import TransferBackend
from sglang.srt.distributed.device_communicators.nixl_library import has_nixl

PD: Final = "pd"
"""Door of the router before prefill and decode servers."""
POOL: Final = "pool"
"""Door of the router before the plain servers."""
MASTER: Final = "master"
LINK: Final = "link to the master"
PREFILL: Final = "prefill"
NUM_DECODE: Final = 2
NUM_NODES: Final = 3
AFTERMATH_S: Final = 20.0
"""Seconds after a fault in which its doors stay excused: breakers close, clients reconnect."""
TIERS: Final = ("device", "host", "storage")
_GAP_S: Final = (4.0, 9.0)
_NEW_ENGINE_S: Final = 15.0
"""Seconds that an engine takes to end or to start; on a busy machine events come late."""


class Kind(StrEnum):
    """Kinds of events that disturb a process or a link."""

    STOP = "stop"
    """SIGSTOP, and SIGCONT after some seconds."""
    KILL = "kill"
    """SIGKILL, and a new start after some seconds."""
    RESTART = "restart"
    """SIGTERM, and a new start after its end."""
    DELAY = "delay"
    """All bytes come late for some seconds."""
    SWITCH = "switch"
    """A decode server is a prefill server for some seconds."""


@dataclass(frozen=True, slots=True)
class Event:
    """One fault.

    Attributes:
        at: Earliest time, in seconds after the begin of the load.
        target: Name of a process, or `LINK`.
        seconds: How long it is stopped, away or delayed; 0 for a restart.
    """

    at: float
    kind: Kind
    target: str
    seconds: float

    @property
    def label(self) -> str:
        """Kind and target, without the target's number."""
        return f"{self.kind} {self.target.rstrip('0123456789 ')}"

    def touches(self) -> Collection[str]:
        """Doors with the target on their way. The store is on none: requests compute what it
        lacks."""
        if self.target.startswith("server "):
            return (self.target, POOL)
        return (PD,) if self.target == PREFILL or self.target.startswith("decode ") else ()

    def excuses(self) -> Collection[str]:
        """Doors through which requests may fail. The store's faults excuse none."""
        if self.target.startswith("server "):
            doors = {
                Kind.STOP: (),
                Kind.KILL: (self.target, POOL),
                Kind.RESTART: (self.target,),
            }
            return doors[self.kind]
        if self.target == PREFILL:
            return (PD,)
        return (PD,) if self.target.startswith("decode ") and self.kind == Kind.KILL else ()


def draw_transport(seed: int) -> TransferBackend:
    """Mooncake moves pages between prefill and decode servers, or NIXL if its package is there."""
    both = (TransferBackend.MOONCAKE, TransferBackend.NIXL)
    return both[seed % 2] if has_nixl() else both[0]


def draw_agenda(
    seed: int, seconds: float, num_servers: int, only: Collection[str] = ()
) -> list[Event]:
    """The faults of a run of `seconds`, in order of time; equal for equal arguments.

    Faults come in shuffled rounds. A round has each kind of fault that a kind of target can have
    once, so that a run of a few minutes sees almost all of them.

    Args:
        only: Labels of the faults that come; empty: all. Raises ValueError that lists the labels.
    """
    rng = random.Random(seed)
    servers = [f"server {number}" for number in range(num_servers)]
    decodes = [f"decode {number}" for number in range(NUM_DECODE)]
    nodes = [f"node {number}" for number in range(NUM_NODES)]
    store = [(kind, group) for kind in (Kind.STOP, Kind.KILL) for group in ([MASTER], nodes)]
    engines = [
        (kind, group)
        for kind in (Kind.STOP, Kind.KILL, Kind.RESTART)
        for group in (servers, decodes, [PREFILL])
    ]
    new_engines = [one for one in engines if one[0] != Kind.STOP]
    choices = [*store, *engines, (Kind.DELAY, [LINK]), (Kind.SWITCH, decodes)]
    labels = [Event(0.0, kind, group[0], 0.0).label for kind, group in choices]
    if unknown := set(only) - set(labels):
        raise ValueError(f"{', '.join(sorted(unknown))}: none of {', '.join(labels)}")
    choices = [one for one, label in zip(choices, labels, strict=True) if label in (only or labels)]
    events: list[Event] = []
    at = 0.0
    while True:
        rng.shuffle(choices)
        for kind, group in choices:
            at += rng.uniform(*_GAP_S)
            if at >= seconds:
                return events
            lasts = 0.0 if kind == Kind.RESTART else round(rng.uniform(1.0, 6.0), 1)
            events.append(Event(round(at, 1), kind, rng.choice(group), lasts))
            at += lasts + (_NEW_ENGINE_S if (kind, group) in new_engines else 0.0)


class Outcome(StrEnum):
    """How a request ended for its client."""

    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"
    """No connection, or 502 or 503 with a message."""
    CUT = "cut"
    """The connection or the stream broke off."""
    UNNAMED = "unnamed"
    """Any other status, or an error without a message."""
    HUNG = "hung"
    """No end before the deadline."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """What an answer tells about the tiers. Routers may drop the field that asks for it."""

    asks_l3: bool | None = None
    """True if L1 and L2 lacked so much of the prompt that the server looked into L3, or would have
    if L3 had answered; None: not told."""
    l3_wait: float | None = None
    """Seconds for which the request waited for L3 alone; None: not told."""
    first: float | None = None
    """Seconds until the first token of a stream."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request. Times are seconds after the begin of the load."""

    door: str
    began: float
    ended: float
    outcome: Outcome
    detail: str = ""
    """The reply or error, unless the outcome is right."""
    tiers: Tiers = field(default_factory=Tiers)


@dataclass(slots=True)
class Span:
    """The time of an event, until its target serves again; None: not yet."""

    event: Event
    began: float
    ended: float | None = None

    def touches(self, attempt: Attempt, margin: float) -> bool:
        """True if the attempt lies in part between the begin and `margin` seconds after the end."""
        until = float("inf") if self.ended is None else self.ended + margin
        return attempt.ended >= self.began and attempt.began <= until

    def excuses(self, attempt: Attempt) -> bool:
        """True if the attempt may have failed because of this event."""
        return attempt.door in self.event.excuses() and self.touches(attempt, AFTERMATH_S)


def broken_rules(
    attempts: Iterable[Attempt],
    spans: Sequence[Span],
    lost: Sequence[str],
    cached: Counter[str],
) -> list[str]:
    """A line for each rule that a run broke.

    Args:
        lost: Questions that never got an answer.
        cached: Prompt tokens by tier, of all answers that tell them.
    """
    lines = [f"lost: {question}" for question in lost]
    for one in attempts:
        may_fail = one.outcome in (Outcome.REFUSED, Outcome.CUT)
        excused = may_fail and any(span.excuses(one) for span in spans)
        if one.outcome != Outcome.RIGHT and not excused:
            why = f"{one.outcome} without an excuse" if may_fail else one.outcome
            times = f"{one.began:.1f} to {one.ended:.1f} s"
            lines.append(f"{why}: {one.door}, {times}: {one.detail}")
    lines += [f"no prompt token came from {tier}" for tier in TIERS if not cached[tier]]
    return lines


def summary(attempts: Iterable[Attempt], spans: Sequence[Span]) -> list[str]:
    """Lines of a table: events, and the outcomes of requests during them. A request that saw
    several events counts for the last one."""
    times = Counter(span.event.label for span in spans)
    counts: Counter[tuple[str, Outcome]] = Counter()
    for one in attempts:
        seen = [span.event.label for span in spans if span.touches(one, 0.0)]
        counts[seen[-1] if seen else "calm", one.outcome] += 1
    lines = [f"{'event':24}{'times':>7}" + "".join(f"{outcome:>9}" for outcome in Outcome)]
    for label in ["calm", *sorted(times)]:
        row = "".join(f"{counts[label, outcome]:9}" for outcome in Outcome)
        lines.append(f"{label:24}{times[label] or '':>7}{row}")
    return lines


def latencies(attempts: Iterable[Attempt], spans: Sequence[Span]) -> list[str]:
    """Lines on the seconds of right answers, and of streams until their first token: in calm, and
    beside events whose targets were not on the way. A request that saw any event on its way counts
    for neither.

    The store is on the way of no request, since prompts are computed without it. Lines of their own
    tell apart the requests that ask it and those that do not, where answers tell that.
    """
    rows: dict[str, list[Attempt]] = {"calm": [], "beside any": []}
    for one in attempts:
        seen = [span.event for span in spans if span.touches(one, 0.0)]
        if one.outcome != Outcome.RIGHT or any(one.door in event.touches() for event in seen):
            continue
        label = f"beside {seen[-1].label}" if seen else "calm"
        labels = [label, "beside any"] if seen else [label]
        if one.tiers.asks_l3 is not None:
            labels.append(f"{label}{', asks L3' if one.tiers.asks_l3 else ', asks not'}")
        for name in labels:
            rows.setdefault(name, []).append(one)
    lines = [
        f"{'untouched requests':40}{'number':>7}{'p50 s':>7}{'p99 s':>7}{'/ calm':>7}"
        f"{'streams':>9}{'first p50':>10}{'p99':>7}{'/ calm':>7}{'L3 p99':>8}{'most':>7}"
    ]
    calm = [percentile(times, 0.99) for times in _times(rows["calm"])]
    for label, some in sorted(rows.items()):
        waits = [one.tiers.l3_wait for one in some if one.tiers.l3_wait is not None]
        line = f"{label:40}"
        for times, base, width in zip(_times(some), calm, (7, 9), strict=True):
            p99 = percentile(times, 0.99)
            line += (
                f"{len(times):{width}}{percentile(times, 0.5):{width + width // 9}.2f}{p99:7.2f}"
            )
            line += f"{p99 / base:7.2f}" if base else f"{'':7}"
        lines.append(f"{line}{percentile(waits, 0.99):8.2f}{max(waits, default=0.0):7.2f}")
    return lines


def _times(attempts: Sequence[Attempt]) -> tuple[list[float], list[float]]:
    """Seconds of whole requests, and until the first token, of those that were streams."""
    firsts = [one.tiers.first for one in attempts if one.tiers.first is not None]
    return [one.ended - one.began for one in attempts], firsts


def percentile(times: Sequence[float], share: float) -> float:
    """The time that `share` of the times do not pass; 0: there are none."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
