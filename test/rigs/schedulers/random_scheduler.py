"""Random work for a whole scheduler, over a checkable model and a misbehaving store.

    python -m rigs.schedulers.random_scheduler --seed N      repeats one run
    python -m rigs.schedulers.random_scheduler --seconds S   runs seed after seed

A seed determines a configuration (kinds of state, page size, policies, sizes of the tiers, layout,
overlap). It also determines each tick's work: requests that share prefixes in many ways, aborts,
administration, and moods of the store. Each tick compares all outputs with the expected ones. Page
ownership is checked every few ticks, and whenever the scheduler is idle. All is real except the
model's arithmetic, the store, and the engine's timers, which are too long for ticks of 1 ms.

A run is a function of its seed, except for the progress of copies and transfers in other threads.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rigs.caches.host_damage import flip_any
from rigs.caches.storage_rigs import counts as counter_values
from rigs.schedulers import random_seeds
from rigs.schedulers.checkable_worker import CheckableRig, CheckableWorker
from rigs.schedulers.random_checks import (
    assert_stored,
    assert_unpinned,
    assert_whole,
    assert_words,
)
from rigs.schedulers.random_requests import RandomRequests, Sent
from rigs.schedulers.random_seeds import Outcome
from rigs.schedulers.random_setup import Setup, impatient
from rigs.schedulers.scheduler_rig import Collected
from rigs.schedulers.step_watchdog import Watchdog, log_kept
from rigs.stores.object_store import FILE, MOODS, ObjectFolder, ObjectStore
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l2.host_flows import WRITE_POLICIES
from sglang.srt.messages.io_struct import (
    AbortReq,
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ContinueGenerationReqInput,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
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
    """

    def __init__(self, seed: int, setup: Setup | None = None) -> None:
        self.rng = random.Random(seed)
        # Drawn apart, so that the rest of a run stays that of its seed.
        self._pausing = random.Random(f"{seed} pauses")
        self.setup = setup or Setup.draw(self.rng)
        kind = ObjectFolder if self.setup.backend == FILE else ObjectStore
        self.store = kind(seed, damages=self.setup.verify_checksum, breaks_contract=seed % 2 == 1)
        self.outcome = SchedulerOutcome(setup=self.setup)
        self._log: deque[str] = deque(maxlen=40)
        self._watchdog = Watchdog()
        self._sent: dict[str, Sent] = {}
        """Requests that have not ended."""
        self._unanswered: set[str] = set()
        # Penalties count tokens at the launch of a step, and a lagging device tells them later.
        self._requests = RandomRequests(
            self.rng, self.setup.page_size, penalises=not self.setup.most_lag_s
        )
        self._working_steps = 0
        self._num_controls = 0
        self._is_draining = False
        self._epoch = -1
        self._epoch_began = 0.0
        """Start of the tick in which the tree began the epoch, in `time.monotonic()` seconds."""
        self._rig: CheckableRig | None = None

    @property
    def rig(self) -> CheckableRig:
        assert self._rig is not None, "within `run`"
        return self._rig

    def run(self, steps: int = STEPS_PER_SEED) -> SchedulerOutcome:
        """Run about `steps` ticks. Raises for any wrong result."""
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(impatient())
            stack.enter_context(self.setup.in_use())
            stack.enter_context(log_kept(self._log))
            stack.enter_context(self._watchdog)
            stack.enter_context(self.store)
            self._rig = self._make_rig()
            stack.callback(self._rig.close)
            stack.callback(self.store.release)
            stack.callback(self.store.set_mood, "quick")
            try:
                self._work(steps)
            except BaseException as error:
                error.add_note(self._describe())
                raise
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _make_rig(self) -> CheckableRig:
        rig = CheckableRig(BUILTIN_MODEL_DIR, **self.setup.rig_args())
        self.setup.slow_down(rig.tree, random.Random(self.rng.random()))
        return rig

    def _work(self, steps: int) -> None:
        if self.setup.tiers == 3:
            self._step(self._attach())
        while self.outcome.steps < steps:
            self._busy_time()
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
                self.outcome.counts["damaged in L2"] += flip_any(self.rig.tree, rng)
            if self._pausing.random() < (0.15 if self._is_paused else 0.01):
                messages.insert(0, self._pause_or_continue())
            self._step(*messages)

    def _step(self, *messages: ToScheduler) -> None:
        """Run one tick, and check the invariants after it."""
        rig, state = self.rig, self.rig.scheduler.state
        before = state.counters.prefill_batches + state.counters.decode_steps
        was_paused = self._is_paused
        began = time.monotonic()
        with self._watchdog.within(_HANG_S):
            rig.step(*messages)
        self.outcome.steps += 1
        self._working_steps += state.counters.prefill_batches + state.counters.decode_steps - before
        if was_paused and self._is_paused:
            done = state.counters.prefill_batches + state.counters.decode_steps
            assert done == before and state.in_flight is None, "a step in a pause"
        tree = rig.tree
        if isinstance(tree, HiRadixCache) and tree.store.epoch != self._epoch:
            self._epoch, self._epoch_began = tree.store.epoch, began
        self._take_answers()
        for rid in list(self._sent):
            self._look_at(rid)
        assert not self.store.contradictions, (
            f"two pages were written to L3 under one key: {self.store.contradictions[0]}"
        )
        if self.rng.random() < 0.2:
            rig.check()
        if rig.scheduler.poll_timeout_ms():
            time.sleep(_IDLE_S)

    def _come_to_rest(self) -> None:
        """Run until idle, and check that nothing is left over."""
        rig = self.rig
        if self.rng.random() < 0.7:
            self.store.set_mood("quick")
        began, steps = time.monotonic(), 0
        if self._is_paused:
            self._step(self._pause_or_continue())
        while self._sent or not rig.scheduler.is_idle() or self._unanswered:
            if steps % 5 == 4:
                self.store.release()
            self._step()
            steps += 1
            if time.monotonic() - began > _REST_S and steps > _MOST_STEPS_TO_REST:
                raise AssertionError(
                    f"no rest after {steps} steps: requests {sorted(self._sent)}, "
                    f"unanswered {self._unanswered}, busy {rig.scheduler._control.busy()}"
                )
        rig.assert_clean()
        assert_unpinned(rig.tree)
        assert_stored(rig.tree, self.store, self.setup.backend, self._epoch_began)
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
        while not self.rig.scheduler.is_stopped:
            assert time.monotonic() - began < _REST_S, "the scheduler does not stop"
            self.store.release()
            self._step()
        assert not self._sent, f"never told of the end: {sorted(self._sent)}"

    def _flush_at_rest(self) -> None:
        rig, tree = self.rig, self.rig.tree
        self._step(FlushCacheReqInput(req_id=self._control_id()))
        assert not self._unanswered, "a flush at rest is done at once"
        pools = rig.scheduler.state.pools
        assert pools.allocator.available_size() == pools.allocator.size
        states = pools.req_to_token_pool.mamba_pool
        assert states is None or states.available_size() == states.size
        if isinstance(tree, HiRadixCache):
            for entry in tree.cache_controller.mem_pool_host.entries.values():
                if entry.spec.indices_from_pool is None:
                    assert entry.host_pool.available_size() == entry.host_pool.size, entry.name

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
        rids = [*self._sent, self._requests.last_rid, "nobody"]
        rid = rng.choice(rids)
        if rid in self._sent:
            self._sent[rid].may_be_aborted = True
        return [AbortReq(rid=rid)]

    def _look_at(self, rid: str) -> None:
        """Compare the output of a request so far with the expected one."""
        sent, got = self._sent[rid], self.rig.results.get(rid)
        waited = self._working_steps - sent.arrived
        assert waited < _MOST_WORKING_STEPS, f"{rid} waits while others got {waited} steps"
        if got is None:
            return
        assert_words(sent, got)
        if got.finish_reason is not None:
            self._on_end(rid, sent, got)

    def _on_end(self, rid: str, sent: Sent, got: Collected) -> None:
        reason, message = got.finish_reason, sent.message
        assert reason is not None and got.last is not None
        del self._sent[rid], self.rig.results[rid]
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
        if sent.extra is not None:
            counts[f"with {sent.extra}"] += 1
        counts["tokens of prompts"] += len(sent.prompt)
        counts["prompts with logprobs"] += message.logprob_start_len >= 0
        conversation = sent.prompt + got.output_ids
        if len(conversation) < self.rig.scheduler.state.limits.max_input_tokens * 3 // 4:
            self._requests.remember(message.extra_key, conversation)

    # ---- administration and the store ----------------------------------------------------------

    def _control_id(self) -> str:
        self._num_controls += 1
        name = f"c{self._num_controls}"
        self._unanswered.add(name)
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
            hicache_write_policy=rng.choice((*WRITE_POLICIES, None, None, None)),
        )

    def _control(self) -> ToScheduler:
        kinds: list[Callable[[str], ToScheduler]] = [
            lambda rid: FlushCacheReqInput(req_id=rid, timeout=self.rng.choice((0.0, 5.0))),
            lambda rid: GetInternalStateReq(req_id=rid),
            lambda rid: GetMetricsReq(req_id=rid),
            lambda rid: GetHiCacheStorageReqInput(req_id=rid),
            lambda rid: DetachHiCacheStorageReqInput(req_id=rid),
        ]
        if self.rng.random() < 0.1:
            return ClearHiCacheReqInput(req_id=self._control_id())
        which = self.rng.randrange(len(kinds) + 3)
        return kinds[which](self._control_id()) if which < len(kinds) else self._attach()

    def _take_answers(self) -> None:
        for answer in self.rig.answers:
            assert answer.req_id in self._unanswered, f"{answer.req_id} is answered twice"
            self._unanswered.remove(answer.req_id)
            self.outcome.counts["done" if answer.success else "refused"] += 1
        self.rig.answers.clear()

    def _move_store(self) -> None:
        rng = self.rng
        match rng.randrange(20):
            case 0:
                self.store.restart()
            case 1 | 2:
                self.store.rot(rng)
            case 3 | 4:
                self._restart_store_in_prefetch()
            case at if at < 11:
                self.store.release()
            case _:
                self.store.set_mood(rng.choice(_MOODS))

    def _restart_store_in_prefetch(self) -> None:
        """Restart the store while requests that read from it wait."""
        tree = self.rig.tree
        if isinstance(tree, HiRadixCache) and tree.is_busy().get("prefetches"):
            self.store.restart()

    # ---- reports -------------------------------------------------------------------------------

    def _count(self) -> None:
        counts, counters = self.outcome.counts, self.rig.scheduler.state.counters
        worker = self.rig.worker
        assert isinstance(worker, CheckableWorker)
        counts["positions checked"] = worker.num_checked
        counts["prompts cached whole"] = worker.num_whole
        counts["steps from a state of the tree"] = worker.num_continued
        counts["retractions"] = counters.retractions
        counts["started again"] = counters.redone
        counts["wrong contexts"] = worker.num_wrong
        counts["drafts accepted"] = worker.num_accepted
        counts["drafts rejected"] = worker.num_rejected
        counts["verifications ahead"] = worker.num_ahead
        counts["prefill batches"] = counters.prefill_batches
        counts["decode steps"] = counters.decode_steps
        counts.update({f"store: {what}": n for what, n in self.store.happened.items()})
        tree = self.rig.tree
        states = tree.state_metrics
        if states is not None:
            for metric, name in (
                (states.evicted, "states evicted from"),
                (states.snapshots, "snapshots of"),
            ):
                counts.update(
                    {f"{name} {what}": int(n) for what, n in counter_values(metric).items()}
                )
        if isinstance(tree, HiRadixCache):
            for metric, name in (
                (tree.metrics.prefetch_outcomes, "read"),
                (tree.metrics.backup_outcomes, "write"),
                (tree.metrics.evicted, "evicted from"),
                (tree.metrics.dropped, "dropped"),
                (tree.metrics.checked_pages, "checked"),
                (tree.metrics.load_back, "loaded"),
            ):
                counts.update(
                    {f"{name} {what}": int(n) for what, n in counter_values(metric).items()}
                )

    def _describe(self) -> str:
        state = None if self._rig is None else self._rig.scheduler.state
        lines = [
            f"after {self.outcome.steps} steps: {self.outcome.describe()}",
            f"mood of the store: {self.store.mood}; on their way: {list(self._sent)}",
        ]
        if state is not None:
            lines.append(
                f"waiting {[req.rid for req in state.queues.waiting]}, running "
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
