"""Loads Mooncake's library with other defaults, narrows its ports to this process's address, and
contains the exceptions of its parser.

Mooncake binds its ports to all addresses and has no setting for that. Nine bytes to its handshake
port end the process, and its data port reads and writes registered memory. The libraries call
libc's `bind` through their tables of imported functions. These tables get the address of
`BindRedirection._bind` instead, which replaces "all addresses" for calls within `listening_at`.
A port is never open to others, not even for a moment, and no privilege is needed. Ports stay open
where the address is not known; `log_exposed_ports` names these.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import importlib
import logging
import os
import platform
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Final

from sglang.srt.distributed.device_communicators.mooncake_log import mooncake_log
from sglang.srt.environ import envs
from sglang.srt.utils.loaded_libraries import replace_imports
from sglang.srt.utils.network import address_at_home, ports_on_all_addresses

logger = logging.getLogger(__name__)

MOONCAKE_MISSING: Final = (
    "{user}: Mooncake cannot be loaded ({cause}); install mooncake-transfer-engine and the "
    "libraries libcurl4, libibverbs1 and libnuma1, for its EFA wheels also libfabric1"
)
STORE_USER: Final = "--hicache-storage-backend mooncake"
ENGINE_USER: Final = "Transfer Engine"
PEER_TO_PEER: Final = "P2PHANDSHAKE"
"""Stands for no metadata server: clients and engines ask each other."""
_Bind: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)
_EXIT_CALL: Final = {"x86_64": 60, "aarch64": 93}
"""Number of the system call that ends a thread, by machine."""
_PARSER_ERRORS: Final = b"N4Json"
"""Prefix of the C++ names of all types of Mooncake's JSON library."""
_Handler: Final = ctypes.CFUNCTYPE(None)
_SetHandler: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_ExceptionType: Final = ctypes.CFUNCTYPE(ctypes.c_void_p)
_ADDRESS_AT: Final = {int(socket.AF_INET): slice(4, 8), int(socket.AF_INET6): slice(8, 24)}
"""Place of the address in a `sockaddr`, by family."""
_IPV4_IN_IPV6: Final = bytes(10) + b"\xff\xff"

_addresses: ContextVar[Mapping[int, bytes]] = ContextVar("mooncake_addresses")
"""Address to which a socket is bound instead of "all addresses", by family."""


def load_mooncake() -> ModuleType:
    """Load the module `mooncake.store`. It logs only errors to stderr, and its retries are bounded.
    Raises ValueError if the package or a shared library that it needs is missing; names them."""
    return _load("mooncake.store", STORE_USER)


def load_transfer_engine() -> ModuleType:
    """Load the module `mooncake.engine`. It ends a stalled TCP transfer after ten seconds.

    Its default limit is as long as its calls wait, so that either the transfer or the call could
    end first. Raises like `load_mooncake`.
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
    # The prefix matches the package's libraries, and the wheel's others in `mooncake_*.libs`.
    libraries = str(package.parent / "mooncake")
    binds, logs = bind_redirection().redirect(libraries), mooncake_log().redirect(libraries)
    logger.debug("%s: %d imports of bind and %d of stderr redirected", module, binds, logs)


@contextlib.contextmanager
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
    family = _family(sockaddr)
    if family not in addresses or not is_wide(sockaddr):
        return None
    where = _ADDRESS_AT[family]
    return sockaddr[: where.start] + addresses[family] + sockaddr[where.stop :]


def is_wide(sockaddr: bytes) -> bool:
    """True if a `sockaddr` of IPv4 or IPv6 means "all addresses"."""
    where = _ADDRESS_AT.get(_family(sockaddr))
    return where is not None and not any(sockaddr[where])


def _family(sockaddr: bytes) -> int:
    return int.from_bytes(sockaddr[:2], sys.byteorder)


def log_exposed_ports(logger: logging.Logger) -> None:
    """Warn in one line about the ports that Mooncake has open on all addresses in this process, if
    there are any. Listeners of others are theirs to warn of."""
    ports = sorted(bind_redirection().wide.intersection(ports_on_all_addresses()))
    if ports:
        logger.warning(
            "Mooncake's TCP ports %s are open on all addresses: anyone who reaches them can read "
            "and write pages of this process, and keep its peers from it; set "
            "MOONCAKE_LOCAL_HOSTNAME to the address at which peers reach this host, or keep the "
            "ports behind a firewall",
            ", ".join(map(str, ports)),
        )


@functools.cache
def bind_redirection() -> BindRedirection:
    """The redirection of this process. It is never freed: the libraries' tables point to it."""
    return BindRedirection()


class BindRedirection:
    """A C function in place of libc's `bind`.

    Attributes:
        theirs: Address of libc's function.
        ours: Address of this function.
        wide: Ports that the libraries have bound to all addresses, some of which may be closed.
    """

    def __init__(self) -> None:
        self.theirs = ctypes.cast(ctypes.CDLL("libc.so.6").bind, ctypes.c_void_p).value or 0
        self._their_bind = _Bind(self.theirs)
        self._our_bind = _Bind(self._bind)
        self.ours = ctypes.cast(self._our_bind, ctypes.c_void_p).value or 0
        self.wide: set[int] = set()

    def redirect(self, libraries: str) -> int:
        """Redirect the `bind` of the loaded libraries whose paths begin with `libraries`. Returns
        the number of imports that this call redirected. Idempotent."""
        return replace_imports(libraries, self.theirs, self.ours)

    def _bind(self, fd: int, sockaddr: int, length: int) -> int:
        """libc's `bind`, as Mooncake calls it; errno is the caller's."""
        code: int
        given = b""
        try:
            given = ctypes.string_at(sockaddr, length)
            raw = narrowed(given, _addresses.get({}))
        except Exception:
            # The caller is C++, so nothing above would log it.
            logger.exception("a port of Mooncake stays open at all addresses")
            raw = None
        if raw is not None:
            code = self._their_bind(fd, ctypes.create_string_buffer(raw, length), length)
            if not code or ctypes.get_errno() != errno.EADDRNOTAVAIL:
                return code
        code = self._their_bind(fd, sockaddr, length)
        if not code and is_wide(given):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as bound:
                self.wide.add(bound.getsockname()[1])
        return code


@functools.cache
def contain_parser_errors() -> None:
    """Keep this process alive when Mooncake's parser throws on a message of a peer. Does nothing on
    machines for which Mooncake has no wheel. Idempotent.

    The thread behind Mooncake's handshake port parses messages of peers without catching
    exceptions, so C++ would end the process. The handler ends only that thread. Transfers and
    connections go on, but the port answers no new peer until the process starts again.
    """
    number = _EXIT_CALL.get(platform.machine())
    if number is not None:
        atexit.register(_Containment(number).remove)


class _Containment:
    """A C++ terminate handler. It passes other exceptions on to the previous handler."""

    def __init__(self, exit_call: int) -> None:
        self._exit_call = exit_call
        self._libc = ctypes.CDLL("libc.so.6")
        runtime = ctypes.CDLL("libstdc++.so.6")
        # std::set_terminate
        self._set_handler = _SetHandler(("_ZSt13set_terminatePFvvE", runtime))
        self._exception_type = _ExceptionType(("__cxa_current_exception_type", runtime))
        self._ours = _Handler(self._terminate)
        self._before = self._set_handler(ctypes.cast(self._ours, ctypes.c_void_p))

    def remove(self) -> None:
        """Put back the previous handler: this one needs the interpreter."""
        self._set_handler(self._before)

    def _terminate(self) -> None:
        """Runs in the thread with the uncaught exception. Its stack is not unwound."""
        try:
            name = self._exception_name()
            is_main = threading.get_native_id() == os.getpid()
            if name.startswith(_PARSER_ERRORS) and not is_main:
                logger.error(
                    "Mooncake's parser cannot take a message to its handshake port (%s): the port "
                    "answers no new peers until this process starts again; connected peers go on. "
                    "Keep strangers away from Mooncake's ports (SECURITY.md)",
                    name.decode(errors="replace"),
                )
                # End the thread without unwinding, which would end the process. A join of the
                # thread returns.
                self._libc.syscall(self._exit_call, 0)
            logger.critical("uncaught C++ exception %r", name)
        except Exception:
            logger.exception("thread %d ends the process", threading.get_native_id())
        if self._before:
            _Handler(self._before)()

    def _exception_name(self) -> bytes:
        """Mangled name of the current exception's type; empty if there is none."""
        type_info = self._exception_type()
        if not type_info:
            return b""
        # The name's pointer follows the one to the virtual functions. An asterisk marks names that
        # are local to a library.
        name = ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p)).value
        return (name or b"").removeprefix(b"*")
