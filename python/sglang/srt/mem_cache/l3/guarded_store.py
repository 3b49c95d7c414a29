"""The storage client and what protects the engine from it: every call to the store is made here.

A call that fails opens a breaker, a call that does not return makes the store unavailable until it
does, and an answer is checked before it counts. Mooncake's calls can block for a minute.

Threads: the two of an `AttachedStore` make calls, each one at a time; properties are for any thread
and never block.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.l3.circuit_breaker import CircuitBreaker, RecentTimeouts
from sglang.srt.mem_cache.l3.stored_pools import StoredPools, combined_outcomes
from sglang.srt.mem_cache.storage import answers
from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.types import (
    CacheOutcome,
    HiCacheStorageExtraInfo,
    StorageUnavailable,
    StorageUnreachable,
)
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.srt.mem_cache.tree.radix_key import PageHash
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.logging_utils import RateLimitedLogger

logger = logging.getLogger(__name__)

PAGES_PER_CALL: Final = 64
"""Pages of one get or put: enough to hide the round trip, few enough to end a read soon. A call
takes as much CPU time as ten more pages of 64 KB in it, or 500 more keys."""
_STUCK_AFTER_S: Final = 3.0
"""A call that takes longer makes the store unavailable until it returns."""
_CLEAR: Final = "clear"
_PROBE: Final = "probe"
"""Kinds of calls that do not trip the breaker, however long they take."""

Connect = Callable[[], HiCacheStorage]
"""Makes a client with all pools registered. Raises StorageUnavailable."""


class GuardedStore:
    """Owns the storage client, its breaker and the memory of its timeouts.

    Args:
        connect: Called again after failures where there is no client yet.
        pools: How the pages of a model's pools map to objects.
        pass_prefix_keys: Tell the backend the keys of the pages before.
        metrics: Counts what happened.
        degrade: Go on without a client where the first `connect` fails.

    Raises:
        StorageUnavailable: The first `connect` failed, and `degrade` is false.
        ValueError: The configuration cannot work.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        pools: StoredPools,
        pass_prefix_keys: bool,
        metrics: HiCacheMetrics,
        degrade: bool = False,
    ) -> None:
        self._connect = connect
        self.pools = pools
        self.pass_prefix_keys = pass_prefix_keys
        self.metrics = metrics
        self.log = RateLimitedLogger(logger)
        """Rate-limited log of both threads."""
        self._breaker = CircuitBreaker(self._probe)
        self._call_started: dict[str, float] = {}
        self.timeouts = {"get": RecentTimeouts(), "set": RecentTimeouts()}
        """Recent timeouts by kind of call; each kind has a thread of its own."""
        self.client: HiCacheStorage | None = None
        self.reconnects = 0
        """How often the store came back: what it held before may be gone."""
        try:
            self.client = connect()
        except StorageUnavailable as error:
            # A store that is there and refuses, a pool for example, would refuse again.
            if not degrade or not isinstance(error, StorageUnreachable):
                raise
            logger.warning("L3 is unavailable, running without it until it answers: %s", error)
            self.trip()

    # ---- state -----------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """False while a call is stuck, so that asking for more is pointless, and while the store
        is being cleared."""
        started = dict(self._call_started)
        return _CLEAR not in started and not any(map(_is_stuck, started.values()))

    @property
    def backend_name(self) -> str | None:
        """Class name of the client; None while there is none."""
        return type(self.client).__name__ if self.client is not None else None

    @property
    def is_open(self) -> bool:
        """True while the store is left alone after failures."""
        return self._breaker.is_open

    @property
    def is_calling(self) -> bool:
        """True while a call is under way."""
        return bool(self._call_started)

    # ---- transfer threads ------------------------------------------------------------------

    def allows_calls(self) -> bool:
        """True if a call may be made now. Probes the store first where a pause is over."""
        return self._breaker.allow() and self.client is not None

    def trip(self) -> None:
        """The store failed: leave it alone for a while."""
        self._breaker.trip()
        self.metrics.breaker_open.set(1)

    def note_success(self) -> None:
        """The store works: close the breaker, if it is open."""
        if self.is_open:
            self._breaker.reset()
            self.metrics.breaker_open.set(0)

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
            prefix: Hashes of the pages before.

        Returns:
            The leading pages of which every part landed, and why the next page did not.

        Raises:
            StorageUnavailable: The store failed, or broke its contract.
        """
        if not objects:
            return len(hashes), CacheOutcome.LANDED
        storage = self._require_client()
        call = storage.batch_get_v2 if kind == "get" else storage.batch_set_v2
        otherwise = CacheOutcome.MISS if kind == "get" else CacheOutcome.FAILED
        started = time.monotonic()
        outcomes = [CacheOutcome.FAILED] * len(hashes)
        try:
            with self._calling(kind):
                answer = call(objects, self._hints(prefix))
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
            if _is_stuck(started):
                missing = [not outcome for outcome in outcomes]
                self.timeouts[kind].add(itertools.compress(hashes, missing))
            for outcome in set(outcomes):
                self.metrics.pages.labels(kind, outcome.value).inc(outcomes.count(outcome))
        landed = next((i for i, outcome in enumerate(outcomes) if not outcome), len(outcomes))
        return landed, outcomes[landed] if landed < len(outcomes) else CacheOutcome.LANDED

    def hit_pages(
        self, prompts: Sequence[Sequence[PageHash]], prefixes: Sequence[Sequence[PageHash]]
    ) -> list[int]:
        """Ask, in one call, how many pages of each prompt the store has in all pools.

        Args:
            prompts: Page hashes.
            prefixes: For each prompt the hashes of the pages before.

        Raises:
            StorageUnavailable: As `transfer`.
        """
        storage = self._require_client()
        keys = [self.pools.keys(hashes) for hashes in prompts]
        hints = [self._hints(prefix) for prefix in prefixes]
        # Backends of one pool need not know of others.
        further = (self.pools.questions,) if self.pools.questions else ()
        with self._calling("exists"):
            answer = storage.prompts_exist(keys, hints, *further)
        return answers.prompt_hits(storage, "prompts_exist", answer, list(map(len, keys)))

    @contextmanager
    def reporting_failures(self, what: str) -> Iterator[None]:
        """Report whatever a thread's work on the store raises, so that the thread goes on.

        `SystemExit` too, or operations would wait for a thread that has ended.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, StorageUnavailable):
                logger.exception("L3 backend %s raised what it must not", self.backend_name)
            self.trip()
            self.log.warning(what, "L3 %s failed, leaving it alone for a while: %s", what, error)

    # ---- any thread, while nothing is under way --------------------------------------------

    def clear(self) -> None:
        """Remove this namespace's objects.

        Until it returns `available` is false, so that nothing is asked of the store meanwhile.
        Raises StorageUnavailable or ValueError, or whatever else the backend raises.
        """
        with self._calling(_CLEAR):
            self._require_client().clear()

    def close(self, timeout_s: float) -> bool:
        """Close the client; False if it failed to within `timeout_s` seconds."""
        client, self.client = self.client, None
        if client is None:
            return True
        closing = BackgroundCall("hicache-close", client.close)
        if not closing.wait(timeout_s):
            logger.warning("an L3 backend hangs in close(); it is left to the end of the process")
            return False
        return closing.error is None

    # ---- calls -----------------------------------------------------------------------------

    def _require_client(self) -> HiCacheStorage:
        if self.client is None:
            raise StorageUnavailable("the storage backend is not connected")
        return self.client

    def _hints(self, prefix: Sequence[PageHash]) -> HiCacheStorageExtraInfo | None:
        if not self.pass_prefix_keys:
            return None
        return HiCacheStorageExtraInfo(prefix_keys=self.pools.keys(prefix))

    def _probe(self) -> bool:
        """Breaker: does the store work again? Builds the client where there is none."""
        # A probe can hang as any call can; callers must not wait for it.
        with self._calling(_PROBE):
            works = self._probe_client()
        if works:
            self.reconnects += 1
            self.metrics.breaker_open.set(0)
            logger.info("L3 answers again (%s)", self.backend_name)
        return works

    def _probe_client(self) -> bool:
        try:
            if self.client is None:
                self.client = self._connect()
                return True
            return answers.flag(self.client, "probe", self.client.probe())
        except StorageUnavailable as error:
            self.log.warning("reconnect", "L3 is still unavailable: %s", error)
        except BaseException:
            logger.exception("L3 (%s) could not be probed", self.backend_name)
        return False

    @contextmanager
    def _calling(self, kind: str) -> Iterator[None]:
        """Watch a call, so that `available` shows whether it hangs; if a transfer or a question was
        stuck, trip the breaker at its end.

        A call that raises trips it where the error is caught, and not here too.
        """
        started = self._call_started[kind] = time.monotonic()
        try:
            yield
        finally:
            del self._call_started[kind]
        if kind not in (_CLEAR, _PROBE) and _is_stuck(started):
            self.trip()


def _is_stuck(started: float) -> bool:
    return time.monotonic() - started > _STUCK_AFTER_S
