"""The objects of a misbehaving store, and the faults of calls to it; see `chaotic_store.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

import xxhash

from sglang.srt.mem_cache.hicache_storage import StorageUnavailable, StorageUnreachable
from sglang.srt.mem_cache.host.page_checksums import NO_CHECKSUM
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.storage.object_files import ObjectFiles
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES

PLAIN: Final = "chaotic-plain"
IN_PLACE: Final = "chaotic-in-place"
FILE: Final = "chaotic-file"
_BACKENDS: Final = {PLAIN: "PlainStore", IN_PLACE: "InPlaceStore", FILE: "FileStore"}
STORE_KEY: Final = "object_store"
"""Key in the extra config for the name of the `ObjectStore`."""

_SLOW_S: Final = 0.004
_CRAWL_S: Final = 0.03
_LIES: Final = 0.15
"""Chance of an answer that the interface does not allow, if the store breaks its contract."""
_HANG_LIMIT_S: Final = 10.0
"""Longest hang, so that a failed test can end."""
_HUNG_LIMIT_S: Final = 90.0
"""The same of a client whose calls all hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mood:
    """Chances, from 0 to 1, of faults of a call or a page."""

    slow: float = 0.1
    """A call takes some milliseconds, and again every few pages."""
    crawl: float = 0.0
    """A get or set takes tens of milliseconds, and again every few pages."""
    hang: float = 0.0
    """A call waits until it is released."""
    fail: float = 0.0
    """A call raises."""
    refuse: float = 0.0
    """A page fails, although the object exists or could be written."""
    damage: float = 0.0
    """A page that is read arrives with other bytes."""
    lose: float = 0.0
    """The object of a requested page is removed for good."""
    is_full: bool = False
    """True if every write is refused."""


MOODS: Final = {
    "well": Mood(),
    "quick": Mood(slow=0.0),
    "slow": Mood(slow=0.9),
    "crawling": Mood(crawl=0.7),
    "hanging": Mood(hang=0.2, slow=0.3),
    "failing": Mood(fail=0.3),
    "dead": Mood(fail=1.0),
    "refusing": Mood(refuse=0.2),
    "rotten": Mood(damage=0.2),
    "forgetful": Mood(lose=0.1),
    "full": Mood(is_full=True),
    "mad": Mood(slow=0.3, crawl=0.1, hang=0.05, fail=0.1, refuse=0.1, damage=0.1, lose=0.05),
}
"""Moods by name."""
MOODS_AT_REST: Final = (*("quick",) * 5, "dead", "full", "refusing")
"""Names of moods beside which a scheduler comes to rest: some stores take nothing."""


class StoreBroke(Exception):
    """An exception of a store's own client library."""


_EXCEPTIONS: Final[tuple[Callable[[], Exception], ...]] = (
    partial(StorageUnavailable, "the store is away"),
    partial(StorageUnreachable, "the store is not there"),
    partial(OSError, 5, "input/output error"),
    partial(TimeoutError, "timed out"),
    partial(ValueError, "unexpected answer\nof two lines"),
    partial(KeyError, "node"),
    RuntimeError,
    partial(StoreBroke, "{%s}"),
)


class ObjectStore:
    """Objects by key, and the faults of calls. Any thread.

    Args:
        seed: Determines the faults of the n-th call of each kind.
        damages: Bytes may change; only for engines that check them.
        breaks_contract: Also give answers that the interface does not allow.
    """

    _by_name: ClassVar[dict[str, ObjectStore]] = {}

    def __init__(self, seed: int, *, damages: bool = True, breaks_contract: bool = False) -> None:
        self.name = f"chaos-{seed}-{id(self)}"
        self.mood = MOODS["quick"]
        self.happened: Counter[str] = Counter()
        """Number of faults so far, by kind."""
        self._seed = seed
        self._damages = damages
        self._breaks_contract = breaks_contract
        self._objects: dict[str, bytes] = {}
        self._first_writes: dict[str, int] = {}
        """Key to the number of its first write among the first writes of all keys."""
        self._first: dict[str, bytes] = {}
        """The first intact value of each key. The KV of a page has only one."""
        self.contradictions: list[str] = []
        """Keys with different values at different times."""
        self._lost_at: dict[str, float] = {}
        """Key to the time when its object was lost, in `time.monotonic()` seconds."""
        self._calls: Counter[str] = Counter()
        self._hung: tuple[object, threading.Event] | None = None
        """A client whose calls all hang, and what they wait for."""
        self._gate = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> ObjectStore:
        self._by_name[self.name] = self
        for name, backend in _BACKENDS.items():
            module = "rigs.stores.chaotic_store"
            StorageBackendFactory.register_backend(name, module, backend)
        return self

    def __exit__(self, *_: object) -> None:
        self.mood = MOODS["quick"]
        self.hang_for(None)
        self.release()
        del self._by_name[self.name]

    @classmethod
    def named(cls, name: str) -> ObjectStore:
        return cls._by_name[name]

    # ---- the test's side ---------------------------------------------------------------------

    def set_mood(self, name: str) -> None:
        """Set the mood of calls that begin from now on."""
        self.mood = MOODS[name]

    def hang_for(self, client: object | None) -> None:
        """Let all calls of one client hang from now on; None: of none any more."""
        before = self._hung
        self._hung = None if client is None else (client, threading.Event())
        if before is not None:
            before[1].set()

    def release(self) -> None:
        """Continue the calls that hang now."""
        with self._lock:
            gate, self._gate = self._gate, threading.Event()
        gate.set()

    def restart(self) -> None:
        """Lose all objects."""
        with self._lock:
            self._lose(list(self._objects))
        self.happened["restarts"] += 1

    def rot(self, rng: random.Random) -> None:
        """Damage some stored objects: flip a bit, change the length, or swap them."""
        if not self._damages:
            return
        with self._lock:
            keys = sorted(self._objects)
            for key in rng.sample(keys, min(len(keys), 3)):
                other = self._objects[rng.choice(keys)]
                self._objects[key] = damaged(self._objects[key], other, rng)

    def first_write(self, key: str) -> float:
        """Number of the first write under `key`, also of a damaged object, in the order of the
        first writes of all keys; infinite: there was none."""
        return self._first_writes.get(key, math.inf)

    def has_had_since(self, key: str, when: float) -> bool:
        """True if the object existed at any time after `when` (`time.monotonic()` seconds)."""
        with self._lock:
            return key in self._objects or self._lost_at.get(key, when - 1.0) >= when

    # ---- the backends' side ------------------------------------------------------------------

    def begin(self, kind: str, *, of: object = None, is_awaited: bool = False) -> Call:
        """Begin a call of `kind`, which may be slow, hang or raise here; `of`: the client.

        An awaited call does not hang, and within the contract raises only StorageUnavailable.
        """
        if (hung := self._hung) is not None and hung[0] is of:
            self.happened["hang of one client"] += 1
            hung[1].wait(_HUNG_LIMIT_S)
        with self._lock:
            number = self._calls[kind]
            self._calls[kind] += 1
        mood, rng = self.mood, random.Random(f"{self._seed} {kind} {number}")
        if not is_awaited:
            call = Call(self, kind, mood, rng)
            call.pause()
            return call
        call = Call(self, kind, dataclasses.replace(mood, hang=0.0, fail=0.0), rng)
        call.pause()
        if rng.random() < mood.fail / 2:
            self.happened[f"{kind} fail"] += 1
            raise StorageUnavailable("the store is away")
        if call.lies():
            raise rng.choice(_EXCEPTIONS)()
        return call

    def wait_for_release(self) -> None:
        """Hang until `release`, unless the mood no longer hangs."""
        with self._lock:
            gate = self._gate
        if self.mood.hang:
            gate.wait(_HANG_LIMIT_S)

    def read(self, key: str) -> bytes | None:
        with self._lock:
            return self._objects.get(key)

    def any_object(self, rng: random.Random) -> bytes:
        """Any of the objects; there must be one."""
        with self._lock:
            return self._objects[rng.choice(sorted(self._objects))]

    def write(self, key: str, value: bytes) -> None:
        with self._lock:
            self._objects[key] = value
            self._first_writes.setdefault(key, len(self._first_writes))
            if not _is_intact(value):
                # L2 was damaged before the write; readers see that.
                self.happened["damaged before its write"] += 1
                return
            if self._first.setdefault(key, value) != value:
                self.contradictions.append(key)

    def remove(self, key: str) -> None:
        with self._lock:
            self._lose([key])

    def clear(self, namespace: str) -> None:
        with self._lock:
            self._lose([key for key in self._objects if key.startswith(f"{namespace}/")])

    def _lose(self, keys: list[str]) -> None:
        now = time.monotonic()
        for key in keys:
            if self._objects.pop(key, None) is not None:
                self._lost_at[key] = now

    @property
    def damages(self) -> bool:
        return self._damages

    @property
    def breaks_contract(self) -> bool:
        return self._breaks_contract


class ObjectFolder(ObjectStore):
    """The same faults for the engine's own store of files, whose objects are in `folder`."""

    def __init__(self, seed: int, *, damages: bool = True, breaks_contract: bool = False) -> None:
        super().__init__(seed, damages=damages, breaks_contract=breaks_contract)
        self._directory = tempfile.TemporaryDirectory(prefix="object-folder-")
        self.folder = Path(self._directory.name)
        self._last_loss = 0.0

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._directory.cleanup()

    def restart(self) -> None:
        for path in self._paths():
            self.lose(path)
        self.happened["restarts"] += 1

    def rot(self, rng: random.Random) -> None:
        if self._damages:
            paths = self._paths()
            for path in rng.sample(paths, min(len(paths), 3)):
                self.spoil(path, rng)

    def lose(self, path: Path) -> None:
        """Remove an object, if it is there."""
        path.unlink(missing_ok=True)
        self._last_loss = time.monotonic()

    def spoil(self, path: Path, rng: random.Random) -> None:
        """Damage an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            other = rng.choice(self._paths() or [path])
            value = damaged(path.read_bytes(), other.read_bytes(), rng)
            spoiled = self.folder / "spoiled"
            spoiled.write_bytes(value)
            spoiled.rename(path)
            # Readers remove what is damaged.
            self._last_loss = time.monotonic()

    def has_had_since(self, key: str, when: float) -> bool:
        """See `ObjectStore`. Also true if any object was lost after `when`."""
        namespace, _, rest = key.partition("/")
        path = ObjectFiles(self.folder).path(namespace, rest)
        return path.exists() or self._last_loss >= when

    def _paths(self) -> list[Path]:
        # The engine may remove a folder meanwhile: `os.walk` passes over it, `Path.glob` raises.
        return sorted(
            Path(folder, name)
            for folder, _, names in os.walk(self.folder)
            if len(Path(folder).name) == 2
            for name in names
        )


class Call:
    """The faults of one call to the store, drawn in order."""

    def __init__(self, store: ObjectStore, kind: str, mood: Mood, rng: random.Random) -> None:
        self.store = store
        self.rng = rng
        self._kind = kind
        self._mood = mood

    def pause(self) -> None:
        """A point at which the call may be slow, hang or fail."""
        if self._draws(self._mood.slow, "slow"):
            time.sleep(self.rng.random() * _SLOW_S)
        if self._kind in ("get", "set") and self._draws(self._mood.crawl, "crawl"):
            time.sleep(self.rng.random() * _CRAWL_S)
        if self._draws(self._mood.hang, "hang"):
            self.store.wait_for_release()
            if self.rng.random() < 0.5:
                raise StorageUnavailable("no answer in time")
        if self._draws(self._mood.fail, "fail"):
            raise self.rng.choice(_EXCEPTIONS)()

    def fetch(self, key: str) -> bytes | None:
        """The object as it arrives, or None."""
        if self._draws(self._mood.lose, "lose"):
            self.store.remove(key)
        value = self.store.read(key)
        if value is None or self._draws(self._mood.refuse, "refuse"):
            return None
        if self.store.damages and self._draws(self._mood.damage, "damage"):
            return damaged(value, self.store.any_object(self.rng), self.rng)
        return value

    def keep(self, key: str, value: bytes) -> bool:
        """Write the object. False if refused."""
        if self.refuses():
            return False
        self.store.write(key, value)
        return True

    def disturb(self, path: Path) -> None:
        """Lose or damage the file of an object that is about to be read."""
        folder = self.store
        assert isinstance(folder, ObjectFolder)
        if self._draws(self._mood.lose, "lose"):
            folder.lose(path)
        if folder.damages and self._draws(self._mood.damage, "damage"):
            folder.spoil(path, self.rng)

    def refuses(self) -> bool:
        """True if the object of a page is not moved."""
        is_full = self._mood.is_full and self._kind == "set"
        self.store.happened[f"{self._kind} full"] += is_full
        return is_full or self._draws(self._mood.refuse, "refuse")

    def lies(self) -> bool:
        return self.store.breaks_contract and self._draws(_LIES, "lie")

    def _draws(self, chance: float, what: str) -> bool:
        if not chance or self.rng.random() >= chance:
            return False
        self.store.happened[f"{self._kind} {what}"] += 1
        return True


def _is_intact(value: bytes) -> bool:
    """True if an object has the bytes that its checksum says, or no checksum."""
    page, checksum = value[:-TRAILER_BYTES], value[-TRAILER_BYTES:-16]
    return checksum in (NO_CHECKSUM, xxhash.xxh3_128_digest(page))


def damaged(value: bytes, other: bytes, rng: random.Random) -> bytes:
    if not value:
        return other  # The value was cut to nothing before.
    match rng.randrange(4):
        case 0:
            at = rng.randrange(len(value))
            return value[:at] + bytes([value[at] ^ (1 << rng.randrange(8))]) + value[at + 1 :]
        case 1:
            return value[: rng.randrange(len(value))]
        case 2:
            return value + b"\0"
    return other
