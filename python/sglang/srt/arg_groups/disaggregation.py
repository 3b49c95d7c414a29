"""The flags of prefill and decode on different servers: what contradicts them or has no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sglang.srt.arg_groups.checks import refuse_ignored
from sglang.srt.arg_groups.cli import flag_name

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

WHOLE: Final = "null"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
MODES: Final = (WHOLE, PREFILL, DECODE)
"""The values of `--disaggregation-mode`."""
OFFLOAD_FLAG: Final = "--disaggregation-decode-enable-offload-kvcache"
_RADIX: Final = "disaggregation_decode_enable_radix_cache"
_OFFLOAD: Final = "disaggregation_decode_enable_offload_kvcache"
BOOTSTRAP_PORT_FLAG: Final = "--disaggregation-bootstrap-port"


def check_disaggregation(args: ServerArgs) -> None:
    """Refuse flags without effect, and combinations that halves of requests do not work with.

    Raises:
        ValueError: One line that names the flag and the remedy.
    """
    mode, port = args.disaggregation_mode, args.disaggregation_bootstrap_port
    where = f"with --disaggregation-mode {mode}"
    if mode == WHOLE:
        for field in ("disaggregation_transfer_backend", "disaggregation_ib_device"):
            refuse_ignored(args, field, where)
    if mode != PREFILL:
        refuse_ignored(args, "disaggregation_bootstrap_port", where)
    if mode != DECODE:
        refuse_ignored(args, _RADIX, where)
        refuse_ignored(args, _OFFLOAD, where)
    if not 1 <= port <= 65535:
        raise ValueError(f"{BOOTSTRAP_PORT_FLAG} {port}: must be from 1 to 65535")
    if mode == PREFILL and port == args.port:
        raise ValueError(
            f"{BOOTSTRAP_PORT_FLAG} {port} is --port too: requests and decode servers come to "
            "different ports; change one of them"
        )
    if mode == WHOLE:
        return
    if mode == DECODE:
        _check_caches_of_decode(args, where)
    if mode == DECODE and args.attn_cp_size > 1:
        raise ValueError(
            f"{flag_name('attn_cp_size')} {args.attn_cp_size} has no use {where}, which computes "
            "no prompts: use it on the prefill servers"
        )
    if args.nnodes > 1:
        raise ValueError(
            f"{flag_name('nnodes')} {args.nnodes} does not work {where} yet: start a server on "
            "each machine, and name all of them to the router"
        )


def _check_caches_of_decode(args: ServerArgs, where: str) -> None:
    if args.disaggregation_decode_enable_radix_cache and args.disable_radix_cache:
        raise ValueError(f"{flag_name(_RADIX)} contradicts --disable-radix-cache; drop one of them")
    if args.disaggregation_decode_enable_offload_kvcache:
        if args.hicache_storage_backend is None:
            raise ValueError(f"{OFFLOAD_FLAG} needs --hicache-storage-backend, which it writes to")
        refuse_ignored(args, "hicache_storage_prefetch_policy", f"{where}, which only writes to L3")
    elif args.enable_hierarchical_cache or args.hicache_storage_backend:
        raise ValueError(
            f"the hierarchical cache has no effect {where}, whose prompts come from prefill "
            f"servers, but to write to L3: use it on those, or give {OFFLOAD_FLAG} too"
        )
