"""Keeps this process alive when a peer's message is more than Mooncake's parser takes.

The thread behind Mooncake's handshake port parses what peers send, and does not catch what the
parser throws; C++ then ends the process. `contain_parser_errors` ends that thread alone. Transfers
and connections go on, but the port answers no new peer until the process starts again.
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
"""Number of the system call that ends one thread, by machine."""
_PARSER_ERRORS: Final = b"N4Json"
"""How the C++ names of all types of Mooncake's JSON library begin."""
_Handler: Final = ctypes.CFUNCTYPE(None)
_SetHandler: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_ExceptionType: Final = ctypes.CFUNCTYPE(ctypes.c_void_p)


@functools.cache
def contain_parser_errors() -> None:
    """Install the handler, for all threads of this process. Idempotent; not for other machines
    than those of Mooncake's wheels."""
    number = _EXIT_CALL.get(platform.machine())
    if number is not None:
        atexit.register(_Containment(number).remove)


class _Containment:
    """A C++ terminate handler. Others' exceptions go to the handler that was there before."""

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
        """Put back the handler that was there before. Ours needs the interpreter."""
        self._set_handler(self._before)

    def _terminate(self) -> None:
        """In the thread whose exception nobody catches. Its stack is still there, and stays."""
        try:
            name = self._exception_name()
            is_main = threading.get_native_id() == os.getpid()
            if name.startswith(_PARSER_ERRORS) and not is_main:
                logger.error(
                    "a peer sent to Mooncake's handshake port what its parser does not take (%s): "
                    "the port answers no new peers until this process starts again; what is "
                    "connected goes on. Keep strangers away from Mooncake's ports (SECURITY.md)",
                    name.decode(errors="replace"),
                )
                # No unwinding, which would end the process. Who joins the thread sees its end.
                self._libc.syscall(self._exit_call, 0)
            logger.critical("C++ exception %r is caught nowhere", name)
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
