"""Checks of the flags of prefill and decode on different servers: the flags that do not go with
them, or have no effect there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from sglang.srt.arg_groups.cli import flag_name, refuse_ignored
from sglang.srt.arg_groups.disaggregation import (
    BOOTSTRAP_PORT_FLAG,
    PREFILL_HOSTS_FLAG,
    SECRET_FLAG,
    DisaggregationMode,
    TransferBackend,
    may_decode,
    may_prefill,
    moves_pages,
    moves_pages_by_mooncake,
    prefill_hosts,
)
from sglang.srt.arg_groups.server_flags import ServerFlags
from sglang.srt.environ import envs
from sglang.srt.utils.network import is_loopback

MIN_SECRET_CHARS: Final = 16
OFFLOAD_FLAG: Final = "--disaggregation-decode-enable-offload-kvcache"
_RADIX: Final = "disaggregation_decode_enable_radix_cache"
_OFFLOAD: Final = "disaggregation_decode_enable_offload_kvcache"
_SWITCH: Final = "enable_pd_role_switch"
_RETRACTION: Final = "disaggregation_decode_retraction_backup"
_ALLOW_NO_SECRET: Final = "--disaggregation-allow-no-secret"
_PEER_FIELDS: Final = (
    "disaggregation_ib_device",
    "disaggregation_secret_file",
    "disaggregation_allow_no_secret",
    "disaggregation_bootstrap_port",
    "disaggregation_prefill_hosts",
    "disaggregation_enable_kv_checksum",
)
"""Fields that matter only where servers talk to each other."""


def check_disaggregation(args: ServerFlags) -> Iterator[str]:
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
            "disaggregation_enable_kv_checksum",
            "disaggregation_bootstrap_port",
        ):
            yield from refuse_ignored(args, field, where)
        yield from refuse_ignored(args, _SWITCH, where)
    if not may_decode(args):
        yield from refuse_ignored(args, "disaggregation_prefill_hosts", where)
        yield from refuse_ignored(args, _RADIX, where)
        yield from refuse_ignored(args, _OFFLOAD, where)
        yield from refuse_ignored(args, _RETRACTION, where)
    if may_prefill(args) and port == args.port:
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
    if args.enable_pd_role_switch:
        yield from _check_role_switch(args)
    if may_decode(args):
        yield from _check_caches_of_decode(args)
    if may_decode(args) and args.attn_cp_size > 1:
        yield (
            f"{flag_name('attn_cp_size')} {args.attn_cp_size} has no use {where}, which computes "
            "no prompts: use it on the prefill servers"
        )
    prefill_hosts(args, args.host)


def check_machines(args: ServerFlags, meeting_host: str) -> Iterator[str]:
    """Refuse addresses of a prefill or decode server of several machines that are another's on each
    machine: a line for each, with the setting and the remedy. All of them may be loopback ones if
    the ranks meet there."""
    if args.nnodes == 1 or not moves_pages(args) or is_loopback(meeting_host):
        return
    where = f"with --nnodes {args.nnodes} --disaggregation-mode {args.disaggregation_mode}"
    engine = envs.MOONCAKE_LOCAL_HOSTNAME
    addresses = {"--host ": args.host}
    if engine.is_set() and moves_pages_by_mooncake(args):
        # The ranks of a decode server listen for Mooncake alone.
        is_decode = args.disaggregation_mode == DisaggregationMode.DECODE
        addresses = {} if is_decode else addresses
        addresses[f"{engine.name}="] = engine.get()
    for name, address in addresses.items():
        if is_loopback(address):
            yield (
                f"{name}{address} {where}: the other servers do not reach this machine's ranks "
                "there: give its own address, on each machine another"
            )
    if args.disaggregation_mode == DisaggregationMode.PREFILL:
        return
    if args.disaggregation_prefill_hosts is None:
        yield (
            f"{PREFILL_HOSTS_FLAG} is missing {where}: without it requests may name prefill "
            "servers on loopback addresses, where each rank would look on its own machine"
        )
        return
    with contextlib.suppress(ValueError):  # `check_disaggregation` has the line.
        named = prefill_hosts(args, args.host)
        assert named is not None, "a decode server that reads"
        if own := sorted(host for host, _ in named.hosts if is_loopback(host)):
            yield (
                f"{PREFILL_HOSTS_FLAG} names {own[0]} {where}: each rank would look for it on its "
                "own machine; give the address at which all machines reach the prefill server"
            )


def _check_role_switch(args: ServerFlags) -> Iterator[str]:
    flag = flag_name(_SWITCH)
    if args.admin_api_key is None:
        yield (
            f"{flag} needs an operator's key, which POST /pd_role_switch asks for: give "
            "--admin-api-key-file or SGLANG_ADMIN_API_KEY"
        )
    if args.nnodes > 1:
        yield f"{flag} does not work with {flag_name('nnodes')} above 1 yet: leave one of them out"


def _check_secret(args: ServerFlags) -> Iterator[str]:
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


def _check_caches_of_decode(args: ServerFlags) -> Iterator[str]:
    if args.disaggregation_decode_enable_radix_cache and args.disable_radix_cache:
        yield f"{flag_name(_RADIX)} contradicts --disable-radix-cache; drop one of them"
    if args.disaggregation_decode_enable_offload_kvcache and args.hicache_storage_backend is None:
        yield f"{OFFLOAD_FLAG} needs --hicache-storage-backend, which it writes to"
