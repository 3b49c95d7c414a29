"""Mooncake's calls of `bind`, as they are redirected."""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
from collections.abc import Callable

import pytest

from sglang.srt.distributed.device_communicators.mooncake_library import (
    BindRedirection,
    bind_redirection,
    log_exposed_ports,
    narrowed,
)
from sglang.srt.utils.network import ports_on_all_addresses
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

HOME = socket.inet_aton("10.0.0.1")
MAPPED = bytes(10) + b"\xff\xff" + HOME
ADDRESSES = {int(socket.AF_INET): HOME, int(socket.AF_INET6): MAPPED}


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


def bind_of(redirection: BindRedirection) -> Callable[[int, bytes, int], int]:
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
    return kind(redirection.ours)


def test_the_function_binds_as_libc_does() -> None:
    redirection = BindRedirection()
    bind = bind_of(redirection)
    address = struct.pack("=HH", socket.AF_INET, 0) + socket.inet_aton("127.0.0.1") + bytes(8)
    with socket.socket() as sock:
        assert bind(sock.fileno(), address, len(address)) == 0
        assert sock.getsockname()[0] == "127.0.0.1"
        assert bind(sock.fileno(), address, len(address)) == -1, "it has an address already"
    assert not redirection.wide


def test_only_ports_of_mooncake_are_called_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """A port of KV events or of a prefill server may be open on all addresses too."""
    with socket.create_server(("0.0.0.0", 0)) as other, socket.socket() as mooncakes:
        address = struct.pack("=HH", socket.AF_INET, 0) + bytes(12)
        assert bind_of(bind_redirection())(mooncakes.fileno(), address, len(address)) == 0
        log_exposed_ports(logging.getLogger(__name__))
        assert not caplog.messages, "it does not listen yet"
        mooncakes.listen(1)
        port = mooncakes.getsockname()[1]
        assert {port, other.getsockname()[1]} <= set(ports_on_all_addresses())
        log_exposed_ports(logging.getLogger(__name__))
    (line,) = caplog.messages
    assert f"Mooncake's TCP ports {port} are open" in line
    assert "end this process" not in line, "a server contains what Mooncake's parser throws"
