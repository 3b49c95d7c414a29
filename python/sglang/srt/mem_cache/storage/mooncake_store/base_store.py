"""The connection of a Mooncake Store backend: created, replaced after failures, and closed."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch

from sglang.srt.distributed.device_context import require_device_set
from sglang.srt.mem_cache.storage.mooncake_store.client import (
    MooncakeClient,
    check_health,
    settle_protocol,
)
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig
from sglang.srt.mem_cache.storage.types import StorageUnavailable

logger = logging.getLogger(__name__)


class MooncakeBaseStore:
    """Connects to the store, replaces a broken connection, and registers memory with it.

    Raises:
        ValueError: A setting is missing, malformed or cannot work on this host.
        StorageUnreachable: There is no master. Raised without delay.
        RuntimeError: No device is set in this process yet.
    """

    def __init__(self, config: MooncakeStoreConfig) -> None:
        device = require_device_set("Mooncake Store")
        self.config = config
        self.protocol, self.ib_device = settle_protocol(config, device)
        """The protocol and the InfiniBand devices that Mooncake uses."""
        self._client = MooncakeClient(config, self.protocol, self.ib_device)
        self._client_lock = threading.Lock()
        """Held while the client is replaced, not while it is used."""
        self._closed = False

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

    def check_server(self) -> None:
        """Ask the master for its health. Raises StorageUnreachable."""
        check_health(self.config)

    def rebuild(self) -> None:
        """Connect again and register the same memory. Raises StorageUnavailable.

        The old client is dropped, not closed: another thread may still be inside one of its calls,
        which keeps it alive. With a stand-alone client the rebuild is refused: Mooncake reconnects
        to a restarted process by itself, and a second client of this process could not share the
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
