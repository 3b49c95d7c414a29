"""The scheduler's process: builds a rank, says ready, runs the loop."""

from __future__ import annotations

import logging
import os
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from tqdm import tqdm

from sglang.srt.arg_groups.parallelism import ranks_per_node
from sglang.srt.distributed.device_communicators.mooncake_containment import (
    contain_parser_errors,
)
from sglang.srt.distributed.rank_group import RankLost
from sglang.srt.managers.messages.ready_message import send_error, send_ready
from sglang.srt.managers.scheduler.process.build import build_scheduler
from sglang.srt.managers.scheduler.process.channel import ZmqChannel
from sglang.srt.managers.scheduler.process.other_ranks import OtherRanks, share_cores
from sglang.srt.managers.scheduler.watchdog import TickWatchdog
from sglang.srt.mem_cache.hicache_storage import StorageUnavailable
from sglang.srt.utils.listeners import log_exposed_ports
from sglang.srt.utils.logging_utils import configure_logger
from sglang.srt.utils.process import freeze_heap, leave_signals_to_parent, start_parent_watch

if TYPE_CHECKING:
    from sglang.srt.distributed.rendezvous import Rendezvous
    from sglang.srt.managers.messages.ipc import IpcAddresses
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


def run_scheduler_process(
    server_args: ServerArgs,
    ipc: IpcAddresses,
    rendezvous: Rendezvous | None,
    ready_pipe: Connection,
    parent_pid: int | None = None,
) -> None:
    """Entry point of the process of a rank. Returns after a `ShutdownReq`, with exit status 0.

    The parent handles signals for the process group: it drains this process with a message. The
    process ends with its parent. On a failure it ends with status 1 and the cause in the log; with
    `LOST_A_RANK` if the cause is that another rank is gone.

    Args:
        server_args: Resolved arguments.
        ipc: Socket addresses of this server.
        rendezvous: Meeting point of the ranks, and this rank's number; None: it is alone.
        ready_pipe: Gets one JSON message, `ready_message`.
        parent_pid: Process whose end also ends this one; by default the one that started it.
    """
    leave_signals_to_parent()
    rank = 0 if rendezvous is None else rendezvous.rank
    configure_logger(server_args.log_level, f"scheduler {rank}")
    share_cores(ranks_per_node(server_args))
    # Progress bars share a lock between processes by default: a semaphore that a killed process
    # leaves behind, with a warning as the last line of the log.
    tqdm.set_lock(threading.RLock())
    start_parent_watch(os.getppid() if parent_pid is None else parent_pid, ipc.exit_as_orphan)
    contain_parser_errors()
    watchdog = TickWatchdog(server_args.watchdog_timeout)
    others = OtherRanks(rendezvous)
    try:
        built = build_scheduler(server_args, rendezvous, watchdog, others.watch)
    except (ValueError, StorageUnavailable) as error:
        send_error(ready_pipe, f"{others.prefix()}{error}")
        raise SystemExit(1) from None
    except RankLost as error:
        others.end_after_loss(error)
    except Exception as error:
        logger.critical("the scheduler cannot start", exc_info=True)
        what = f"the scheduler cannot start: {type(error).__name__}: {error}"
        send_error(ready_pipe, f"{others.prefix()}{what}")
        raise SystemExit(1) from None
    for line in built.tiers:
        logger.info("%s", line)
    log_exposed_ports(logger, "Mooncake")
    channel = ZmqChannel(ipc) if rank == 0 else None
    freeze_heap()
    send_ready(ready_pipe, built.ready_details())
    try:
        if channel is None:
            built.scheduler.run_beside()
        else:
            built.scheduler.run(channel)
        others.leave(built.group)
    except RankLost as error:
        others.end_after_loss(error)
    except Exception:
        logger.critical("scheduler rank %d failed", rank, exc_info=True)
        logging.shutdown()
        # Not SystemExit: threads of the cache may be in calls that block for minutes.
        os._exit(1)
    if channel is not None:
        channel.close()
    built.scheduler.close()
    watchdog.close()
    logger.info("shut down")
