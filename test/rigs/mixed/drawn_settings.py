"""Settings of mixed runs that the plan does not pair with each other, and L3."""

from __future__ import annotations

import json
import random
from typing import Any

from rigs.mixed.plan import STATES, Mix
from rigs.stores.object_store import FILE, STORE_KEY, ObjectStore
from sglang.srt.mem_cache.l2.host_backup import HostBackup
from sglang.srt.mem_cache.l3.buffered_backup import BufferedBackup
from sglang.srt.messages.io_struct import AttachHiCacheStorageReqInput


def draw_policies(mix: Mix, rng: random.Random) -> dict[str, Any]:
    """Draw arguments of a rig."""
    args: dict[str, Any] = {"schedule_policy": rng.choice(("fcfs", "lpm"))}
    if mix.tiers > 1:
        kind = BufferedBackup if mix.is_buffer else HostBackup
        args["hicache_write_policy"] = rng.choice(kind.POLICIES)
    if mix.family in STATES:
        args["mamba_max_states_per_path"] = rng.choice((-1, -1, 1, 2))
    return args


def l3_of(mix: Mix, store: ObjectStore | None) -> tuple[str, str]:
    """Name and configuration of the backend of L3: `store`, or the engine's own store of files."""
    extra: dict[str, Any] = {"prefetch_threshold": mix.page_size}
    if store is None:
        return "file", json.dumps(extra)
    extra |= {
        "backend_name": FILE,
        "module_path": "rigs.stores.chaotic_store",
        "class_name": "FileStore",
        STORE_KEY: store.name,
        "prefetch_timeout_base": 0.05,
        "prefetch_timeout_max": 0.2,
    }
    return "dynamic", json.dumps(extra)


def attaching(mix: Mix, store: ObjectStore | None) -> AttachHiCacheStorageReqInput | None:
    """A message that attaches L3; None: there is no L2."""
    if mix.tiers == 1:
        return None
    backend, config = l3_of(mix, store)
    return AttachHiCacheStorageReqInput(
        hicache_storage_backend=backend, hicache_storage_backend_extra_config_json=config
    )
