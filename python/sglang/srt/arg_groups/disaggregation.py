"""The flags of prefill and decode on different servers, and the flags that do not go with them.

`PrefillHosts` are the prefill servers that clients may send a decode server to. It resolves no
name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

from sglang.srt.arg_groups.api_keys import resolve_key
from sglang.srt.arg_groups.cli import flag_name, refuse_ignored
from sglang.srt.environ import envs
from sglang.srt.utils.network import canonical_host, is_loopback, own_addresses

if TYPE_CHECKING:
    from sglang.srt.arg_groups.server_args import ServerArgs


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
    FAKE = "fake"
    """No library: for warm-up and benchmarks of a single server."""


FAKE_BOOTSTRAP_HOST: Final = "2.2.2.2"
"""Bootstrap host of a room that this server has to itself."""
OFFLOAD_FLAG: Final = "--disaggregation-decode-enable-offload-kvcache"
_RADIX: Final = "disaggregation_decode_enable_radix_cache"
_ALLOW_NO_SECRET: Final = "--disaggregation-allow-no-secret"
_OFFLOAD: Final = "disaggregation_decode_enable_offload_kvcache"
BOOTSTRAP_PORT_FLAG: Final = "--disaggregation-bootstrap-port"
SECRET_FLAG: Final = "--disaggregation-secret-file"
MIN_SECRET_CHARS: Final = 16
_PEER_FIELDS: Final = (
    "disaggregation_ib_device",
    "disaggregation_secret_file",
    "disaggregation_allow_no_secret",
    "disaggregation_bootstrap_port",
    "disaggregation_prefill_hosts",
)
"""Fields that matter only where servers talk to each other."""


def moves_pages(args: ServerArgs) -> bool:
    """True if pages move between this server and others."""
    backend = args.disaggregation_transfer_backend
    is_whole = args.disaggregation_mode == DisaggregationMode.NULL
    return not is_whole and backend != TransferBackend.FAKE


def read_secret(args: ServerArgs) -> str | None:
    """The deployment's secret, from the file or the environment. Raises as `resolve_key`."""
    flag, variable = SECRET_FLAG.removesuffix("-file"), envs.SGLANG_DISAGGREGATION_SECRET
    return resolve_key(None, args.disaggregation_secret_file, flag, variable)


def check_disaggregation(args: ServerArgs) -> Iterator[str]:
    """Refuse flags without effect, and combinations that prefill and decode servers do not
    support: a line for each, with the flag and the remedy."""
    mode, port = args.disaggregation_mode, args.disaggregation_bootstrap_port
    where = f"with --disaggregation-mode {mode}"
    if mode == DisaggregationMode.NULL:
        for field in (
            "disaggregation_transfer_backend",
            "disaggregation_ib_device",
            "disaggregation_secret_file",
            "disaggregation_allow_no_secret",
        ):
            yield from refuse_ignored(args, field, where)
    if mode != DisaggregationMode.PREFILL:
        yield from refuse_ignored(args, "disaggregation_bootstrap_port", where)
    if mode != DisaggregationMode.DECODE:
        yield from refuse_ignored(args, "disaggregation_prefill_hosts", where)
        yield from refuse_ignored(args, _RADIX, where)
        yield from refuse_ignored(args, _OFFLOAD, where)
    if mode == DisaggregationMode.PREFILL and port == args.port:
        yield (
            f"{BOOTSTRAP_PORT_FLAG} {port} is --port too: requests and decode servers come to "
            "different ports; change one of them"
        )
    if mode == DisaggregationMode.NULL:
        return
    if not moves_pages(args):
        where += f" --disaggregation-transfer-backend {TransferBackend.FAKE}"
        for field in _PEER_FIELDS:
            yield from refuse_ignored(args, field, where)
    else:
        yield from _check_secret(args)
    if mode == DisaggregationMode.DECODE:
        yield from _check_caches_of_decode(args, where)
    if mode == DisaggregationMode.DECODE and args.attn_cp_size > 1:
        yield (
            f"{flag_name('attn_cp_size')} {args.attn_cp_size} has no use {where}, which computes "
            "no prompts: use it on the prefill servers"
        )
    if args.nnodes > 1:
        yield (
            f"{flag_name('nnodes')} {args.nnodes} does not work {where} yet: start a server on "
            "each machine, and name all of them to the router"
        )
    prefill_hosts(args)


def _check_secret(args: ServerArgs) -> Iterator[str]:
    secret, allows_none = args.disaggregation_secret, args.disaggregation_allow_no_secret
    if secret is not None:
        if len(secret) < MIN_SECRET_CHARS:
            yield (
                f"{SECRET_FLAG}: the secret has fewer than {MIN_SECRET_CHARS} characters; make one "
                "with: openssl rand -hex 32"
            )
        if allows_none:
            yield f"{_ALLOW_NO_SECRET} contradicts the secret; drop one of them"
    # A name may resolve to any address.
    elif not allows_none and not is_loopback(args.host):
        yield (
            f"--host {args.host} with --disaggregation-mode {args.disaggregation_mode} needs a "
            f"secret, the same on all servers of the deployment: give {SECRET_FLAG} or "
            f"SGLANG_DISAGGREGATION_SECRET, or {_ALLOW_NO_SECRET} if only these servers can reach "
            "each other"
        )


def prefill_hosts(args: ServerArgs) -> PrefillHosts | None:
    """The prefill servers that requests may name; None: this server contacts none. Raises as
    `PrefillHosts.parse`."""
    if args.disaggregation_mode != DisaggregationMode.DECODE or not moves_pages(args):
        return None
    return PrefillHosts.parse(args.disaggregation_prefill_hosts, args.host)


def _check_caches_of_decode(args: ServerArgs, where: str) -> Iterator[str]:
    if args.disaggregation_decode_enable_radix_cache and args.disable_radix_cache:
        yield f"{flag_name(_RADIX)} contradicts --disable-radix-cache; drop one of them"
    if args.disaggregation_decode_enable_offload_kvcache:
        if args.hicache_storage_backend is None:
            yield f"{OFFLOAD_FLAG} needs --hicache-storage-backend, which it writes to"
        yield from refuse_ignored(
            args, "hicache_storage_prefetch_policy", f"{where}, which only writes to L3"
        )
    elif args.enable_hierarchical_cache or args.hicache_storage_backend:
        yield (
            f"the hierarchical cache has no effect {where} except to write to L3, because prompts "
            f"come from prefill servers: use it on those, or give {OFFLOAD_FLAG} too"
        )
