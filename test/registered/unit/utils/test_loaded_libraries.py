"""Entries in tables of loaded libraries are found by their value, and replaced."""

from __future__ import annotations

import ctypes
import mmap
import struct

import pytest

from sglang.srt.utils.loaded_libraries import open_loaded, replace_pointers
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

LIBC = ctypes.CDLL("libc.so.6")
OLD, NEW = 0x7F00_1234_5678, 0x7F00_8765_4321


@pytest.mark.parametrize("is_writable", [True, False])
def test_pointers_are_replaced_in_place(is_writable: bool) -> None:
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        end = begin + len(memory)
        entries = [mmap.PAGESIZE - 8, mmap.PAGESIZE + 16]
        for offset in (*entries, 100):  # 100 is no place of a pointer.
            struct.pack_into("P", memory, offset, OLD)
        if not is_writable:
            assert LIBC.mprotect(ctypes.c_void_p(begin), len(memory), mmap.PROT_READ) == 0
        assert replace_pointers(begin, end, OLD, NEW, is_writable=is_writable) == 2
        assert replace_pointers(begin, end, OLD, NEW, is_writable=is_writable) == 0
        found = [ctypes.c_void_p.from_address(begin + offset).value for offset in entries]
        assert found == [NEW, NEW]
        assert struct.unpack_from("P", memory, 100)[0] == OLD


def test_a_loaded_library_is_found_by_its_path() -> None:
    libc = open_loaded("/", "libc.so")
    assert libc is not None and libc.getpid() == LIBC.getpid()
    assert open_loaded("/", "libnothing") is None
