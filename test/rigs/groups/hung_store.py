"""A store that hangs for one DP group alone, while the others work."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rigs.schedulers.scheduler_rig import SchedulerRig
from rigs.stores.object_store import ObjectStore
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache

_ROUNDS: Final = 4
"""Times that requests arrive in a hang."""
_LIMIT_S: Final = 60.0


def client_of(rig: SchedulerRig) -> HiCacheStorage | None:
    """The store's client of a rig; None: it has no L3 now."""
    tree = rig.tree
    attached = tree.store.attached if isinstance(tree, HiRadixCache) else None
    return None if attached is None else attached.client


def work_beside_a_hang(
    rigs: Sequence[SchedulerRig],
    store: ObjectStore,
    rng: random.Random,
    step: Callable[[bool], None],
    busy: Callable[[], Iterable[int | None]],
) -> int:
    """Let the store hang for one group that has it, and requests arrive. Requests of other groups
    end before it goes on. Returns the number of hangs, 0 or 1.

    Args:
        step: Runs a tick of all groups, in which requests may arrive, if the argument is true.
        busy: Gives the groups that have requests.
    """
    clients = {group: client_of(rig) for group, rig in enumerate(rigs)}
    having = [group for group, client in clients.items() if client is not None]
    if len(rigs) < 2 or not having:
        return 0
    store.set_mood("quick")
    store.release()
    hung = rng.choice(having)
    store.hang_for(clients[hung])
    try:
        for _ in range(_ROUNDS):
            step(True)
        began = time.monotonic()
        while others := set(busy()) - {hung, None}:
            assert time.monotonic() - began < _LIMIT_S, f"group {hung} holds up {others}"
            step(False)
    finally:
        store.hang_for(None)
    return 1
