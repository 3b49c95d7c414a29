"""The connection of a Mooncake Store backend: made, replaced where it broke, and closed."""

from __future__ import annotations

import logging
import threading

import torch

from sglang.srt.distributed.device_context import require_device_set
from sglang.srt.mem_cache.storage.mooncake_store.client import (
    MooncakeClient,
    check_health,
    choose_protocol,
)
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig
from sglang.srt.mem_cache.storage.types import StorageUnavailable

logger = logging.getLogger(__name__)


class MooncakeBaseStore:
    """Connects to the store, replaces a connection that broke, and registers memory with it.

    Raises:
        ValueError: A setting is missing, malformed or cannot work on this host.
        StorageUnreachable: No master, said at once.
        RuntimeError: No device is set in this process yet.
    """

    def __init__(self, config: MooncakeStoreConfig) -> None:
        require_device_set("Mooncake Store")
        self.config = config
        self.protocol = choose_protocol(config)
        """What Mooncake really uses."""
        self._client = MooncakeClient(config, self.protocol)
        self._client_lock = threading.Lock()
        """Held while the client is replaced; not while it is used."""
        self._closed = False

    def register_buffer(self, tensor: torch.Tensor) -> None:
        """Make a contiguous CPU tensor's memory known to the transport. Idempotent."""
        self._client.register(tensor)

    def check_server(self) -> None:
        """Ask the master for its health. Raises StorageUnreachable."""
        check_health(self.config)

    def rebuild(self) -> None:
        """Connect anew and register the same memory. Raises StorageUnavailable.

        The old client is dropped, not closed: another thread may still be inside a call of its,
        and keeps it alive until that returns. Refused with a stand-alone client: that takes up a
        process which came back at its address by itself, and memory that one client of this
        process has shared cannot be shared by a second one.
        """
        if self.config.standalone_storage:
            raise StorageUnavailable(
                f"mooncake_client at {self.config.client_server_address} moves nothing yet; one "
                "that was restarted within a second is not noticed: stop it for three"
            )
        with self._client_lock:
            old = self._client
            new = MooncakeClient(self.config, self.protocol)
            for tensor in old.registered():
                new.register(tensor)
            self._client = new
        logger.warning("Mooncake client was replaced")

    def close(self) -> None:
        """Disconnect. Idempotent; no transfer may be in flight."""
        if not self._closed:
            self._closed = True
            self._client.close()
