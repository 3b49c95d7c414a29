"""Calls to one attached store, and what protects the engine from it.

Every call to the store is made here. A call that fails opens a breaker, a call that does not return
makes the store unavailable until it does, and an answer is checked before it counts. Mooncake's
calls can block for a minute.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.l3.circuit_breaker import CircuitBreaker, RecentTimeouts
from sglang.srt.mem_cache.l3.storage_settings import OnUnreachable, StorageSettings
from sglang.srt.mem_cache.l3.store_usage import StoreUsage
from sglang.srt.mem_cache.l3.stored_pools import StoredPools, combined_outcomes
from sglang.srt.mem_cache.storage import answers
from sglang.srt.mem_cache.storage.backend_factory import FILE
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.types import (
    CacheOutcome,
    HiCacheStorageExtraInfo,
    StorageUnavailable,
    StorageUnreachable,
)
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.kv_events import StorageMedium
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.utils.logging_utils import RateLimitedLogger

logger = logging.getLogger(__name__)

_STUCK_AFTER_S: Final = 3.0
"""A call that takes longer makes the store unavailable until it returns."""
_SILENT_AFTER_S: Final = 0.25
"""A question that takes longer is a silence of the store; a usual one takes below a millisecond. A
get may also take `_USUAL` times the time of its pages at the measured rate."""
_USUAL: Final = 2
_FIRST_GET_S: Final = 0.5
"""Time of a get before there is a rate. The first ones open sessions with the store's nodes."""
_AWAITED: Final = ("exists", "get")
"""Kinds of calls that requests wait for."""
_WHAT: Final = {"get": "read", "set": "write", "exists": "question"}
"""Words of the log, by kind of call."""
_CLEAR: Final = "clear"
_PROBE: Final = "probe"
"""Kinds of calls that do not trip the breaker, however long they take."""
_MEMORY: Final = 4
"""Measurements of full size after which an earlier one has lost two thirds of its weight."""
_SIZE_FADES: Final = 0.99
_ENOUGH_SAMPLES: Final = 4


class RateEstimate:
    """Tokens per second of one kind of work. The weight of a measurement is its tokens, so that
    small ones, which are mostly overhead, say little about large ones."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self.samples = 0
        self._largest = 0.0
        self._weight = 0.0

    @property
    def known(self) -> int:
        """Tokens per second, at least 1; 0 before there are enough measurements."""
        return max(1, int(self.tokens_per_s)) if self.samples >= _ENOUGH_SAMPLES else 0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measurement; an empty one is ignored."""
        if tokens <= 0 or seconds <= 0:
            return
        self._largest = max(tokens, _SIZE_FADES * self._largest)
        self._weight += tokens - self._weight * tokens / (_MEMORY * self._largest)
        self.tokens_per_s += tokens / self._weight * (tokens / seconds - self.tokens_per_s)
        self.samples += 1


@dataclass(eq=False, repr=False)
class StoreCalls:
    """The client, its breaker and the memory of its timeouts.

    Threads: the prefetch thread and the backup thread make calls, each one at a time, and the
    breaker's thread makes probes; properties are for any thread and never block.

    Args:
        connect: Makes the client with its pools registered. Raises StorageUnavailable. Called again
            after failures where there is no client yet.
        config: Extra config that the backend was given.
        settings: The engine's own part of it.
        page_size: Tokens.
        page_bytes: Bytes of a page in all host pools.
        pages_per_read: Most pages of one get, which a hanging call keeps in the host pools.
        pools: How the pages of the model's pools map to objects.

    Attributes:
        breaker: Refuses calls for a while after a failure.
        threshold_pages: Shorter hits are not read.
        read_rate: Speed of reads on this rank. The prefetch thread adds measurements.
        prefill_rate: Speed of prefills on this rank. The scheduler thread adds measurements.
        usage: How full the store is, for the scheduler thread.
        log: Rate-limited log of both threads.
        timeouts: Recent timeouts by kind of call; each kind has a thread of its own.
        reconnects: How often the store came back: what it held before may be gone.

    Raises:
        StorageUnavailable: The first `connect` failed, and `settings` do not allow that.
        ValueError: The configuration cannot work.
    """

    connect: Callable[[], HiCacheStorage]
    _: KW_ONLY
    backend: str
    config: Mapping[str, Any]
    settings: StorageSettings
    page_size: int
    page_bytes: int
    pages_per_read: int
    metrics: HiCacheMetrics
    pools: StoredPools

    def __post_init__(self) -> None:
        self.threshold_pages = self.settings.threshold_pages(self.page_size)
        self.read_rate, self.prefill_rate = RateEstimate(), RateEstimate()
        self.log = RateLimitedLogger(logger)
        self.breaker = CircuitBreaker(self._probe, self.metrics.breaker_open)
        self.usage = StoreUsage()
        self.timeouts = {"get": RecentTimeouts(), "set": RecentTimeouts()}
        self.reconnects = 0
        self._call_started: dict[str, float] = {}
        self._usual_get_s = 0.0
        """Prefetch thread: seconds that the get under way takes at the measured rate."""
        self.client: HiCacheStorage | None = None
        try:
            self.client = self.connect()
        except StorageUnreachable as error:
            if self.settings.on_unreachable is not OnUnreachable.DEGRADE:
                raise
            logger.warning("L3 is unavailable, running without it until it answers: %s", error)
            self.breaker.trip()

    # ---- state -----------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """False while a call is stuck, so that asking for more is pointless, and while the store
        is being cleared."""
        started, now = dict(self._call_started), time.monotonic()
        return _CLEAR not in started and all(
            now - begin <= _STUCK_AFTER_S for begin in started.values()
        )

    @property
    def silence_s(self) -> float:
        """Seconds for which the store has not answered the call that requests wait for; 0 if it is
        not long, so that it need not be compared with anything."""
        started = dict(self._call_started)
        begins = [started[kind] for kind in _AWAITED if kind in started]
        seconds = time.monotonic() - min(begins) if begins else 0.0
        usual_s = self._usual_get_s if "get" in started else 0.0
        return seconds if seconds > _SILENT_AFTER_S + _USUAL * usual_s else 0.0

    @property
    def medium(self) -> StorageMedium:
        """The store's name in events."""
        return StorageMedium.DISK if self.backend == FILE else StorageMedium.EXTERNAL

    @property
    def backend_name(self) -> str | None:
        """Class name of the client; None while there is none."""
        return type(self.client).__name__ if self.client is not None else None

    @property
    def wants_prefixes(self) -> bool:
        """True if writes need the hashes of the pages before theirs."""
        return self.settings.pass_prefix_keys or (
            self.client is not None and self.client.renews_prefixes
        )

    @property
    def is_calling(self) -> bool:
        """True while a call is under way."""
        return bool(self._call_started)

    # ---- transfer threads ------------------------------------------------------------------

    def transfer(
        self,
        kind: Literal["get", "set"],
        hashes: Sequence[PageHash],
        objects: list[PoolTransfer],
        prefix: Sequence[PageHash],
    ) -> tuple[int, CacheOutcome]:
        """One get or put of some pages, in all pools.

        Args:
            kind: Direction: `get` reads into L2, `set` writes to the store.
            hashes: One for each page.
            objects: The objects of these pages that this rank gets or puts; see
                `StoredPools.objects`. Others count as landed.
            prefix: Hashes of the pages before; empty if the store does not want them.

        Returns:
            The leading pages whose parts all landed, and why the next page did not.

        Raises:
            StorageUnavailable: The store failed, or broke its contract.
        """
        if not objects:
            return len(hashes), CacheOutcome.LANDED
        otherwise = CacheOutcome.MISS if kind == "get" else CacheOutcome.FAILED
        started = time.monotonic()
        if kind == "get":
            tokens, rate = len(hashes) * self.page_size, self.read_rate.known
            self._usual_get_s = tokens / rate if rate else _FIRST_GET_S
        outcomes = [CacheOutcome.FAILED] * len(hashes)
        try:
            with self._calling(kind) as storage:
                call = storage.batch_get_v2 if kind == "get" else storage.batch_set_v2
                passes = self.settings.pass_prefix_keys if kind == "get" else self.wants_prefixes
                answer = call(objects, self._hints(prefix) if passes else None)
            answered = [
                answers.page_outcomes(
                    storage,
                    f"batch_{kind}_v2",
                    answer,
                    len(one.keys or ()),
                    pool=one.name,
                    otherwise=otherwise,
                )
                for one in objects
            ]
            outcomes = combined_outcomes(self.pools.keys(hashes), objects, answered)
        finally:
            if time.monotonic() - started > _STUCK_AFTER_S:
                missing = [not outcome for outcome in outcomes]
                self.timeouts[kind].add(itertools.compress(hashes, missing))
            for outcome in set(outcomes):
                self.metrics.pages.labels(kind, outcome.value).inc(outcomes.count(outcome))
        landed = next((i for i, outcome in enumerate(outcomes) if not outcome), len(outcomes))
        return landed, outcomes[landed] if landed < len(outcomes) else CacheOutcome.LANDED

    def hit_pages(
        self, prompts: Sequence[Sequence[PageHash]], prefixes: Sequence[Sequence[PageHash]]
    ) -> list[answers.PromptHit]:
        """Ask, in one call, how many pages of each prompt the store has.

        Args:
            prompts: Page hashes.
            prefixes: For each prompt the hashes of the pages before.

        Raises:
            StorageUnavailable: See `transfer`.
        """
        passes = self.settings.pass_prefix_keys
        hints = [self._hints(prefix) if passes else None for prefix in prefixes]
        # Backends of one pool need not know of others.
        further = (self.pools.questions,) if self.pools.questions else ()
        with self._calling("exists") as storage:
            keys = [self.pools.keys(hashes) for hashes in prompts]
            answer = storage.prompts_exist(keys, hints, *further)
        return answers.prompt_hits(storage, "prompts_exist", answer, list(map(len, keys)))

    def _hints(self, prefix: Sequence[PageHash]) -> HiCacheStorageExtraInfo:
        return HiCacheStorageExtraInfo(prefix_keys=self.pools.keys(prefix))

    @contextmanager
    def _calling(self, kind: str) -> Iterator[HiCacheStorage]:
        """The client, for one call, which `available` shows if it hangs. If a transfer or a
        question was stuck, trip the breaker at its end.

        A call that raises trips it where the error is caught, and not here too. Raises
        StorageUnavailable without a client.
        """
        if self.client is None:
            raise StorageUnavailable("the storage backend is not connected")
        started = self._call_started[kind] = time.monotonic()
        try:
            yield self.client
        finally:
            del self._call_started[kind]
        seconds = time.monotonic() - started
        if kind != _CLEAR and seconds > _STUCK_AFTER_S:
            self._leave_alone(
                f"slow-{kind}",
                f"L3 took {seconds:.1f} s for a {_WHAT[kind]}, more than {_STUCK_AFTER_S:g}",
            )

    @contextmanager
    def reporting_failures(self, what: str) -> Iterator[None]:
        """Report any exception of a thread's work on the store, so that the thread goes on.

        `SystemExit` too, or operations would wait for a thread that has ended.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, StorageUnavailable):
                logger.exception("L3 backend %s raised what it must not", self.backend_name)
            self._leave_alone(what, f"L3 {what} failed: {error}")

    def _leave_alone(self, kind: str, problem: str) -> None:
        """Open the breaker, and log the cause. `kind`: as for `RateLimitedLogger`."""
        self.breaker.trip()
        self.log.warning(kind, "L3 is left alone for a while: %s", problem)

    def _probe(self) -> bool:
        """Breaker: does the store work again? Builds the client where there is none."""
        # A probe can hang as any call can; nobody should ask the store meanwhile.
        self._call_started[_PROBE] = time.monotonic()
        try:
            if self.client is None:
                self.client = self.connect()
            elif not answers.flag(self.client, "probe", self.client.probe()):
                self.log.warning("reconnect", "L3 is still unavailable: its probe failed")
                return False
        except StorageUnavailable as error:
            self.log.warning("reconnect", "L3 is still unavailable: %s", error)
            return False
        except BaseException:
            logger.exception("L3 (%s) could not be probed", self.backend_name)
            return False
        finally:
            del self._call_started[_PROBE]
        self.reconnects += 1
        logger.info("L3 answers again (%s)", self.backend_name)
        return True

    # ---- any thread, while nothing is under way --------------------------------------------

    def clear(self) -> None:
        """Remove this namespace's objects.

        Until it returns `available` is false, so that nothing is asked of the store meanwhile.
        Raises StorageUnavailable or ValueError, or whatever else the backend raises.
        """
        with self._calling(_CLEAR) as storage:
            storage.clear()
