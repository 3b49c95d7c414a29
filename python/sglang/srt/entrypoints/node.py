"""A machine that is not the first of its server: it runs ranks, without HTTP."""

from __future__ import annotations

import logging
from typing import Final

from sglang.srt.arg_groups.parallelism import ranks_per_node
from sglang.srt.entrypoints.engine_processes import launch_subprocesses
from sglang.srt.entrypoints.start_checks import check_start
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

EXIT_FAILED: Final = 1


def run_node(args: ServerArgs) -> int:
    """Run this machine's ranks until rank 0 ends them; return the process's exit status.

    Args:
        args: Resolved arguments, with a `node_rank` above 0.

    Raises:
        ValueError: Settings or files are wrong.
        StartError: A rank could not start.
    """
    check_start(args)
    processes = launch_subprocesses(args)
    try:
        count = ranks_per_node(args)
        first = args.node_rank * count
        which = (
            f"rank {first} serves" if count == 1 else f"ranks {first} to {first + count - 1} serve"
        )
        logger.info("%s; rank 0 ends the server", which)
        return 0 if processes.wait_for_scheduler(None) else EXIT_FAILED
    finally:
        processes.kill()
