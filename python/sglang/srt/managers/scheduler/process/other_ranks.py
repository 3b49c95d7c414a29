"""Work of a process that is one of several ranks: watch the others, share the cores."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, NoReturn

import torch

from sglang.srt.distributed.parallel_state import make_store
from sglang.srt.distributed.rank_watch import LIMIT_S, RankWatch
from sglang.srt.environ import envs
from sglang.srt.managers.messages.ready_message import LOST_A_RANK

if TYPE_CHECKING:
    from sglang.srt.distributed.rank_group import RankGroup, RankLost
    from sglang.srt.distributed.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

_NAMING_S = LIMIT_S + 1.5
"""Seconds for the watch to find out which rank is gone, if the transport does not say."""


class OtherRanks:
    """The other ranks of this process's server, if there are any. The scheduler's thread uses it.

    Args:
        rendezvous: Meeting point of the ranks; None: there are no others.
    """

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

    def leave(self, group: RankGroup) -> None:
        """Wait in an orderly shutdown until every rank has left its loop. A collective."""
        if self._watch is not None:
            self._watch.close()
        group.reduce_min(torch.zeros(1, dtype=torch.int64))

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


def share_cores(ranks_here: int) -> None:
    """Give torch this rank's part of the machine's cores, unless the environment sets the
    number."""
    if ranks_here > 1 and not envs.OMP_NUM_THREADS.is_set():
        torch.set_num_threads(max(torch.get_num_threads() // ranks_here, 1))
