"""Requests of the random PD driver: their ways to both servers, aborts, and their ends."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from rigs.disaggregation.pd_pair import NEVER_ASKED
from rigs.disaggregation.pd_rig import PdRig, RoleRig
from rigs.disaggregation.random_work.setup import NAMED, UNKNOWN_S
from rigs.mixed.pd_work import PdWork
from rigs.schedulers.random_requests import Sent
from rigs.schedulers.scheduler_rig import Collected
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.messages.io_struct import AbortReq, Bootstrap, ToScheduler

AWAY: Final = "away"
SILENT: Final = "silent"
"""Hosts of prefill servers that do not exist, or do not answer."""
_LATEST: Final = 20
"""Most steps by which a message is late."""


@dataclass(slots=True)
class Pending:
    """A request under way."""

    sent: Sent
    is_remote: bool
    """True if the request has a room."""
    is_odd: bool
    """True if it may fail without faults: one side does not get it, or its room is taken."""
    to_come: set[str]
    """The sides that have not reported its end yet."""


class Traffic:
    """Requests on their way, and what they must give.

    Args:
        seed: Determines the groups that requests go to.
        rng: Random numbers of the driver.
        counts: Gets the ends of the requests.
    """

    def __init__(
        self,
        seed: int,
        rng: random.Random,
        work: PdWork,
        pair: PdRig,
        counts: Counter[str],
    ) -> None:
        self.rng = rng
        self.work = work
        self.pair = pair
        self._counts = counts
        self._apart = random.Random(f"places of {seed}")
        self.pending: dict[str, Pending] = {}
        self.late: list[tuple[int, RoleRig, ToScheduler]] = []
        """Messages for a group, and the step in which they arrive."""
        self._came = time.monotonic()
        """Last time, `time.monotonic()` seconds, at which all messages had arrived."""
        self.places: dict[str, dict[str, RoleRig]] = {}
        """The groups of requests under way, by the side's name."""
        self._num_rooms = 0
        self._owner = ""
        """The request that was given the last room."""

    def arrive(self, odd: float, step: int) -> None:
        rng = self.rng
        limits = self.pair.decode.scheduler.state.limits
        for sent in self.work.draw(limits):
            rid = sent.message.rid
            is_remote = not rid.startswith(HEALTH_CHECK_RID_PREFIX) and rng.random() < 0.9
            # Samples are where their prompt is.
            places = self.places[rid] = self.places.get(sent.message.sample_of or "") or {
                side: self._apart.choice(rigs) for side, rigs in self.pair.sides.items()
            }
            if not is_remote:
                self.pending[rid] = Pending(sent, False, False, {"decode"})
                self.late.append((step, places["decode"], sent.message))
                continue
            is_odd = rng.random() < odd
            owner = self._owner if is_odd and rng.random() < 0.5 else None
            if owner in self.pending and self.pending[owner].sent.prompt != sent.prompt:
                # On each side one of the two gets their room. Were their prompts equal, each could
                # go on with the other's first token, and say other words than its seed gives.
                self.pending[owner].is_odd = True
                places = self.places[rid] = self.places[owner]  # See `DPGroups.enter`.
            else:
                self._num_rooms += 1
                self._owner = rid
            # A request that comes to only one side waits for seconds.
            sides, host = ["prefill", "decode"], LOOPBACK
            if is_odd and owner is None:
                sides.remove(rng.choice(sides))
                host = rng.choice((LOOPBACK, AWAY, SILENT))
            bootstrap = Bootstrap(host, NEVER_ASKED, self._num_rooms)
            message = msgspec.structs.replace(sent.message, bootstrap=bootstrap)
            for side in sides:
                delay = rng.choice((0, 0, 0, rng.randint(1, _LATEST)))
                self.late.append((step + delay, places[side], message))
            self.pending[rid] = Pending(sent, True, is_odd, set(sides))

    def abort(self, step: int) -> None:
        rid = self.rng.choice([*self.pending, "nobody"])
        sides = self.rng.choice((["prefill"], ["decode"], ["prefill", "decode"]))
        self.abort_one(rid, sides, step)

    def abort_one(self, rid: str, sides: Sequence[str], step: int) -> None:
        if rid in self.pending:
            self.pending[rid].sent.may_be_aborted = True
        for side in sides:
            rig = self.places.get(rid, {side: self.pair.sides[side][0]})[side]
            self.late.append((step, rig, AbortReq(rid=rid)))

    def take_due(self, step: int) -> dict[RoleRig, list[ToScheduler]]:
        """Take the messages that arrive in a step, for each group. Messages for replaced groups are
        lost."""
        now = time.monotonic()
        is_slow = now - self._came > UNKNOWN_S / 4
        if is_slow:
            step += _LATEST  # The other side waits for seconds.
        if is_slow or not self.late:
            self._came = now
        due = [one for one in self.late if one[0] <= step]
        self.late = [one for one in self.late if one[0] > step]
        return {rig: [m for _, to, m in due if to is rig] for rig in self.pair.rigs}

    def may_all_fail(self) -> bool:
        """True if no request under way has to give its words."""
        return all(one.is_odd or one.sent.may_be_aborted for one in self.pending.values())

    def lose(self, side: str, before: Sequence[RoleRig]) -> None:
        """A server was replaced: its requests are lost there, and may fail at the other one.

        Args:
            before: Its groups until then.
        """
        for pending in self.pending.values():
            pending.is_odd = True
        # Samples of a request that has ended go where it was.
        for rid, place in list(self.places.items()):
            if (lost := place.get(side)) in before:
                # Requests may share the places.
                self.places[rid] = place | {side: self.pair.sides[side][before.index(lost)]}
                if rid in self.pending:
                    self.pending[rid].to_come.discard(side)
                    self._forget_ended(rid)

    def look_at(self, rid: str, may_fail: bool) -> None:
        pending = self.pending[rid]
        for side, rig in self.places[rid].items():
            got = rig.results.get(rid)
            if side not in pending.to_come or got is None:
                continue
            if side == "decode" or not pending.sent.is_refused:
                self.work.assert_so_far(pending.sent, got)
            if got.finish_reason is not None:
                pending.to_come.remove(side)
                del rig.results[rid]
                self._on_end(pending, side, got, may_fail or pending.is_odd)
        self._forget_ended(rid)

    def _forget_ended(self, rid: str) -> None:
        if not self.pending[rid].to_come:
            del self.pending[rid]

    def _on_end(self, pending: Pending, side: str, got: Collected, may_fail: bool) -> None:
        sent, reason = pending.sent, got.finish_reason
        assert reason is not None
        rid, counts = sent.message.rid, self._counts
        if reason.type != "abort":
            if side == "decode":
                self.work.assert_whole(sent, got)
                self.work.remember(sent, got.output_ids)
            else:
                self.work.assert_first(sent, got)
            counts[f"{side}: right"] += 1
            counts.update(f"{side}: with {extra}" for extra in sent.extras)
            return
        why = reason.message or ""
        is_refused = "can ever fit" in why
        is_named = bool(NAMED.search(why))
        is_aborted = sent.may_be_aborted and (reason.status_code == 499 or is_named)
        assert is_aborted or (is_refused and self._is_too_long(sent)) or (may_fail and is_named), (
            f"{rid} ended at {side} by {reason}"
        )
        counts[f"{side}: {'aborted' if is_aborted else 'refused' if is_refused else 'failed'}"] += 1

    def _is_too_long(self, sent: Sent) -> bool:
        """True if the prompt is too long for one of the sides."""
        limits = (rig.scheduler.state.limits.max_input_tokens for rig in self.pair.rigs)
        return len(sent.prompt) > min(limits)
