"""Loads Mooncake's library with other defaults, and narrows its ports to this process's address.

Mooncake binds its ports to all addresses and has no setting for that. Nine bytes to its handshake
port end the process, and its data port reads and writes registered memory. The libraries call
libc's `bind` through their tables of imported functions. These tables get the address of
`BindRedirection._bind` instead, which replaces "all addresses" for calls within `listening_at`.
A port is never open to others, not even for a moment, and no privilege is needed. Ports stay open
where the address is not known; `log_exposed_ports` looks at the ports themselves.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Final

from sglang.srt.distributed.device_communicators.mooncake_log import redirect_log
from sglang.srt.environ import envs
from sglang.srt.utils.loaded_libraries import replace_imports
from sglang.srt.utils.network import address_at_home

logger = logging.getLogger(__name__)

MOONCAKE_MISSING: Final = (
    "{user}: Mooncake cannot be loaded ({cause}); install mooncake-transfer-engine and the "
    "libraries libibverbs1 and libnuma1"
)
STORE_USER: Final = "--hicache-storage-backend mooncake"
ENGINE_USER: Final = "Transfer Engine"
PEER_TO_PEER: Final = "P2PHANDSHAKE"
"""Stands for no metadata server: clients and engines ask each other."""
_Bind: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)
_ADDRESS_AT: Final = {int(socket.AF_INET): slice(4, 8), int(socket.AF_INET6): slice(8, 24)}
"""Place of the address in a `sockaddr`, by family."""
_IPV4_IN_IPV6: Final = bytes(10) + b"\xff\xff"

_addresses: ContextVar[Mapping[int, bytes]] = ContextVar("mooncake_addresses")
"""Address to which a socket is bound instead of "all addresses", by family."""


def load_mooncake() -> ModuleType:
    """Load the module `mooncake.store`. It logs only errors to stderr, and its retries are bounded.

    Raises:
        ValueError: The package or a shared library that it needs is missing; names them.
    """
    return _load("mooncake.store", STORE_USER)


def load_transfer_engine() -> ModuleType:
    """Load the module `mooncake.engine`. It ends a stalled TCP transfer after ten seconds.

    Its default limit is as long as its calls wait, so that either the transfer or the call could
    end first.

    Raises:
        ValueError: The package or a shared library that it needs is missing; names them.
    """
    for field in (
        envs.MC_TCP_PROGRESS_TIMEOUT_SEC,
        envs.MC_TCP_STATUS_TIMEOUT_SEC,
        envs.MC_TRANSFER_TIMEOUT,
    ):
        field.export_default()
    return _load("mooncake.engine", ENGINE_USER)


def _load(module: str, user: str) -> ModuleType:
    # Mooncake reads these variables when its first library is loaded: no other module here may
    # import it.
    for field in (envs.MC_STORE_CLIENT_SETUP_RETRIES, envs.MC_LOG_LEVEL, envs.GLOG_minloglevel):
        field.export_default()
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(MOONCAKE_MISSING.format(user=user, cause=error)) from error
    _redirect(module)
    return loaded


@functools.cache
def _redirect(module: str) -> None:
    """Redirect what the libraries of `module` bind and log, once: the search takes 25 ms."""
    package = Path(os.path.realpath(str(importlib.import_module("mooncake").__file__))).parent
    # Its own libraries, and those that the wheel carries along (`mooncake_*.libs`).
    libraries = str(package.parent / "mooncake")
    binds, logs = redirect_binds(libraries), redirect_log(libraries)
    logger.debug("%s: %d imports of bind and %d of stderr redirected", module, binds, logs)


@contextmanager
def listening_at(hostname: str, metadata: str = PEER_TO_PEER) -> Iterator[None]:
    """Context manager: ports that Mooncake opens in this thread are open only at `hostname`.

    They are open at all addresses if `address_at_home` knows none, if this machine does not have
    the address (behind a NAT), and with a metadata server, because Mooncake chooses the address
    that it registers there.

    Args:
        hostname: The name that Mooncake is given: `host`, `host:port` or `[host]:port`.
        metadata: Mooncake's metadata server.
    """
    address = address_at_home(hostname) if metadata == PEER_TO_PEER else None
    packed: dict[int, bytes] = {}
    if address is not None:
        packed[socket.AF_INET6] = address.packed
    if address is not None and address.version == 4:
        packed = {
            socket.AF_INET: address.packed,
            socket.AF_INET6: _IPV4_IN_IPV6 + address.packed,
        }
    token = _addresses.set(packed)
    try:
        yield
    finally:
        _addresses.reset(token)


def narrowed(sockaddr: bytes, addresses: Mapping[int, bytes]) -> bytes | None:
    """A `sockaddr` of "all addresses" with its family's address instead; None: leave it."""
    family = int.from_bytes(sockaddr[:2], sys.byteorder)
    where = _ADDRESS_AT.get(family)
    if where is None or family not in addresses or any(sockaddr[where]):
        return None
    return sockaddr[: where.start] + addresses[family] + sockaddr[where.stop :]


def redirect_binds(libraries: str) -> int:
    """Redirect the `bind` of loaded libraries. Idempotent.

    Args:
        libraries: Prefix of the paths of Mooncake's libraries.

    Returns:
        Number of imports that this call redirected.
    """
    redirection = _redirection()
    return replace_imports(libraries, redirection.theirs, redirection.ours)


@functools.cache
def _redirection() -> BindRedirection:
    """The redirection of this process. It is never freed: the libraries' tables point to it."""
    return BindRedirection()


class BindRedirection:
    """A C function in place of libc's `bind`.

    Attributes:
        theirs: Address of libc's function.
        ours: Address of this function.
    """

    def __init__(self) -> None:
        self.theirs = ctypes.cast(ctypes.CDLL("libc.so.6").bind, ctypes.c_void_p).value or 0
        self._their_bind = _Bind(self.theirs)
        self._our_bind = _Bind(self._bind)
        self.ours = ctypes.cast(self._our_bind, ctypes.c_void_p).value or 0

    def _bind(self, fd: int, sockaddr: int, length: int) -> int:
        """libc's `bind`, as Mooncake calls it; errno is the caller's."""
        code: int
        try:
            raw = narrowed(ctypes.string_at(sockaddr, length), _addresses.get({}))
        except Exception:
            # The caller is C++, so nothing above would log it.
            logger.exception("a port of Mooncake stays open at all addresses")
            raw = None
        if raw is not None:
            code = self._their_bind(fd, ctypes.create_string_buffer(raw, length), length)
            if not code or ctypes.get_errno() != errno.EADDRNOTAVAIL:
                return code
        code = self._their_bind(fd, sockaddr, length)
        return code
