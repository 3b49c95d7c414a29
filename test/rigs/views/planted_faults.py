"""Faults that a test turns on and off in a running server: `ForkedServer(in_rank=...)` plants them.

A fault is on while the file of its name is in the folder of switches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import sglang
from sglang.srt import constants
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.l3 import store_connection, store_presence, store_usage
from sglang.srt.mem_cache.storage.types import CacheNamespace

SLOW_READS: Final = "slow reads"
SLOW_WRITES: Final = "slow writes"
LAGGING_RANK: Final = "lagging rank"
LAGGARD: Final = 1
_CALL_S: Final = 1.5
"""Seconds of a slow call; after three the engine takes the store for a failed one."""
_TICK_S: Final = 0.05


def switched(folder: Path, name: str) -> AbstractContextManager[None]:
    """The fault is on inside the context."""

    @contextmanager
    def on() -> Any:
        switch = folder / name
        switch.touch()
        try:
            yield
        finally:
            switch.unlink()

    return on()


def looks_once(rank: int) -> None:
    """The server does not renew its note in the store, which would be another put."""
    del rank
    mock.patch.object(store_presence, "_PAUSE_S", 3600.0).start()


def slow_files(folder: str, rank: int) -> None:
    """Each call of the file store takes 1.5 s while its switch is on."""
    for name, method in ((SLOW_READS, "batch_get_v2"), (SLOW_WRITES, "batch_set_v2")):
        _delay(HiCacheFile, method, Path(folder, name), _CALL_S)
    asks_often(rank)


def lagging_rank(folder: str, rank: int) -> None:
    """A rank comes late to each tick while the switch is on."""
    if rank == LAGGARD:
        _delay(HiRadixCache, "check_hicache_events", Path(folder, LAGGING_RANK), _TICK_S)


def asks_often(rank: int) -> None:
    """The server asks its store for its usage at every scrape."""
    del rank
    mock.patch.object(store_usage, "_FRESH_S", 0.0).start()


def looks_often(rank: int) -> None:
    """The server looks for others on its store all the time."""
    mock.patch.object(store_presence, "_PAUSE_S", 0.05).start()
    asks_often(rank)


def has_format(version: int, rank: int) -> None:
    """The server writes and reads pages of another version of their format."""
    made = partial(CacheNamespace, format_version=version)
    mock.patch.object(store_connection, "CacheNamespace", made).start()
    asks_often(rank)


def has_version(version: str, rank: int) -> None:
    """The server's scheduler is one of another version of the engine, with the same format."""
    mock.patch.object(constants, "VERSION", version).start()
    mock.patch.object(sglang, "__version__", version).start()
    asks_often(rank)


def _delay(owner: type, name: str, switch: Path, seconds: float) -> None:
    method: Callable[..., Any] = getattr(owner, name)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        if switch.exists():
            time.sleep(seconds)
        return method(*args, **kwargs)

    mock.patch.object(owner, name, delayed).start()
