"""Random work on a whole scheduler over a model that can be checked and a store that misbehaves.

    python -m sglang.test.random_scheduler --seed N      repeats one run
    python -m sglang.test.random_scheduler --seconds S   runs seed after seed

A seed draws a configuration (page size, policies, sizes of the tiers, layout, overlap) and then,
tick by tick, requests that share prefixes in every way, aborts, administration, and moods of the
store. After each tick every word that came out is compared with what the prompt must give; every
few ticks, and whenever all is at rest, the books are checked. Everything is real but the model's
arithmetic, the store, and the engine's timers, which are too long for ticks of a millisecond.

A run follows from its seed as far as threads allow: how far a copy or a transfer has come at a
tick is theirs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

import torch

from sglang.srt.constants import BUILTIN_MODEL_DIR, HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import (
    AbortReq,
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    GetHiCacheStorageReqInput,
    GetInternalStateReq,
    GetMetricsReq,
    ShutdownReq,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sglang.srt.mem_cache import (
    circuit_breaker,
    fetch_choice,
    hiradix_cache,
    recent_timeouts,
    storage_io,
)
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.host_tier_cache import WRITE_POLICIES
from sglang.test import checkable_model
from sglang.test.chaotic_store import IN_PLACE, MOODS, PLAIN, STORE_KEY, ObjectStore
from sglang.test.checkable_model import VOCAB_SIZE, CheckableWorker
from sglang.test.scheduler_rig import Collected, SchedulerRig, greedy
from sglang.test.storage_rigs import counts as counter_values

BREAKS_CONTRACT: Final = False
"""Whether stores may also answer what `HiCacheStorage` does not allow: too few results, wrong
types, any exception from attaching, clearing and closing."""

STEPS_PER_SEED: Final = 500
_HANG_S: Final = 60.0
"""A step takes a millisecond. Longer than any bound that the engine waits for in it."""
_REST_S: Final = 30.0
_MOST_STEPS_TO_REST: Final = 4000
_MOST_WORKING_STEPS: Final = 2500
"""Forwards that others may get from a request's arrival to its end."""
_MOODS: Final = (*MOODS, *("quick", "well", "crawling") * 3)
_MOST_CONVERSATIONS: Final = 20
_IDLE_S: Final = 0.0005
_EVICTION: Final = ("lru", "lfu", "fifo", "priority", "slru")
_LAYOUTS: Final = ("auto", "layer_first", "page_first", "page_first_direct", "page_first_kv_split")
_KEYS: Final = (None, None, None, None, "a", "b")


class StepHangs(AssertionError):
    """A step of the scheduler did not return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The configuration of one run. Lengths in pages unless they say tokens."""

    page_size: int
    l1_pages: int
    tiers: int
    l2_ratio: float
    max_requests: int
    max_queued: int
    chunk_tokens: int
    max_prefill_tokens: int
    schedule_policy: str
    conservativeness: float
    eviction: str
    write_policy: str
    prefetch_policy: str
    layout: str
    overlap: bool
    stream_interval: int
    backend: str
    pass_prefix_keys: bool
    verify_checksum: bool
    threshold_pages: int
    slow_copies: float
    """Chance of a copy between L1 and L2 to take a while."""

    @classmethod
    def draw(cls, rng: random.Random) -> Setup:
        page = rng.choice((1, 2, 4, 16, 64))
        few = rng.random() < 0.7
        l1_pages = rng.randint(9, 16) if few else rng.randint(20, 60)
        if page < 4:
            l1_pages *= 4
        chunk = rng.choice((-1, page, 2 * page, 5 * page))
        return cls(
            page_size=page,
            l1_pages=l1_pages,
            tiers=rng.choice((1, 2, 3, 3, 3, 3)),
            l2_ratio=rng.choice((0.5, 1.5, 3.0, 8.0)),
            max_requests=rng.choice((1, 2, 4, 8)),
            max_queued=rng.choice((8, *(1000,) * 7)),
            chunk_tokens=chunk,
            max_prefill_tokens=rng.choice((page, 3 * page, 16384)),
            schedule_policy=rng.choice(("fcfs", "lpm")),
            conservativeness=rng.choice((0.01, 0.3, 1.0)),
            eviction=rng.choice(_EVICTION),
            write_policy=rng.choice(WRITE_POLICIES),
            prefetch_policy=rng.choice(("best_effort", "wait_complete", "timeout", "timeout")),
            layout=rng.choice(_LAYOUTS),
            overlap=rng.random() < 0.5,
            stream_interval=rng.choice((1, 3)),
            backend=rng.choice((PLAIN, IN_PLACE)),
            pass_prefix_keys=rng.random() < 0.3,
            verify_checksum=rng.random() < 0.8,
            threshold_pages=rng.choice((1, 1, 2)),
            slow_copies=rng.choice((0.0, 0.1, 0.5)),
        )

    def server_args(self) -> dict[str, Any]:
        """As `SchedulerRig` takes them."""
        args: dict[str, Any] = {
            "page_size": self.page_size,
            "max_queued_requests": self.max_queued,
            "chunked_prefill_size": self.chunk_tokens,
            "max_prefill_tokens": self.max_prefill_tokens,
            "schedule_policy": self.schedule_policy,
            "schedule_conservativeness": self.conservativeness,
            "radix_eviction_policy": self.eviction,
            "stream_interval": self.stream_interval,
        }
        if self.tiers > 1:
            args |= {
                "enable_hierarchical_cache": True,
                "hicache_ratio": self.l2_ratio,
                "hicache_write_policy": self.write_policy,
                "hicache_mem_layout": self.layout,
                "hicache_storage_prefetch_policy": self.prefetch_policy,
            }
        return args

    def extra_config(self, store: ObjectStore) -> str:
        return json.dumps(
            {
                STORE_KEY: store.name,
                "prefetch_threshold": self.threshold_pages * self.page_size,
                "prefetch_timeout_base": 0.01,
                "prefetch_timeout_max": 0.05,
                "hicache_storage_pass_prefix_keys": self.pass_prefix_keys,
                "verify_checksum": self.verify_checksum,
            }
        )


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Scale the engine's timers to ticks of a millisecond."""
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (storage_io, "_GATHER_S", 0.002),
            (storage_io, "_STUCK_AFTER_S", 0.03),
            (storage_io, "_CHECK_PAUSE_S", 0.0),
            (storage_io, "_LONGEST_CHECK_PAUSE_S", 0.05),
            (circuit_breaker, "_FIRST_PAUSE_S", 0.004),
            (circuit_breaker, "_LONGEST_PAUSE_S", 0.05),
            (recent_timeouts, "PERIOD_S", 0.05),
            (hiradix_cache, "_CHECK_EVERY", 5),
            (fetch_choice, "_PROBE_EVERY", 4),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


class CheckableRig(SchedulerRig):
    """A scheduler whose model is a `CheckableWorker`."""

    device = "cpu"

    def make_worker(
        self, model_path: Path, page_size: int, pool_tokens: int, max_requests: int
    ) -> CheckableWorker:
        return CheckableWorker(page_size, pool_tokens, max_requests)


@dataclass(slots=True)
class Sent:
    """A request on its way, and what it must give."""

    message: TokenizedGenerateReqInput
    words: list[int]
    """All that may come, in order; the last ends it."""
    stops: bool
    """Whether the last is a stop token."""
    arrived: int
    """Working steps before it came."""
    may_be_aborted: bool = False
    is_refused: bool = False
    """Too long ever to run."""


@dataclass(slots=True)
class Outcome:
    """What happened in one run, to see that it was not idle."""

    setup: Setup
    steps: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)


class RandomScheduler:
    """One run.

    Args:
        seed: Decides everything but the threads.
        breaks_contract: See `BREAKS_CONTRACT`.
    """

    def __init__(self, seed: int, *, breaks_contract: bool = BREAKS_CONTRACT) -> None:
        self.rng = random.Random(seed)
        self.setup = Setup.draw(self.rng)
        self.store = ObjectStore(
            seed, damages=self.setup.verify_checksum, breaks_contract=breaks_contract
        )
        self.outcome = Outcome(self.setup)
        self._log: deque[str] = deque(maxlen=40)
        self._watchdog = Watchdog()
        self._sent: dict[str, Sent] = {}
        """Not ended yet."""
        self._unanswered: set[str] = set()
        self._conversations: list[tuple[str | None, list[int]]] = []
        self._families = [self._tokens(self._pages(2, 6)) for _ in range(3)]
        self._working_steps = 0
        self._next_id = 0
        self._is_draining = False
        self._epoch = -1
        self._epoch_began = 0.0
        """Before the tick at which the tree took to it, `time.monotonic()` seconds."""
        self._rig: CheckableRig | None = None

    @property
    def rig(self) -> CheckableRig:
        assert self._rig is not None, "within `run`"
        return self._rig

    def run(self, steps: int = STEPS_PER_SEED) -> Outcome:
        """Do about `steps` ticks. Raises what is found wrong."""
        began = time.monotonic()
        setup = self.setup
        with contextlib.ExitStack() as stack:
            stack.enter_context(impatient())
            stack.enter_context(_log_kept(self._log))
            stack.enter_context(self._watchdog)
            stack.enter_context(self.store)
            self._rig = CheckableRig(
                BUILTIN_MODEL_DIR,
                pool_tokens=setup.l1_pages * setup.page_size,
                max_requests=setup.max_requests,
                overlap=setup.overlap,
                **setup.server_args(),
            )
            stack.callback(self._rig.close)
            stack.callback(self.store.release)
            stack.callback(self.store.set_mood, "quick")
            self._slow_copies()
            if setup.tiers == 3:
                self._step(self._attach())
            while self.outcome.steps < steps:
                self._busy_time()
                self._come_to_rest()
            if self.rng.random() < 0.3:
                self._shut_down()
            self._count()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # ---- ticks ---------------------------------------------------------------------------------

    def _busy_time(self) -> None:
        rng = self.rng
        rate = rng.choice((0.05, 0.2, 0.6))
        most = rng.choice((3, 12, 30))
        self.store.set_mood(rng.choice(_MOODS))
        for _ in range(rng.choice((20, 60, 150))):
            messages: list[ToScheduler] = []
            if rng.random() < rate and len(self._sent) < most:
                messages += self._arrivals()
            if rng.random() < 0.04:
                messages += self._abort()
            if rng.random() < 0.02:
                messages.append(self._control())
            if rng.random() < 0.05:
                self._move_store()
            self._step(*messages)

    def _step(self, *messages: ToScheduler) -> None:
        """One tick, and all that must hold after it."""
        rig, state = self.rig, self.rig.scheduler.state
        before = state.counters.prefill_batches + state.counters.decode_steps
        began = time.monotonic()
        with self._watchdog.within(_HANG_S):
            rig.step(*messages)
        self.outcome.steps += 1
        self._working_steps += state.counters.prefill_batches + state.counters.decode_steps - before
        tree = rig.tree
        if isinstance(tree, HiRadixCache) and tree._storage_epoch != self._epoch:
            self._epoch, self._epoch_began = tree._storage_epoch, began
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
        """Let everything end, then see that nothing is left over."""
        rig = self.rig
        if self.rng.random() < 0.7:
            self.store.set_mood("quick")
        began, steps = time.monotonic(), 0
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
        self._assert_unpinned()
        self._assert_stored()
        if self.rng.random() < 0.8:
            # What comes next is read from L3.
            self._flush_at_rest()

    def _shut_down(self) -> None:
        """In the middle of work: whoever waits is told, and the loop ends."""
        for _ in range(self.rng.randint(0, 3)):
            self._step(*self._arrivals())
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

    def _assert_unpinned(self) -> None:
        tree = self.rig.tree
        for node in tree.nodes():
            assert not node.host_ref_counter, f"{node} is pinned though nothing is under way"
            assert not node.lock_ref, f"{node} is locked though nothing runs"

    def _assert_stored(self) -> None:
        """L3 has, or has lost since, what the tree takes for stored; it was given no page without
        those before it."""
        tree = self.rig.tree
        if not isinstance(tree, HiRadixCache) or self.store.breaks_contract:
            return
        controller = tree.cache_controller.storage_io
        storage = None if controller is None else controller.storage
        if storage is None:
            return
        namespace = tree._attachment._namespace()
        for node in tree.nodes():
            pages = [f"{namespace}/{page}" for page in node.page_hashes(tree.page_size)]
            keys = storage.object_keys(pages, PoolName.KV)
            if node.storage_epoch == tree._storage_epoch:
                missing = [k for k in keys if not self.store.has_had_since(k, self._epoch_began)]
                assert not missing, f"{node} counts as stored, but L3 never had {missing[0]}"
            if self.setup.backend == IN_PLACE and node.parent not in (None, tree.root_node):
                assert node.parent is not None
                last = f"{namespace}/{node.parent.page_hashes(tree.page_size)[-1]}"
                (above,) = storage.object_keys([last], PoolName.KV)
                orphans = [key for key in keys if self.store.has_had(key)]
                assert not orphans or self.store.has_had(above), f"{node} was written as an orphan"

    def _flush_at_rest(self) -> None:
        rig, tree = self.rig, self.rig.tree
        self._step(FlushCacheReqInput(req_id=self._control_id()))
        assert not self._unanswered, "a flush at rest is done at once"
        pools = rig.scheduler.state.pools
        assert pools.allocator.available_size() == pools.allocator.size
        if isinstance(tree, HiRadixCache):
            assert tree.host_pool.available_size() == tree.host_pool.size

    # ---- requests ------------------------------------------------------------------------------

    def _pages(self, least: int, most: int) -> int:
        """Tokens of so many pages, or a few more or less; of more where pages are short."""
        scale = max(1, 4 // self.setup.page_size)
        pages = self.rng.randint(least * scale, most * scale)
        return max(1, pages * self.setup.page_size + self.rng.choice((-1, 0, 0, 1, 3)))

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1, VOCAB_SIZE) for _ in range(count)]

    def _prompt(self) -> tuple[str | None, list[int]]:
        """`extra_key` and tokens."""
        rng, page = self.rng, self.setup.page_size
        kind = rng.random()
        if kind < 0.45 and self._conversations:
            key, said = rng.choice(self._conversations)
            again = rng.random() < 0.5
            return key, said if again else said + self._tokens(rng.randint(1, 2 * page + 1))
        key = rng.choice(_KEYS)
        if kind < 0.65:
            # A tree that branches at every page.
            depth = rng.randint(1, 5)
            branches = [rng.randrange(2) * 500 + 7 * level for level in range(depth)]
            tokens = [start + i for start in branches for i in range(1, page + 1)]
            return key, tokens + self._tokens(rng.choice((0, 0, 1, page)))
        family = rng.choice(self._families)
        cut = rng.choice((len(family), rng.randint(0, len(family))))
        if rng.random() < 0.5:
            cut -= cut % page
        tail = rng.choice((0, 1, page - 1, page, page + 1, self._pages(1, 3)))
        return key, (family[:cut] + self._tokens(tail)) or [1]

    def _arrivals(self) -> list[ToScheduler]:
        rng = self.rng
        if rng.random() < 0.05:
            rid = rng.choice(sorted(self._sent)) if self._sent else None
            if rid is not None:
                # An id that is in use is dropped without a word.
                return [self._sent[rid].message]
        key, tokens = self._prompt()
        if rng.random() < 0.03:
            tokens = tokens * (1 + self.rig.scheduler.state.limits.pool_tokens // len(tokens))
        messages: list[ToScheduler] = []
        first: str | None = None
        for _ in range(rng.choice((1, 1, 1, 1, 2, 5))):
            message = self._request(key, tokens, first)
            first = first or message.rid
            messages.append(message)
        return messages

    def _request(
        self, key: str | None, tokens: list[int], sample_of: str | None
    ) -> TokenizedGenerateReqInput:
        rng, limits = self.rng, self.rig.scheduler.state.limits
        self._next_id += 1
        rid = f"r{self._next_id}"
        if sample_of is None and rng.random() < 0.03:
            rid = f"{HEALTH_CHECK_RID_PREFIX}{self._next_id}"
        seed = sum(map(ord, key or "")) + 1
        is_refused = len(tokens) > limits.max_input_tokens
        wanted = rng.choice((1, 2, 12, rng.randint(1, 2 * self.setup.page_size + 40)))
        wanted = 0 if rng.random() < 0.02 else wanted
        most = min(wanted, limits.max_request_tokens - len(tokens))
        words = [] if is_refused else checkable_model.words(tokens, seed, most)
        params: dict[str, Any] = {}
        stops = False
        if words and rng.random() < 0.3:
            stop = rng.choice(words)
            words = words[: words.index(stop) + 1]
            params, stops = {"ignore_eos": False, "stop_token_ids": [stop]}, True
        logprobs = rng.random() < 0.15
        message = self.rig.request(
            rid,
            tokens,
            greedy(wanted, **params),
            seed=seed,
            stream=rng.random() < 0.5,
            extra_key=key,
            priority=rng.randrange(3),
            sample_of=sample_of,
            return_logprob=logprobs,
            logprob_start_len=rng.choice((-1, 0, len(tokens) // 2)) if logprobs else -1,
        )
        self._sent[rid] = Sent(message, words, stops, self._working_steps, is_refused=is_refused)
        return message

    def _abort(self) -> list[ToScheduler]:
        rng = self.rng
        if rng.random() < 0.04:
            for sent in self._sent.values():
                sent.may_be_aborted = True
            return [AbortReq(abort_all=True)]
        rids = [*self._sent, f"r{self._next_id}", "nobody"]
        rid = rng.choice(rids)
        if rid in self._sent:
            self._sent[rid].may_be_aborted = True
        return [AbortReq(rid=rid)]

    def _look_at(self, rid: str) -> None:
        """What has come of a request so far."""
        sent, got = self._sent[rid], self.rig.results.get(rid)
        waited = self._working_steps - sent.arrived
        assert waited < _MOST_WORKING_STEPS, f"{rid} waits while others got {waited} steps"
        if got is None:
            return
        said = got.output_ids
        if said != sent.words[: len(said)]:
            at = next(i for i, word in enumerate(said) if sent.words[i : i + 1] != [word])
            raise AssertionError(
                f"{rid}: word {at} is {said[at]} and not {sent.words[at : at + 1]}, after a "
                f"prompt of {len(sent.message.input_ids)} tokens; {got.last}"
            )
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
        assert not sent.is_refused, f"{rid} is too long and ran"
        assert got.output_ids == sent.words, f"{rid} ended after {len(got.output_ids)} words"
        assert reason.type == ("stop" if sent.stops else "length"), f"{rid} ended by {reason}"
        details = got.last.cached_tokens_details
        assert details.total < len(message.input_ids), f"{rid}: {details}"
        for tier in ("device", "host", "storage"):
            counts[f"tokens from {tier}"] += getattr(details, tier)
        counts["tokens of prompts"] += len(message.input_ids)
        if message.logprob_start_len >= 0:
            wanted = checkable_model.input_logprobs(
                message.input_ids, message.seed, message.logprob_start_len
            )
            assert got.input_logprobs == wanted, f"{rid}: wrong logprobs of its prompt"
            counts["prompts with logprobs"] += 1
        conversation = message.input_ids + got.output_ids
        if len(conversation) < self.rig.scheduler.state.limits.max_input_tokens * 3 // 4:
            kept = self._conversations
            kept.insert(self.rng.randint(0, len(kept)), (message.extra_key, conversation))
            del kept[_MOST_CONVERSATIONS:]

    # ---- administration and the store ----------------------------------------------------------

    def _control_id(self) -> str:
        self._next_id += 1
        name = f"c{self._next_id}"
        self._unanswered.add(name)
        return name

    def _attach(self) -> AttachHiCacheStorageReqInput:
        rng = self.rng
        policies = ("best_effort", "wait_complete", "timeout", None, None)
        return AttachHiCacheStorageReqInput(
            req_id=self._control_id(),
            hicache_storage_backend=self.setup.backend,
            hicache_storage_backend_extra_config_json=self.setup.extra_config(self.store),
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
            case at if at < 8:
                self.store.release()
            case _:
                self.store.set_mood(rng.choice(_MOODS))

    def _slow_copies(self) -> None:
        """Let some copies between L1 and L2 take a while, before and between their layers."""
        tree = self.rig.tree
        if not isinstance(tree, HiRadixCache) or not self.setup.slow_copies:
            return
        rng = random.Random(self.rng.random())
        for name in ("load_to_device_per_layer", "backup_from_device_all_layer"):
            copy = getattr(tree.host_pool, name)

            def slow(*args: Any, copy: Callable[..., None] = copy) -> None:
                if rng.random() < self.setup.slow_copies:
                    time.sleep(rng.random() * 0.003)
                copy(*args)

            setattr(tree.host_pool, name, slow)

    # ---- reports -------------------------------------------------------------------------------

    def _count(self) -> None:
        counts, counters = self.outcome.counts, self.rig.scheduler.state.counters
        worker = self.rig.worker
        assert isinstance(worker, CheckableWorker)
        counts["positions checked"] = worker.num_checked
        counts["retractions"] = counters.retractions
        counts["prefill batches"] = counters.prefill_batches
        counts["decode steps"] = counters.decode_steps
        counts.update({f"store: {what}": n for what, n in self.store.happened.items()})
        tree = self.rig.tree
        if isinstance(tree, HiRadixCache):
            for metric, name in (
                (tree.metrics.prefetch_outcomes, "read"),
                (tree.metrics.backup_outcomes, "write"),
                (tree.metrics.evicted, "evicted from"),
                (tree.metrics.dropped, "dropped"),
                (tree.metrics.load_back, "loaded"),
            ):
                counts.update(
                    {f"{name} {what}": int(n) for what, n in counter_values(metric).items()}
                )

    def describe(self) -> str:
        """Where the run is."""
        state = None if self._rig is None else self._rig.scheduler.state
        lines = [
            f"after {self.outcome.steps} steps of {self.setup}",
            f"mood of the store: {self.store.mood}; on their way: {list(self._sent)}",
        ]
        if state is not None:
            lines.append(
                f"waiting {[req.rid for req in state.waiting]}, running "
                f"{[req.rid for req in state.running()]}, busy {state.tree.is_busy()}"
            )
        return "\n".join([*lines, "the log's last lines:", *self._log])


# ---- running seeds -----------------------------------------------------------------------------


def run_seed(
    seed: int, steps: int = STEPS_PER_SEED, *, breaks_contract: bool = BREAKS_CONTRACT
) -> Outcome:
    """One run. What it raises has notes: the state, and the command that repeats the run."""
    run = RandomScheduler(seed, breaks_contract=breaks_contract)
    try:
        return run.run(steps)
    except BaseException as error:
        switch = " --breaks-contract" if breaks_contract else ""
        error.add_note(run.describe())
        command = f"python -m sglang.test.random_scheduler --seed {seed} --steps {steps}{switch}"
        error.add_note(f"to repeat: {command}")
        raise


def run_for(
    seconds: float,
    first_seed: int,
    *,
    steps: int = STEPS_PER_SEED,
    breaks_contract: bool = BREAKS_CONTRACT,
    most_failures: int = 5,
) -> tuple[Counter[str], list[int]]:
    """Seed after seed for `seconds`, one at least: what happened in all, and the seeds that failed.

    Prints a line for each, and what failed with its cause.
    """
    counts: Counter[str] = Counter()
    failed: list[int] = []
    began, seed = time.monotonic(), first_seed
    while seed == first_seed or (
        time.monotonic() - began < seconds and len(failed) < most_failures
    ):
        # Said before: a copy that fails ends the process.
        print(f"seed {seed}:", end=" ", flush=True)
        try:
            outcome = run_seed(seed, steps, breaks_contract=breaks_contract)
        except Exception:  # noqa: BLE001 - reported, and the next seed is worth a try
            failed.append(seed)
            print("FAILED", flush=True)
            traceback.print_exc(file=sys.stdout)
        else:
            one = outcome.setup
            print(
                f"{outcome.steps} steps in {outcome.seconds:.1f} s; {one.tiers} tiers, pages of "
                f"{one.page_size}, {one.schedule_policy}, {one.write_policy}, "
                f"{one.prefetch_policy}{', overlap' if one.overlap else ''}",
                flush=True,
            )
            counts["steps"] += outcome.steps
            counts.update(outcome.counts)
        counts["seeds"] += 1
        seed += 1
    return counts, failed


class Watchdog:
    """Raises StepHangs in the main thread where a step takes too long, with all threads' stacks.

    Must be entered in the main thread. A step that hangs in C without ever coming back to the
    interpreter is left to who started the process.
    """

    def __enter__(self) -> Watchdog:
        self._before = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What is done here takes no longer."""
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    @staticmethod
    def _on_alarm(_: int, frame: FrameType | None) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(at))}"
            for ident, at in sys._current_frames().items()
        ]
        raise StepHangs("a step hangs; the stacks of all threads:\n" + "\n".join(stacks))


class _LastLines(logging.Handler):
    """Keeps the engine's last lines for the report of a failure; nothing is printed."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{record.levelname} {record.threadName}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            line += f" ({record.exc_info[1]!r})"
        self._lines.append(line)


@contextlib.contextmanager
def _log_kept(lines: deque[str]) -> Iterator[None]:
    logger, handler = logging.getLogger("sglang"), _LastLines(lines)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, help="this one, or the first [drawn from the clock]")
    parser.add_argument("--seconds", type=float, default=0.0, help="seed after seed for so long")
    parser.add_argument("--steps", type=int, default=STEPS_PER_SEED, help="of each seed")
    parser.add_argument("--most-failures", type=int, default=5, help="then end [5]")
    parser.add_argument(
        "--breaks-contract", action="store_true", default=BREAKS_CONTRACT, help="stores lie, too"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    seed = int(time.time()) if args.seed is None else args.seed
    counts, failed = run_for(
        args.seconds,
        seed,
        steps=args.steps,
        breaks_contract=args.breaks_contract,
        most_failures=args.most_failures,
    )
    print("\n".join(f"{n:10} {what}" for what, n in sorted(counts.items())))
    print(f"failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
