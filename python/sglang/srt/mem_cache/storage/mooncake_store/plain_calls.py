"""Calls of a Mooncake Store for one object by its full key, which the engine does not use.

A value is a page's bytes; its trailer is added here and taken off again.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.mem_cache.storage.base import HiCacheStorage
from sglang.srt.mem_cache.storage.mooncake_store.base_store import MooncakeBaseStore
from sglang.srt.mem_cache.storage.mooncake_store.calls import set_outcome
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES, is_intact, seal
from sglang.srt.mem_cache.storage.pool_hits import leading_run
from sglang.srt.mem_cache.storage.types import HiCacheStorageExtraInfo, StorageUnavailable


class MooncakePlainCalls(MooncakeBaseStore, HiCacheStorage):
    """`get`, `set` and `exists` of `HiCacheStorage`. A location is a tensor, or an address in
    registered memory with a size in bytes."""

    _verify: bool
    """Hash values that are stored, and values that were read."""

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        with self._client.transferring(pages=False) as store:
            raw: bytes = store.get(key)
        data, trailer = memoryview(raw)[:-TRAILER_BYTES], memoryview(raw)[-TRAILER_BYTES:]
        if not is_intact(trailer, [data], key, verify_checksum=self._verify):
            return None
        value = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if target_location is None:
            return value
        target = self._memory(target_location, target_sizes)
        flat = target.view(-1).view(torch.uint8)
        if len(flat) != len(value):
            return None
        flat.copy_(value)
        return target

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        if value is None and target_location is None:
            raise ValueError("value: MooncakeStore stores a tensor")
        source = self._memory(target_location if value is None else value, target_sizes)
        raw = source.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        sealed = raw + seal([raw], key, with_checksum=self._verify)
        with self._client.transferring(pages=False) as store:
            code: int = store.put(key, sealed)
        return bool(set_outcome(code))

    def _memory(self, location: Any, size: int | None) -> torch.Tensor:
        """A tensor, or `size` bytes of registered memory from an address on.

        Raises:
            ValueError: That memory is not registered.
        """
        if isinstance(location, torch.Tensor):
            return location
        if not isinstance(location, int):
            raise ValueError(f"a tensor or an address is due, not {type(location).__name__}")
        for tensor in self._client.registered():
            begin = location - tensor.data_ptr()
            if size is not None and 0 <= begin < begin + size <= tensor.nbytes:
                return tensor.view(-1).view(torch.uint8)[begin : begin + size]
        raise ValueError(
            f"target_location: {size} bytes (target_sizes) at {location:#x} are in no registered "
            "memory; see register_buffer"
        )

    def exists(self, key: str) -> bool:
        return self._exist([key])[0]

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return leading_run(self._exist(keys))

    def _exist(self, object_keys: list[str]) -> list[bool]:
        """For each object, True if it exists. Raises StorageUnavailable without a master."""
        if not object_keys:
            return []
        with self._client.using() as store:
            codes: list[int] = store.batch_is_exist(object_keys)
        if len(codes) != len(object_keys) or all(code < 0 for code in codes):
            raise StorageUnavailable(f"Mooncake's master does not answer: {codes[:1]}")
        return [code == 1 for code in codes]
