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
groups; in the others a model that checks all it reads. In some seeds servers are replaced, and
requests under way may fail. NIXL carries the bytes in some, if its package is there. A run is a
function of its seed, except for the progress of threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from rigs.caches.host_damage import flip_any
from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.nixl_package import NOT_DRAWN, has_nixl
from rigs.disaggregation.pd_rig import PdRig, RoleRig, one_rank
from rigs.disaggregation.random_work.faulty_reads import FaultyReads, LocalReads, NixlReads
from rigs.disaggregation.random_work.setup import (
    INJECTED,
    LOST_S,
    attach,
    attaching,
    draw_args,
    draw_buffer,
    draw_groups,
    short_repeats,
    small_l1,
)
from rigs.disaggregation.random_work.traffic import AWAY, SILENT, Traffic
from rigs.mixed.operator import Operator
from rigs.mixed.pd_work import CheckableWork, PdWork, RealWork, draw_family, real_args
from rigs.mixed.poisoned_pools import poison_free
from rigs.schedulers import random_seeds
from rigs.schedulers.checkable_pools import CheckableState
from rigs.schedulers.checkable_worker import CheckableWorker
from rigs.schedulers.random_checks import assert_unpinned, resting_in_pauses
from rigs.schedulers.random_seeds import Outcome
from rigs.schedulers.random_setup import draw_group, speculation, text_args
from rigs.schedulers.step_watchdog import Watchdog
from rigs.stores.object_store import MOODS, ObjectStore
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.disaggregation.decode import DecodeRole
from sglang.srt.disaggregation.prefill import PrefillRole
from sglang.srt.distributed.device_communicators.transfer_types import Block, PeerUnreachable
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.messages.io_struct import AttachHiCacheStorageReqInput
from sglang.srt.utils.metrics import counts_by_label

_MODULE: Final = "rigs.disaggregation.random_pd"
STEPS_PER_SEED: Final = 300
_HANG_S: Final = 60.0
_REST_S: Final = 60.0
_SEARCH_S: Final = 60.0
_READ_S: Final = 1.0
"""Time in which a read begins that is to be aborted."""
_STEPS_TO_REST: Final = 3000
"""Steps to rest that a busy machine gets, however long they take."""
_MOODS: Final = ("well", "quick", "slow", "hanging", "failing", "rotten", "forgetful", "mad")
_RESTARTS: Final = 0.02
"""Share of the steps in which a prefill server is replaced, in seeds with restarts."""


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
            of_groups = random.Random(f"groups of {seed}")
            group = draw_group(of_groups, self.page_size)
            is_repeatable = of_groups.random() < 0.5
            self.state = dataclasses.replace(self.state, group=group, is_repeatable=is_repeatable)
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
        operates = random.Random(f"operator {seed}").random() < 0.6
        self._operator = Operator(seed, self.outcome.counts, self._attaching) if operates else None
        self.work: PdWork = (
            CheckableWork(self.rng, self.page_size)
            if family is None
            else RealWork(family, self.rng, self.page_size)
        )
        self.uses_nixl = has_nixl() and random.Random(f"carrier of {seed}").random() < 0.3
        if self.uses_nixl:
            self.unit_bytes = None  # Its servers pack no pages.
        restarts = random.Random(f"restarts of {seed}")
        self._restarts = restarts if restarts.random() < 0.3 else None
        """Draws the times at which a server is replaced; None: none is."""
        self._has_faults = False
        self._watchdog = Watchdog()
        self._pair: PdRig | None = None
        self._mover: FaultyReads = LocalReads(random.Random(seed))

    @property
    def pair(self) -> PdRig:
        assert self._pair is not None, "within `run`"
        return self._pair

    def run(self, steps: int = STEPS_PER_SEED, least_right: int = 0) -> Outcome:
        """Run about `steps` ticks, then on until `least_right` requests have ended right, for up to
        a minute: on a busy machine most ticks wait. Raises for any wrong result."""
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
                self._mover = NixlReads(random.Random(self._seed))
            stack.callback(self._mover.close)
            self._pair = stack.enter_context(
                PdRig(engine=self._mover.new_engine, groups=self.groups, **self._model_args())
            )
            self._traffic = Traffic(
                self._seed, self.rng, self.work, self._pair, self.outcome.counts
            )
            stack.callback(self._mover.release)
            stack.callback(self.store.release)
            self._attach_l3(self.pair.rigs)
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
                    and time.monotonic() - began < _SEARCH_S
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
            return PeerUnreachable("p", INJECTED)
        return None

    def _forget_a_room(self) -> None:
        """Let a sender give up its room by itself."""
        roles = map(_prefill_role, self.pair.sides["prefill"])
        if rooms := next((role._rooms for role in roles if role._rooms), None):
            rooms[self.rng.choice(list(rooms))].sender.abort("given up by injection")
            self.outcome.counts["rooms forgotten"] += 1

    def _set_faults(self, has_faults: bool) -> None:
        self._has_faults = has_faults
        self._mover.set_faults(has_faults)

    def _restart(self, mode: DisaggregationMode) -> None:
        """Replace a server, maybe while others wait for it or read from it."""
        pair = self.pair
        before = pair.sides[mode]
        pair.restart(mode)
        self._attach_l3(pair.sides[mode])
        self._aim_proxies()
        self._traffic.lose(mode, before)
        self.outcome.counts[f"{mode}: restarts"] += 1

    def _aim_proxies(self) -> None:
        for proxy, rig in zip(self._proxies, self.pair.sides["prefill"], strict=True):
            proxy.target = rig.endpoint

    def _attaching(self) -> AttachHiCacheStorageReqInput | None:
        """Attaches L3; None: there is none."""
        rng = random.Random(self.outcome.steps)
        return attaching(self.page_size, self.store, rng) if self._has_l3 else None

    def _attach_l3(self, rigs: Sequence[RoleRig]) -> None:
        mood, self.store.mood = self.store.mood, MOODS["quick"]  # None is refused.
        for rig in rigs:
            if self._has_l3 and isinstance(rig.tree, HiRadixCache):
                attach(rig.tree, self.store, self._damage)
        self.store.mood = mood

    # ---- rounds --------------------------------------------------------------------------------

    def _round(self, *, injects: bool) -> None:
        rng = self.rng
        self._set_faults(rng.random() < 0.6)
        self.store.set_mood(random.Random(self.outcome.steps).choice(_MOODS))
        may_fail = self._has_faults or injects
        odd = 0.1 if rng.random() < 0.3 else 0.0
        hangs = self._has_faults and rng.random() < 0.5
        rate = rng.choice((0.1, 0.3, 0.8))
        for _ in range(rng.choice((10, 40, 80))):
            if rng.random() < rate and len(self._traffic.pending) < self.work.most:
                self._traffic.arrive(odd, self.outcome.steps)
            if rng.random() < (0.15 if hangs else 0.04):
                self._traffic.abort(self.outcome.steps)
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
            if self._restarts is not None and self._restarts.random() < _RESTARTS:
                self._restart(DisaggregationMode.PREFILL)
            self._step(may_fail)
        if hangs:
            self._abort_a_read()
        self._come_to_rest(may_fail)
        self.outcome.counts["rounds with faults" if may_fail else "rounds without"] += 1

    def _step(self, may_fail: bool, *, is_resting: bool = False) -> None:
        to_each = self._traffic.take_due(self.outcome.steps)
        if (operator := self._operator) is not None:
            for rig, messages in to_each.items():
                messages += operator.messages(rig, is_resting=is_resting)
        if isinstance(self.work, RealWork):
            for rig in self.pair.rigs:
                poison_free(rig.pools, rig.worker)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._watchdog.within(_HANG_S))
            for rig in self.pair.rigs:
                stack.enter_context(resting_in_pauses(rig))
            self.pair.step_each(to_each)
        self.outcome.steps += 1
        for rid in list(self._traffic.pending):
            self._traffic.look_at(rid, may_fail)
        for rig in self.pair.sides["decode"]:
            self._check_reads(rig)
        if self.rng.random() < 0.2:
            for rig in self.pair.rigs:
                rig.check()

    def _abort_a_read(self) -> None:
        """Abort a request while its read hangs, which steps alone seldom do on a busy machine."""
        self._mover.hold = True
        self._traffic.arrive(0.0, self.outcome.steps)
        began = time.monotonic()
        while time.monotonic() - began < _READ_S:
            self._step(may_fail=True)
            for rid in map(self._request_under_way, self.pair.sides["decode"]):
                if rid in self._traffic.pending:
                    self._traffic.abort_one(rid, ["decode"], self.outcome.steps)
                    self.outcome.counts["aborts of reads"] += 1
                    self._step(may_fail=True)
                    return
            self._mover.release()  # Metadata is read before the pages.
            self._mover.hold = True

    def _request_under_way(self, decode: RoleRig) -> str | None:
        """A request that a read in flight writes to."""
        written = self._pages_under_way(decode)
        reqs = decode.scheduler.state.queues.held
        return next((req.rid for req in reqs if written & self._pages(req, decode)), None)

    def _check_reads(self, decode: RoleRig) -> None:
        """Pages that reads in flight write to belong to requests that are held, or linger."""
        queues = decode.scheduler.state.queues
        owned = {
            page for req in (*queues.held, *queues.lingering) for page in self._pages(req, decode)
        }
        written = self._pages_under_way(decode)
        assert written <= owned, f"pages {written - owned} are read into, and have no owner"

    def _pages_under_way(self, decode: RoleRig) -> set[int]:
        """Pages of the first pool that reads in flight write to."""
        (address, *_), (size, *_), (page_bytes, *_) = decode.pools[0].get_contiguous_buf_infos()
        written: set[int] = set()
        for transfer in list(self._mover.begun):
            for block in () if transfer.is_settled else transfer.blocks:
                if address <= block.local < address + size:
                    first = (block.local - address) // page_bytes
                    written |= set(range(first, first + block.length // page_bytes))
        return written

    def _pages(self, req: Req, rig: RoleRig) -> set[int]:
        slots = req.slots.own_slots(rig.scheduler.state.pools.req_to_token_pool)
        return set((slots // self.page_size).tolist())

    def _come_to_rest(self, may_fail: bool) -> None:
        pair, traffic = self.pair, self._traffic
        began, steps = time.monotonic(), 0
        while traffic.pending or traffic.late or not self._is_idle():
            self._mover.release()
            self.store.release()
            self._step(may_fail, is_resting=True)
            steps += 1
            for rig in pair.rigs:
                # A request that must not fail waits for threads and for slots, which a busy machine
                # has late: the limits of waits stand still. A lost request ends by them alone.
                rig.now += LOST_S / 1000 if may_fail or traffic.may_all_fail() else -rig.tick_s
            if time.monotonic() - began > _REST_S and steps > _STEPS_TO_REST:
                raise AssertionError(f"no rest: {traffic.pending}")
        self._set_faults(False)
        pair.assert_clean()
        for rig in pair.rigs:
            assert_unpinned(rig.tree)
        for rig in pair.sides["prefill"]:
            assert not _prefill_role(rig)._rooms, "rooms without an end"
            assert all(room.has_ended for room in rig.rooms._rooms.values())
        for role in map(_decode_role, pair.sides["decode"]):
            assert not (role._owners or role._waiting or role._transferring or role._lingering)
        self._mover.begun.clear()
        traffic.places.clear()
        if self.rng.random() < 0.5:
            for rig in pair.rigs:
                rig.scheduler._control.flush_now()
        if self._swaps is not None and self._swaps.random() < 0.5:
            pair.swap()
            self._aim_proxies()
            self.outcome.counts["role switches"] += 1
        if self._restarts is not None and self._restarts.random() < 0.5:
            self._restart(DisaggregationMode.DECODE)
        if self._operator is not None:
            for rig in pair.rigs:
                self._change_l3(self._operator, rig)

    def _change_l3(self, operator: Operator, rig: RoleRig) -> None:
        """Let a server that is idle attach or detach L3, or not."""
        change = operator.change(rig)
        if change is None:
            return
        rig.step(change)
        began = time.monotonic()
        while not operator.is_answered(rig):
            assert time.monotonic() - began < _REST_S, "a change of L3 is never answered"
            self.store.release()
            rig.step()

    def _is_idle(self) -> bool:
        """True if nothing is left to do, and the operator has all answers."""
        return self.pair.is_idle() and (
            self._operator is None or all(map(self._operator.is_answered, self.pair.rigs))
        )

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
    if not has_nixl():
        print(NOT_DRAWN)
    raise SystemExit(random_seeds.main(__doc__, _MODULE, STEPS_PER_SEED, run_seed))
