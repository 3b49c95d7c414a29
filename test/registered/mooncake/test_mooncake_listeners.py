"""Ports of Mooncake are open at the address at which peers reach a process, and nowhere else.

Mooncake would open them at all addresses, and a few bytes to one of them end a process.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rigs.stores.handshake_bombs import ELSEWHERE, tcp_listeners, throw_bombs
from rigs.stores.mooncake_cluster import MooncakeCluster
from rigs.stores.transfer_peer import TransferPeer
from sglang.embedded_mooncake import LOOPBACK, ManagedProcess
from sglang.srt.distributed.device_communicators.mooncake_library import (
    PEER_TO_PEER,
    bind_redirection,
    listening_at,
    load_transfer_engine,
)
from sglang.srt.distributed.device_communicators.mooncake_log import mooncake_log
from sglang.srt.utils.network import ports_on_all_addresses, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=13, suite="base-b-test-cpu")


@pytest.fixture(params=["store node", "transfer engine"])
def process(request: pytest.FixtureRequest) -> Iterator[ManagedProcess]:
    """A process with Mooncake's ports, on the loopback interface."""
    if request.param == "store node":
        with MooncakeCluster(segment_size="16mb") as cluster:
            yield cluster.nodes[0]
    else:
        with TransferPeer(num_bytes=4096) as peer:
            yield peer


def test_bombs_reach_no_port_from_another_address(process: ManagedProcess) -> None:
    listeners = tcp_listeners(process.pid)
    assert len(listeners) == 2, "the handshake port and the data port"
    assert {address for address, _ in listeners} == {LOOPBACK}
    assert throw_bombs(process.pid, ELSEWHERE) == 0
    assert process.is_running()


def test_the_bombs_end_a_process_that_they_reach(process: ManagedProcess) -> None:
    """Or the test above would show nothing. Once this fails, Mooncake is mended."""
    assert throw_bombs(process.pid, LOOPBACK) > 0
    assert wait_until(lambda: not process.is_running(), 60)


@pytest.mark.parametrize(
    ("hostname", "metadata", "is_narrow"),
    [
        ("localhost", PEER_TO_PEER, True),
        (f"{LOOPBACK}:12345", PEER_TO_PEER, True),
        # Behind a NAT: an address that is none of this machine's.
        ("198.51.100.9", PEER_TO_PEER, False),
        # Mooncake tells a metadata server an address of its own choice.
        ("localhost", "http://127.0.0.1:1/metadata", False),
    ],
)
def test_ports_stay_open_where_peers_use_an_unknown_address(
    hostname: str, metadata: str, is_narrow: bool
) -> None:
    engine = load_transfer_engine().TransferEngine()
    before = set(tcp_listeners(os.getpid()))
    with listening_at(hostname, metadata):
        assert engine.initialize(hostname, PEER_TO_PEER, "tcp", "") == 0
    # The handshake port has IPv6, the other one IPv4: now and then both have the same number.
    new = set(tcp_listeners(os.getpid())) - before
    opened = [port for address, port in new if address in ("::", "0.0.0.0")]
    assert len(new) == 2
    assert len(opened) == (0 if is_narrow else 2)
    known = bind_redirection().wide.intersection(ports_on_all_addresses())
    assert known.intersection(port for _, port in new) == set(opened)
    assert engine.get_rpc_port() in (port for _, port in tcp_listeners(os.getpid()))


def test_imports_are_redirected_once() -> None:
    load_transfer_engine()
    package = importlib.import_module("mooncake")
    libraries = str(Path(os.path.realpath(str(package.__file__))).parent.parent / "mooncake")
    assert bind_redirection().redirect(libraries) == mooncake_log().redirect(libraries) == 0
