"""Random work for a whole scheduler, over a checkable model and a misbehaving store.

    python -m rigs.schedulers.random_scheduler --seed N      repeats one run
    python -m rigs.schedulers.random_scheduler --seconds S   runs seed after seed

A seed determines a configuration (kinds of state, page size, policies, sizes of the tiers, layout,
overlap). It also determines each tick's work: requests that share prefixes in many ways, aborts,
administration, and moods of the store. Each tick compares all outputs with the expected ones. Page
ownership is checked every few ticks, and whenever the scheduler is idle. All is real except the
model's arithmetic, the store, and the engine's timers, which are too long for ticks of 1 ms.

Some seeds have several DP groups: schedulers with pools and a tree of their own over one store, at
unlike speeds, behind the server process's choice of a group.

Only the progress of other threads is not decided by the seed.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rigs.caches.host_damage import flip_any
from rigs.groups.hung_store import work_beside_a_hang
from rigs.mixed.front_door import FrontDoor
from rigs.mixed.held_copies import HeldCopies
from rigs.schedulers import random_seeds
from rigs.schedulers.checkable_worker import CheckableRig
from rigs.schedulers.random_checks import (
    assert_empty,
    assert_stored,
    assert_unpinned,
    assert_whole,
    assert_words,
    counts_of,
    num_forwards,
    resting_in_pauses,
)
from rigs.schedulers.random_requests import RandomRequests, Sent
from rigs.schedulers.random_seeds import Outcome
from rigs.schedulers.random_setup import Setup, impatient
from rigs.schedulers.scheduler_rig import Collected
from rigs.schedulers.step_watchdog import Watchdog, log_kept
from rigs.stores.object_store import FILE, MOODS, MOODS_AT_REST, ObjectFolder, ObjectStore
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.messages.io_struct import (
    AbortReq,
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ContinueGenerationReqInput,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    GetCacheViewReq,
    GetHiCacheStorageReqInput,
    GetInternalStateReq,
    GetMetricsReq,
    PauseGenerationReqInput,
    ShutdownReq,
    ToScheduler,
)

_MODULE: Final = "rigs.schedulers.random_scheduler"
STEPS_PER_SEED: Final = 500
_HANG_S: Final = 60.0
"""Limit of a step, which takes about a millisecond; longer than any wait of the engine in it."""
_REST_S: Final = 30.0
_MOST_STEPS_TO_REST: Final = 4000
_MOST_WORKING_STEPS: Final = 2500
"""Most forwards between the arrival of a request and its end."""
_MOODS: Final = (*MOODS, *("quick", "well") * 4, *("crawling",) * 3)
_IDLE_S: Final = 0.0005


@dataclass(slots=True, kw_only=True)
class SchedulerOutcome(Outcome):
    """Outcome of a run, with its configuration."""

    setup: Setup

    def describe(self) -> str:
        one = self.setup
        what = "sparse" if one.is_sparse else "dense"
        if one.num_states:
            what += f" with {one.num_states} states every {one.alignment} tokens"
        if one.num_draft_tokens > 1:
            what += f", {one.num_draft_tokens} tokens a step"
        overlap = f", overlap, lag {one.most_lag_s} s" if one.overlap else ""
        return (
            f"{what}, {one.tiers} tiers, pages of {one.page_size}, {one.schedule_policy}, "
            f"{one.write_policy}, {one.prefetch_policy}, {one.backend}{overlap}"
        )


class RandomScheduler:
    """One run.

    Args:
        seed: Determines everything except the timing of threads. An odd seed makes the store break
            the contract of `HiCacheStorage` too: too few results, wrong types, any exception from
            attaching, clearing and closing.
        setup: Replaces the configuration that the seed chooses.
        num_groups: Number of DP groups; None: the seed chooses it.
    """

    def __init__(
        self, seed: int, setup: Setup | None = None, num_groups: int | None = None
    ) -> None:
        self.rng = random.Random(seed)
        # Drawn apart, so that the rest of a run stays that of its seed.
        self._resting, self._pausing = (random.Random(f"{seed} {of}") for of in ("rests", "pauses"))
        grouping = random.Random(f"{seed} groups")
        self._hanging = random.Random(f"{seed} hangs")
        self._timing = random.Random(f"{seed} times")
        self.setup = setup or Setup.draw(self.rng)
        drawn = grouping.choice((1, 1, 2, 2, 3))
        self._door = FrontDoor(grouping, num_groups or drawn, self.setup.page_size)
        kind = ObjectFolder if self.setup.backend == FILE else ObjectStore
        self.store = kind(seed, damages=self.setup.verify_checksum, breaks_contract=seed % 2 == 1)
        self.outcome = SchedulerOutcome(setup=self.setup)
        self._log: deque[str] = deque(maxlen=40)
        self._watchdog = Watchdog()
        self._sent: dict[str, Sent] = {}
        """Requests that have not ended."""
        self._unanswered: Counter[str] = Counter()
        """Control requests, and the groups that have not answered."""
        # Penalties count tokens at the launch of a step, and a lagging device tells them later.
        self._requests = RandomRequests(
            self.rng,
            self.setup.page_size,
            penalises=not self.setup.most_lag_s,
            in_company=random.Random(f"{seed} demands").random() < 0.6,
        )
        self._working_steps = 0
        self._num_controls = 0
        self._held: HeldCopies | None = None
        self._is_draining = False
        self._epochs: dict[CheckableRig, tuple[int, float]] = {}
        """The epoch of each tree, and the start of the tick in which it began (`time.monotonic()`
        seconds)."""
        self.rigs: list[CheckableRig] = []

    @property
    def rig(self) -> CheckableRig:
        """That of the first group."""
        return self.rigs[0]

    def run(self, steps: int = STEPS_PER_SEED) -> SchedulerOutcome:
        """Run about `steps` ticks. Raises for any wrong result."""
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(impatient())
            self._held = stack.enter_context(self.setup.in_use())
            stack.enter_context(log_kept(self._log))
            stack.enter_context(self._watchdog)
            stack.enter_context(self.store)
            for group in range(self._door.num_groups):
                self.rigs.append(self._make_rig(group))
                stack.callback(self.rigs[-1].close)
            stack.callback(self.store.release)
            stack.callback(self.store.set_mood, "quick")
            try:
                self._work(steps)
            except BaseException as error:
                error.add_note(self._describe())
                raise
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _make_rig(self, group: int) -> CheckableRig:
        rig = CheckableRig(
            BUILTIN_MODEL_DIR, held_pages=self._door.notes[group], **self.setup.rig_args()
        )
        rig.tick_s = self.setup.tick_s  # type: ignore[misc]
        self.setup.slow_down(rig.tree, random.Random(self.rng.random()))
        return rig

    def _work(self, steps: int) -> None:
        if self.setup.tiers == 3:
            self._step(self._attach())
        while self.outcome.steps < steps:
            self._busy_time()
            self._hang_for_one()
            self._come_to_rest()
        if self.rng.random() < 0.3:
            self._shut_down()
        self._count()

    # ---- ticks ---------------------------------------------------------------------------------

    def _busy_time(self) -> None:
        rng = self.rng
        rate = rng.choice((0.05, 0.2, 0.6))
        most = rng.choice((3, 12, 30))
        self.store.set_mood(rng.choice(_MOODS))
        self._door.draw_favourite()
        if rng.random() < 0.7:
            # Prompts that only L3 has after a flush.
            self._step(*self._send(self._requests.draw_again(self.rig.scheduler.state.limits)))
        for _ in range(rng.choice((10, 30, 60, 150))):
            messages: list[ToScheduler] = []
            if rng.random() < rate and len(self._sent) < most:
                messages += self._arrivals()
            if rng.random() < 0.04:
                messages += self._abort()
            if rng.random() < 0.02:
                messages.append(self._control())
            if rng.random() < 0.08:
                self._move_store()
            if self.setup.damages_l2 and rng.random() < 0.1:
                for rig in self.rigs:
                    self.outcome.counts["damaged in L2"] += flip_any(rig.tree, rng)
            if self._requests.in_company and self._pausing.random() < 0.03:
                messages.append(self._requests.session(self._control_id()))
            if self._pausing.random() < (0.15 if self._is_paused else 0.01):
                messages.insert(0, self._pause_or_continue())
            self._step(*messages)

    def _step(self, *messages: ToScheduler) -> None:
        """Run one tick of each group, and check the invariants after it."""
        boxes = self._door.deliver(messages)
        self.outcome.steps += 1
        for rig, box in zip(self.rigs, boxes, strict=True):
            if not self._door.may_skip(rig, box):
                self._step_group(rig, box)
        self._take_answers()
        for rid in list(self._sent):
            self._look_at(rid)
        assert not self.store.contradictions, (
            f"two pages were written to L3 under one key: {self.store.contradictions[0]}"
        )
        if self.rng.random() < 0.2:
            for rig in self.rigs:
                rig.check()
        if all(rig.scheduler.poll_timeout_ms() for rig in self.rigs):
            time.sleep(_IDLE_S)

    def _step_group(self, rig: CheckableRig, messages: Sequence[ToScheduler]) -> None:
        if self._held is not None:
            self._held.run_some(self._timing)
        before, began = num_forwards(rig), time.monotonic()
        with self._watchdog.within(_HANG_S), resting_in_pauses(rig):
            rig.step(*messages)
        self._door.hear(rig)
        self._working_steps += num_forwards(rig) - before
        tree = rig.tree
        if isinstance(tree, HiRadixCache) and tree.store.epoch != self._epochs.get(rig, (-1, 0))[0]:
            self._epochs[rig] = tree.store.epoch, began

    def _hang_for_one(self) -> None:
        if self._hanging.random() < 0.4 and not self._is_paused:
            self.outcome.counts["hangs of one group"] += work_beside_a_hang(
                self.rigs,
                self.store,
                self._hanging,
                lambda arrives: self._step(*(self._arrivals() if arrives else ())),
                lambda: map(self._door.group_of, self._sent),
            )

    def _come_to_rest(self) -> None:
        """Run until idle, and check that nothing is left over."""
        if self.rng.random() < 0.7:
            self.store.set_mood(self._resting.choice(MOODS_AT_REST))
        began, steps = time.monotonic(), 0
        if self._is_paused:
            self._step(self._pause_or_continue())
        while self._sent or self._unanswered or not self._are_idle():
            if steps % 5 == 4:
                self.store.release()
            self._step()
            steps += 1
            if time.monotonic() - began > _REST_S and steps > _MOST_STEPS_TO_REST:
                raise AssertionError(
                    f"no rest after {steps} steps: requests {sorted(self._sent)}, "
                    f"unanswered {self._unanswered}, "
                    f"busy {[rig.scheduler._control.busy() for rig in self.rigs]}"
                )
        for rig in self.rigs:
            rig.assert_clean()
            assert_unpinned(rig.tree)
            _, began = self._epochs.get(rig, (-1, 0.0))
            assert_stored(rig.tree, self.store, self.setup.backend, began)
        self._door.check_at_rest(self.rigs)
        if self.rng.random() < 0.8:
            # The next requests then read from L3.
            self._flush_at_rest()

    def _shut_down(self) -> None:
        """Shut down with requests under way: all of them end, and the loop ends."""
        for _ in range(self.rng.randint(0, 3)):
            self._step(*self._arrivals())
        if self._pausing.random() < 0.5:
            self._step(self._pause_or_continue())
        timeout = self.rng.choice((0.0, 3.0, 1000.0))
        for sent in self._sent.values():
            sent.may_be_aborted = True
        self._is_draining = True
        self._step(ShutdownReq(timeout=timeout), *self._arrivals())
        began = time.monotonic()
        while not all(rig.scheduler.is_stopped for rig in self.rigs):
            assert time.monotonic() - began < _REST_S, "the scheduler does not stop"
            self.store.release()
            self._step()
        assert not self._sent, f"never told of the end: {sorted(self._sent)}"

    def _are_idle(self) -> bool:
        return all(rig.scheduler.is_idle() for rig in self.rigs)

    def _flush_at_rest(self) -> None:
        self._step(FlushCacheReqInput(req_id=self._control_id()))
        assert not self._unanswered, "a flush at rest is done at once"
        for rig in self.rigs:
            assert_empty(rig)

    # ---- requests ------------------------------------------------------------------------------

    def _arrivals(self) -> list[ToScheduler]:
        if self._sent and self.rng.random() < 0.05:
            # A request with an id in use is dropped silently.
            return [self._sent[self.rng.choice(sorted(self._sent))].message]
        return self._send(self._requests.draw(self.rig.scheduler.state.limits))

    def _send(self, drawn: Sequence[Sent]) -> list[ToScheduler]:
        for one in drawn:
            one.arrived = self._working_steps
            self._sent[one.message.rid] = one
        return [one.message for one in drawn]

    def _abort(self) -> list[ToScheduler]:
        rng = self.rng
        if rng.random() < 0.04:
            for sent in self._sent.values():
                sent.may_be_aborted = True
            return [AbortReq(abort_all=True)]
        rid = rng.choice([*self._sent, self._requests.last_rid, "nobody"])
        if rid in self._sent:
            self._sent[rid].may_be_aborted = True
        return [AbortReq(rid=rid)]

    def _look_at(self, rid: str) -> None:
        """Compare the output of a request so far with the expected one."""
        sent, got = self._sent[rid], self._result(rid)
        waited = self._working_steps - sent.arrived
        assert waited < _MOST_WORKING_STEPS, f"{rid} waits while others got {waited} steps"
        if got is None:
            return
        assert_words(sent, got)
        self._door.on_output(rid, got)
        if got.finish_reason is not None:
            self._on_end(rid, sent, got)

    def _result(self, rid: str) -> Collected | None:
        """The output so far of a request, which is in one group."""
        found = [rig.results[rid] for rig in self.rigs if rid in rig.results]
        assert len(found) < 2, f"{rid} is in several groups"
        return found[0] if found else None

    def _on_end(self, rid: str, sent: Sent, got: Collected) -> None:
        reason, message = got.finish_reason, sent.message
        assert reason is not None and got.last is not None
        del self._sent[rid]
        for rig in self.rigs:
            rig.results.pop(rid, None)
        counts = self.outcome.counts
        counts[f"ended by {reason.type}"] += 1
        if reason.type == "abort":
            is_full = reason.status_code == 503 and "queue is full" in (reason.message or "")
            assert (
                (is_full and self.setup.max_queued < 1000)
                or (reason.status_code == 400 and sent.is_refused)
                or (reason.status_code == 499 and sent.may_be_aborted)
                or (reason.status_code == 503 and self._is_draining)
            ), f"{rid} ended by {reason}"
            counts[f"aborted after {min(len(got.output_ids), 1)} words"] += 1
            counts[f"aborted with {reason.status_code}"] += 1
            return
        assert_whole(sent, got)
        details = got.last.cached_tokens_details
        for tier in ("device", "host", "storage"):
            counts[f"tokens from {tier}"] += getattr(details, tier)
        counts.update(f"with {extra}" for extra in sent.extras)
        counts["with two demands"] += len(sent.extras) > 1
        counts["with sessions"] += message.session_id is not None
        counts["tokens of prompts"] += len(sent.prompt)
        counts["prompts with logprobs"] += message.logprob_start_len >= 0
        conversation = sent.prompt + got.output_ids
        if len(conversation) < self.rig.scheduler.state.limits.max_input_tokens * 3 // 4:
            self._requests.remember(message.extra_key, conversation)

    # ---- administration and the store ----------------------------------------------------------

    def _control_id(self) -> str:
        self._num_controls += 1
        name = f"c{self._num_controls}"
        self._unanswered[name] = len(self.rigs)
        return name

    @property
    def _is_paused(self) -> bool:
        return self.rig.scheduler._control.is_paused

    def _pause_or_continue(self) -> ToScheduler:
        self.outcome.counts["pauses"] += not self._is_paused
        kind = ContinueGenerationReqInput if self._is_paused else PauseGenerationReqInput
        return kind(req_id=self._control_id())

    def _attach(self) -> AttachHiCacheStorageReqInput:
        rng = self.rng
        policies = ("best_effort", "wait_complete", "timeout", None, None)
        return AttachHiCacheStorageReqInput(
            req_id=self._control_id(),
            hicache_storage_backend=self.setup.backend,
            hicache_storage_backend_extra_config_json=self.setup.extra_config(
                self.store, self.rig.group.attn_tp_size
            ),
            hicache_storage_prefetch_policy=rng.choice(policies),
            hicache_write_policy=rng.choice((*self.setup.write_policies, None, None, None)),
        )

    def _control(self) -> ToScheduler:
        kinds: list[Callable[[str], ToScheduler]] = [
            lambda rid: FlushCacheReqInput(req_id=rid, timeout=self.rng.choice((0.0, 5.0))),
            lambda rid: GetInternalStateReq(req_id=rid),
            lambda rid: self._pausing.choice((GetMetricsReq, GetCacheViewReq))(req_id=rid),
            lambda rid: GetHiCacheStorageReqInput(req_id=rid),
            lambda rid: DetachHiCacheStorageReqInput(req_id=rid),
        ]
        if self.rng.random() < 0.1:
            return ClearHiCacheReqInput(req_id=self._control_id())
        which = self.rng.randrange(len(kinds) + 3)
        return kinds[which](self._control_id()) if which < len(kinds) else self._attach()

    def _take_answers(self) -> None:
        for rig in self.rigs:
            for answer in rig.answers:
                assert self._unanswered[answer.req_id] > 0, f"{answer.req_id} is answered twice"
                self._unanswered -= Counter([answer.req_id])
                self.outcome.counts["done" if answer.success else "refused"] += 1
            rig.answers.clear()

    def _move_store(self) -> None:
        rng = self.rng
        match rng.randrange(20):
            case 0:
                self.store.restart()
            case 1 | 2:
                self.store.rot(rng)
            case 3 | 4:
                if any(rig.tree.is_busy().get("prefetches") for rig in self.rigs):
                    self.store.restart()
            case at if at < 11:
                self.store.release()
            case _:
                self.store.set_mood(rng.choice(_MOODS))

    # ---- reports -------------------------------------------------------------------------------

    def _count(self) -> None:
        counts, retractions = self.outcome.counts, []
        for rig in self.rigs:
            counts.update(counts_of(rig))
            retractions.append(rig.scheduler.state.counters.retractions)
        counts.update({f"store: {what}": n for what, n in self.store.happened.items()})
        if len(self.rigs) > 1:
            counts[f"groups by {self._door.method}"] += len(self.rigs)
            counts["retractions of one group alone"] += max(retractions) - min(retractions)

    def _describe(self) -> str:
        lines = [
            f"after {self.outcome.steps} steps: {self.outcome.describe()}",
            f"mood of the store: {self.store.mood}; on their way: {list(self._sent)}",
        ]
        for group, rig in enumerate(self.rigs):
            state = rig.scheduler.state
            lines.append(
                f"group {group}: waiting {[req.rid for req in state.queues.waiting]}, running "
                f"{[req.rid for req in state.queues.holders()]}, busy {state.tree.is_busy()}"
            )
        return "\n".join([*lines, "the log's last lines:", *self._log])


def run_seed(seed: int, steps: int = STEPS_PER_SEED) -> SchedulerOutcome:
    """Run one seed. Exceptions have notes: the state, and the command that repeats the run."""
    run = RandomScheduler(seed)
    try:
        return run.run(steps)
    except BaseException as error:
        error.add_note(f"with {run.setup}")
        error.add_note(f"to repeat: python -m {_MODULE} --seed {seed} --steps {steps}")
        raise


if __name__ == "__main__":
    raise SystemExit(random_seeds.main(__doc__, _MODULE, STEPS_PER_SEED, run_seed))
