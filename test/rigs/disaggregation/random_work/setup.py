"""Configurations of the random PD driver: chosen by a seed, with tiers too small for the work."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Iterator
from typing import Any, Final

from rigs.schedulers.random_setup import buffers_without_store, impatient
from rigs.stores.object_store import IN_PLACE, PLAIN, STORE_KEY, ObjectStore
from sglang.srt.disaggregation.control import control_client
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.messages.io_struct import AttachHiCacheStorageReqInput

LOST_S: Final = 10
"""Seconds, by the clocks of the schedulers, for which a server waits for the other server of a
request."""
UNKNOWN_S: Final = 4
"""Seconds for which a prefill server may not know a request."""
SILENT_S: Final = 2
INJECTED: Final = "is gone by injection"

NAMED: Final = re.compile(
    "|".join(
        (
            r"^the prefill server (ended the request|does not know the request)",
            r"^the prefill server (is not found|was replaced)",
            r"^the prefill server let go of the pages",
            # The prefill server let go of the row.
            r"^reading the metadata from the prefill server failed: the row is (empty|stale|torn)",
            r"^the prefill server at \S+ has not answered for",
            rf"^reading from the prefill server failed: peer p {INJECTED}$",
            r"^reading from the prefill server failed: peer \S+ (cannot be connected to|ended)\b",
            r"^reading from the prefill server failed: peer \S+ has not answered a read for",
            r"^reading from the prefill server failed: \d+ pages and \d+ states of pools "
            r"[\w, ]+ differ from their checksums$",
            r"^reads of \d+ earlier prompts from the prefill server have not ended",
            r"^injected by SGLANG_TEST_DISAGG_FAILURE_PROB: (asking|reading|confirming) failed$",
            r"^no slots were free for the request within",
            r"^the prefill server computed (another|a) prompt",
            r"^the prefill server was sent another request",
            r"^the decode server (gave it up: .|has not been heard of for)",
            r"^no decode server has asked for it within",
            r"^bootstrap_room \d+ belongs to another request",
            r"^given up by injection$",
        )
    )
)
"""Errors that say what failed."""


def draw_groups(seed: int) -> tuple[int, int]:
    """Draw the numbers of DP groups of the prefill and of the decode server."""
    rng = random.Random(f"groups of {seed}")
    return (rng.choice((1, 2, 3)), rng.choice((1, 1, 2))) if rng.random() < 0.4 else (1, 1)


def draw_args(rng: random.Random, page_size: int) -> dict[str, Any]:
    """Draw the arguments of one side."""
    caches = rng.random() < 0.9
    args: dict[str, Any] = {
        "pool_tokens": page_size * rng.choice((96, 256, 512)) // min(page_size, 8),
        "max_requests": rng.choice((3, 16)),
        "chunked_prefill_size": rng.choice((-1, page_size * 2, 64)),
        "schedule_conservativeness": rng.choice((0.01, 0.3, 1.0)),
        "schedule_policy": rng.choice(("fcfs", "lpm")) if caches else "fcfs",
        "disable_radix_cache": not caches,
        "overlap": rng.random() < 0.5,
    }
    if rng.random() < 0.4 and caches:
        args |= {
            "enable_hierarchical_cache": True,
            "hicache_ratio": rng.choice((1.2, 3.0)),
            "hicache_write_policy": rng.choice(("write_through", "write_back")),
        }
    return args


def draw_buffer(args: dict[str, Any], rng: random.Random) -> None:
    """Maybe make L2 of a side that gets an L3 a buffer."""
    if args.get("enable_hierarchical_cache") and rng.random() < 0.5:
        args["hicache_host_memory_mode"] = "buffer_only"
        args["hicache_write_policy"] = "write_through"


def small_l1(page_size: int) -> dict[str, Any]:
    """Arguments of a decode side that often loads from L2."""
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "pool_tokens": page_size * 96 // min(page_size, 8),
    }


@contextlib.contextmanager
def short_repeats() -> Iterator[None]:
    """Shorten timeouts to seconds, and repeat questions soon."""
    repeat = control_client.REPEAT_S
    with (
        impatient(),
        buffers_without_store(),
        envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.override(LOST_S),
        envs.SGLANG_HICACHE_CHECKED_SHARE.override(1.0),
        envs.SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT.override(UNKNOWN_S),
        envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL.override(1),
        envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE.override(SILENT_S),
    ):
        control_client.REPEAT_S = 0.03  # type: ignore[misc]
        try:
            yield
        finally:
            control_client.REPEAT_S = repeat  # type: ignore[misc]


def attach(tree: HiRadixCache, store: ObjectStore, rng: random.Random) -> None:
    """Attach `store` to a side with tiers."""
    message = attaching(tree.page_size, store, rng)
    result = tree.attach_storage_backend(
        message.hicache_storage_backend,
        message.hicache_storage_backend_extra_config_json,
        hicache_storage_prefetch_policy=message.hicache_storage_prefetch_policy,
    )
    assert result.done, result.message


def attaching(
    page_size: int, store: ObjectStore, rng: random.Random
) -> AttachHiCacheStorageReqInput:
    """A message that attaches `store`."""
    config: dict[str, Any] = {
        STORE_KEY: store.name,
        "prefetch_threshold": page_size,
        "prefetch_timeout_base": 0.01,
        "prefetch_timeout_max": 0.05,
    }
    policy = rng.choice(("best_effort", "wait_complete", "timeout"))
    return AttachHiCacheStorageReqInput(
        hicache_storage_backend=rng.choice((PLAIN, IN_PLACE)),
        hicache_storage_backend_extra_config_json=json.dumps(config),
        hicache_storage_prefetch_policy=policy,
    )
