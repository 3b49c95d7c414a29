"""The two threads that talk to L3, and what protects the engine from it.

    prefetch thread   asks how far the store reaches into a prompt, and reads those pages
    backup thread     writes the pages of nodes

The scheduler thread submits operations and looks at their fields; it never calls the store while
requests run. Mooncake's calls can block for a minute: whatever they do, an operation's fields
tell how far it came, and `available` says whether it is worth asking for more.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

import torch

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.mem_cache.l3.circuit_breaker import CircuitBreaker
from sglang.srt.mem_cache.l3.fetch_worth import FetchWorth
from sglang.srt.mem_cache.l3.recent_timeouts import RecentTimeouts
from sglang.srt.mem_cache.l3.storage_groups import (
    PAGES_PER_CALL,
    next_group,
    questions,
    waits_in_vain,
)
from sglang.srt.mem_cache.l3.storage_operation import (
    CheckOperation,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.storage import answers
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.types import (
    CacheOutcome,
    HiCacheStorageExtraInfo,
    StorageUnavailable,
)
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.logging_utils import RateLimitedLogger
from sglang.srt.utils.threads import give_way, leave_cores_to_model

logger = logging.getLogger(__name__)

_GATHER_S: Final = 0.1
"""How long a write waits for others to go in the same call. Nobody waits for writes."""
_STUCK_AFTER_S: Final = 3.0
"""A call that takes longer makes the store unavailable until it returns."""
_CLOSE_TIMEOUT_S: Final = 5.0
"""For calls under way to return, and again for the client to close."""
_CLEAR: Final = "clear"
"""Among the kinds of calls that are watched."""
_CHECK_PAUSE_S: Final = 30.0
_LONGEST_CHECK_PAUSE_S: Final = 600.0
"""Between two questions whether L3 still has what it had; they grow where it does not: a store that
is too small is not to be filled over and over."""

_Prefetches: TypeAlias = Sequence[PrefetchOperation] | CheckOperation


class StorageIO:
    """Owns the storage client, its breaker and the two threads.

    Args:
        connect: Makes the client with its pools registered. Raises StorageUnavailable. Called
            again after failures where there is no client yet.
        namespace: First part of every key.
        page_size: Tokens.
        page_bytes: Bytes of a page in the host pool.
        pages_per_read: Of one get at most: what a call that hangs can keep of the host pool.
        threshold_pages: Shorter hits are not read.
        pass_prefix_keys: Tell the backend the keys of the pages before.
        metrics: Counts what happened.

    Raises:
        StorageUnavailable: The first `connect` failed, and `degrade` is false.
        ValueError: The configuration cannot work.
    """

    def __init__(
        self,
        connect: Callable[[], HiCacheStorage],
        *,
        namespace: str,
        page_size: int,
        page_bytes: int,
        pages_per_read: int,
        threshold_pages: int,
        pass_prefix_keys: bool,
        metrics: HiCacheMetrics,
        degrade: bool = False,
    ) -> None:
        self._connect = connect
        self._namespace = namespace
        self._page_size = page_size
        self._page_bytes = page_bytes
        self._pages_per_read = pages_per_read
        self._threshold_pages = threshold_pages
        self._pass_prefix_keys = pass_prefix_keys
        self._metrics = metrics
        self._say = RateLimitedLogger(logger)
        self._breaker = CircuitBreaker(self._probe)
        self._call_started: dict[str, float] = {}
        self._timeouts = {"get": RecentTimeouts(), "set": RecentTimeouts()}
        """By kind of call, that is by thread."""
        self.worth = FetchWorth()
        """Fed with reads here, and with prefills by the scheduler."""
        self.storage: HiCacheStorage | None = None
        self._check_pause = _CHECK_PAUSE_S
        self._check_at = 0.0
        """`time.monotonic()` seconds: not before."""
        self.reconnects = 0
        """How often the store came back: what it held before may be gone."""
        try:
            self.storage = connect()
        except StorageUnavailable as error:
            if not degrade:
                raise
            logger.warning("L3 is unavailable, running without it until it answers: %s", error)
            self._trip()
        self._prefetches: queue.SimpleQueue[_Prefetches | None] = queue.SimpleQueue()
        self._backups: queue.SimpleQueue[StorageOperation | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (
                ("hicache-prefetch", self._prefetch_thread),
                ("hicache-backup", self._backup_thread),
            )
        ]
        for thread in self._threads:
            thread.start()

    # ---- scheduler thread ------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """False while a call is stuck, so that asking for more is pointless, and while the store
        is being cleared. Never blocks."""
        started = dict(self._call_started)
        return _CLEAR not in started and not any(map(_is_stuck, started.values()))

    @property
    def backend_name(self) -> str | None:
        """Class name of the client; None while there is none."""
        return type(self.storage).__name__ if self.storage is not None else None

    @property
    def is_open(self) -> bool:
        """True while the store is left alone after failures."""
        return self._breaker.is_open

    def submit_prefetches(self, operations: Sequence[PrefetchOperation]) -> None:
        """Queue reads, which the store is asked about together. Each ends in any case; watch its
        `ended`."""
        self._prefetches.put(operations)

    def submit_check(self, operation: CheckOperation) -> None:
        """Queue a question. It ends in any case; watch `operation.outcome`."""
        self._prefetches.put(operation)

    def submit_backup(self, operation: StorageOperation) -> None:
        """Queue a write. It ends in any case; watch `operation.ended`."""
        self._backups.put(operation)

    def clear(self) -> None:
        """Remove this namespace's objects; any thread, while nothing is under way.

        Until it returns `available` is false, so that nothing is asked of the store meanwhile.
        Raises StorageUnavailable or ValueError, or whatever else the backend raises.
        """
        if self.storage is None:
            raise StorageUnavailable("the storage backend is not connected")
        with self._watching(_CLEAR):
            self.storage.clear()

    def close(self) -> bool:
        """End the threads and the client, within seconds; any thread, while nothing is under way.

        False if the client is left behind, since a call to it hangs, or did not close.
        """
        self._prefetches.put(None)
        self._backups.put(None)
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads) or self._call_started:
            logger.warning("a storage call is stuck; its client is left to the end of the process")
            return False
        storage, self.storage = self.storage, None
        if storage is None:
            return True
        closing = BackgroundCall("hicache-close", storage.close)
        if not closing.wait(_CLOSE_TIMEOUT_S):
            logger.warning("an L3 backend hangs in close(); it is left to the end of the process")
            return False
        return closing.error is None

    # ---- both threads ----------------------------------------------------------------------

    def _allowed(self) -> bool:
        return self._breaker.allow() and self.storage is not None

    def _trip(self) -> None:
        self._breaker.trip()
        self._metrics.breaker_open.set(1)

    def _close_breaker(self) -> None:
        self._breaker.reset()
        self._metrics.breaker_open.set(0)

    def _probe(self) -> bool:
        """Breaker: does the store work again? Builds the client where there is none."""
        # A probe can hang as any call can; who comes meanwhile is not to wait behind it.
        with self._watching("probe"):
            works = self._probe_storage()
        if works:
            self.reconnects += 1
            self._metrics.breaker_open.set(0)
            logger.info("L3 answers again (%s)", self.backend_name)
        return works

    def _probe_storage(self) -> bool:
        try:
            if self.storage is None:
                self.storage = self._connect()
                return True
            return answers.flag(self.storage, "probe", self.storage.probe())
        except StorageUnavailable as error:
            self._say.warning("reconnect", "L3 is still unavailable: %s", error)
        except BaseException:
            logger.exception("L3 (%s) could not be probed", self.backend_name)
        return False

    @contextmanager
    def _reporting_failures(self, what: str) -> Iterator[None]:
        """Around a thread's work on the store: whatever it raises, the thread goes on.

        After `SystemExit` too, or operations would wait for a thread that has ended.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, StorageUnavailable):
                logger.exception("L3 backend %s raised what it must not", self.backend_name)
            self._trip()
            self._say.warning(what, "L3 %s failed, leaving it alone for a while: %s", what, error)

    @contextmanager
    def _watching(self, kind: str) -> Iterator[float]:
        """Around whatever may hang: it shows in `available`. Yields when it began."""
        started = self._call_started[kind] = time.monotonic()
        try:
            yield started
        finally:
            del self._call_started[kind]

    @contextmanager
    def _calling(self, kind: str) -> Iterator[None]:
        """Around each call to the store: one that was stuck trips at its end.

        One that raises trips where that is caught, and not twice.
        """
        with self._watching(kind) as started:
            yield
            if _is_stuck(started):
                self._trip()

    def _keys(self, hashes: Sequence[PageHash]) -> list[str]:
        return [f"{self._namespace}/{page}" for page in hashes]

    def _extra_info(self, prefix: Sequence[PageHash]) -> HiCacheStorageExtraInfo | None:
        if not self._pass_prefix_keys:
            return None
        return HiCacheStorageExtraInfo(prefix_keys=self._keys(prefix))

    def _transfer(
        self,
        kind: Literal["get", "set"],
        hashes: Sequence[PageHash],
        host_indices: torch.Tensor,
        prefix: Sequence[PageHash],
    ) -> tuple[int, CacheOutcome]:
        """One get or put. Returns the leading pages that landed, and why the next did not."""
        storage = self.storage
        assert storage is not None
        call = storage.batch_get_v2 if kind == "get" else storage.batch_set_v2
        transfer = PoolTransfer(
            name=PoolName.KV, keys=self._keys(hashes), host_indices=host_indices
        )
        started = time.monotonic()
        outcomes = [CacheOutcome.FAILED] * len(hashes)
        try:
            with self._calling(kind):
                answer = call([transfer], self._extra_info(prefix))
            outcomes = answers.page_outcomes(
                storage, f"batch_{kind}_v2", answer, len(hashes),
                pool=PoolName.KV,
                otherwise=CacheOutcome.MISS if kind == "get" else CacheOutcome.FAILED,
            )  # fmt: skip
        finally:
            if _is_stuck(started):
                missing = itertools.compress(hashes, [not outcome for outcome in outcomes])
                self._timeouts[kind].add(missing)
            for outcome in set(outcomes):
                self._metrics.pages.labels(kind, outcome.value).inc(outcomes.count(outcome))
        landed = next((i for i, outcome in enumerate(outcomes) if not outcome), len(outcomes))
        why = CacheOutcome.LANDED if landed == len(outcomes) else outcomes[landed]
        return landed, why

    def _hit_pages(
        self, prompts: Sequence[Sequence[PageHash]], prefixes: Sequence[Sequence[PageHash]]
    ) -> list[int]:
        """One question: how many pages the store has of each prompt."""
        storage = self.storage
        assert storage is not None
        keys = [self._keys(hashes) for hashes in prompts]
        with self._calling("exists"):
            answer = storage.prompts_exist(keys, [self._extra_info(prefix) for prefix in prefixes])
        return answers.prompt_hits(storage, "prompts_exist", answer, list(map(len, keys)))

    # ---- prefetch thread -------------------------------------------------------------------

    def _prefetch_thread(self) -> None:
        leave_cores_to_model()
        while (operations := self._prefetches.get()) is not None:
            if isinstance(operations, CheckOperation):
                operations.outcome = self._check(operations.hashes)
                continue
            for group in questions(operations):
                self._prefetch_group(group)

    def _prefetch_group(self, group: Sequence[PrefetchOperation]) -> None:
        """Ask about several prompts, tell those that have nothing to read, read for the others."""
        started = time.monotonic()
        to_read: list[PrefetchOperation] = []
        for operation, answer in zip(group, self._ask(group), strict=True):
            outcome: CacheOutcome | None = CacheOutcome.FAILED
            with self._reporting_failures("read"):
                outcome = self._decide(operation, answer)
            if outcome is None:
                operation.note_answer()
                to_read.append(operation)
            else:
                self._end_prefetch(operation, outcome, time.monotonic() - started)
        for operation in to_read:
            started = time.monotonic()
            ended = CacheOutcome.FAILED
            with self._reporting_failures("read"):
                ended = self._read_pages(operation, operation.hit_pages)
            self._end_prefetch(operation, ended, time.monotonic() - started)

    def _ask(self, group: Sequence[PrefetchOperation]) -> list[int | CacheOutcome]:
        """Pages that the store has of each prompt, or why that is not known."""
        known: dict[int, int | CacheOutcome] = {
            index: operation.why_cut if operation.is_terminated else CacheOutcome.UNAVAILABLE
            for index, operation in enumerate(group)
        }
        reaches = [self._timeouts["get"].leading_allowed(operation.hashes) for operation in group]
        asked = [i for i, one in enumerate(group) if reaches[i] and not one.is_terminated]
        if not asked or not self._allowed():
            return list(known.values())
        known.update(dict.fromkeys(asked, CacheOutcome.FAILED))
        with self._reporting_failures("read"):
            hits = self._hit_pages(
                [group[i].hashes[: reaches[i]] for i in asked],
                [group[i].prefix_hashes for i in asked],
            )
            known.update(zip(asked, hits, strict=True))
        return list(known.values())

    def _decide(
        self, operation: PrefetchOperation, answer: int | CacheOutcome
    ) -> CacheOutcome | None:
        """How `operation` ends without a read; None: `hit_pages` are to be read."""
        hit = answer if isinstance(answer, int) else 0
        operation.hit_pages = hit
        if not isinstance(answer, int):
            return answer
        if hit < self._threshold_pages or hit == 0:
            return CacheOutcome.REVOKED if hit else CacheOutcome.MISS
        return None

    def _end_prefetch(
        self, operation: PrefetchOperation, outcome: CacheOutcome, seconds: float
    ) -> None:
        self._report_prefetch(operation, outcome, seconds)
        operation.finish(outcome)

    def _read_pages(self, operation: PrefetchOperation, pages: int) -> CacheOutcome:
        assert self.storage is not None
        for begin in range(0, pages, self._pages_per_read):
            end = min(begin + self._pages_per_read, pages)
            if not operation.hand_over(end):
                return operation.why_cut
            before = operation.hashes[:begin] if self._pass_prefix_keys else []
            started = time.monotonic()
            landed, why = self._transfer(
                "get",
                operation.hashes[begin:end],
                operation.host_indices[begin * self._page_size : end * self._page_size],
                [*operation.prefix_hashes, *before],
            )
            operation.landed_pages += landed
            # Of calls, not of prompts: long ones tell how fast reads are while they last.
            self.worth.reads.add(landed * self._page_size, time.monotonic() - started)
            if not why:
                self._say.warning(
                    f"get-{why}", "L3: page %d of %d is %s; the rest is recomputed",
                    begin + landed, pages, why.value,
                )  # fmt: skip
                return why
        self._close_breaker()
        return CacheOutcome.OVERTAKEN if operation.is_overtaken else CacheOutcome.LANDED

    def _check(self, hashes: Sequence[PageHash]) -> CacheOutcome:
        """Whether the store still has pages that it had: MISS, or LANDED also where it is not time
        to ask, or it does not answer."""
        # A store that failed may get its probe here: nobody else asks while all is in L1 and L2.
        if not self._allowed() or time.monotonic() < self._check_at:
            return CacheOutcome.LANDED
        there: int | None = None
        with self._reporting_failures("question"):
            (there,) = self._hit_pages([hashes], [()])
        if there is None:
            return CacheOutcome.LANDED
        is_whole = there == len(hashes)
        longer = min(2 * self._check_pause, _LONGEST_CHECK_PAUSE_S)
        self._check_pause = _CHECK_PAUSE_S if is_whole else longer
        self._check_at = time.monotonic() + self._check_pause
        if is_whole:
            return CacheOutcome.LANDED
        self._metrics.pages.labels("check", CacheOutcome.MISS.value).inc()
        logger.warning(
            "L3 has lost page %d of %d of a prompt: whatever prompts use is looked for there "
            "again, and written where it is missing", there, len(hashes),
        )  # fmt: skip
        return CacheOutcome.MISS

    def _report_prefetch(
        self, operation: PrefetchOperation, outcome: CacheOutcome, seconds: float
    ) -> None:
        self._metrics.prefetch_outcomes.labels(outcome.value).inc()
        self._metrics.transfer_seconds.labels("prefetch").observe(seconds)
        if operation.landed_pages:
            self._metrics.prefetched.inc(operation.landed_pages * self._page_size)
            rate = operation.landed_pages * self._page_bytes / max(seconds, 1e-9)
            self._metrics.prefetch_bandwidth.set(rate / 1e9)

    # ---- backup thread ---------------------------------------------------------------------

    def _backup_thread(self) -> None:
        leave_cores_to_model()
        # Mooncake waits for the end of a transfer by asking over and over.
        give_way()
        while (first := self._backups.get()) is not None:
            # Asleep, so that what comes meanwhile does not wake this thread one by one.
            time.sleep(_GATHER_S)
            queued = [first, *self._queued_backups()]
            while queued:
                group = next_group(queued)
                for operation in group[self._write_together(group) :]:
                    self._write_alone(operation)
                del queued[: len(group)]

    def _queued_backups(self) -> Iterator[StorageOperation]:
        """What is in the queue now."""
        while not self._backups.empty():
            operation = self._backups.get()
            if operation is None:
                self._backups.put(None)  # the end: for the loop to see
                break
            yield operation

    def _write_together(self, group: Sequence[StorageOperation]) -> int:
        """Write several operations in one call; returns how many of the first that settled.

        Whatever is not plain success is left for each operation's own write to find out.
        """
        hashes = [page for operation in group for page in operation.hashes]
        allowed = self._timeouts["set"].leading_allowed(hashes) == len(hashes)
        if len(group) < 2 or self._pass_prefix_keys or not allowed or not self._allowed():
            return 0
        assert self.storage is not None
        slots = torch.cat([operation.host_indices for operation in group])
        started = time.monotonic()
        landed = 0
        with self._reporting_failures("write"):
            landed, _ = self._transfer("set", hashes, slots, ())
        ends = itertools.accumulate(len(operation.hashes) for operation in group)
        settled = sum(end <= landed for end in ends)
        if settled:
            pages = sum(len(operation.hashes) for operation in group[:settled])
            self._report_backup(pages, [CacheOutcome.LANDED] * settled, time.monotonic() - started)
        for operation in group[:settled]:
            operation.finish(CacheOutcome.LANDED)
        return settled

    def _write_alone(self, operation: StorageOperation) -> None:
        started = time.monotonic()
        landed, outcome = 0, CacheOutcome.FAILED
        with self._reporting_failures("write"):
            landed, outcome = self._backup(operation)
        self._report_backup(landed, [outcome], time.monotonic() - started)
        operation.finish(outcome)

    def _backup(self, operation: StorageOperation) -> tuple[int, CacheOutcome]:
        if waits_in_vain(operation):
            return 0, CacheOutcome.SHORT
        reach = self._timeouts["set"].leading_allowed(operation.hashes)
        if reach < len(operation.hashes) or not self._allowed():
            return 0, CacheOutcome.UNAVAILABLE
        assert self.storage is not None
        total = 0
        for begin in range(0, len(operation.hashes), PAGES_PER_CALL):
            end = min(begin + PAGES_PER_CALL, len(operation.hashes))
            landed, why = self._transfer(
                "set",
                operation.hashes[begin:end],
                operation.host_indices[begin * self._page_size : end * self._page_size],
                [*operation.prefix_hashes, *operation.hashes[:begin]],
            )
            total += landed
            if not why:
                self._say.warning(
                    f"set-{why}", "L3: page %d of %d was not written: %s; nor is what follows it",
                    total, len(operation.hashes), why.value,
                )  # fmt: skip
                return total, why
        return total, CacheOutcome.LANDED

    def _report_backup(self, landed: int, outcomes: Sequence[CacheOutcome], seconds: float) -> None:
        for outcome in outcomes:
            self._metrics.backup_outcomes.labels(outcome.value).inc()
        self._metrics.transfer_seconds.labels("backup").observe(seconds)
        if landed:
            self._metrics.backuped.inc(landed * self._page_size)
            rate = landed * self._page_bytes / max(seconds, 1e-9)
            self._metrics.backup_bandwidth.set(rate / 1e9)


def _is_stuck(started: float) -> bool:
    return time.monotonic() - started > _STUCK_AFTER_S
