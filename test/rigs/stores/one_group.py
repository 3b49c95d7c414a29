"""A backend that only one of a server's DP groups can connect to."""

from __future__ import annotations

from pathlib import Path

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig


class ForOneGroup(HiCacheFile):
    """Stores files in `folder` of the extra config, which must not exist yet."""

    def __init__(self, storage_config: HiCacheStorageConfig) -> None:
        folder = Path((storage_config.extra_config or {})["folder"])
        folder.mkdir()
        super().__init__(storage_config, str(folder))
