"""One connection to a Mooncake Store: set up in bounded time, and replaceable after a failure; its
calls, and the codes that Mooncake 0.3.13.post1 returns for an object.

All addresses that are passed to C++ come from tensors that are registered here.
"""

from __future__ import annotations

import itertools
import logging
import resource
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_library import (
    listening_at,
    load_mooncake,
)
from sglang.srt.distributed.device_communicators.transfer_types import SliceBudget
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig, check_reachable
from sglang.srt.mem_cache.storage.mooncake_store.offload_folder import claim_folder
from sglang.srt.mem_cache.storage.types import (
    CacheOutcome,
    StorageUnavailable,
    StorageUnreachable,
)
from sglang.srt.utils.network import wait_for_listener_to_end

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

    from sglang.srt.mem_cache.storage.mooncake_store.page_batches import PageBatch

_STANDALONE_SCRATCH_BYTES: Final = 16 * MIB
"""Scratch memory through which a stand-alone client moves small objects other than pages."""
_FAULT_AROUND: Final = 64 << 10
"""Bytes that Linux maps around the first access to a page of shared memory."""
_BYTES_OF_TOUCH: Final = 1024
"""Slices of an object that `_map_ahead` puts."""
_MAP_AHEAD_S: Final = 1.0
"""Longest that `_map_ahead` takes, beyond its memory at `_MAP_AHEAD_RATE`."""
_MAP_AHEAD_RATE: Final = 8e9
"""Bytes per second; it is 18e9 where the objects stay on this host."""
_UNFINISHED_AFTER_S: Final = 59.0
"""A call that took longer may have left transfers under way: Mooncake returns after 60 s without
ending them."""
_UNANSWERED_AFTER_S: Final = 29.0
"""A call to a stand-alone client that took longer had no answer: the limit is 30 s."""
NO_ROOM: Final = -200
"""A put found no room. Evictions may make room later."""
_BUFFER_TOO_SMALL: Final = -600
_NOT_READY: Final = -703
_NOT_FOUND: Final = -704
_EXISTS: Final = -705
_UNDER_LEASE: Final = -706
_LEASE_EXPIRED: Final = -707
_TRANSFER_FAILED: Final = -800
"""No bytes moved: a broken client, a dead node or a truncated object."""
_NO_MASTER: Final = -900
_NO_OFFLOAD: Final = -1300
"""The master does not offload."""
UNKNOWN_TENANT: Final = -1701
"""The master keeps tenants apart, and does not know this one."""
UNREGISTERED: Final = (
    "mooncake_master does not know tenant %s, so nothing is stored: add it to the file of "
    "--tenant_quota_connector_uri, or set tenant_id (MOONCAKE_TENANT_ID)"
)
STORE_FAILURES: Final = (_TRANSFER_FAILED, _NO_MASTER)
"""The store failed, not just this object."""
_ABOUT_OBJECT: Final = (_NOT_READY, _NOT_FOUND, _UNDER_LEASE)
"""Negative codes that answer a query about an object; other ones report a failed query."""
_NOT_THERE: Final = (_NOT_READY, _NOT_FOUND, _LEASE_EXPIRED)


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
        self.is_given_up = False
        """True if the client must be replaced; every use of it raises."""
        self._disconnected = False
        self.has_unfinished_transfers = False
        """True if a stand-alone client may have transfers under way, which only its end stops."""
        self._changed = threading.Condition()
        self._client_address = config.client_host_port()
        self.store: Any = load_mooncake().MooncakeDistributedStore()
        code = self._set_up(config, protocol, ib_device)
        if code:
            where = f"protocol {protocol}, local_hostname {config.local_hostname}"
            if self.is_standalone:
                where = f"MOONCAKE_CLIENT={config.client_server_address}"
            if code == _NO_OFFLOAD:
                where += "; start mooncake_master with --enable_offload=true for enable_ssd_offload"
            raise StorageUnreachable(
                f"Mooncake could not be set up (code {code}) with MOONCAKE_MASTER="
                f"{config.master_server_address}, metadata_server {config.metadata_server}, "
                f"global_segment_size {config.global_segment_size}, {where}"
            )
        logger.info(
            "Mooncake client is set up with master %s over %s",
            config.master_server_address,
            protocol,
        )

    def _set_up(self, config: MooncakeStoreConfig, protocol: str, ib_device: str) -> int:
        code: int
        if self.is_standalone:
            # Size 0: the client needs no memory pool, because it shares the registered memory.
            scratch = config.local_buffer_size or _STANDALONE_SCRATCH_BYTES
            code = self.store.setup_dummy(0, scratch, config.client_server_address)
            return code
        further: dict[str, Any] = {"tenant_id": config.tenant_id} if config.has_tenant else {}
        if config.offloads:
            folder = claim_folder(config.ssd_offload_path or "")
            further |= {"enable_ssd_offload": True, "ssd_offload_path": str(folder)}
        with listening_at(config.local_hostname, config.metadata_server):
            code = self.store.setup(
                config.local_hostname,
                config.metadata_server,
                config.global_segment_size,
                config.local_buffer_size,
                protocol,
                ib_device,
                config.master_server_address,
                **further,
            )
        return code

    @contextmanager
    def using(self) -> Iterator[Any]:
        """The store, for one call. Raises StorageUnavailable if the client was given up."""
        with self._changed:
            if self.is_given_up:
                raise StorageUnavailable("the Mooncake client was given up and not replaced yet")
            self._users += 1
        try:
            yield self.store
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    @contextmanager
    def transferring(self, slices: int = 0) -> Iterator[Any]:
        """`using`, for one call that moves bytes; ends or notes transfers that the call leaves.

        A call that times out on a hanging node leaves queued transfers. They continue when the node
        does, minutes later: a get writes into host pages, a put into memory that the master may
        have given to another engine's object. They end with their client, so this
        method gives the client up. Transfers of a stand-alone client are in that process: see
        `wait_for_unfinished_transfers`.

        Args:
            slices: Buffers in registered memory, which count in the budget; 0: the bytes are in
                Mooncake's own memory.

        Raises:
            StorageUnavailable: The client was given up, before the call or because of it.
        """
        with self.budget.hold(slices) if slices else nullcontext():
            started = time.monotonic()
            try:
                with self.using() as store:
                    yield store
            finally:
                seconds = time.monotonic() - started
                if self.is_standalone and seconds > _UNANSWERED_AFTER_S:
                    self.has_unfinished_transfers |= slices > 0
                    raise StorageUnavailable("mooncake_client did not answer within 30 s")
                if not self.is_standalone and seconds > _UNFINISHED_AFTER_S:
                    self.give_up()
                    raise StorageUnavailable(
                        "a store node hangs: Mooncake did not end a transfer within a minute"
                    )

    def wait_for_unfinished_transfers(self) -> None:
        """Block until no earlier call can touch registered memory any more.

        A stand-alone client may continue a call that it left unanswered at any time, and only the
        end of its process stops that. Blocks until then, without a limit.
        """
        assert self._client_address is not None
        logger.error(
            "mooncake_client at %s:%d hangs, and may still access the pages of a call that it did "
            "not answer: L3 is off, and the pages stay reserved, until that process has ended; "
            "stop it, and start it again three seconds later",
            *self._client_address,
        )
        wait_for_listener_to_end(*self._client_address)
        self.has_unfinished_transfers = False
        logger.warning("mooncake_client has ended, and with it the call that it did not answer")

    def give_up(self) -> None:
        """Disconnect for good. After the return, nothing accesses registered memory.

        Waits until the calls of other threads have returned. `registered` still returns the
        tensors, for a replacement. Idempotent.
        """
        with self._changed:
            is_first, self.is_given_up = not self.is_given_up, True
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
        if self.is_standalone:
            self._map_ahead(address, tensor.nbytes)

    def _map_ahead(self, address: int, size: int) -> None:
        """Let a stand-alone client map memory that it has just learnt of.

        Else it maps each page when a transfer first meets it, and the first pass through L2 takes
        four to six times as long as later ones. Objects of single bytes are put and removed. A
        store that fails, is full or is far away keeps the pages unmapped.
        """
        key = f"map-ahead/{uuid.uuid4().hex}"
        until = time.monotonic() + _MAP_AHEAD_S + size / _MAP_AHEAD_RATE
        touched = range(address, address + size, _FAULT_AROUND)
        for first in range(0, len(touched), _BYTES_OF_TOUCH):
            places = list(touched[first : first + _BYTES_OF_TOUCH])
            with self.transferring(len(places)) as store:
                code: int = store.batch_put_from_multi_buffers(
                    [key], [places], [[1] * len(places)]
                )[0]
            self.remove([key])
            if code or time.monotonic() > until:
                return

    def unregister(self, tensor: torch.Tensor) -> None:
        """Unregister a tensor, which no transfer may be using."""
        if self._registered.pop(tensor.data_ptr(), None) is not None and not self.is_given_up:
            self.store.unregister_buffer(tensor.data_ptr())

    def registered(self) -> Iterable[torch.Tensor]:
        """The registered tensors."""
        return tuple(self._registered.values())

    def close(self) -> None:
        """Unregister all tensors and disconnect. No other call may be in flight."""
        for tensor in self.registered():
            self.unregister(tensor)
        self.give_up()

    # -- calls: without a master each takes seconds to fail, so the first failure decides for all --

    def move(self, batch: PageBatch, *, is_get: bool, groups: list[str] | None = None) -> list[int]:
        """Get or put a batch, within the budget. Returns a code for each page.

        Args:
            groups: For a put, the group of each object. Objects of a group share their lease, and a
                full store evicts all or none of them.

        Raises StorageUnavailable if transfers may still be under way or the answer is malformed.
        """
        count = len(batch.keys)
        # Opening a session with a hanging node takes a minute for each key: get one key first.
        bounds = [0, 1, count] if is_get and not self.has_read and count > 1 else [0, count]
        codes: list[int] = []
        for begin, end in itertools.pairwise(bounds):
            pages = slice(begin, end)
            parts = (batch.keys[pages], batch.ptrs[pages], batch.sizes[pages])
            with self.transferring(sum(map(len, batch.ptrs[pages]))) as store:
                if is_get:
                    codes += store.batch_get_into_multi_buffers(*parts)
                elif groups is None:
                    codes += store.batch_put_from_multi_buffers(*parts)
                else:
                    config = load_mooncake().ReplicateConfig()
                    config.group_ids = groups
                    codes += store.batch_put_from_multi_buffers(*parts, config)
            if end < count and any(code in STORE_FAILURES for code in codes):
                return self._mark_truncated(batch, [codes[0]] * count)
        if len(codes) != count:
            raise StorageUnavailable(f"Mooncake answered {len(codes)} codes to {count}")
        self.has_read |= is_get and count > 1
        has_failed = is_get and _TRANSFER_FAILED in codes
        return self._mark_truncated(batch, codes) if has_failed else codes

    def _mark_truncated(self, batch: PageBatch, codes: list[int]) -> list[int]:
        """Replace the codes of failed transfers by the object's size if the size is wrong.

        For an object that is smaller than the buffers, Mooncake returns the code of a failed
        transfer. A plain get would return the size, but supports only one buffer for each object.
        """
        marked = list(codes)
        for index, code in enumerate(codes):
            if code != _TRANSFER_FAILED:
                continue
            with self.using() as store:
                size: int = store.get_size(batch.keys[index])
            if size < 0 and size not in _ABOUT_OBJECT:
                break
            if size != sum(batch.sizes[index]):
                marked[index] = size
        return marked

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects while the master answers. Raises StorageUnavailable for a lost client."""
        for key in keys:
            with self.using() as store:
                code: int = store.remove(key, True)
            if code < 0 and code not in _ABOUT_OBJECT:
                return

    def moves_bytes(self, key: str, *, full_is_fine: bool) -> bool:
        """True if a client can put and get a few bytes. A broken one answers, but moves nothing.

        Args:
            key: A key of no other object; the object is removed again.
            full_is_fine: True if a store without room for the object counts as working.

        Raises:
            StorageUnavailable: The client was given up, before or because of this call.
        """
        payload = b"probe"
        with self.transferring() as store:
            code: int = store.put(key, payload)
        if code == NO_ROOM:
            with self.using() as store:
                return full_is_fine and bool(store.health_check() == 0)
        if code:
            return False
        with self.transferring() as store:
            got: bytes = store.get(key)
        self.remove([key])
        return got == payload


def get_outcome(code: int, size: int) -> CacheOutcome:
    """Outcome of a get of `size` bytes. After LANDED, the trailer must still be checked.

    An object of another size is damaged.
    """
    if code == size:
        return CacheOutcome.LANDED
    if code >= 0 or code == _BUFFER_TOO_SMALL:
        return CacheOutcome.DAMAGED
    return CacheOutcome.MISS if code in _NOT_THERE else CacheOutcome.FAILED


def set_outcome(code: int) -> CacheOutcome:
    """Outcome of a put, as Mooncake says. A key that already exists counts as written; so does one
    that another client has begun to put, though the store does not have it: ask afterwards."""
    return CacheOutcome.LANDED if code in (0, _EXISTS) else CacheOutcome.FAILED


def _lockable() -> str:
    """How much memory this process may page-lock, as transports that use RDMA do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    amount = "any amount" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    return f"this process may lock {amount} of memory"
