"""Changes where a loaded C library's calls and data references lead.

A library reaches functions and variables of others through a table of their addresses, which the
loader fills. Entries are found by their value, so this depends on no format and no machine.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_POINTER_BYTES: Final = ctypes.sizeof(ctypes.c_void_p)


def replace_imports(path_prefix: str, old: int, new: int) -> int:
    """In the tables of loaded libraries, put address `new` in place of `old`. Returns how many
    entries were replaced.

    Args:
        path_prefix: The libraries to change: the beginning of their resolved paths.
        old: Address of a function or variable of another library.
        new: Stays valid as long as the process lives.
    """
    found = 0
    for span, access, path in mappings():
        if path.startswith(path_prefix) and access[0] == "r" and access[2] == "-":
            begin, end = (int(bound, 16) for bound in span.split("-"))
            found += replace_pointers(begin, end, old, new, is_writable=access[1] == "w")
    return found


def open_loaded(path_prefix: str, name: str) -> ctypes.CDLL | None:
    """A loaded library whose path and file name begin with the given prefixes."""
    for _, _, path in mappings():
        if path.startswith(path_prefix) and Path(path).name.startswith(name):
            return ctypes.CDLL(path)
    return None


def mappings() -> Iterator[tuple[str, str, str]]:
    """Span, access and path of each part of a file in this process's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *path = line.split(maxsplit=5)
        if path:
            yield span, access, path[0]


def replace_pointers(begin: int, end: int, old: int, new: int, *, is_writable: bool) -> int:
    """Replace pointers in the memory `[begin, end)`, which may be read-only. Returns how many."""
    memory = ctypes.string_at(begin, end - begin)
    wanted = old.to_bytes(_POINTER_BYTES, sys.byteorder)
    found = 0
    offset = memory.find(wanted)
    while offset >= 0:
        if offset % _POINTER_BYTES == 0 and _write(begin + offset, new, is_writable):
            found += 1
        offset = memory.find(wanted, offset + 1)
    return found


def _write(entry: int, value: int, is_writable: bool) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(entry - entry % mmap.PAGESIZE)
    # The loader may have made the table read-only after it had filled it (RELRO).
    if not is_writable and libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE):
        logger.warning("mprotect: %s", os.strerror(ctypes.get_errno()))
        return False
    ctypes.c_void_p.from_address(entry).value = value
    if not is_writable:
        libc.mprotect(page, mmap.PAGESIZE, mmap.PROT_READ)
    return True
