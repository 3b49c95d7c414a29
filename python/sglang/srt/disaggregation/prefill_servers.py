"""The prefill servers that a rank of a decode server asks, and the prompts that it reads."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Sequence
from typing import Final

from sglang.srt.disaggregation.common.remote_prompt import STEPS, OwnSlots
from sglang.srt.disaggregation.common.whole_prompt import Means, WholePrompt
from sglang.srt.disaggregation.contact import Contact
from sglang.srt.disaggregation.prefill_peer import LAST_WORDS_S, PrefillPeer
from sglang.srt.distributed.device_communicators.call_threads import CallThreads
from sglang.srt.managers.messages.io_struct import Bootstrap
from sglang.srt.utils.network import canonical_host, wait_until

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 256
"""Most prefill servers, each with a thread and a connection while there is anything to ask."""
_TOO_MANY: Final = f"this server asks {MAX_PEERS} prefill servers already, which do not answer"


class PrefillServers:
    """Connections of a rank of a decode server to prefill servers. Scheduler's thread.

    Threads: `disagg-peer`, one for each prefill server that is asked about rooms; `disagg-prompt`,
    one for each prompt that has slots.

    Args:
        means: Means that its prompts share.
        instance: Id drawn at the start, the same on all ranks of this server and different on every
            other server.
        failure_prob: Share of prompts that fail by injection.
    """

    def __init__(self, means: Means, instance: str, failure_prob: float = 0.0) -> None:
        self._means = means
        self._instance = instance
        self._failure_prob = failure_prob
        self._num_begun = 0
        self._asking = CallThreads("disagg-peer")
        self._threads = CallThreads("disagg-prompt")
        self._news: deque[Contact] = deque()
        self._peers: dict[tuple[str, int], PrefillPeer] = {}
        """By canonical host and port of the bootstrap server; the last used last."""

    def meet(self, meeting: Bootstrap) -> Contact:
        """See `Remote`."""
        peer = self._peer(meeting)
        if peer is not None:
            return peer.meet(meeting)
        contact = Contact(meeting, None, self._news)
        contact.fail(_TOO_MANY)
        return contact

    def take_news(self) -> Sequence[Contact]:
        """See `Remote`."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def begin(self, contact: Contact, own: OwnSlots) -> WholePrompt:
        """See `Remote`."""
        fails = random.random() < self._failure_prob
        # All ranks begin the same prompts in the same order.
        reader = f"{self._instance} {self._num_begun}"
        self._num_begun += 1
        fails_at = random.choice(STEPS) if fails else None
        standing = contact.standing
        prompt = WholePrompt(contact.meeting, standing.sources, own, self._means, reader, fails_at)
        contact.leave()
        if standing.failure is not None:
            prompt.refuse(standing.failure)
            return prompt
        try:
            self._threads.submit(prompt.run)
        except RuntimeError as error:
            prompt.refuse(f"no thread for the prompt: {error}")
        return prompt

    def decline(self, meeting: Bootstrap, reason: str) -> None:
        """See `Remote`."""
        if self._means.place.rank:
            return  # One rank speaks for all.
        if (peer := self._peer(meeting)) is None:
            logger.warning("room %d could not be declined: %s", meeting.room, _TOO_MANY)
        else:
            peer.decline(meeting.room, reason)

    def close(self) -> None:
        """Accept no more prompts, and end the threads that ask; they first decline what they can.
        Prompts on their way end by themselves."""
        for peer in self._peers.values():
            peer.close()
        wait_until(lambda: not any(peer.has_thread for peer in self._peers.values()), LAST_WORDS_S)
        self._asking.close()
        self._threads.close()

    def _peer(self, meeting: Bootstrap) -> PrefillPeer | None:
        """The prefill server of a room; None: there are too many to ask another one."""
        key = canonical_host(meeting.host), meeting.port
        peer = self._peers.pop(key, None)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                idle = next((one for one, peer in self._peers.items() if peer.is_idle), None)
                if idle is None:
                    return None
                self._peers.pop(idle).close()
            peer = PrefillPeer(*key, self._means, self._asking, self._news)
        self._peers[key] = peer
        return peer
