"""The scheduler's process: builds a rank, says ready, runs the loop, watches the other ranks."""

from __future__ import annotations

import logging
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final, NoReturn

import torch
import zmq
from tqdm import tqdm

from sglang.srt.arg_groups.checks import ranks_per_node
from sglang.srt.distributed.device_communicators.mooncake_library import (
    contain_parser_errors,
    log_exposed_ports,
)
from sglang.srt.distributed.parallel_state import make_store
from sglang.srt.distributed.rank_group import RankLost
from sglang.srt.distributed.rank_watch import LIMIT_S, RankWatch
from sglang.srt.distributed.torch_rank_group import TorchRankGroup
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import StorageUnavailable
from sglang.srt.messages.io_struct import (
    SCHEDULER_DECODER,
    BatchTokenIDOutput,
    SchedulerOutput,
    ToScheduler,
    encode,
)
from sglang.srt.messages.ipc import (
    LOST_A_RANK,
    IpcAddresses,
    pull_socket,
    push_socket,
    send_error,
    send_ready,
)
from sglang.srt.process.build import build_scheduler
from sglang.srt.process.tick_watchdog import TickWatchdog
from sglang.srt.utils.bad_messages import MALFORMED, BadMessages
from sglang.srt.utils.logging_utils import configure_logger
from sglang.srt.utils.process import freeze_heap, leave_signals_to_parent, start_parent_watch

if TYPE_CHECKING:
    from sglang.srt.distributed.rendezvous import Rendezvous
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


_LINGER_MS: Final = 2000
_MAX_MESSAGES_PER_TICK: Final = 1024
"""A limit, because a flood of messages must not keep running requests waiting."""
_READABLE: Final = int(zmq.POLLIN)
"""A plain number: enumerations of flags take longer to combine."""


class ZmqChannel:
    """Rank 0's channel; in each DP group its first rank has one. One thread uses it."""

    def __init__(self, ipc: IpcAddresses, dp_rank: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._source = pull_socket(self._context, ipc.scheduler_input(dp_rank))
        self._to_detokenizer = push_socket(self._context, ipc.detokenizer_input)
        self._to_server = push_socket(self._context, ipc.server_input)
        self._bad = BadMessages(logger, "message")

    def receive(self, timeout_ms: int) -> list[ToScheduler]:
        """Messages that are there, after waiting at most `timeout_ms` for the first."""
        messages: list[ToScheduler] = []
        self._source.set(zmq.RCVTIMEO, timeout_ms)
        may_wait = timeout_ms > 0
        # Asking takes half the time of an exception, in each tick and before each first token.
        while len(messages) < _MAX_MESSAGES_PER_TICK and (may_wait or self._has_message()):
            try:
                payload = self._source.recv()
            except zmq.Again:
                break
            may_wait = False
            try:
                messages += SCHEDULER_DECODER.decode(payload)
            except MALFORMED as error:
                self._bad.add(error)
        return messages

    def _has_message(self) -> bool:
        return bool(int(self._source.get(zmq.EVENTS)) & _READABLE)

    def send(self, output: SchedulerOutput) -> None:
        """Tokens to the detokenizer, everything else to the server. Never blocks."""
        is_tokens = isinstance(output, BatchTokenIDOutput)
        (self._to_detokenizer if is_tokens else self._to_server).send(encode(output))

    def close(self) -> None:
        """Send the remaining messages within a bounded time, and close."""
        self._context.destroy(linger=_LINGER_MS)


_NAMING_S = LIMIT_S + 1.5
"""Seconds for the watch to find out which rank is gone, if the transport does not say."""


class OtherRanks:
    """The other ranks of this process's server, if there are any. The scheduler's thread uses
    it."""

    def __init__(self, rendezvous: Rendezvous | None) -> None:
        self._rendezvous = rendezvous
        self._watch: RankWatch | None = None

    def prefix(self) -> str:
        """Prefix of this process's error messages: the rank, if there are several."""
        return "" if self._rendezvous is None else f"rank {self._rendezvous.rank}: "

    def watch(self) -> None:
        """Watch the other ranks, all of which have joined; end this process when one of them
        ends."""
        meeting = self._rendezvous
        if meeting is not None:
            self._watch = RankWatch(make_store(meeting), meeting.rank, meeting.size, end_process)

    def announce_silence(self, seconds: float) -> None:
        """See `RankWatch.announce`; nothing if this rank is alone. Any thread."""
        if self._watch is not None:
            self._watch.announce(seconds)

    def leave(self, num_groups: int) -> None:
        """Wait in an orderly shutdown until every rank has left its loop. A collective of the
        world.

        DP groups finish at unlike times: a rank that waits is still watched, and it stays until no
        rank watches it any more.
        """
        if self._watch is None:
            return
        world, nothing = TorchRankGroup.of_world(), torch.zeros(1, dtype=torch.int64)
        if num_groups > 1:
            world.reduce_min(nothing)
        self._watch.close()
        world.reduce_min(nothing)

    def end_after_loss(self, error: RankLost) -> NoReturn:
        """End this process after a failed collective; the log names the rank that is gone."""
        logger.critical("%s", error)
        if self._watch is not None:
            time.sleep(_NAMING_S)  # The watch ends the process first.
        end_process(str(error))


def end_process(cause: str) -> NoReturn:
    """End this process because another rank is gone. Any thread."""
    logger.critical("%s: this rank ends", cause)
    logging.shutdown()
    # Not SystemExit: threads of the cache may be in calls that block for minutes.
    os._exit(LOST_A_RANK)


def run_scheduler_process(
    server_args: ServerArgs,
    ipc: IpcAddresses,
    rendezvous: Rendezvous | None,
    ready_pipe: Connection,
) -> None:
    """Entry point of the process of a rank. Returns after a `ShutdownReq`, with exit status 0.

    The parent handles signals for the process group: it drains this process with a message. The
    process ends with its parent. On a failure it ends with status 1 and the cause in the log; with
    `LOST_A_RANK` if the cause is that another rank is gone. `ready_pipe` gets one JSON message, by
    `send_ready` or `send_error`.
    """
    leave_signals_to_parent()
    rank = 0 if rendezvous is None else rendezvous.rank
    configure_logger(server_args.log_level, f"scheduler {rank}", server_args.log_format)
    ranks_here = ranks_per_node(server_args)
    if ranks_here > 1 and not envs.OMP_NUM_THREADS.is_set():
        torch.set_num_threads(max(torch.get_num_threads() // ranks_here, 1))
    # Progress bars share a lock between processes by default: a semaphore that a killed process
    # leaves behind, with a warning as the last line of the log.
    tqdm.set_lock(threading.RLock())
    start_parent_watch(os.getppid(), ipc.exit_as_orphan)
    contain_parser_errors()
    watchdog = TickWatchdog(server_args.watchdog_timeout)
    others = OtherRanks(rendezvous)
    try:
        built = build_scheduler(
            server_args, rendezvous, watchdog, ipc, others.watch, others.announce_silence
        )
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
    for line in built.ready_details["tiers"]:
        logger.info("%s", line)
    log_exposed_ports(logger)
    channel = None if built.group.rank else ZmqChannel(ipc, built.dp_rank)
    freeze_heap()
    send_ready(ready_pipe, built.ready_details)
    try:
        if channel is None:
            built.scheduler.run_beside()
        else:
            built.scheduler.run(channel)
        others.leave(server_args.attn_dp_size)
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
    if built.event_publisher is not None:
        built.event_publisher.shutdown()
    watchdog.close()
    logger.info("shut down")
