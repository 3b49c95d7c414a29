"""Ports and socket names."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang.srt.environ import child_environment
from sglang.srt.utils import network
from sglang.srt.utils.network import (
    address_at_home,
    address_for_peers,
    can_connect,
    check_port_available,
    get_free_port,
    get_free_ports,
    is_loopback,
    wait_for_listener_to_end,
    wait_until,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("hostname", "address"),
    [
        ("localhost", "127.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("10.0.0.1:15000", "10.0.0.1"),
        ("::1", "::1"),
        ("[fd00::2]:15000", "fd00::2"),
        # Not one address that is sure to be what others mean.
        ("0.0.0.0", None),
        ("::", None),
        ("one", "10.0.0.7"),
        ("two", None),
        ("debian", None),
        ("unknown", None),
        ("", None),
    ],
)
def test_hostnames_mean_one_address(
    hostname: str, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"one": ["10.0.0.7"], "two": ["10.0.0.7", "10.0.0.8"], "debian": ["127.0.1.1"]}

    def look_up(host: str, *_: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found = address_at_home(hostname)
    assert (None if found is None else str(found)) == address


def test_free_ports_are_distinct_and_free() -> None:
    ports = get_free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        check_port_available("127.0.0.1", port)


def test_no_outgoing_connection_takes_a_free_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outgoing = tmp_path / "range"
    monkeypatch.setattr(network, "_OUTGOING_PORTS", outgoing)
    outgoing.write_text("20050\t60999\n")
    assert all(20_000 <= port < 20_050 for port in get_free_ports(5))
    outgoing.write_text("1024\t65535\n")
    assert len(set(get_free_ports(5))) == 5, "the kernel's choice, where all may be outgoing"
    outgoing.unlink()
    assert len(set(get_free_ports(5))) == 5, "where the range is not known"


def test_a_port_in_use_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing = tmp_path / "range"
    monkeypatch.setattr(network, "_OUTGOING_PORTS", outgoing)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        taken = listener.getsockname()[1]
        monkeypatch.setattr(network, "_FIRST_FREE_PORT", taken)
        outgoing.write_text(f"{taken + 1} 60999")
        assert get_free_port() != taken


def test_a_port_is_drawn_once_though_nobody_has_bound_it_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that start together draw theirs in different processes."""
    outgoing = tmp_path / "range"
    monkeypatch.setattr(network, "_OUTGOING_PORTS", outgoing)
    program = "from sglang.srt.utils.network import get_free_port as p; print(p()); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment(),
    ) as other:  # fmt: skip
        assert other.stdout is not None
        port = int(other.stdout.readline())
        monkeypatch.setattr(network, "_FIRST_FREE_PORT", port)
        outgoing.write_text(f"{port + 1} 60999")
        assert get_free_port() != port
        check_port_available("127.0.0.1", port)
        other.communicate("\n", timeout=60)


def test_a_taken_port_is_refused_with_the_remedy() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port}: the port is in use .* --port"):
            check_port_available("127.0.0.1", port)
        assert can_connect("127.0.0.1", port)
    assert not can_connect("127.0.0.1", port)


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(ValueError, match="not this machine's"):
        check_port_available("192.0.2.1", get_free_port())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("some.host", False),
    ],
)
def test_loopback_addresses_are_recognized(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_where_peers_reach_a_server() -> None:
    assert address_for_peers("10.0.0.7") == "10.0.0.7"
    assert address_for_peers("127.0.0.1") == "127.0.0.1"
    found = address_for_peers("0.0.0.0")
    check_port_available(found, get_free_port(found))  # An address of this machine.


def test_wait_until_polls_and_gives_up_at_the_deadline() -> None:
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), 5, interval=0.001)
    assert not wait_until(lambda: False, 0.01, interval=0.001)


def test_waiting_for_a_listener_ends_even_if_another_takes_the_port() -> None:
    first = socket.create_server(("127.0.0.1", 0))
    port = first.getsockname()[1]
    waiter = threading.Thread(target=wait_for_listener_to_end, args=("127.0.0.1", port))
    waiter.start()
    connection, _ = first.accept()
    waiter.join(0.05)
    assert waiter.is_alive()
    # The kernel closes both at the end of a process.
    first.close()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with socket.create_server(("127.0.0.1", port), reuse_port=False):
        connection.close()
        waiter.join(30)
        assert not waiter.is_alive()
    # Without a listener the wait ends at once.
    wait_for_listener_to_end("127.0.0.1", port)
