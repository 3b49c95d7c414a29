"""The prefill servers that a decode server may be sent to by its clients. Resolves no name."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from sglang.srt.utils.network import canonical_host, own_addresses

PREFILL_HOSTS_FLAG: Final = "--disaggregation-prefill-hosts"
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class PrefillHosts:
    """Hosts, each with a port or with all ports, and networks.

    Names are compared, not resolved: a host that a client names is contacted only if it is among
    these.

    Attributes:
        hosts: Pairs of a host in the form of `canonical_host` and a port; None: every port.
        networks: Networks: each of their addresses, with every port.
    """

    hosts: frozenset[tuple[str, int | None]]
    networks: tuple[_Network, ...] = ()

    @classmethod
    def parse(cls, text: str | None, own_host: str) -> PrefillHosts:
        """Args:
            text: Value of the flag; None: only this machine.
            own_host: Address that this server listens on.

        Raises:
            ValueError: An entry is no host, HOST:PORT or network; names the flag and the entry.
        """
        if text is None:
            names = {*_LOOPBACK, *map(canonical_host, own_addresses(own_host))}
            return cls(frozenset((name, None) for name in names))
        entries = [entry.strip() for entry in text.split(",")]
        networks = tuple(_network(entry) for entry in entries if "/" in entry)
        return cls(frozenset(_host(entry) for entry in entries if "/" not in entry), networks)

    def has(self, host: str, port: int) -> bool:
        """True if a client may name this bootstrap server."""
        host = canonical_host(host)
        if (host, None) in self.hosts or (host, port) in self.hosts:
            return True
        if not self.networks:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self.networks)


def _network(entry: str) -> _Network:
    try:
        return ipaddress.ip_network(entry)
    except ValueError as error:
        raise _no_entry(entry, f"{error}") from None


def _host(entry: str) -> tuple[str, int | None]:
    host, port = entry, None
    is_bare_address = entry.count(":") > 1 and not entry.startswith("[")
    if not is_bare_address and not entry.endswith("]") and ":" in entry:
        host, _, digits = entry.rpartition(":")
        if not re.fullmatch(r"[0-9]{1,5}", digits) or not 1 <= int(digits) <= 65535:
            raise _no_entry(entry, "its port must be from 1 to 65535")
        port = int(digits)
    host = canonical_host(host)
    if ":" not in host and not _NAME.fullmatch(host):
        raise _no_entry(entry, "it is no name and no address")
    return host, port


def _no_entry(entry: str, why: str) -> ValueError:
    return ValueError(
        f"{PREFILL_HOSTS_FLAG}: {entry[:256]!r} is no HOST, HOST:PORT or network such as "
        f"10.0.0.0/16: {why}; separate several with commas"
    )
