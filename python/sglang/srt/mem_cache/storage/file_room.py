"""Room in the folder of the `file` backend: the objects that were unused for longest are removed.

Servers that share a folder do not talk to each other. Each server sums up the folder when a limit
may be near, and removes the oldest objects. Servers that do so at once choose the same objects, so
together they remove no more than one would.

The time of an object's last use is its file's time of modification. It is set to a whole minute,
minus a microsecond for each page before the object's own: of the pages of a prompt that are used in
one minute, the last ones go first.

Threads: `admits`, `wrote` and `stamp` are for the thread that writes, `renew` for that and the
thread that reads. A thread of its own, started when there is something to do, sums up and removes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from sglang.srt.environ import envs
from sglang.srt.mem_cache.storage.object_files import ObjectFiles
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.threads import lower_priority

logger = logging.getLogger(__name__)

SETTINGS: Final = (
    "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE and SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE"
)
_MINUTE_NS: Final = 60 * 10**9
_DEPTH_NS: Final = 1000
_PAUSE_S: Final = 1.0
"""Least time between two sums."""
_PAUSE_PER_SECOND: Final = 4.0
"""Seconds of pause for each second that the last sum took."""
_LONG_PAUSE_S: Final = 30.0
"""Pause after objects that could not be removed."""
_STALE_S: Final = 600.0
"""Age at which operators get a new sum."""
_MAX_REST_S: Final = 0.1
_MAX_REMEMBERED: Final = 100_000
"""Pages; some 20 MB."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """The space that the objects of a folder may take."""

    max_size: int = 0
    """Bytes of all objects; 0: any."""
    eviction_ratio: float = 0.9
    """Share of `max_size` that stays when objects are removed. The free space grows beyond
    `min_free_space` by the same share of that which goes."""
    min_free_space: int = 0
    """Bytes of the file system that stay free; 0: none."""

    @classmethod
    def from_env(cls) -> FileLimits:
        """The limits in the environment. Raises ValueError that names the variable."""
        return cls(
            envs.SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE.get(),
            envs.SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO.get(),
            envs.SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE.get(),
        )

    @property
    def has_any(self) -> bool:
        return bool(self.max_size or self.min_free_space)


class _Sum(NamedTuple):
    """The folder at a time."""

    used: int
    """Bytes of all objects."""
    num_objects: int
    free: int
    """Free bytes of the file system."""
    written: int
    """`FileRoom._written` at that time."""


class FileRoom:
    """Admits writes of objects, and removes old objects before the limits are reached.

    Args:
        namespace: Counted even if it has no name of an engine's namespace.
        now_ns: Clock of files, ns since the epoch.
    """

    def __init__(
        self,
        files: ObjectFiles,
        namespace: str,
        limits: FileLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._files = files
        self._namespace = namespace
        self._limits = limits
        self._clock = clock
        self._now_ns = now_ns
        self._known: _Sum | None = None
        """The latest sum, or None before the first. All writes are admitted while it is None."""
        self._written = 0
        """Bytes that this process wrote."""
        self._largest = 0
        """Bytes of the largest object that was asked for."""
        self._removed = 0
        self._remembered: tuple[int, set[str]] = (0, set())
        """A minute, and the pages that were renewed in it."""
        self._closing = threading.Event()
        self._started = self._not_before = clock()
        """Times at which the last sum started, and the next one may start."""
        self._lock = threading.Lock()
        """Held while a sum is started."""
        self._work: BackgroundCall[None] | None = None
        self._start()

    # -- the thread that writes --------------------------------------------------------------------

    def admits(self, size: int) -> bool:
        """True if there is room for an object of `size` bytes. Starts to make room before there is
        none. Never blocks."""
        limits, known, free = self._limits, self._known, self._free()
        if known is None or free is None:
            self._start()
            return True
        if limits.max_size and size > limits.max_size // 2:
            return False
        self._largest = max(self._largest, size)
        used = known.used + self._written - known.written
        # The loss of free space shows what other servers write; and other programs, which costs a
        # sum, but no room.
        suspected = max(used, known.used + known.free - free)
        if self._excess(suspected + size, free - size):
            self._start()
        fits = not limits.max_size or used + size <= limits.max_size
        return fits and (not limits.min_free_space or free - size >= limits.min_free_space)

    def wrote(self, size: int) -> None:
        """Note a write of `size` bytes."""
        self._written += size

    def stamp(self, depth: int) -> int:
        """The time of modification, in ns, of a page used now.

        Args:
            depth: Number of pages of the prompt before it, as far as they are known.
        """
        return self._minute() - depth * _DEPTH_NS

    def renew(self, path: Path, modified_ns: int, depth: int) -> None:
        """Note that an object is used, unless that was noted in this minute."""
        if modified_ns < self._minute() - _MINUTE_NS // 2:
            self._files.renew(path, self.stamp(depth))

    def not_renewed(self, pages: Iterable[str]) -> list[tuple[int, str]]:
        """The pages that no call in this minute had, with their positions."""
        minute, seen = self._remembered
        if minute != self._minute() or len(seen) > _MAX_REMEMBERED:
            seen = set()
            self._remembered = (self._minute(), seen)
        new = [(depth, page) for depth, page in enumerate(pages) if page not in seen]
        seen.update(page for _, page in new)
        return new

    def _minute(self) -> int:
        return self._now_ns() // _MINUTE_NS * _MINUTE_NS

    def _start(self) -> None:
        """Start to sum up and to remove, unless that is under way or was just done. Any thread."""
        with self._lock:
            if self._closing.is_set() or (self._work is not None and not self._work.ended):
                return
            now = self._clock()
            if now >= self._not_before:
                self._started, self._not_before = now, now + _PAUSE_S
                self._work = BackgroundCall("hicache-file-room", self._make_room)

    # -- what operators see ------------------------------------------------------------------------

    def usage(self) -> tuple[int, int, int, int] | None:
        """Bytes of all objects, bytes that they may have, their number, and how many of them this
        process has removed. The last sum, and what this process wrote since. Any thread."""
        if self._clock() - self._started > _STALE_S:
            self._start()
        known, free = self._known, self._free()
        if known is None or free is None:
            return None
        used = known.used + self._written - known.written
        total = used + max(0, free - self._limits.min_free_space)
        if self._limits.max_size:
            total = min(total, self._limits.max_size)
        return used, total, known.num_objects, self._removed

    def sum_up_again(self) -> None:
        """Sum up now, because many objects went."""
        self._not_before = self._clock()
        self._start()

    def close(self) -> None:
        """End the work that is under way soon. Idempotent."""
        self._closing.set()

    # -- the thread that makes room ----------------------------------------------------------------

    def _make_room(self) -> None:
        lower_priority()
        started = self._clock()
        pause = 0.0
        try:
            pause = self._sum_up()
        finally:
            spent = self._clock() - started
            self._not_before = self._clock() + max(pause, _PAUSE_S, spent * _PAUSE_PER_SECOND)

    def _sum_up(self) -> float:
        """Sum up the objects, and remove old ones if they are too many. Returns seconds to wait
        at least until it is done again."""
        self._files.remove_stale_temporaries()
        written, free = self._written, self._free()
        if free is None:
            return _LONG_PAUSE_S
        times, sizes = array("q"), array("q")
        for folder in self._unhurried():
            for _, status in self._files.objects(folder):
                times.append(status.st_mtime_ns)
                sizes.append(status.st_size)
        if self._closing.is_set():
            return 0.0
        used, count = sum(sizes), len(sizes)
        excess = self._excess(used + self._largest, free - self._largest)
        freed = number = 0
        failure = None
        if count and excess:
            last = _newest_to_go(times, sizes, excess)
            freed, number, failure = self._remove(last, excess)
            logger.info(
                "file storage backend: removed %d objects of %d, which were unused for longest",
                number,
                count,
            )
        self._known = _Sum(used - freed, count - number, free + freed, written)
        if failure is not None and freed < excess:
            logger.warning(
                "file storage backend: objects in %s cannot be removed: %s; remove them by hand, "
                "or give the folder to the user of this server",
                self._files.root,
                failure.strerror,
            )
            return _LONG_PAUSE_S
        return 0.0

    def _remove(self, last: int, excess: int) -> tuple[int, int, OSError | None]:
        """Remove objects that were last used at `last` or before, until `excess` bytes are gone.

        Returns the bytes, the number of objects, and why others could not be removed.
        """
        freed = number = 0
        failure = None
        for folder in self._unhurried():
            before = number
            for path, status in self._files.objects(folder):
                if status.st_mtime_ns > last or freed >= excess:
                    continue
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    failure = error
                    continue
                freed += status.st_size
                number += 1
                self._removed += 1
            if number > before:
                self._files.remove_empty(folder)
                self._files.remove_empty(folder.parent)
            if freed >= excess:
                break
        return freed, number, failure

    def _unhurried(self) -> Iterable[Path]:
        """The folders, with a rest after each that leaves others half of the time."""
        for folder in self._files.folders(self._namespace):
            started = time.monotonic()
            yield folder
            if self._closing.wait(min(time.monotonic() - started, _MAX_REST_S)):
                return

    def _excess(self, used: int, free: int) -> int:
        """Bytes to remove, so that the limits are not near; 0 while they are far.

        Args:
            used: Bytes of all objects, with the next one.
            free: Free bytes of the file system after the next one.
        """
        limits, margin, excess = self._limits, 2 * self._largest, 0
        if limits.max_size:
            low = min(int(limits.max_size * limits.eviction_ratio), limits.max_size - margin)
            if used > (limits.max_size + low) // 2:
                excess = used - self._largest - low
        if limits.min_free_space:
            spare = int(limits.min_free_space * (1 - limits.eviction_ratio))
            high = limits.min_free_space + max(spare, margin)
            if free < (limits.min_free_space + high) // 2:
                excess = max(excess, high - free - self._largest)
        return max(0, excess)

    def _free(self) -> int | None:
        """Free bytes of the file system; None: it does not tell."""
        try:
            found = os.statvfs(self._files.root)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize


def _newest_to_go(times: array[int], sizes: array[int], excess: int) -> int:
    """The last use of the newest object that must go so that `excess` bytes are gone."""
    order = np.argsort(np.frombuffer(times, dtype=np.int64), kind="stable")
    gone = np.cumsum(np.frombuffer(sizes, dtype=np.int64)[order])
    index = min(int(np.searchsorted(gone, excess)), len(order) - 1)
    return times[int(order[index])]
