"""Settings of the tiers below L1: the part of `ServerArgs` that says where evicted pages go."""

from __future__ import annotations

import dataclasses

from sglang.srt.arg_groups.cli import Heading, flag
from sglang.srt.environ import parse_gigabytes


@dataclasses.dataclass(kw_only=True)
class HiCacheArgs:
    """Fields of `ServerArgs`."""

    enable_hierarchical_cache: bool = flag(
        False,
        "Keep evicted prefixes in host memory.",
        aliases=("--enable-hicache",),
        heading=Heading.TIERS,
    )
    hicache_ratio: float = flag(2.0, "Tokens (and recurrent states) of L2 per one of L1.")
    hicache_size: float = flag(
        0.0,
        "GB of L2 per rank, all kinds of state together, or a size (64GiB); overrides the ratio; "
        "0: use the ratio.",
        parse=parse_gigabytes,
    )
    hicache_host_memory_fraction: float | None = flag(
        None,
        "Share of the host's (or the container's) free memory that L2 of all ranks takes, such as "
        "0.8; servers that start together take it in turn. Overrides the ratio, not the size.",
    )
    hicache_host_memory_mode: str = flag(
        "cache",
        "What L2 is: a tier that keeps pages, or a buffer that they pass between L1 and L3.",
        choices=("cache", "buffer_only"),
    )
    hicache_write_policy: str = flag(
        "write_through",
        "When pages are copied from L1 to L2.",
        choices=("write_through", "write_through_selective", "write_back"),
    )
    hicache_io_backend: str = flag(
        "auto",
        "How pages move between L1 and L2.",
        choices=("auto", "kernel", "direct", "kernel_ascend"),
    )
    hicache_mem_layout: str = flag(
        "auto",
        "Memory layout of L2.",
        choices=("auto", "layer_first", "page_first", "page_first_direct", "page_first_kv_split"),
    )
    hicache_storage_backend: str | None = flag(
        None, "Store below host memory (L3); absent: none.", choices=("file", "mooncake", "dynamic")
    )
    hicache_storage_prefetch_policy: str = flag(
        "timeout",
        "How long a request waits for L3.",
        choices=("timeout", "best_effort", "wait_complete"),
    )
    hicache_storage_prefetch_retry_max_attempts: int | None = flag(
        None,
        "Most repetitions of a look-up in L3 that missed, while its request waits: the writer may "
        "not have committed yet. Absent: none; 8 if the next flag is given.",
    )
    hicache_storage_prefetch_retry_poll_interval: int | None = flag(
        None, "Milliseconds between these look-ups. Absent: 8 if the last flag is given."
    )
    hicache_storage_backend_extra_config: str | None = flag(
        None, "Settings of L3: JSON, or @file with JSON, YAML or TOML.", secret=True
    )
    hicache_allow_dynamic_attach: bool = flag(
        False, "Allow the admin key to attach a dynamic backend, which can run any Python code."
    )
