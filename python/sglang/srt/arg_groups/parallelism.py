"""The flags of several ranks: which sizes fit each other, and which ranks a machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.checks import refuse_ignored

if TYPE_CHECKING:
    from sglang.srt.arg_groups.server_args import ServerArgs


def check_parallelism(args: ServerArgs) -> Iterator[str]:
    """Refuse numbers of ranks and machines that do not fit each other: a line for each mistake,
    with the flag and the remedy."""
    if args.dp_size != 1:
        yield (
            f"--dp-size {args.dp_size}: a server has 1. python -m sglang_router.launch_server "
            "starts several, and a router in front of them"
        )
    if args.tp_size % args.attn_cp_size:
        yield (
            f"--attn-cp-size {args.attn_cp_size} does not divide --tp-size {args.tp_size}: the "
            "ranks of context parallelism are among those of --tp-size"
        )
    if args.enable_prefill_context_parallel and args.attn_cp_size == 1:
        yield (
            "--enable-prefill-context-parallel needs --attn-cp-size N, the ranks over which the "
            "tokens of a prefill are split: at least 2, and a divisor of --tp-size"
        )
    if args.tp_size % args.nnodes:
        yield (
            f"--nnodes {args.nnodes} does not divide --tp-size {args.tp_size}: each machine has "
            "equally many ranks"
        )
    if not 0 <= args.node_rank < args.nnodes:
        yield (
            f"--node-rank {args.node_rank}: with --nnodes {args.nnodes} it is from 0 to "
            f"{args.nnodes - 1}"
        )
    if args.nnodes > 1 and args.dist_init_addr is None:
        yield (
            f"--nnodes {args.nnodes} needs --dist-init-addr HOST:PORT, the same on all machines: "
            "an address of the first one, where the ranks meet"
        )
    if args.tp_size == 1:
        yield from refuse_ignored(args, "dist_init_addr", "with --tp-size 1")
    elif args.dist_init_addr is not None:
        try:
            meeting_address(args)
        except ValueError as error:
            yield str(error)


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
