"""The flows between L1, L2 and L3 of a simulated server.

`write_through`: what enters L1 is copied to L2, and from there to L3. Left out: copies to L2 take
no time, requests do not join each other's reads, and no read is a probe of a slow store.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang.planning.page_tiers import Page, PageTier, PageUses, front
from sglang.planning.served_costs import Clock, CopyThread, Costs, ServerSizes
from sglang.srt.mem_cache.l3.prefetch_cost import PendingRead, is_rejected, slower_reads
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy
from sglang.srt.mem_cache.l3.storage_prefetch import PREFETCH_SHARE
from sglang.srt.mem_cache.l3.storage_reads import pages_per_read
from sglang.srt.mem_cache.l3.storage_writes import PAGES_PER_CALL
from sglang.srt.mem_cache.l3.store_calls import RateEstimate
from sglang.srt.mem_cache.tree.tick_sync import Rates

WRITE_SHARE: Final = 0.5
"""`storage_backup._BACKUP_SHARE`: share of L2 that writes in flight may pin."""
GATHER_S: Final = 0.1
"""`storage_writes._GATHER_S`: seconds for which the first write waits for others."""

PIECES_OF_GET: Final = 4
"""`mooncake_store._CONCURRENT_GETS`: parts of a get under way; a put has one."""

_ALL: Final = 1 << 62
"""Above the numbers of all requests."""


@dataclass(eq=False, slots=True)
class Read:
    """The read of a prompt's pages from L3."""

    pages: Sequence[Page]
    """Pages of the prompt."""
    begin: int
    """Pages that L1 and L2 had when it began."""
    held: int
    """Pages of L2 that it holds."""
    deadline: float
    missing: int
    """Tokens of the prompt to compute if nothing is read."""
    hit: int | None = None
    """Pages that L3 has; None: it was not asked yet."""
    landed: int = 0
    has_ended: bool = False
    is_awaited: bool = True


@dataclass(eq=False, slots=True)
class _Write:
    """The write of some pages of a prompt to L3."""

    prompt: Sequence[Page]
    pages: Sequence[Page]
    pinned: Sequence[Page] = ()


class StoreReads:
    """The thread that reads: one prompt after the other, some pages a call."""

    def __init__(
        self, clock: Clock, costs: Costs, sizes: ServerSizes, copier: CopyThread, store: set[Page]
    ) -> None:
        self._clock, self._costs, self._sizes = clock, costs, sizes
        self._copier, self._store = copier, store
        self._pages_per_call = pages_per_read(sizes.l2 // sizes.page_size)
        self.queue: deque[Read] = deque()
        """The reads under way, in their order."""
        self.rate = RateEstimate()
        self.on_end: Callable[[Read], None] = lambda read: None

    def begin(self, read: Read) -> None:
        self.queue.append(read)
        if len(self.queue) == 1:
            self._clock.after(0.0, self._ask)

    def _ask(self) -> None:
        read = self.queue[0]
        wanted = read.pages[read.begin : read.begin + read.held]
        read.hit = sum(1 for _ in itertools.takewhile(self._store.__contains__, wanted))
        if read.hit * self._sizes.page_size < self._sizes.threshold:
            read.hit = 0
        self._call(read)

    def _call(self, read: Read) -> None:
        assert read.hit is not None and self._costs.read is not None
        count = min(self._pages_per_call, read.hit - read.landed)
        if not (read.is_awaited and count):
            self._end(read)
            return
        tokens, began = count * self._sizes.page_size, self._clock.now

        def land() -> None:
            if read.is_awaited:
                read.landed += count
            self.rate.add(tokens, self._clock.now - began)
            self._call(read)

        copied = min(self._costs.copied, self._costs.read)
        own = tokens * (self._costs.read - copied)
        self._copier.after(own, tokens * copied, land, pieces=PIECES_OF_GET)

    def _end(self, read: Read) -> None:
        read.has_ended = True
        self.queue.popleft()
        if self.queue:
            self._clock.after(0.0, self._ask)
        self.on_end(read)


class StoreWrites:
    """The thread that writes pages of L2, parents first.

    Attributes:
        stored: Pages that this server knows to be in L3.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        sizes: ServerSizes,
        copier: CopyThread,
        store: set[Page],
        l2: PageTier,
    ) -> None:
        self._clock, self._costs, self._page = clock, costs, sizes.page_size
        self._copier, self._store, self._l2 = copier, store, l2
        self.stored: set[Page] = set()
        self._under_way: set[Page] = set()
        self._queue: deque[_Write] = deque()
        self._postponed: list[_Write] = []
        self._is_idle = True
        self.on_end: Callable[[], None] = lambda: None

    def write(self, prompt: Sequence[Page]) -> None:
        """Write what L3 lacks of `prompt`, up to the first page that L2 lacks."""
        late = set(itertools.chain.from_iterable(one.pages for one in self._postponed))
        there = prompt[: front(prompt, self._l2)]
        known = (self.stored, self._under_way, late)
        pages = [page for page in there if not any(page in one for one in known)]
        if pages:
            self._begin_or_postpone(_Write(prompt, pages))

    def _begin_or_postpone(self, write: _Write) -> None:
        most = WRITE_SHARE * self._l2.size
        if self._under_way and len(self._under_way) + len(write.pages) > most:
            self._postponed.append(write)
            return
        self._under_way.update(write.pages)
        # Pages stay in L2 while one after them has to.
        write.pinned = write.prompt[: write.prompt.index(write.pages[-1]) + 1]
        self._l2.pin(write.pinned)
        self._queue.append(write)
        if self._is_idle:
            self._is_idle = False
            self._clock.after(GATHER_S, self._next)

    def _next(self) -> None:
        self._is_idle = not self._queue
        if self._queue:
            self._call(self._queue.popleft(), 0)

    def _call(self, write: _Write, begin: int) -> None:
        call = write.pages[begin : begin + PAGES_PER_CALL]
        # Another server may have written some of them.
        tokens = self._page * sum(page not in self._store for page in call)

        def land() -> None:
            self._store.update(call)
            if begin + len(call) < len(write.pages):
                self._call(write, begin + len(call))
            else:
                self._end(write)

        copied = min(self._costs.copied, self._costs.write)
        self._copier.after(tokens * (self._costs.write - copied), tokens * copied, land)

    def _end(self, write: _Write) -> None:
        self._under_way.difference_update(write.pages)
        self._l2.unpin(write.pinned)
        self.stored.update(write.pages)
        postponed, self._postponed = self._postponed, []
        for late in postponed:
            if self._postponed:
                self._postponed.append(late)  # Writes begin in their order.
                continue
            # Pages that have left L2, and those after them, are not written.
            reach = set(late.prompt[: front(late.prompt, self._l2)])
            late.pages = [page for page in late.pages if page in reach]
            if late.pages:
                self._begin_or_postpone(late)
        self.on_end()
        self._next()


class ServedTiers:
    """L1, L2 and the way to L3 of one server.

    Args:
        store: Pages of L3, which all servers share; None: there is no L3.
        on_end: Called when a read has ended.
    """

    def __init__(
        self,
        clock: Clock,
        costs: Costs,
        sizes: ServerSizes,
        copier: CopyThread,
        store: set[Page] | None,
        on_end: Callable[[], None],
    ) -> None:
        self._clock, self._sizes = clock, sizes
        self.uses = PageUses()
        self.l1 = PageTier(sizes.l1 // sizes.page_size, self.uses)
        self.l2 = PageTier(sizes.l2 // sizes.page_size, self.uses)
        self.prefills = RateEstimate()
        """Rate of prefills, which the cost model compares with that of reads."""
        self._owed: dict[Page, tuple[Sequence[Page], int]] = {}
        """Prompts whose copy to L2 waits for room, by their last page, with their last use."""
        self._on_end = on_end
        self.is_full = False
        """True if the last read found no room in L2, and nothing has ended since."""
        self._held: list[Read] = []
        """Reads that hold pages of L2: under way, or landed and not published yet."""
        self._reads: StoreReads | None = None
        self._writes: StoreWrites | None = None
        if store is not None:
            self._reads = StoreReads(clock, costs, sizes, copier, store)
            self._writes = StoreWrites(clock, costs, sizes, copier, store, self.l2)
            self._reads.on_end, self._writes.on_end = self._end_read, self._resume

    # ---- reads -----------------------------------------------------------------------------

    def begin_read(
        self, pages: Sequence[Page], known: int, number: int, to_compute: int, until: float
    ) -> Read | None:
        """Begin to read what L1 and L2 lack of a prompt, as far as L2 has room; None: nothing is
        read now, or later unless `is_full`.

        Args:
            pages: Whole pages of the prompt that a match may have.
            known: Pages that L1 and L2 have.
            number: Number of its request, in the order of arrival.
            to_compute: Tokens that wait to be computed already.
            until: Seconds of the clock at which its request waits no longer.
        """
        self.is_full = False
        page = self._sizes.page_size
        if self._reads is None or (len(pages) - known) * page < self._sizes.threshold:
            return None
        missing = len(pages) - known
        room = int(PREFETCH_SHARE * self.l2.size) - sum(read.held for read in self._held)
        wanted = min(missing, room)
        if wanted * page < self._sizes.threshold:
            self.is_full = True
            return None
        ahead = sum(page * (read.hit - read.landed) for read in self._reads.queue if read.hit)
        if self._sizes.policy is not PrefetchPolicy.WAIT_COMPLETE and is_rejected(
            wanted * page, self._rates, ahead=ahead, waiting=to_compute
        ):
            return None
        self.l2.pin(pages[:known])
        wanted = min(wanted, self.l2.make_room(wanted, spares=number))
        self.l2.unpin(pages[:known])
        if wanted * page < self._sizes.threshold:
            self.is_full = True
            return None
        self.l2.held += wanted
        read = Read(pages, known, wanted, until, missing * page)
        self._held.append(read)
        self._reads.begin(read)
        return read

    @property
    def _rates(self) -> Rates:
        assert self._reads is not None
        return Rates(self._reads.rate.known, self.prefills.known)

    def awaits(self, read: Read) -> bool:
        """True if the request of `read` must not be scheduled yet."""
        if self._sizes.policy is PrefetchPolicy.BEST_EFFORT:
            return False
        return read.is_awaited and not read.has_ended and self._clock.now < read.deadline

    def cancel_slower(self, to_compute: int) -> None:
        """Cancel the reads that computing would overtake, where `to_compute` tokens wait to be
        computed already."""
        if self._reads is None or self._sizes.policy is not PrefetchPolicy.TIMEOUT:
            return
        awaited = [read for read in self._reads.queue if read.is_awaited]
        pending = []
        for read in awaited:
            reach = read.held if read.hit is None else read.hit
            left = (reach - read.landed) * self._sizes.page_size
            rest = read.missing - read.landed * self._sizes.page_size
            pending.append(PendingRead(unread=left, missing=left, uncached=rest))
        slower = slower_reads(pending, self._rates, ahead=0, waiting=to_compute)
        for read in itertools.compress(awaited, slower):
            read.is_awaited = False

    def publish(self, read: Read) -> int:
        """End a read and put what has landed into L2. Returns the number of pages that were new."""
        read.is_awaited = False
        self._held.remove(read)
        self.l2.held -= read.held
        read.held = 0
        pages = read.pages[: read.begin + read.landed]
        known = front(pages, self.l1, self.l2)
        if known < read.begin:
            return 0  # The pages before it have left.
        self.l2.pages.update(pages[known:])
        assert self._writes is not None
        self._writes.stored.update(pages[known:])
        self.uses.use(pages)
        return len(pages) - known

    def _end_read(self, read: Read) -> None:
        if read.held:
            self.l2.held -= read.held - read.landed
            read.held = read.landed
        self._resume()
        self._on_end()

    # ---- copies ----------------------------------------------------------------------------

    def copy(self, prompt: Sequence[Page]) -> None:
        """Copy what L2 lacks of `prompt`, which L1 has and was just used, and then write it."""
        if prompt and self.l2.size:
            used = self.uses.last(prompt[-1])
            if not self._copy(prompt, used):
                self._owed.pop(prompt[-1], None)
                self._owed[prompt[-1]] = prompt, used

    def _copy(self, prompt: Sequence[Page], used: int) -> bool:
        """False: L2 has no room for all of it."""
        missing = [page for page in prompt if page not in self.l2.pages]
        room = self.l2.make_room(len(missing), spares=_ALL, used_since=used)
        self.l2.pages.update(missing[:room])
        if self._writes is not None:
            self._writes.write(prompt)
        return room >= len(missing)

    def _resume(self) -> None:
        """Something has ended that held pages of L2: begin copies that wait for room, the newest
        first."""
        self.is_full = False
        while self._owed:
            last = next(reversed(self._owed))
            if last in self.l1.pages and not self._copy(*self._owed[last]):
                return
            del self._owed[last]
