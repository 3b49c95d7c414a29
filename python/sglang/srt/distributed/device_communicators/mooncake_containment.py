"""Keeps this process alive when Mooncake's parser throws on a message of a peer.

The thread behind Mooncake's handshake port parses messages of peers without catching exceptions, so
C++ would end the process. `contain_parser_errors` ends only that thread. Transfers and connections
go on, but the port answers no new peer until the process starts again.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import platform
import threading
from typing import Final

logger = logging.getLogger(__name__)

_EXIT_CALL: Final = {"x86_64": 60, "aarch64": 93}
"""Number of the system call that ends a thread, by machine."""
_PARSER_ERRORS: Final = b"N4Json"
"""Prefix of the C++ names of all types of Mooncake's JSON library."""
_Handler: Final = ctypes.CFUNCTYPE(None)
_SetHandler: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_ExceptionType: Final = ctypes.CFUNCTYPE(ctypes.c_void_p)


@functools.cache
def contain_parser_errors() -> None:
    """Install the handler for all threads of this process. Does nothing on machines for which
    Mooncake has no wheel. Idempotent."""
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
                # Without unwinding, which would end the process. A join of the thread returns.
                self._libc.syscall(self._exit_call, 0)
            logger.critical("uncaught C++ exception %r", name)
        except Exception:
            logger.exception("thread %d ends the process", threading.get_native_id())
        if self._before:
            _Handler(self._before)()

    def _exception_name(self) -> bytes:
        """Name of the current exception's type, as the compiler writes it; empty: none."""
        type_info = self._exception_type()
        if not type_info:
            return b""
        # Behind the pointer to its virtual functions; an asterisk marks names of one library.
        name = ctypes.c_char_p.from_address(type_info + ctypes.sizeof(ctypes.c_void_p)).value
        return (name or b"").removeprefix(b"*")
