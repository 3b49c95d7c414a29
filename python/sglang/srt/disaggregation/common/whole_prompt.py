"""A prompt on its way to a rank of a decode server, from all prefill ranks with a part of it.

A `RemotePrompt` asks each of these ranks, the first in the prompt's own thread, the others in
threads `disagg-part`. When all ranks have sent their offers, the portions to read of each are
settled. The prompt is complete when all parts are; a failed part ends the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sglang.srt.disaggregation.common.bootstrap_route import Route
from sglang.srt.disaggregation.common.conversation import (
    ABORTED,
    Cancellation,
    Patience,
    RoomFailed,
)
from sglang.srt.disaggregation.common.geometry import CannotServe, PoolGeometry, Portion
from sglang.srt.disaggregation.common.link_costs import LinkCosts
from sglang.srt.disaggregation.common.metadata_reader import CONTROL, TRANSPORT, MetadataReader
from sglang.srt.disaggregation.common.page_reads import Mover
from sglang.srt.disaggregation.common.protocol import FirstToken, Offer
from sglang.srt.disaggregation.common.rank_map import RankPlace
from sglang.srt.disaggregation.common.remote_prompt import (
    OwnSlots,
    RemotePrompt,
    Source,
    cannot_serve,
)
from sglang.srt.disaggregation.common.sessions import Sessions
from sglang.srt.disaggregation.common.staging import Staging
from sglang.srt.disaggregation.control.deployment_secret import DeploymentSecret
from sglang.srt.managers.messages.io_struct import Bootstrap

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.1
"""Seconds within which a part that waits for the offers of others notices that it waits in vain."""

FindRank = Callable[[str, int, int], Route]
"""Finds the route of a rank of a prefill server; arguments: host and port of its bootstrap server,
rank. Asks once and may take time; raises BootstrapError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Means that all prompts of a rank share.

    Attributes:
        place: Place of this rank among those of the decode server.
        geometry: Geometry of its pools.
        staging: Buffers for pages of ranks with other heads, and for packed pages.
        link: See `RemotePrompt`.
        metadata: Reads first tokens.
        sessions: Sessions of all prefill servers.
        secret: See `ControlLink`.
    """

    place: RankPlace
    geometry: PoolGeometry
    mover: Mover
    staging: Staging
    metadata: MetadataReader
    sessions: Sessions
    find_rank: FindRank
    patience: Patience
    secret: DeploymentSecret | None = None
    link: LinkCosts | None = None


class WholePrompt:
    """One prompt on its way. One thread calls `run`; any thread may call the rest.

    Args:
        meeting: The prefill server's bootstrap server, and the room.
        sources: The prefill server's ranks to read from, by rank.
        own: Place of the prompt in this server's pools.
        means: Means of all prompts of the rank.
        reader: Id drawn for this prompt, the same on all ranks of this server.
        fails_at: Step of STEPS that fails, for tests.
    """

    def __init__(
        self,
        meeting: Bootstrap,
        sources: Sequence[Route],
        own: OwnSlots,
        means: Means,
        reader: str,
        fails_at: str | None = None,
    ) -> None:
        self._meeting = meeting
        self._sources = sources
        self._own = own
        self._means = means
        self._reader = reader
        self._fails_at = fails_at
        self._cancelled = Cancellation()
        self._lock = threading.Lock()
        self._parts: Sequence[RemotePrompt] = ()
        self._offers: dict[int, Offer] = {}
        """Offers by the index of their part in `_parts`."""
        self._has_offers = threading.Event()
        """Set once all parts have offers."""
        self._returned = threading.Event()
        self.outcome: FirstToken | str | None = None
        """The first token, set once all is there and no read is in flight; or the reason of a
        failure, set maybe long before `has_ended`; None: neither yet. It is set once."""

    @property
    def has_ended(self) -> bool:
        """Whether no read into the slots is in flight any more."""
        return self._returned.is_set() and all(part.has_ended for part in self._parts)

    @property
    def read_seconds(self) -> float:
        """Seconds with reads in flight, of the part with the most."""
        return max((part.read_seconds for part in self._parts), default=0.0)

    @property
    def num_bytes_read(self) -> int:
        """Bytes that all parts have read."""
        return sum(part.num_bytes_read for part in self._parts)

    @property
    def metadata_bytes(self) -> dict[str, int]:
        """Bytes of the first tokens that all parts received, by the way that they came."""
        ways = (CONTROL, TRANSPORT)
        return {way: sum(part.metadata_bytes[way] for part in self._parts) for way in ways}

    def cancel(self, reason: str = ABORTED) -> None:
        """End soon: the prompt is not wanted any more."""
        self._cancelled.set(reason)

    def run(self) -> None:
        """Receive the prompt. Never raises. `has_ended` is true afterwards, unless the transport
        never lets go of the slots."""
        try:
            self._parts = self._make_parts()
            self._run_parts()
            if (first_token := self._parts[0].first_token) is not None:
                self._settle(first_token)
        except RoomFailed as error:
            self._fail(str(error))
        except Exception as error:
            logger.exception("a prompt could not be received")
            self._fail(f"receiving the prompt failed: {type(error).__name__}: {error}")
        self._returned.set()
        if isinstance(self.outcome, str):
            self._means.sessions.probe()

    def refuse(self, why: str) -> None:
        """End the prompt, in place of `run`."""
        self._fail(why)
        self._returned.set()

    def _run_parts(self) -> None:
        """Run all parts, and return when all have ended."""
        first, *others = self._parts
        for at, part in enumerate(others):
            thread = threading.Thread(target=part.run, name="disagg-part", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._fail(f"no thread for a part of the prompt: {error}")
                # They end at once, since the prompt has failed.
                for unstarted in others[at:]:
                    unstarted.run()
                break
        first.run()
        for part in others:
            part.join()

    def _settle(self, outcome: FirstToken | str) -> None:
        with self._lock:
            if self.outcome is None:
                self.outcome = outcome

    def _fail(self, why: str) -> None:
        self._settle(why)
        self._cancelled.set(why)

    def _make_parts(self) -> list[RemotePrompt]:
        means, meeting = self._means, self._meeting
        parts = []
        for place, route in enumerate(self._sources):
            rank = RankPlace(route.rank, route.num_ranks, route.attn_tp_size)
            readers = rank.readers(means.place)
            source = Source(
                where=_where(meeting),
                endpoint=route.endpoint,
                instance_id=route.instance_id,
                room=meeting.room,
                reader=self._reader,
                part=readers.index(means.place.rank),
                num_parts=len(readers),
            )
            parts.append(self._make_part(place, source))
        return parts

    def _make_part(self, place: int, source: Source) -> RemotePrompt:
        means = self._means
        return RemotePrompt(
            source,
            self._own,
            geometry=means.geometry,
            portion_of=lambda offer: self._portion(place, offer),
            on_failure=self._fail,
            mover=means.mover,
            staging=means.staging,
            metadata=means.metadata,
            sessions=means.sessions,
            link=means.link,
            patience=means.patience,
            secret=means.secret,
            cancelled=self._cancelled,
            fails_at=None if place else self._fails_at,
        )

    def _portion(self, place: int, offer: Offer) -> Portion:
        """The portion to read for the part at `place`, once all parts have their offers."""
        with self._lock:
            self._offers[place] = offer
            if len(self._offers) == len(self._parts):
                self._has_offers.set()
        while not self._has_offers.wait(_POLL_S):
            if self._cancelled.is_set():
                raise RoomFailed(self._cancelled.why)
        offers = [self._offers[at] for at in range(len(self._parts))]
        try:
            return self._means.geometry.portions(offers, self._meeting.room)[place]
        except CannotServe as error:
            raise cannot_serve(_where(self._meeting), str(error)) from None


def _where(meeting: Bootstrap) -> str:
    return f"{meeting.host}:{meeting.port}"
