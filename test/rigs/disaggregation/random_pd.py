"""Random work for a prefill and a decode scheduler, over a network and reads that fail.

    python -m rigs.disaggregation.random_pd --seed N      repeats one run
    python -m rigs.disaggregation.random_pd --seconds S   runs seed after seed

A seed determines a configuration of both schedulers, and round after round of work: requests that
share prefixes, aborts on either side, requests that only one side gets, rooms that are taken,
prefill servers that are away or silent. In some rounds nothing fails, and every request must give
its words. In the others messages are lost, doubled and delayed, reads hang and fail, rooms are
given up, and prompts fail by injection; then a request gives its words or ends with an error that
names the step. After each round both sides are idle, their pages have one owner each, and no room
is open. In some seeds the model is a tiny one of a family whose pools have strides, windows and
groups; in the others a model that checks all it reads. NIXL carries the bytes in some, if its
package is there. A run is a function of its seed, except for the progress of threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rigs.caches.host_damage import flip_any
from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.nixl_package import has_nixl
from rigs.disaggregation.pd_pair import NEVER_ASKED
from rigs.disaggregation.pd_rig import PdRig, RoleRig, one_rank
from rigs.disaggregation.random_pd_setup import (
    NAMED,
    FlippingEngineMover,
    FlippingMover,
    attach,
    draw_args,
    draw_buffer,
    draw_groups,
    short_repeats,
    small_l1,
)
from rigs.mixed.pd_work import CheckableWork, PdWork, RealWork, draw_family, real_args
from rigs.mixed.poisoned_pools import poison_free
from rigs.schedulers import random_seeds
from rigs.schedulers.checkable_pools import CheckableState
from rigs.schedulers.checkable_worker import CheckableWorker
from rigs.schedulers.random_checks import assert_unpinned
from rigs.schedulers.random_requests import Sent
from rigs.schedulers.random_seeds import Outcome
from rigs.schedulers.random_setup import draw_group, speculation, text_args
from rigs.schedulers.scheduler_rig import Collected
from rigs.schedulers.step_watchdog import Watchdog
from rigs.stores.object_store import ObjectStore
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.constants import BUILTIN_MODEL_DIR, HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.decode import DecodeRole
from sglang.srt.disaggregation.prefill import PrefillRole
from sglang.srt.distributed.device_communicators.nixl_transfer_engine import NixlTransferEngine
from sglang.srt.distributed.device_communicators.transfer_types import Block, PeerUnreachable
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.messages.io_struct import AbortReq, Bootstrap, ToScheduler
from sglang.srt.utils.metrics import counts_by_label

_MODULE: Final = "rigs.disaggregation.random_pd"
STEPS_PER_SEED: Final = 300
_HANG_S: Final = 60.0
_REST_S: Final = 60.0
_LONGEST_TICK_S: Final = 0.01
"""Most seconds by which the schedulers' clocks advance in a tick at rest."""
_MOODS: Final = ("well", "quick", "slow", "hanging", "failing", "rotten", "forgetful", "mad")
AWAY, SILENT = "away", "silent"
"""Hosts of prefill servers that do not exist, or do not answer."""


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


class RandomPd:
    """One run.

    Args:
        seed: Determines all but the timing of threads.
        family: Family of the model; None: the seed draws one of `FAMILIES`, or a checkable model.
    """

    def __init__(self, seed: int, family: str | None = None) -> None:
        self._seed = seed
        family = family or draw_family(seed)
        self.rng = random.Random(seed)
        self._network = random.Random(self.rng.random())
        """Random numbers of the proxy's thread."""
        self._reads = random.Random(self.rng.random())
        """Random numbers of the reading threads."""
        self._damage = random.Random(seed)
        self._apart = random.Random(f"places of {seed}")
        self.page_size = self.rng.choice((1, 4, 16))
        if family is not None:
            self.page_size = max(self.page_size, 4)  # Pages have whole groups.
        self.args = {side: draw_args(self.rng, self.page_size) for side in ("prefill", "decode")}
        # Drawn apart, so that seeds stay the same otherwise.
        apart = random.Random(~seed)
        self.unit_bytes = apart.choice((None, 4096, 20_000))
        self.num_draft_tokens = apart.choice((1, 1, 2, 4, 9))
        self.state = CheckableState(
            is_sparse=apart.random() < 0.25,
            num_states=40 if apart.random() < 0.4 else 0,
            alignment=self.page_size,
        )
        self.store = ObjectStore(seed)
        """L3 of both sides, if they have one."""
        self._has_l3 = apart.random() < 0.6
        self.damages_l2 = apart.random() < 0.4
        if apart.random() < 0.5 and not self.args["decode"]["disable_radix_cache"]:
            self.args["decode"] |= small_l1(self.page_size)
        if self.args["decode"].get("enable_hierarchical_cache") and apart.random() < 0.5:
            self.args["decode"]["disaggregation_decode_retraction_backup"] = "host_pool"
        if self.state.num_states and self.num_draft_tokens == 1:
            group = draw_group(random.Random(f"groups of {seed}"), self.page_size)
            self.state = dataclasses.replace(self.state, group=group)
        self.groups = draw_groups(seed)
        for args in self.args.values() if self._has_l3 else ():
            draw_buffer(args, apart)
        may_swap = not self.damages_l2 and apart.random() < 0.7 and self.groups == (1, 1)
        self._swaps = random.Random(seed) if may_swap else None
        """Draws the rests in which both servers change their roles; None: they keep them."""
        if self._swaps is not None:
            for args in self.args.values():
                args |= {"enable_pd_role_switch": True, "admin_api_key": "operator"}
        self.outcome = Outcome()
        self.work: PdWork = (
            CheckableWork(self.rng, self.page_size)
            if family is None
            else RealWork(family, self.rng, self.page_size)
        )
        self._mover = FlippingMover(random.Random(seed))
        self.uses_nixl = has_nixl() and random.Random(f"carrier of {seed}").random() < 0.3
        if self.uses_nixl:
            self.unit_bytes = None  # Its servers pack no pages.
        self._pending: dict[str, Pending] = {}
        self._late: list[tuple[int, RoleRig, ToScheduler]] = []
        """Messages for a group, and the step in which they arrive."""
        self._places: dict[str, dict[str, RoleRig]] = {}
        """The groups of requests under way, by the side's name."""
        self._has_faults = False
        self._num_rooms = 0
        self._owner = ""
        """The request that was given the last room."""
        self._watchdog = Watchdog()
        self._pair: PdRig | None = None

    @property
    def pair(self) -> PdRig:
        assert self._pair is not None, "within `run`"
        return self._pair

    def run(self, steps: int = STEPS_PER_SEED, least_right: int = 0) -> Outcome:
        """Run about `steps` ticks, or up to ten times as many until `least_right` requests have
        ended right: on a busy machine most ticks wait. Raises for any wrong result."""
        began = time.monotonic()
        prob = self.rng.choice((0.0, 0.0, 0.1))
        with contextlib.ExitStack() as stack:
            stack.enter_context(short_repeats())
            stack.enter_context(envs.SGLANG_TEST_DISAGG_FAILURE_PROB.override(prob))
            # Every other seed has metadata in rows; the others have it in messages.
            stack.enter_context(envs.SGLANG_MOONCAKE_SEND_AUX_TCP.override(self._seed % 2 == 1))
            stack.enter_context(self._watchdog)
            stack.enter_context(self.store)
            if self.uses_nixl:
                engine = NixlTransferEngine(LOOPBACK)
                stack.callback(engine.close)
                self._mover = FlippingEngineMover(random.Random(self._seed), engine)
            self._pair = stack.enter_context(
                PdRig(engine=self._mover, groups=self.groups, **self._model_args())
            )
            stack.callback(self._mover.release)
            stack.callback(self.store.release)
            for rig in self.pair.rigs:
                if self._has_l3 and isinstance(rig.tree, HiRadixCache):
                    attach(rig.tree, self.store, self._damage)
            self._proxies = [
                stack.enter_context(ControlProxy(rig.endpoint, self._fate))
                for rig in self.pair.sides["prefill"]
            ]
            self.pair.endpoints = {at: one.endpoint for at, one in enumerate(self._proxies)}
            silent = stack.enter_context(socket.create_server((LOOPBACK, 0)))
            endpoint = f"tcp://{LOOPBACK}:{silent.getsockname()[1]}"
            self.pair.strangers = {AWAY: None, SILENT: one_rank(endpoint)}
            self._mover.fails = self._read_error
            try:
                while self.outcome.steps < steps or (
                    self.outcome.counts["decode: right"] < least_right
                    and self.outcome.steps < 10 * steps
                ):
                    self._round(injects=prob > 0)
            except BaseException as error:
                error.add_note(
                    f"after {self.outcome.steps} steps, {'over NIXL, ' * self.uses_nixl}units of "
                    f"{self.unit_bytes}, "
                    f"{self.num_draft_tokens} tokens a step, {self.groups} groups, {self.work}, "
                    f"{self.state}, {self.args}"
                )
                error.add_note(self.pair.describe())
                raise
            for name, count in sum((one.counts for one in self._proxies), Counter()).items():
                self.outcome.counts[f"messages {name}"] += count
            self._count()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _model_args(self) -> dict[str, Any]:
        """Arguments of `PdRig` by the model."""
        args = {"page_size": self.page_size, "unit_bytes": self.unit_bytes}
        if isinstance(self.work, RealWork):
            sides = {side: real_args(one, self.page_size) for side, one in self.args.items()}
            return {**args, **sides, "model_path": self.work.path}
        return {
            **args,
            "model_path": BUILTIN_MODEL_DIR,
            "checkable": True,
            "state": self.state,
            "prefill": self.args["prefill"],
            "decode": {**self.args["decode"], "tolerates_damage": self.damages_l2},
            **speculation(self.num_draft_tokens),
            **text_args(),
        }

    # ---- faults --------------------------------------------------------------------------------

    def _fate(self, message: bytes, is_question: bool) -> Sequence[float]:
        if not self._has_faults:
            return (0.0,)
        kind = self._network.random()
        if kind < 0.1:
            return ()
        if kind < 0.2:
            return 0.0, self._network.random() * 0.05
        return (self._network.random() * 0.02,) if kind < 0.4 else (0.0,)

    def _read_error(self, blocks: Sequence[Block]) -> PeerUnreachable | None:
        if self._has_faults and self._reads.random() < 0.1:
            return PeerUnreachable("p", "is gone by injection")
        return None

    def _forget_a_room(self) -> None:
        """Let a sender give up its room by itself."""
        roles = map(_prefill_role, self.pair.sides["prefill"])
        if rooms := next((role._rooms for role in roles if role._rooms), None):
            rooms[self.rng.choice(list(rooms))].sender.abort("given up by injection")
            self.outcome.counts["rooms forgotten"] += 1

    # ---- rounds --------------------------------------------------------------------------------

    def _round(self, *, injects: bool) -> None:
        rng = self.rng
        self._has_faults = self._mover.flips = rng.random() < 0.6
        self.store.set_mood(random.Random(self.outcome.steps).choice(_MOODS))
        may_fail = self._has_faults or injects
        odd = 0.1 if rng.random() < 0.3 else 0.0
        hangs = self._has_faults and rng.random() < 0.5
        rate = rng.choice((0.1, 0.3, 0.8))
        for _ in range(rng.choice((10, 40, 80))):
            if rng.random() < rate and len(self._pending) < self.work.most:
                self._arrive(odd)
            if rng.random() < (0.15 if hangs else 0.04):
                self._abort()
            if hangs and rng.random() < 0.2:
                self._mover.hold = True
            if hangs and rng.random() < 0.1:
                self._mover.hold = False  # Reads in flight stay in flight.
            if rng.random() < 0.03:
                self._mover.release()
                self.store.release()
                for tree in (rig.tree for rig in self.pair.sides["decode"]):
                    if self.damages_l2 and isinstance(tree, HiRadixCache):
                        self.outcome.counts["damaged in L2"] += flip_any(tree, self._damage)
            if self._has_faults and rng.random() < 0.02:
                self._forget_a_room()
            self._step(may_fail)
        self._come_to_rest(may_fail)
        self.outcome.counts["rounds with faults" if may_fail else "rounds without"] += 1

    def _arrive(self, odd: float) -> None:
        rng = self.rng
        limits = self.pair.decode.scheduler.state.limits
        for sent in self.work.draw(limits):
            rid = sent.message.rid
            is_remote = not rid.startswith(HEALTH_CHECK_RID_PREFIX) and rng.random() < 0.9
            # Samples are where their prompt is.
            places = self._places[rid] = self._places.get(sent.message.sample_of or "") or {
                side: self._apart.choice(rigs) for side, rigs in self.pair.sides.items()
            }
            if not is_remote:
                self._pending[rid] = Pending(sent, False, False, {"decode"})
                self._late.append((self.outcome.steps, places["decode"], sent.message))
                continue
            is_odd = rng.random() < odd
            owner = self._owner if is_odd and rng.random() < 0.5 else None
            if owner in self._pending and self._pending[owner].sent.prompt != sent.prompt:
                # On each side one of the two gets their room. Were their prompts equal, each could
                # go on with the other's first token, and say other words than its seed gives.
                self._pending[owner].is_odd = True
                places = self._places[rid] = self._places[owner]  # See `DPGroups.enter`.
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
                # A tick of a real model takes longer, and the other side waits for seconds.
                most = 4 if isinstance(self.work, RealWork) else 20
                delay = rng.choice((0, 0, 0, rng.randint(1, most)))
                self._late.append((self.outcome.steps + delay, places[side], message))
            self._pending[rid] = Pending(sent, True, is_odd, set(sides))

    def _abort(self) -> None:
        rng = self.rng
        rid = rng.choice([*self._pending, "nobody"])
        if rid in self._pending:
            self._pending[rid].sent.may_be_aborted = True
        for side in rng.choice((["prefill"], ["decode"], ["prefill", "decode"])):
            rig = self._places.get(rid, {side: self.pair.sides[side][0]})[side]
            self._late.append((self.outcome.steps, rig, AbortReq(rid=rid)))

    def _step(self, may_fail: bool) -> None:
        now = [one for one in self._late if one[0] <= self.outcome.steps]
        self._late = [one for one in self._late if one[0] > self.outcome.steps]
        to_each = {rig: [m for _, to, m in now if to is rig] for rig in self.pair.rigs}
        if isinstance(self.work, RealWork):
            for rig in self.pair.rigs:
                poison_free(rig.pools, rig.worker)
        with self._watchdog.within(_HANG_S):
            self.pair.step_each(to_each)
        self.outcome.steps += 1
        for rid in list(self._pending):
            self._look_at(rid, may_fail)
        for rig in self.pair.sides["decode"]:
            self._check_reads(rig)
        if self.rng.random() < 0.2:
            for rig in self.pair.rigs:
                rig.check()

    def _check_reads(self, decode: RoleRig) -> None:
        """Pages that reads in flight write to belong to requests that are held, or linger."""
        state, infos = decode.scheduler.state, decode.pools[0].get_contiguous_buf_infos()
        (address, *_), (size, *_), (page_bytes, *_) = infos
        written: set[int] = set()
        for transfer in list(self._mover.begun):
            for block in () if transfer.is_settled else transfer.blocks:
                if address <= block.local < address + size:
                    first = (block.local - address) // page_bytes
                    written |= set(range(first, first + block.length // page_bytes))
        owned: set[int] = set()
        for req in [*state.queues.held, *state.queues.lingering]:
            slots = req.slots.own_slots(state.pools.req_to_token_pool)
            owned |= set((slots // self.page_size).tolist())
        assert written <= owned, f"pages {written - owned} are read into, and have no owner"

    def _come_to_rest(self, may_fail: bool) -> None:
        pair = self.pair
        began = ticked = time.monotonic()
        while self._pending or self._late or not all(rig.scheduler.is_idle() for rig in pair.rigs):
            self._mover.release()
            self.store.release()
            self._step(may_fail)
            now = time.monotonic()
            for rig in pair.rigs:
                # Their clocks advance with ticks too. Ticks alone are too quick for threads; real
                # time alone ends requests that wait for slots while a busy machine runs few ticks.
                rig.now += min(now - ticked, _LONGEST_TICK_S)
            ticked = now
            if now - began > _REST_S:
                raise AssertionError(f"no rest: {self._pending}")
        self._has_faults = self._mover.flips = False
        pair.assert_clean()
        for rig in pair.rigs:
            assert_unpinned(rig.tree)
        for rig in pair.sides["prefill"]:
            assert not _prefill_role(rig)._rooms, "rooms without an end"
            assert all(room.has_ended for room in rig.rooms._rooms.values())
        for role in map(_decode_role, pair.sides["decode"]):
            assert not (role._owners or role._waiting or role._transferring or role._lingering)
        self._mover.begun.clear()
        self._places.clear()
        if self.rng.random() < 0.5:
            for rig in pair.rigs:
                rig.scheduler._control.flush_now()
        if self._swaps is not None and self._swaps.random() < 0.5:
            pair.swap()
            self._proxies[0].target = pair.prefill.endpoint
            self.outcome.counts["role switches"] += 1

    # ---- results -------------------------------------------------------------------------------

    def _look_at(self, rid: str, may_fail: bool) -> None:
        pending = self._pending[rid]
        for side, rig in self._places[rid].items():
            got = rig.results.get(rid)
            if side not in pending.to_come or got is None:
                continue
            if side == "decode" or not pending.sent.is_refused:
                self.work.assert_so_far(pending.sent, got)
            if got.finish_reason is not None:
                pending.to_come.remove(side)
                del rig.results[rid]
                self._on_end(pending, side, got, may_fail or pending.is_odd)
        if not pending.to_come:
            del self._pending[rid]

    def _on_end(self, pending: Pending, side: str, got: Collected, may_fail: bool) -> None:
        sent, reason = pending.sent, got.finish_reason
        assert reason is not None
        rid, counts = sent.message.rid, self.outcome.counts
        if reason.type != "abort":
            if side == "decode":
                self.work.assert_whole(sent, got)
                self.work.remember(sent, got.output_ids)
            else:
                self.work.assert_first(sent, got)
            counts[f"{side}: right"] += 1
            if sent.extra is not None:
                counts[f"{side}: with {sent.extra}"] += 1
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

    def _count(self) -> None:
        self.outcome.counts["over NIXL"] += self.uses_nixl
        self.outcome.counts["real models"] += isinstance(self.work, RealWork)
        self.outcome.counts["with groups"] += self.groups != (1, 1)
        for name, rig in ((name, rig) for name, side in self.pair.sides.items() for rig in side):
            counters = rig.scheduler.state.counters
            self.outcome.counts[f"{name}: retractions"] += counters.retractions
            self.outcome.counts[f"{name}: tokens computed"] += counters.prefill_tokens
            if isinstance(rig.worker, CheckableWorker):
                self.outcome.counts[f"{name}: accepted drafts"] += rig.worker.num_accepted
                self.outcome.counts[f"{name}: rejected drafts"] += rig.worker.num_rejected
                self.outcome.counts[f"{name}: verifications ahead"] += rig.worker.num_ahead
            self.outcome.counts[f"{name}: started again"] += counters.redone
            for what, tokens in counts_by_label(rig.scheduler.state.metrics.backed_up).items():
                self.outcome.counts[f"{name}: retracted tokens, {what}"] += tokens
            for tier, tokens in rig.scheduler.state.metrics.num_cached.items():
                self.outcome.counts[f"{name}: tokens from {tier}"] += tokens


def _prefill_role(rig: RoleRig) -> PrefillRole:
    role = rig.scheduler._role
    assert isinstance(role, PrefillRole)
    return role


def _decode_role(rig: RoleRig) -> DecodeRole:
    role = rig.scheduler._role
    assert isinstance(role, DecodeRole)
    return role


def run_seed(seed: int, steps: int = STEPS_PER_SEED) -> Outcome:
    """Run one seed. Exceptions have a note with the command that repeats the run."""
    try:
        return RandomPd(seed).run(steps)
    except BaseException as error:
        error.add_note(f"to repeat: python -m {_MODULE} --seed {seed} --steps {steps}")
        raise


if __name__ == "__main__":
    raise SystemExit(random_seeds.main(__doc__, _MODULE, STEPS_PER_SEED, run_seed))
