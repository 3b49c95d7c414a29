"""What Mooncake's calls of `bind` become, and how its tables of imports are changed."""

from __future__ import annotations

import ctypes
import mmap
import socket
import struct

import pytest

from sglang.srt.distributed.device_communicators.mooncake_listeners import (
    BindRedirection,
    narrowed,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

HOME = socket.inet_aton("10.0.0.1")
MAPPED = bytes(10) + b"\xff\xff" + HOME
ADDRESSES = {int(socket.AF_INET): HOME, int(socket.AF_INET6): MAPPED}
LIBC = ctypes.CDLL("libc.so.6")
BIND = ctypes.cast(LIBC.bind, ctypes.c_void_p).value or 0


def ipv4(address: bytes) -> bytes:
    return struct.pack("=H", socket.AF_INET) + b"\x3a\x98" + address + bytes(8)


def ipv6(address: bytes) -> bytes:
    return struct.pack("=H", socket.AF_INET6) + b"\x3a\x98" + bytes(4) + address + bytes(4)


def test_all_addresses_become_one() -> None:
    assert narrowed(ipv4(bytes(4)), ADDRESSES) == ipv4(HOME)
    assert narrowed(ipv6(bytes(16)), ADDRESSES) == ipv6(MAPPED)


@pytest.mark.parametrize(
    "sockaddr",
    [
        ipv4(socket.inet_aton("127.0.0.1")),
        ipv6(bytes(15) + b"\x01"),
        struct.pack("=H", socket.AF_UNIX) + b"/tmp/socket",
        struct.pack("=H", 999) + bytes(14),
        b"",
    ],
)
def test_other_calls_stay_as_they_are(sockaddr: bytes) -> None:
    assert narrowed(sockaddr, ADDRESSES) is None


def test_nothing_is_narrowed_without_an_address() -> None:
    assert narrowed(ipv4(bytes(4)), {}) is None
    assert narrowed(ipv4(bytes(4)), {int(socket.AF_INET6): bytes(16)}) is None


@pytest.mark.parametrize("is_writable", [True, False])
def test_entries_of_a_table_are_redirected(is_writable: bool) -> None:
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        end = begin + len(memory)
        entries = [mmap.PAGESIZE - 8, mmap.PAGESIZE + 16]
        for offset in (*entries, 100):  # 100 is no place of a pointer.
            struct.pack_into("P", memory, offset, BIND)
        if not is_writable:
            assert LIBC.mprotect(ctypes.c_void_p(begin), len(memory), mmap.PROT_READ) == 0
        redirection = BindRedirection()
        assert redirection.redirect(begin, end, is_writable) == 2
        assert redirection.redirect(begin, end, is_writable) == 0
        found = [ctypes.c_void_p.from_address(begin + offset).value for offset in entries]
        assert len(set(found)) == 1 and found[0] != BIND
        bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        with socket.socket() as sock:
            to_port = ipv4(socket.inet_aton("127.0.0.1"))[:2] + bytes(2) + b"\x7f\0\0\1" + bytes(8)
            assert bind(found[0] or 0)(sock.fileno(), to_port, len(to_port)) == 0
            assert sock.getsockname()[0] == "127.0.0.1"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
