"""The prefill servers that a rank of a decode server asks about rooms, and reads from."""

from __future__ import annotations

import logging
import random
from typing import Final

from sglang.srt.disaggregation.base.conn import BootstrapAddr
from sglang.srt.disaggregation.common.transfer_context import TransferContext
from sglang.srt.disaggregation.mooncake.prefill_peer import CLOSE_S, PrefillPeer
from sglang.srt.disaggregation.mooncake.shard_receiver import STEPS
from sglang.srt.distributed.device_communicators.call_threads import CallThreads
from sglang.srt.utils.network import canonical_host, wait_until

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 256
"""Most prefill servers, each with a thread and a connection while there is anything to ask."""
TOO_MANY: Final = f"this server asks {MAX_PEERS} prefill servers already, which do not answer"


class PrefillServers:
    """Scheduler's thread. Threads: `disagg-peer`, one for each prefill server that is asked about
    rooms; `disagg-prompt`, one for each prompt that is read.

    Args:
        context: What all receivers of the rank share.
        instance_id: Id drawn at the start, the same on all ranks of this server and different on
            every other server.
        failure_prob: Share of prompts that fail by injection.

    Attributes:
        reading: The threads that read prompts.
    """

    def __init__(
        self, context: TransferContext, instance_id: str, failure_prob: float = 0.0
    ) -> None:
        self.context = context
        self._instance_id = instance_id
        self._failure_prob = failure_prob
        self._num_readers = 0
        self._asking = CallThreads("disagg-peer")
        self.reading = CallThreads("disagg-prompt")
        self._peers: dict[BootstrapAddr, PrefillPeer] = {}
        """By canonical host and port; the last used last."""

    def new_reader(self) -> tuple[str, str | None]:
        """Id of the next prompt's reader, and the step that fails by injection, or None. All ranks
        read the same prompts in the same order."""
        fails = random.random() < self._failure_prob
        reader = f"{self._instance_id} {self._num_readers}"
        self._num_readers += 1
        return reader, random.choice(STEPS) if fails else None

    def find(self, address: BootstrapAddr) -> PrefillPeer | None:
        """The prefill server with this bootstrap server; None: there are too many to ask another
        one."""
        host, port = address
        key = canonical_host(host), port
        peer = self._peers.pop(key, None)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                idle = next((one for one, peer in self._peers.items() if peer.is_idle), None)
                if idle is None:
                    return None
                self._peers.pop(idle).close()
            peer = PrefillPeer(*key, self.context, self._asking)
        self._peers[key] = peer
        return peer

    def decline(self, address: BootstrapAddr, room: int, reason: str) -> None:
        """Decline a room of a prefill server: it is not wanted."""
        if self.context.place.rank:
            return  # One rank speaks for all.
        if (peer := self.find(address)) is None:
            logger.warning("room %d could not be declined: %s", room, TOO_MANY)
        else:
            peer.decline(room, reason)

    def close(self) -> None:
        """Accept no more prompts, and end the threads that ask; they first decline what they can.
        Prompts on their way end by themselves."""
        for peer in self._peers.values():
            peer.close()
        wait_until(lambda: not any(peer.has_thread for peer in self._peers.values()), CLOSE_S)
        self._asking.close()
        self.reading.close()
