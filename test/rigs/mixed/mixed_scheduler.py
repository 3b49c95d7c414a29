"""Random work for a whole scheduler over tiny models, whose features all meet each other.

    python -m rigs.mixed.mixed_scheduler --seed N      repeats one run
    python -m rigs.mixed.mixed_scheduler --seconds S   runs seed after seed

`random_scheduler.py` checks every position of a model that is made for checks. Here the models, the
attention, the formats of state and the draft layers are the engine's own. All words, and their log
probabilities where a request asks for them, are compared with those of an engine that caches and
drafts nothing. Free slots hold NaN. Whenever the scheduler is idle, and at random between, page
ownership is checked, and a mirror of the tiers, which hears KV events alone, is compared with the
tree.

Some seeds have two DP groups: schedulers over one store, behind the server's choice of a group.
Some have a store that hangs, fails and is slow, and the engine's timers are scaled to that.

Seeds from 0 to the number of `covering_mixes` have these configurations in turn, and so on.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from rigs.caches.host_damage import flip_any
from rigs.drafts.guesses import guessed
from rigs.mixed.cold_engine import ColdEngine
from rigs.mixed.drawn_settings import attaching, draw_policies, l3_of
from rigs.mixed.front_door import FrontDoor
from rigs.mixed.held_copies import HeldCopies
from rigs.mixed.left_apart import count_states_apart
from rigs.mixed.mirror import Mirror
from rigs.mixed.mixed_requests import Asked, MixedRequests
from rigs.mixed.operator import Operator
from rigs.mixed.plan import DRAFTING, LATENT, LEVELS, STATES, Mix, covering_mixes
from rigs.mixed.poisoned_pools import poison_free
from rigs.mixed.still_bytes import StillBytes
from rigs.models.letters import Letters
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers import random_seeds
from rigs.schedulers.random_checks import assert_unpinned
from rigs.schedulers.random_seeds import Outcome
from rigs.schedulers.random_setup import impatient, speculation
from rigs.schedulers.scheduler_rig import Collected, SchedulerRig
from rigs.schedulers.step_watchdog import log_kept
from rigs.stores.object_store import ObjectFolder
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l3 import store_calls
from sglang.srt.messages.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    ToScheduler,
)

_MODULE: Final = "rigs.mixed.mixed_scheduler"
STEPS_PER_SEED: Final = 200
_REST_S: Final = 30.0
_MOST_STEPS_TO_REST: Final = 4000
_MANY: Final = 60
"""Requests that run or wait at once, for `many requests`."""
_MOODS: Final = ("quick", "well", "slow", "crawling", "hanging", "hanging", "failing", "dead")
"""Of a store that loses nothing."""
Pair = frozenset[str]
FEATURES: Final = (
    *(f"model {family}" for family in LEVELS["family"]),
    "DP groups",
    "KV events",
    "L2",
    "L3",
    "abort",
    "cache report",
    "damage",
    "drafts",
    "extra key",
    "fp8 state",
    "hit in device",
    "hit in host",
    "hit in storage",
    "logprobs",
    "many requests",
    "overlap",
    "parts of prompts",
    "pauses",
    "priority",
    "prompt logprobs",
    "retraction",
    "samples",
    "session",
    "stops",
    "whole prompt",
)
"""Features that are counted, of runs and of requests."""
NEVER_TOGETHER: Final = {
    *map(frozenset, itertools.combinations(FEATURES[: len(LEVELS["family"])], 2)),
    # The server refuses these.
    *(frozenset({f"model {one}", "drafts"}) for one in LEVELS["family"] if one not in DRAFTING),
    *(frozenset({f"model {one}", "fp8 state"}) for one in LEVELS["family"] if one not in LATENT),
}
"""Features that exclude each other."""


@cache
def _models() -> tempfile.TemporaryDirectory[str]:
    """Folder of the checkpoints of this process."""
    return tempfile.TemporaryDirectory()


@cache
def cold_engine(family: str, kv_cache_dtype: str) -> ColdEngine:
    """The engine to compare with. Rounded state must choose no other experts, so a model with
    rounded state has none."""
    path = Path(_models().name) / f"{family}-{kv_cache_dtype}"
    fields: dict[str, Any] = {"mtp": family in DRAFTING}
    if family == "deepseek_v4":
        # Whole groups in the smallest pages.
        rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
        fields["compress_rates"] = rates
    if family == "glm5_next":
        fields |= {"index_kpool": 4, "index_topk": 12}
    if kv_cache_dtype != "auto":
        fields["first_k_dense_replace"] = 4 if family == "kimi_linear" else 2
    save_tiny_checkpoint(path, family, eos_token_id=None, **fields)
    return ColdEngine(path, kv_cache_dtype)


@dataclass(slots=True, kw_only=True)
class MixedOutcome(Outcome):
    """Outcome of a run."""

    mix: Mix
    run_features: set[str] = field(default_factory=set)
    """Features of the run as a whole."""
    of_requests: set[frozenset[str]] = field(default_factory=set)
    """For each request that ended what it asked for, and what happened to it."""
    most_off: float = 0.0
    """Largest difference from a log probability of the cold engine."""

    def pairs(self) -> set[Pair]:
        """Each two features that met: in the run, or in a request of it."""
        together = [self.run_features | one for one in self.of_requests]
        return {frozenset(two) for one in together for two in itertools.combinations(one, 2)}

    def describe(self) -> str:
        return f"{self.mix}; off by {self.most_off:.1e} at most"


class MixedScheduler:
    """One run.

    Args:
        seed: Determines all but the timing of threads.
        mix: Replaces the settings that the seed has, and there is one group.
    """

    def __init__(self, seed: int, mix: Mix | None = None) -> None:
        mixes = covering_mixes()
        self.rng = random.Random(seed)
        # Drawn apart, so that the rest of a run stays that of its seed.
        grouping = random.Random(f"{seed} groups")
        num_groups = 1 if mix is not None else grouping.choice((1, 1, 2))
        self.mix = mix or mixes[seed % len(mixes)]
        self._door = FrontDoor(grouping, num_groups, self.mix.page_size)
        self.outcome = MixedOutcome(mix=self.mix)
        self._cold = cold_engine(self.mix.family, self.mix.kv_cache_dtype)
        self._log: deque[str] = deque(maxlen=30)
        self._mirrors = [Mirror() for _ in range(num_groups)]
        self._texts: list[list[int]] = []
        """Texts that were said; the draft layer of a random model is hardly ever right."""
        self._asked: dict[str, Asked] = {}
        """Requests that have not ended."""
        self._storage = Path()
        self._troubles = random.Random(f"{seed} store")
        is_troubled = mix is None and self.mix.tiers == 3 and self._troubles.random() < 0.4
        self._store = ObjectFolder(seed, damages=False) if is_troubled else None
        """A store with moods; None: L3 is the engine's own store of files, or there is none."""
        self._rigs: list[SchedulerRig] = []
        """Those of the groups."""
        self._requests = MixedRequests(self.rng, self.mix.page_size, self._most_tokens)
        self._operator = Operator(
            seed, self.outcome.counts, lambda: attaching(self.mix, self._store)
        )
        self._apart = random.Random(f"{seed} apart")
        self._policies = draw_policies(self.mix, self._apart)
        # Reads find no room at first in the smaller L2.
        self._l2_ratio = random.Random(f"{seed} L2").choice((2.0, 0.3))
        self._copies = HeldCopies() if self._apart.random() < 0.5 else None
        """None: threads copy between L1 and L2."""
        self._group_tokens = 1
        """Tokens of the model's longest group."""
        self._still: dict[SchedulerRig, StillBytes] = {}

    @property
    def _most_tokens(self) -> int:
        return 8 * self.mix.page_size

    @property
    def rig(self) -> SchedulerRig:
        """That of the first group."""
        return self._rigs[0]

    def run(self, steps: int = STEPS_PER_SEED) -> MixedOutcome:
        """Run about `steps` ticks. Raises for any wrong result."""
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            self._storage = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(self._storage))
            stack.enter_context(folder)
            stack.enter_context(impatient())
            stack.enter_context(self._store or unhurried())
            stack.enter_context(log_kept(self._log))
            if self._copies is not None:
                stack.enter_context(self._copies)
            if self.mix.damages_l2:
                stack.enter_context(envs.SGLANG_HICACHE_CHECKED_SHARE.override(1.0))
            if self.mix.num_drafts:
                stack.enter_context(guessed(self._texts, 0.8))
            for group in range(self._door.num_groups):
                self._rigs.append(self._make_rig(group))
                stack.callback(self._rigs[-1].close)
            stack.callback(self._calm_store)
            try:
                while self.outcome.steps < steps:
                    self._busy_time()
                    self._come_to_rest()
            except BaseException as error:
                error.add_note(f"after {self.outcome.steps} steps of {self.mix}; the log:")
                error.add_note("\n".join(self._log))
                raise
        self._note_run()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _make_rig(self, group: int) -> SchedulerRig:
        mix = self.mix
        page, rows = mix.page_size, mix.max_requests
        most = self._most_tokens + 3 * page + mix.num_drafts + 1
        pages = (
            max(most // page + 2, 3 * rows // 2) if mix.is_small else (1 + rows // 2) * most // page
        )
        args: dict[str, Any] = {
            "pool_tokens": pages * page,
            "max_requests": rows,
            "page_size": page,
            "overlap": mix.overlap,
            "kv_cache_dtype": mix.kv_cache_dtype,
            "chunked_prefill_size": mix.chunk_tokens,
            "radix_eviction_policy": mix.eviction,
            "schedule_conservativeness": 0.01 if mix.is_small else 1.0,
            "publish_events": self._mirrors[group].hear,
            "held_pages": self._door.notes[group],
            "keep_session_share": 0.5,
            "tokenizer": Letters(),
            **speculation(1 + mix.num_drafts),
            **self._policies,
        }
        if mix.family in STATES:
            args["num_states"] = rows + (3 if mix.is_small else rows)
        if mix.family in ("kimi_linear", "qwen3_next", "nemotron_h", "deepseek_v4", "glm5_next"):
            args["mamba_track_interval"] = 2 * page
        if mix.tiers > 1:
            args |= {"enable_hierarchical_cache": True, "hicache_ratio": self._l2_ratio}
        if mix.tiers > 2:
            if mix.is_buffer:
                args |= {"hicache_host_memory_mode": "buffer_only", "hicache_ratio": 0.2}
            backend, config = l3_of(mix, self._store)
            args |= {
                "hicache_storage_backend": backend,
                "hicache_storage_prefetch_policy": "wait_complete"
                if self._store is None
                else self._troubles.choice(("wait_complete", "timeout")),
                "hicache_storage_backend_extra_config": config,
                "hicache_allow_dynamic_attach": True,
            }
        rig = SchedulerRig(self._cold.path, **args)
        rig.tick_s = 0.01  # type: ignore[misc]
        count_states_apart(rig.tree, self.outcome.counts)
        self._group_tokens = max((one.spec.stride for one in rig.pools), default=1)
        if rig.device == "cpu":
            may_look = not mix.damages_l2
            self._still[rig] = StillBytes(rig.tree, rig.pools, looks_at_host=may_look)
        policy = rig.scheduler._draft_policy
        policy.first_steps, policy.trial_steps, policy.period_steps = 6, 2, 8
        return rig

    # ---- the store -----------------------------------------------------------------------------

    def _trouble_store(self) -> None:
        """Change the mood of the store now and then, or let go what hangs."""
        if self._store is not None and self._troubles.random() < 0.15:
            self._store.set_mood(self._troubles.choice(_MOODS))
            if self._troubles.random() < 0.5:
                self._store.release()

    def _calm_store(self) -> None:
        if self._store is not None:
            self._store.set_mood("quick")
            self._store.release()

    # ---- ticks ---------------------------------------------------------------------------------

    def _busy_time(self) -> None:
        rng, most = self.rng, self.mix.max_requests
        wanted = rng.choice((2, most // 2, most + 4))
        self._door.draw_favourite()
        for _ in range(rng.choice((10, 20, 40))):
            messages: list[ToScheduler] = []
            # All at once, or a few at a time.
            burst = rng.choice((0, 0, 2, wanted))
            for _ in range(min(burst, wanted - len(self._asked))):
                one = self._requests.draw()
                self._asked[one.message.rid] = one
                messages.append(one.message)
            if self._asked and rng.random() < 0.1:
                one = rng.choice(list(self._asked.values()))
                one.is_aborted = True
                messages.append(AbortReq(rid=one.message.rid))
            if self.mix.damages_l2 and rng.random() < 0.2:
                for rig in self._rigs:
                    self.outcome.counts["damaged in L2"] += flip_any(rig.tree, rng)
            self._trouble_store()
            self._step(*messages)

    def _step(self, *messages: ToScheduler, is_resting: bool = False) -> None:
        boxes = self._door.deliver(messages)
        self.outcome.steps += 1
        for rig, box in zip(self._rigs, boxes, strict=True):
            box += self._operator.messages(rig, is_resting=is_resting)
            if not self._door.may_skip(rig, box):
                self._step_group(rig, box)
        if sum(len(rig.scheduler.state.queues.alive) for rig in self._rigs) >= _MANY:
            self.outcome.run_features.add("many requests")
        if self.rng.random() < 0.1:
            for rig, mirror in zip(self._rigs, self._mirrors, strict=True):
                rig.check()
                mirror.compare(rig.tree)
                if rig in self._still:
                    self._still[rig].look()
        for rig in self._rigs:
            for rid in [rid for rid in self._asked if rid in rig.results]:
                self._door.on_output(rid, rig.results[rid])
                if rig.results[rid].finish_reason is not None:
                    self._on_end(self._asked.pop(rid), rig.results.pop(rid))

    def _step_group(self, rig: SchedulerRig, messages: Sequence[ToScheduler]) -> None:
        counters, control = rig.scheduler.state.counters, rig.scheduler._control
        before, was_paused = (counters.prefill_batches, counters.decode_steps), control.is_paused
        if self._copies is not None:
            self._copies.run_some(self._apart)
        poison_free(rig.pools, rig.worker)
        rig.step(*messages)
        self._door.hear(rig)
        if was_paused and control.is_paused:
            assert (counters.prefill_batches, counters.decode_steps) == before

    def _come_to_rest(self) -> None:
        began = time.monotonic()
        self._calm_store()
        for steps in itertools.count():
            is_idle = not self._asked and all(rig.scheduler.is_idle() for rig in self._rigs)
            if all(map(self._operator.is_answered, self._rigs)) and is_idle:
                break
            is_late = steps > _MOST_STEPS_TO_REST and time.monotonic() - began > _REST_S
            busy = [rig.tree.is_busy() for rig in self._rigs]
            assert not is_late, f"no rest: {list(self._asked)}, {busy}"
            self._step(is_resting=True)
            if all(rig.scheduler.poll_timeout_ms() for rig in self._rigs):
                time.sleep(0.0005)
        self._door.check_at_rest(self._rigs)
        for rig, mirror in zip(self._rigs, self._mirrors, strict=True):
            rig.assert_clean()
            assert_unpinned(rig.tree)
            mirror.compare(rig.tree)
            # One group may have cleared what another one knows.
            if len(self._rigs) == 1 or not self.outcome.counts["operator: clears"]:
                mirror.compare_store(self._storage)
            # The next prompts come from the tiers below.
            if self.mix.tiers == 3 and self.rng.random() < 0.5:
                rig.step(FlushCacheReqInput(req_id="flush"))
                assert rig.answers.pop().success, "a flush at rest is done at once"
            elif self.mix.tiers > 1:
                rig.tree.evict(EvictParams(num_tokens=rig.scheduler.state.limits.pool_tokens))
                # The group's next tick may be late.
                mirror.hear(rig.tree.take_events())

    # ---- requests ------------------------------------------------------------------------------

    def _on_end(self, asked: Asked, got: Collected) -> None:
        reason, last, message = got.finish_reason, got.last, asked.message
        assert reason is not None and last is not None
        words = got.output_ids
        if words:
            off = self._cold.assert_words(asked.prompt, words, got.logprobs)
            self.outcome.most_off = max(self.outcome.most_off, off)
        features = asked.features()
        is_open = bool(words) and (len(asked.prompt) + len(words) - 1) % self._group_tokens > 0
        self.outcome.counts[f"ended by {reason.type}"] += 1
        if reason.type == "abort":
            assert asked.is_aborted, f"{message.rid} ended by {reason}"
        else:
            features.discard("abort")
            assert len(words) == asked.end_of(words), f"{message.rid}: {len(words)} words"
            assert (last.cache_report is not None) == message.return_cache_report
            self._texts.append([*asked.prompt, *words])
            del self._texts[:-40]
            self._requests.remember(asked, words)
        details = last.cached_tokens_details
        assert details.total < len(asked.prompt)
        if (report := last.cache_report) is not None:
            ends = [cut.at for cut in report.cuts]
            assert ends == sorted(ends) and max(ends, default=0) <= len(asked.prompt)
        if details.total >= len(asked.prompt) - self.mix.page_size > 0:
            features.add("whole prompt")
        for tier in ("device", "host", "storage"):
            if tokens := getattr(details, tier):
                features.add(f"hit in {tier}")
                self.outcome.counts[f"tokens from {tier}"] += tokens
                self.outcome.counts[f"open groups behind {tier}"] += is_open
        if last.verifications is not None:
            features.add("drafts")
            self.outcome.counts["drafts accepted"] += last.verifications.accepted
        self.outcome.of_requests.add(frozenset(features))

    def _note_run(self) -> None:
        outcome, mix = self.outcome, self.mix
        counters = [rig.scheduler.state.counters for rig in self._rigs]
        retractions = sum(one.retractions for one in counters)
        heard = any(mirror.device.tokens for mirror in self._mirrors)
        happened = {
            f"model {mix.family}": True,
            "DP groups": len(self._rigs) > 1,
            "KV events": heard or mix.tiers == 3,
            "fp8 state": mix.kv_cache_dtype != "auto",
            "overlap": mix.overlap,
            "L2": mix.tiers > 1,
            "L3": mix.tiers > 2,
            "L2 as a buffer": mix.is_buffer,
            "troubled store": self._store is not None,
            "damage": outcome.counts["damaged in L2"] > 0,
            "retraction": retractions > 0,
            "parts of prompts": mix.chunk_tokens > 0,
            "pauses": outcome.counts["operator: pauses"] > 0,
        }
        outcome.run_features |= {name for name, has in happened.items() if has}
        if self._store is not None:
            faults = self._store.happened.items()
            outcome.counts.update({f"store: {what}": count for what, count in faults})
        outcome.counts["retractions"] += retractions
        outcome.counts["started again"] += sum(one.redone for one in counters)
        outcome.counts["nodes"] += sum(
            1 for rig in self._rigs if isinstance(rig.tree, HiRadixCache) for _ in rig.tree.nodes()
        )


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """No call to L3 counts as stuck because the machine is slow."""
    with (
        patch.object(store_calls, "_STUCK_AFTER_S", 20.0),
        patch.object(store_calls, "_SILENT_AFTER_S", 20.0),
    ):
        yield


def run_seed(seed: int, steps: int = STEPS_PER_SEED) -> MixedOutcome:
    """Run one seed. Exceptions have notes: the state, and the command that repeats the run."""
    run = MixedScheduler(seed)
    try:
        return run.run(steps)
    except BaseException as error:
        error.add_note(f"to repeat: python -m {_MODULE} --seed {seed} --steps {steps}")
        raise


if __name__ == "__main__":
    raise SystemExit(random_seeds.main(__doc__, _MODULE, STEPS_PER_SEED, run_seed))
