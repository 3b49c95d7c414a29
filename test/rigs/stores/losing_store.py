"""A file store that loses an object after it was asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)


class LosingStore(HiCacheFile):
    """Keeps its files in `SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR`."""

    doomed: ClassVar[Path | None] = None
    """The file that is gone after a question; tests patch it."""

    def __init__(self, storage_config: Any, **_: Any) -> None:
        super().__init__(storage_config, envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get())

    def prompts_exist(
        self,
        prompts: Sequence[list[str]],
        extra_infos: Sequence[HiCacheStorageExtraInfo | None],
        pool_transfers: Sequence[PoolTransfer] | None = None,
    ) -> list[PoolTransferResult]:
        answer = super().prompts_exist(prompts, extra_infos, pool_transfers)
        if self.doomed is not None:
            self.doomed.unlink(missing_ok=True)
        return answer
