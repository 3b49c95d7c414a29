"""The connection of a Mooncake Store backend: created, replaced after failures, and closed.

It has the calls for one object by its full key too, which the engine does not use. A value is a
page's bytes; its trailer is added here and taken off again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

from sglang.srt.distributed.device_context import require_device_set
from sglang.srt.mem_cache.storage.base import HiCacheStorage, leading_run
from sglang.srt.mem_cache.storage.mooncake_store.client import MooncakeClient, set_outcome
from sglang.srt.mem_cache.storage.mooncake_store.config import (
    MooncakeStoreConfig,
    check_engine_offloads_nothing,
    check_health,
    settle_protocol,
)
from sglang.srt.mem_cache.storage.mooncake_store.master_metrics import read_usage
from sglang.srt.mem_cache.storage.page_trailer import TRAILER_BYTES, is_intact, seal
from sglang.srt.mem_cache.storage.types import (
    HiCacheStorageExtraInfo,
    StorageUnavailable,
    StorageUsage,
)

logger = logging.getLogger(__name__)

_NOTES: Final = "notes"
"""Part of a note's key where the hash of a page would be."""


class MooncakeBaseStore(HiCacheStorage):
    """Connects to the store, replaces a broken connection, and registers memory with it.

    A location of `get` and `set` is a tensor, or an address in registered memory with a size in
    bytes.

    Raises:
        ValueError: A setting is missing, malformed or cannot work on this host.
        StorageUnreachable: There is no master. Raised without delay.
        RuntimeError: No device is set in this process yet.
    """

    _verify: bool
    """Hash values that are stored, and values that were read."""

    def __init__(self, config: MooncakeStoreConfig, rank: int | None = None) -> None:
        """Connect; `rank` is that of `settle_protocol`."""
        check_engine_offloads_nothing(config)
        device = require_device_set("Mooncake Store")
        self.config = config
        self.protocol, self.ib_device = settle_protocol(config, device, rank)
        """The protocol and the InfiniBand devices that Mooncake uses."""
        self._client = MooncakeClient(config, self.protocol, self.ib_device)
        self._client_lock = threading.Lock()
        """Held while the client is replaced, not while it is used."""
        self._closed = False

    @property
    def _key_prefix(self) -> str:
        """First part of the keys of objects; empty without `extra_backend_tag`."""
        return f"{self.config.extra_backend_tag}/" if self.config.extra_backend_tag else ""

    def object_keys(self, keys: Sequence[str], pool: str) -> list[str]:
        plain = super().object_keys(keys, pool)
        prefix = self._key_prefix
        return [prefix + key for key in plain] if prefix else plain

    def register_buffer(self, tensor: torch.Tensor) -> None:
        """Register the memory of a contiguous CPU tensor with the transport. Idempotent."""
        self._client.register(tensor)

    def describe_transport(self) -> dict[str, Any] | None:
        """The transport in use, in the words of `MooncakeTransferEngine.describe`; None: a
        stand-alone client has one of its own, which its `--protocol` chooses."""
        if self.config.standalone_storage:
            return None
        return {
            "protocol": self.protocol,
            "requested_protocol": self.config.protocol,
            "is_fallback": self.protocol != self.config.protocol,
            "ib_device": self.ib_device,
        }

    def get_usage(self) -> StorageUsage | None:
        """Usage of the memory of all clients together; None behind a discovery service."""
        master, port = self.config.master_host_port(), self.config.master_metrics_port
        own = None if self.config.standalone_storage else self.protocol
        return None if master is None else read_usage(master[0], port, own)

    def check_server(self) -> None:
        """Ask the master for its health. Raises StorageUnreachable."""
        check_health(self.config)

    def rebuild(self) -> None:
        """Connect again and register the same memory. Raises StorageUnavailable.

        The old client is dropped, not closed: another thread may still be inside one of its calls,
        which keeps it alive. A stand-alone client is not rebuilt: Mooncake reconnects to a
        restarted process by itself, and a second client of this process could not share the
        memory that the first one has shared.
        """
        if self.config.standalone_storage:
            raise StorageUnavailable(
                f"mooncake_client at {self.config.client_server_address} moves nothing yet; a "
                "restart within a second is not noticed: stop it for three seconds"
            )
        with self._client_lock:
            old = self._client
            new = MooncakeClient(self.config, self.protocol, self.ib_device)
            for tensor in old.registered():
                new.register(tensor)
            self._client = new
        logger.warning("Mooncake client was replaced")

    def close(self) -> None:
        """Disconnect. Idempotent; no transfer may be in flight."""
        if not self._closed:
            self._closed = True
            self._client.close()

    # -- one object --------------------------------------------------------------------------------

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        with self._client.transferring() as store:
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
        with self._client.transferring() as store:
            code: int = store.put(key, sealed)
        return bool(set_outcome(code)) and self.exists(key)

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

    # -- notes -------------------------------------------------------------------------------------

    def get_notes(self, names: Sequence[str]) -> list[bytes | None]:
        with self._client.transferring() as store:
            values: list[bytes] = store.get_batch([self._note_key(name) for name in names])
        if len(values) != len(names):
            raise StorageUnavailable(f"Mooncake answered {len(values)} notes to {len(names)}")
        return [value or None for value in values]

    def set_note(self, name: str, value: bytes) -> None:
        with self._client.transferring() as store:
            code: int = store.upsert(self._note_key(name), value)
        if code:
            raise StorageUnavailable(f"Mooncake did not store a note: {code}")

    def _note_key(self, name: str) -> str:
        namespace = self.storage_config.namespace if self.storage_config else ""
        return f"{self._key_prefix}{namespace}/{_NOTES}/{name}"

    # -- many objects ------------------------------------------------------------------------------

    def _exist(self, object_keys: list[str]) -> list[bool]:
        """For each object, True if it exists. Raises StorageUnavailable without a master."""
        if not object_keys:
            return []
        with self._client.using() as store:
            codes: list[int] = store.batch_is_exist(object_keys)
        if len(codes) != len(object_keys) or all(code < 0 for code in codes):
            raise StorageUnavailable(f"Mooncake's master does not answer: {codes[:1]}")
        return [code == 1 for code in codes]
