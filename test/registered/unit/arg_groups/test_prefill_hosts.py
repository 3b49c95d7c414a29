"""The prefill servers that a decode server may be sent to: how they are named, and who is none."""

from __future__ import annotations

import socket

import psutil
import pytest

from sglang.srt.arg_groups.disaggregation import PrefillHosts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        # Each is the same address again, by a name that nobody needs.
        ("127.1", False),
        ("127.0.0.2", False),
        ("0x7f.0.0.1", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("prefill-0", False),
    ],
)
def test_without_the_flag_it_is_this_machine_alone(host: str, is_own: bool) -> None:
    assert PrefillHosts.parse(None, "127.0.0.1").has(host, 8998) is is_own


def test_the_servers_own_host_is_this_machine_too() -> None:
    assert PrefillHosts.parse(None, "10.1.2.3").has("10.1.2.3", 1)
    assert PrefillHosts.parse(None, "node-7").has("Node-7", 1)
    everywhere = PrefillHosts.parse(None, "0.0.0.0")
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            is_address = one.family in (socket.AF_INET, socket.AF_INET6)
            assert everywhere.has(one.address, 1) is is_address
    assert not everywhere.has("192.0.2.1", 1)


@pytest.mark.parametrize(
    ("text", "others", "strangers"),
    [
        ("prefill-0", [("prefill-0", 1), ("PREFILL-0", 9)], [("prefill-1", 1), ("localhost", 1)]),
        ("a:8998, b", [("a", 8998), ("b", 1)], [("a", 8999)]),
        ("10.0.0.0/30", [("10.0.0.3", 1), ("::ffff:10.0.0.1", 1)], [("10.0.0.4", 1), ("a", 1)]),
        ("fd00::/8", [("fd00::1", 1), ("[fd12::1]", 1)], [("fe00::1", 1), ("10.0.0.1", 1)]),
        ("[fd00::1]:7", [("fd00:0::1", 7)], [("fd00::1", 8), ("fd00::2", 7)]),
        ("fd00::1", [("fd00::1", 7)], [("::1", 7)]),
        ("127.0.0.1:7", [("127.0.0.1", 7)], [("127.0.0.1", 8), ("localhost", 7)]),
    ],
)
def test_those_that_are_named_and_no_others(
    text: str, others: list[tuple[str, int]], strangers: list[tuple[str, int]]
) -> None:
    hosts = PrefillHosts.parse(text, "127.0.0.1")
    assert all(hosts.has(*one) for one in others)
    assert not any(hosts.has(*one) for one in strangers)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "'' is no HOST"),
        ("a,,b", "'' is no HOST"),
        ("a b", "'a b' is no HOST"),
        ("http://a", "'http://a' is no HOST, HOST:PORT or network"),
        ("a:0", "from 1 to 65535"),
        ("a:99999", "from 1 to 65535"),
        ("a:", "from 1 to 65535"),
        ("10.0.0.1/8", "has host bits set"),
        ("10.0.0.0/33", "'10.0.0.0/33' is no HOST"),
        ("*", "'\\*' is no HOST"),
    ],
)
def test_what_is_no_host_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"^--disaggregation-prefill-hosts: .*{named}"):
        PrefillHosts.parse(text, "127.0.0.1")
