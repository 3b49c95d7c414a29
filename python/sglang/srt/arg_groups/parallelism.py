"""The flags of several ranks: which sizes fit each other, and which ranks a machine has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.checks import refuse_ignored

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def check_parallelism(args: ServerArgs) -> None:
    """Refuse numbers of ranks and machines that do not fit each other.

    Raises:
        ValueError: One line that names the flag and the remedy.
    """
    for field in ("tp_size", "attn_cp_size", "nnodes"):
        if getattr(args, field) < 1:
            name = field.replace("_", "-")
            raise ValueError(f"--{name} {getattr(args, field)}: must be at least 1")
    if args.tp_size % args.attn_cp_size:
        raise ValueError(
            f"--attn-cp-size {args.attn_cp_size} does not divide --tp-size {args.tp_size}: the "
            "ranks of context parallelism are among those of --tp-size"
        )
    if args.enable_prefill_context_parallel and args.attn_cp_size == 1:
        raise ValueError(
            "--enable-prefill-context-parallel needs --attn-cp-size N, the ranks over which the "
            "tokens of a prefill are split: at least 2, and a divisor of --tp-size"
        )
    if args.tp_size % args.nnodes:
        raise ValueError(
            f"--nnodes {args.nnodes} does not divide --tp-size {args.tp_size}: each machine has "
            "equally many ranks"
        )
    if not 0 <= args.node_rank < args.nnodes:
        raise ValueError(
            f"--node-rank {args.node_rank}: with --nnodes {args.nnodes} it is from 0 to "
            f"{args.nnodes - 1}"
        )
    if args.base_gpu_id < 0:
        raise ValueError(f"--base-gpu-id {args.base_gpu_id}: must be 0 or more")
    if args.nnodes > 1 and args.dist_init_addr is None:
        raise ValueError(
            f"--nnodes {args.nnodes} needs --dist-init-addr HOST:PORT, the same on all machines: "
            "an address of the first one, where the ranks meet"
        )
    if args.tp_size == 1:
        refuse_ignored(args, "dist_init_addr", "with --tp-size 1")
    if args.dist_init_addr is not None:
        meeting_address(args)


def ranks_per_node(args: ServerArgs) -> int:
    """How many ranks each machine has."""
    return args.tp_size // args.nnodes


def meeting_address(args: ServerArgs) -> tuple[str, int]:
    """Host and port where the ranks meet; port 0: a free one.

    Raises:
        ValueError: `--dist-init-addr` is not HOST:PORT.
    """
    if args.dist_init_addr is None:
        return "127.0.0.1", 0
    host, _, port = args.dist_init_addr.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(
            f"--dist-init-addr {args.dist_init_addr}: must be HOST:PORT with a port from 1 to 65535"
        )
    return host, int(port)
