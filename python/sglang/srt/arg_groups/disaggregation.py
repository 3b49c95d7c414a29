"""The flags of prefill and decode on different servers.

`PrefillHosts` are the prefill servers that clients may send a decode server to. It resolves no
name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeAlias

from sglang.srt.arg_groups.api_keys import resolve_key
from sglang.srt.arg_groups.cli import Heading, flag
from sglang.srt.constants import DEFAULT_BOOTSTRAP_PORT
from sglang.srt.environ import EnvField, Envs, envs
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
        """The hosts in the flag's value; None: only this machine, which listens on `own_host`.

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


class DisaggregationMode(StrEnum):
    """Values of `--disaggregation-mode`: the part of its requests that a server computes."""

    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"


class TransferBackend(StrEnum):
    """Values of `--disaggregation-transfer-backend`: the library that moves keys and values."""

    MOONCAKE = "mooncake"
    MOONCAKE_TCP = "mooncake_tcp"
    """Mooncake with its protocol set to tcp."""
    NIXL = "nixl"
    FAKE = "fake"
    """No library: for warm-up and benchmarks of a single server."""


@dataclasses.dataclass(kw_only=True)
class DisaggregationArgs:
    """Fields of `ServerArgs`."""

    disaggregation_mode: str = flag(
        DisaggregationMode.NULL,
        "Serve whole requests (null), or only their prefill or decode.",
        choices=tuple(DisaggregationMode),
        heading=Heading.DISAGGREGATION,
    )
    disaggregation_transfer_backend: str = flag(
        TransferBackend.MOONCAKE,
        "What moves keys and values between the servers; mooncake_tcp: mooncake with "
        "MOONCAKE_PROTOCOL=tcp; nixl: NIXL over UCX, from and to memory of the CPU.",
        choices=tuple(TransferBackend),
    )
    disaggregation_bootstrap_port: int = flag(
        DEFAULT_BOOTSTRAP_PORT,
        "Port of a prefill server's bootstrap server, where decode servers find its ranks.",
    )
    disaggregation_ib_device: str | None = flag(
        None,
        "InfiniBand devices of KV transfers: a list, a JSON object by GPU, or a "
        ".json file with one; absent: MOONCAKE_DEVICE, or what the transport chooses.",
    )
    disaggregation_secret: str | None = flag(
        None, "The secret of the deployment.", secret=True, is_shown=False
    )
    disaggregation_secret_file: str | None = flag(
        None,
        "File with the secret that all prefill and decode servers of the deployment share; or set "
        "SGLANG_DISAGGREGATION_SECRET.",
    )
    disaggregation_allow_no_secret: bool = flag(
        False, "Serve without that secret although --host is reachable by other machines."
    )
    disaggregation_prefill_hosts: str | None = flag(
        None,
        "Prefill servers that requests to a decode server may name, as bootstrap_host: HOST, "
        "HOST:PORT or networks such as 10.0.0.0/16, separated by commas; absent: this machine "
        "alone (loopback and --host).",
    )
    disaggregation_enable_kv_checksum: bool = flag(
        False,
        "Compare all pages between servers with their checksums: SGLANG_HICACHE_CHECKED_SHARE=1.",
    )
    disaggregation_decode_enable_radix_cache: bool = flag(
        False,
        "Implied: a decode server reads only what its own prefix cache lacks, unless "
        "--disable-radix-cache is given.",
    )
    disaggregation_decode_enable_offload_kvcache: bool = flag(
        False,
        "Implied by --hicache-storage-backend: a decode server writes what it computes and reads "
        "to L3.",
    )
    disaggregation_decode_retraction_backup: str | None = flag(
        None,
        "Copy the pages of a retracted request to L2 (--enable-hierarchical-cache), and load them "
        "when it goes on; absent: --hicache-write-policy decides, and what leaves L1 without a "
        "copy is computed again.",
        choices=("host_pool",),
    )
    enable_pd_role_switch: bool = flag(
        False,
        "Let POST /pd_role_switch change a prefill server into a decode server, or back, while it "
        "is idle. Flags of both roles may be given.",
    )


FAKE_BOOTSTRAP_HOST: Final = "2.2.2.2"
"""Bootstrap host of a room that this server has to itself."""
BOOTSTRAP_PORT_FLAG: Final = "--disaggregation-bootstrap-port"
SECRET_FLAG: Final = "--disaggregation-secret-file"


def moves_pages(args: DisaggregationArgs) -> bool:
    """True if pages move between this server and others."""
    backend = args.disaggregation_transfer_backend
    is_whole = args.disaggregation_mode == DisaggregationMode.NULL
    return not is_whole and backend != TransferBackend.FAKE


def moves_pages_by_mooncake(args: DisaggregationArgs) -> bool:
    """True if pages move between this server and others through Mooncake's Transfer Engine."""
    return moves_pages(args) and args.disaggregation_transfer_backend != TransferBackend.NIXL


def _variables(args: DisaggregationArgs) -> Iterator[tuple[str, EnvField[Any], Any]]:
    """Flags that stand for an environment variable: the flag, the variable and its value."""
    if args.disaggregation_transfer_backend == TransferBackend.MOONCAKE_TCP:
        given = f"--disaggregation-transfer-backend {TransferBackend.MOONCAKE_TCP}"
        yield given, Envs.MOONCAKE_PROTOCOL, "tcp"
    if args.disaggregation_enable_kv_checksum:
        yield "--disaggregation-enable-kv-checksum", Envs.SGLANG_HICACHE_CHECKED_SHARE, 1.0


@contextlib.contextmanager
def variables_of(args: DisaggregationArgs) -> Iterator[None]:
    """Inside the block, environment variables have the values that flags stand for, for this
    process and for children that it starts."""
    with contextlib.ExitStack() as stack:
        for _, variable, value in _variables(args):
            stack.enter_context(variable.override(value))
        yield


def overruled_variables(args: DisaggregationArgs) -> Iterator[str]:
    """A line for each environment variable whose value a flag replaces by another one."""
    for given, variable, value in _variables(args):
        if variable.is_set() and variable.get() != value:
            yield f"{variable.name}={variable.get()} has no effect: {given} makes it {value}"


def read_secret(args: DisaggregationArgs) -> str | None:
    """The deployment's secret, from the file or the environment. Raises as `resolve_key`."""
    name, variable = SECRET_FLAG.removesuffix("-file"), envs.SGLANG_DISAGGREGATION_SECRET
    return resolve_key(None, args.disaggregation_secret_file, name, variable)


def may_prefill(args: DisaggregationArgs) -> bool:
    """True if the server is a prefill server, or may become one."""
    mode = args.disaggregation_mode
    return mode == DisaggregationMode.PREFILL or _may_change(args)


def may_decode(args: DisaggregationArgs) -> bool:
    """True if the server is a decode server, or may become one."""
    return args.disaggregation_mode == DisaggregationMode.DECODE or _may_change(args)


def _may_change(args: DisaggregationArgs) -> bool:
    return args.enable_pd_role_switch and args.disaggregation_mode != DisaggregationMode.NULL


def prefill_hosts(args: DisaggregationArgs, own_host: str) -> PrefillHosts | None:
    """The prefill servers that requests may name; None: this server contacts none. Parameters and
    errors: see `PrefillHosts.parse`."""
    if not may_decode(args) or not moves_pages(args):
        return None
    return PrefillHosts.parse(args.disaggregation_prefill_hosts, own_host)
