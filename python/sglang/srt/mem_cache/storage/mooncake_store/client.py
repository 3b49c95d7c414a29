"""One connection to a Mooncake Store: set up in bounded time, and replaceable after a failure.

All addresses that are passed to C++ come from tensors that are registered here.
"""

from __future__ import annotations

import logging
import resource
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_library import (
    STORE_USER,
    listening_at,
    load_mooncake,
)
from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    IB_PROTOCOLS,
    SUPPORTED_PROTOCOLS,
    choose_devices,
    get_ib_devices_for_gpu,
    list_rdma_devices,
    resolve_mooncake_protocol,
    wheel_protocols,
)
from sglang.srt.distributed.device_communicators.slice_budget import SliceBudget
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_kinds import NPU, device_kind
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig
from sglang.srt.mem_cache.storage.types import StorageUnavailable, StorageUnreachable
from sglang.srt.utils.network import can_connect, wait_for_listener_to_end

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

DEVICE_FIELD: Final = "MOONCAKE_DEVICE (device_name)"
"""Setting of the InfiniBand devices, for errors."""
_NOT_IN_STORE: Final = {
    "nvlink": "Mooncake's store has no such transport",
    "nvlink_intra": "it moves memory of GPUs, and the store's pages are in host memory",
    "barex": "Mooncake's store has no such transport",
}
"""Protocols of Mooncake's engine with which no store client can be set up, and why."""
_STANDALONE_SCRATCH_BYTES: Final = 16 * MIB
"""Scratch memory through which a stand-alone client moves small objects other than pages."""
REACH_SECONDS: Final = 1.5
"""Limit of a TCP connect to the master. TCP repeats a lost packet after one second; Mooncake's own
set-up tries for 90 s."""
_UNFINISHED_AFTER_S: Final = 59.0
"""A call that took longer may have left transfers under way: Mooncake returns after 60 s without
ending them."""
_UNANSWERED_AFTER_S: Final = 29.0
"""A call to a stand-alone client that took longer had no answer: the limit is 30 s."""


class MooncakeClient:
    """A set-up `MooncakeDistributedStore`, its slice budget, and the memory registered with it.

    Several threads may call `store` at once, each within `using`, or within `transferring` for
    calls that move bytes. A client that is replaced is dropped, not closed, because another thread
    may be inside one of its calls for up to a minute.
    """

    def __init__(self, config: MooncakeStoreConfig, protocol: str, ib_device: str) -> None:
        """Connect, over what `settle_protocol` returned.

        Raises:
            StorageUnreachable: One line that names the missing service.
        """
        check_reachable(config)
        self.is_standalone = config.standalone_storage
        self.budget = SliceBudget()
        self.has_read = False
        """True if a node has answered a get, so that a session with it exists. Prefetch thread."""
        self._registered: dict[int, torch.Tensor] = {}
        self._users = 0
        self._given_up = False
        self._disconnected = False
        self._unfinished_transfers = False
        """True if a stand-alone client may have transfers under way, which only its end stops."""
        self._changed = threading.Condition()
        self._client_address = config.client_host_port()
        self.store: Any = load_mooncake().MooncakeDistributedStore()
        code = self._set_up(config, protocol, ib_device)
        if code:
            where = f"protocol {protocol}, local_hostname {config.local_hostname}"
            if self.is_standalone:
                where = f"MOONCAKE_CLIENT={config.client_server_address}"
            raise StorageUnreachable(
                f"Mooncake could not be set up (code {code}) with MOONCAKE_MASTER="
                f"{config.master_server_address}, {where}, global_segment_size "
                f"{config.global_segment_size}"
            )
        logger.info(
            "Mooncake client is set up with master %s over %s",
            config.master_server_address,
            protocol,
        )

    def _set_up(self, config: MooncakeStoreConfig, protocol: str, ib_device: str) -> int:
        code: int
        if self.is_standalone:
            # No memory pool of its own, because the registered memory is already shared with it.
            scratch = config.local_buffer_size or _STANDALONE_SCRATCH_BYTES
            code = self.store.setup_dummy(0, scratch, config.client_server_address)
            return code
        with listening_at(config.local_hostname, config.metadata_server):
            code = self.store.setup(
                config.local_hostname,
                config.metadata_server,
                config.global_segment_size,
                config.local_buffer_size,
                protocol,
                ib_device,
                config.master_server_address,
            )
        return code

    @property
    def is_given_up(self) -> bool:
        """True if the client must be replaced; every use of it raises."""
        return self._given_up

    @contextmanager
    def using(self) -> Iterator[Any]:
        """The store, for one call. Raises StorageUnavailable if the client was given up."""
        with self._changed:
            if self._given_up:
                raise StorageUnavailable("the Mooncake client was given up and not replaced yet")
            self._users += 1
        try:
            yield self.store
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    @contextmanager
    def transferring(self, *, pages: bool = True) -> Iterator[Any]:
        """`using`, for one call that moves bytes; ends or notes transfers that the call leaves.

        A call that times out on a hanging node leaves queued transfers. They continue when the node
        does, minutes later: those of a get write into host pages, those of a put into memory that
        the master may have given to another engine's object. They end with their client, so this
        method gives the client up. Transfers of a stand-alone client are in that process: see
        `wait_for_unfinished_transfers`.

        Args:
            pages: True if the bytes are in registered memory, rather than in Mooncake's own.

        Raises:
            StorageUnavailable: The client was given up, before the call or because of it.
        """
        started = time.monotonic()
        try:
            with self.using() as store:
                yield store
        finally:
            seconds = time.monotonic() - started
            if self.is_standalone and seconds > _UNANSWERED_AFTER_S:
                self._unfinished_transfers |= pages
                raise StorageUnavailable("mooncake_client did not answer within 30 s")
            if not self.is_standalone and seconds > _UNFINISHED_AFTER_S:
                self.give_up()
                raise StorageUnavailable(
                    "a store node hangs: Mooncake did not end a transfer within a minute"
                )

    def wait_for_unfinished_transfers(self) -> None:
        """Block until no earlier call can touch registered memory any more.

        Returns at once, unless a stand-alone client left a call unanswered. Such a client may
        continue the call at any time, and only the end of its process stops that. Blocks until
        then, without a limit.
        """
        if not self._unfinished_transfers:
            return
        assert self._client_address is not None
        logger.error(
            "mooncake_client at %s:%d hangs, and may still access the pages of a call that it did "
            "not answer: L3 is off, and the pages stay reserved, until that process has ended; "
            "stop it, and start it again three seconds later",
            *self._client_address,
        )
        wait_for_listener_to_end(*self._client_address)
        self._unfinished_transfers = False
        logger.warning("mooncake_client has ended, and with it the call that it did not answer")

    def give_up(self) -> None:
        """Disconnect for good. After the return, nothing accesses registered memory.

        Waits until the calls of other threads have returned. `registered` still returns the
        tensors, for a replacement. Idempotent.
        """
        with self._changed:
            is_first, self._given_up = not self._given_up, True
            self._changed.wait_for(lambda: self._users == 0)
            if not is_first:
                self._changed.wait_for(lambda: self._disconnected)
                return
        try:
            self.store.close()
        finally:
            with self._changed:
                self._disconnected = True
                self._changed.notify_all()

    def register(self, tensor: torch.Tensor) -> None:
        """Register the memory of a contiguous tensor, and keep it alive until `unregister`.

        Idempotent.

        Raises:
            StorageUnavailable: Mooncake refused the memory.
            ValueError: A stand-alone client cannot map the memory.
        """
        address = tensor.data_ptr()
        if address in self._registered:
            return
        code = self.store.register_buffer(address, tensor.nbytes)
        if code and self.is_standalone:
            raise ValueError(
                f"mooncake_client cannot map {tensor.nbytes} bytes of L2: they are not from "
                "Mooncake's allocator, which is chosen only at start; restart the server with "
                "MOONCAKE_CLIENT (client_server_address) set"
            )
        if code:
            held = sum(one.nbytes for one in self._registered.values())
            raise StorageUnavailable(
                f"Mooncake refused to register {tensor.nbytes} bytes of host memory (code {code}) "
                f"beside {held} that it has; {_lockable()} (ulimit -l): raise that, or lower "
                "--hicache-size or --hicache-ratio"
            )
        self._registered[address] = tensor

    def unregister(self, tensor: torch.Tensor) -> None:
        """Unregister a tensor, which no transfer may be using."""
        if self._registered.pop(tensor.data_ptr(), None) is not None and not self._given_up:
            self.store.unregister_buffer(tensor.data_ptr())

    def registered(self) -> Iterable[torch.Tensor]:
        """The registered tensors."""
        return tuple(self._registered.values())

    def close(self) -> None:
        """Unregister all tensors and disconnect. No other call may be in flight."""
        for tensor in self.registered():
            self.unregister(tensor)
        self.give_up()


def _lockable() -> str:
    """How much memory this process may page-lock, as transports that use RDMA do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    amount = "any amount" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return f"this process may lock {amount} of memory"


def check_store_protocol(config: MooncakeStoreConfig) -> None:
    """Refuse a protocol that only Mooncake's engine has. Raises ValueError with one line.

    A stand-alone client has a transport of its own, and pages reach it through shared memory.
    """
    if config.standalone_storage or config.protocol not in _NOT_IN_STORE:
        return
    usable = ", ".join(one for one in SUPPORTED_PROTOCOLS if one not in _NOT_IN_STORE)
    raise ValueError(
        f"{STORE_USER} cannot use MOONCAKE_PROTOCOL={config.protocol}: "
        f"{_NOT_IN_STORE[config.protocol]}; set protocol in "
        f"--hicache-storage-backend-extra-config to one of: {usable}"
    )


def settle_protocol(config: MooncakeStoreConfig, device: str) -> tuple[str, str]:
    """The protocol and the InfiniBand devices (comma separated; empty: Mooncake chooses) for this
    process; see `mooncake_protocol`.

    Args:
        config: Settings of the store.
        device: Device of this process, as given to `mark_device_set`.

    Raises:
        ValueError: One line with the setting and the remedy.
    """
    load_mooncake()
    check_store_protocol(config)
    devices = list_rdma_devices()
    names = ""
    if config.protocol in IB_PROTOCOLS:
        _, _, index = device.partition(":")
        gpu_id = int(index) if index else None
        names = get_ib_devices_for_gpu(config.device_name, gpu_id, field=DEVICE_FIELD) or ""
        devices = choose_devices(names, devices, field=DEVICE_FIELD)
    protocol = resolve_mooncake_protocol(
        config.protocol,
        allow_tcp_fallback=envs.SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK.get(),
        devices=devices,
        supported=wheel_protocols(),
    )
    if protocol == "ascend" and device_kind(device) is not NPU:
        raise ValueError(
            f"MOONCAKE_PROTOCOL=ascend connects NPUs, and this process is on {device}: set "
            "MOONCAKE_PROTOCOL (protocol) to rdma or tcp"
        )
    return protocol, names if protocol in IB_PROTOCOLS else ""


def is_master_reachable(config: MooncakeStoreConfig) -> bool:
    """True if the master's port accepts connections, within `REACH_SECONDS`."""
    return _answers(config.master_host_port())


def is_reachable(config: MooncakeStoreConfig) -> bool:
    """True if the master, and the stand-alone client if there is one, accept connections."""
    return is_master_reachable(config) and _answers(config.client_host_port())


def _answers(address: tuple[str, int] | None) -> bool:
    return address is None or can_connect(*address, timeout=REACH_SECONDS)


def check_reachable(config: MooncakeStoreConfig) -> None:
    """Raise StorageUnreachable, without delay, if master or client does not answer."""
    if not is_master_reachable(config):
        raise StorageUnreachable(
            f"no mooncake_master answers at MOONCAKE_MASTER={config.master_server_address}: start "
            "one there, or set MOONCAKE_MASTER (master_server_address) to where it runs"
        )
    if not is_reachable(config):
        raise StorageUnreachable(
            f"no mooncake_client answers at MOONCAKE_CLIENT={config.client_server_address}: start "
            "one on this host, or unset MOONCAKE_CLIENT (client_server_address)"
        )
    if config.check_server:
        check_health(config)


def check_health(config: MooncakeStoreConfig) -> None:
    """Ask the master's metrics port for its health. Raises StorageUnreachable."""
    address = config.master_host_port()
    host = address[0] if address else "localhost"
    bracketed = f"[{host}]" if ":" in host else host
    url = f"http://{bracketed}:{config.master_metrics_port}/health"
    try:
        with urllib.request.urlopen(url, timeout=REACH_SECONDS):
            return
    except (urllib.error.URLError, OSError) as error:
        raise StorageUnreachable(
            f"mooncake_master is not healthy at {url}: {error}; check MOONCAKE_MASTER and "
            "MOONCAKE_MASTER_METRICS_PORT, or unset MOONCAKE_CHECK_SERVER"
        ) from error
