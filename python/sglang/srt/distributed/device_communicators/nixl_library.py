"""Loads NIXL's library, and makes agents that read over UCX.

The wheel has names for CUDA 12 and 13, and works without a GPU too. UCX takes its settings from the
environment. The defaults here differ from UCX's in three ways:

- Sockets are open at one address. UCX listens at every interface.
- Reads that UCX would emulate are refused. The process that is read answers them, and UCX ends that
  process if the reader dies at the wrong moment. Reads over RDMA, and from a process of the same
  host, are not emulated; those over TCP are.
- Modules for RDMA are not loaded on hosts without such devices: they break the process's exit.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import numpy as np

from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    get_ib_devices_for_gpu,
    list_rdma_devices,
)
from sglang.srt.distributed.device_communicators.transfer_types import Request
from sglang.srt.environ import envs
from sglang.srt.utils.network import interface_towards

PACKAGES: Final = ("nixl_cu13", "nixl_cu12")
NIXL_USER: Final = "--disaggregation-transfer-backend nixl"
NIXL_MISSING: Final = (
    "{user}: NIXL cannot be loaded ({cause}); install the package nixl-cu13 (extra nixl)"
)
_PLUGIN: Final = "UCX"
_IB_FIELD: Final = "--disaggregation-ib-device"


class UnknownRemoteRange(Exception):
    """The peer has not registered some of the addresses."""


class RemoteFailed(Exception):
    """The peer is gone, or UCX cannot read its memory; the message has NIXL's word."""


def has_nixl() -> bool:
    """True if there is a package; it may lack a library."""
    return any(importlib.util.find_spec(name) for name in PACKAGES)


def load_nixl() -> ModuleType:
    """Load the package. Raises ValueError if none is there, or it lacks a library; names them."""
    envs.NIXL_LOG_LEVEL.export_default()
    cause: ImportError | None = None
    raises = logging.raiseExceptions
    try:
        for name in PACKAGES:
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                cause = cause or error
            except ImportError as error:
                cause = error
                break
    finally:
        logging.raiseExceptions = raises  # NIXL unsets it.
    raise ValueError(NIXL_MISSING.format(user=NIXL_USER, cause=cause)) from cause


def export_ucx_settings(hostname: str, ib_device: str | None) -> None:
    """Set UCX's variables that the environment lacks.

    Args:
        hostname: Address at which peers reach this process.
        ib_device: Devices for RDMA as `get_ib_devices_for_gpu` takes them; None or empty: all.

    Raises:
        ValueError: No interface has the address, or a device is not named correctly.
    """
    chosen = get_ib_devices_for_gpu(ib_device, None, field=_IB_FIELD)
    devices = [one.name for one in list_rdma_devices()] if chosen is None else chosen.split(",")
    if not envs.UCX_NET_DEVICES.is_set():
        ports = [f"{device}:1" for device in devices]
        envs.UCX_NET_DEVICES.set(",".join([interface_towards(hostname), *ports]))
    if not envs.UCX_MODULES.is_set() and not devices:
        envs.UCX_MODULES.set("^ib,rdmacm")
    for field in (envs.UCX_PROTO_EMULATION_ENABLE, envs.UCX_LOG_LEVEL):
        field.export_default()


class NixlAgent:
    """An agent of NIXL with registered memory. Any thread.

    Threads: one of UCX, for events. NIXL's own thread for progress is off, because it takes a whole
    core even while nothing moves: reads progress with `is_read`, those of peers with `progress`.

    Raises:
        ValueError: The plugin for UCX is missing.
        RuntimeError: UCX does not start; names the remedy.
    """

    def __init__(self, library: ModuleType, name: str) -> None:
        self.name = name
        config = library.nixl_agent_config(
            backends=[],
            enable_prog_thread=False,
            sync_mode=library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._errors = importlib.import_module("._bindings", library.__name__)
        try:
            raw: Any = library.nixl_agent(name, config)
            plugins = raw.get_plugin_list()
        except RuntimeError:  # There is none at all.
            plugins = []
        if _PLUGIN not in plugins:
            raise ValueError(
                f"{NIXL_USER}: NIXL's plugin {_PLUGIN} is missing, it has "
                f"{', '.join(sorted(plugins)) or 'none'}: install the package again, or correct "
                "NIXL_PLUGIN_DIR"
            )
        try:
            raw.create_backend(_PLUGIN, {})
        except Exception as error:
            if not _is_of_nixl(error):
                raise
            raise RuntimeError(
                f"{NIXL_USER}: UCX does not start ({error}) with UCX_NET_DEVICES="
                f"{envs.UCX_NET_DEVICES.get()} and UCX_TLS={envs.UCX_TLS.get() or 'all'}: name "
                "devices and transports of this host, or unset them"
            ) from error
        self._raw = raw
        self._registered: dict[int, Any] = {}
        self._reads: dict[int, Any] = {}
        """Handles of reads that have not ended, by number."""
        self._num_reads = 0
        self._lock = threading.Lock()

    def register(self, ranges: Mapping[int, int]) -> None:
        """Register memory of the CPU, address to bytes: all or none. Raises RuntimeError if NIXL
        refuses."""
        done: list[int] = []
        for address, length in ranges.items():
            try:
                known = self._raw.register_memory([(address, length, 0, "")], "DRAM")
            except Exception as error:
                for earlier in done:
                    self.unregister(earlier)
                if not _is_of_nixl(error):
                    raise
                raise RuntimeError(f"NIXL refused to register {length} bytes ({error})") from error
            self._registered[address] = known
            done.append(address)

    def unregister(self, address: int) -> None:
        self._raw.deregister_memory(self._registered.pop(address))

    def metadata(self) -> bytes:
        """Address of this agent and its registered memory, for `connect` of a peer."""
        metadata = self._raw.get_agent_metadata()
        assert isinstance(metadata, bytes)
        return metadata

    def connect(self, metadata: bytes) -> str:
        """Connect to a peer, and return its name. Raises RemoteFailed."""
        with self._failing():
            return str(self._raw.add_remote_agent(metadata), "utf-8", "replace")

    def begin_read(self, peer: str, requests: Sequence[Request]) -> int:
        """Begin to read from a peer; the number of the read. Over shared memory the call copies the
        bytes itself. Raises UnknownRemoteRange or RemoteFailed; then no byte is in flight, except
        after RemoteFailed until `end`."""
        with self._failing():
            own = self._descriptors([(one.local, one.length, 0) for one in requests])
            theirs = self._descriptors([(one.remote, one.length, 0) for one in requests])
            handle = self._raw.initialize_xfer("READ", own, theirs, peer)
        with self._lock:
            number = self._num_reads
            self._num_reads += 1
            self._reads[number] = handle
        with self._failing():
            self._raw.transfer(handle)
        return number

    def is_read(self, number: int) -> bool:
        """True if all bytes of a read are there. Raises RemoteFailed; then bytes may be in flight
        until `end`."""
        with self._failing():
            state = self._raw.check_xfer_state(self._reads[number])
            if state == "ERR":
                raise RemoteFailed("the read failed")
            if state != "DONE":
                return False
            with self._lock:
                handle = self._reads.pop(number)
            handle.release()
            return True

    def progress(self) -> None:
        """Let peers connect, and forget their notifications, which nobody here sends."""
        self._raw.get_new_notifs()

    def end(self) -> None:
        """End the agent and all its reads: no byte arrives afterwards. No call may be in progress,
        and none may follow."""
        with self._lock:
            for handle in self._reads.values():
                # NIXL forgets the handle at once; its bytes go on to arrive until the agent ends.
                handle.release()
                handle._agent = None
            self._reads.clear()
            self._registered.clear()
        # The last reference ends it. Tracebacks of errors may hold the handles and `_raw`.
        self._raw.agent = None
        del self._raw

    def _descriptors(self, rows: Sequence[tuple[int, int, int]]) -> object:
        return self._raw.get_xfer_descs(np.array(rows, dtype=np.uint64), "DRAM")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn NIXL's exceptions into those of this module."""
        try:
            yield
        except self._errors.nixlNotFoundError as error:
            raise UnknownRemoteRange(str(error)) from error
        except Exception as error:
            if not _is_of_nixl(error):
                raise
            raise RemoteFailed(str(error)) from error


def _is_of_nixl(error: Exception) -> bool:
    """True for NIXL's exceptions, which have no base of their own."""
    return type(error).__name__.startswith("nixl")


MakeAgent = Callable[[str], NixlAgent]
"""Makes an agent with a name."""
