"""A room of a prefill server: one request whose prompt a decode server reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.base.first_token import FirstToken


@dataclass(slots=True)
class Room:
    """State of a room, under the lock of its `RoomServer`. Times are in seconds of its clock."""

    number: int
    opened: float
    named: float | None = None
    """Time at which a decode server last named the room; None: none has."""
    pages: list[int] = field(default_factory=list)
    metadata: FirstToken | None = None
    row: int | None = None
    """Index of the row of `MetadataBuffers` that has the metadata too."""
    is_complete: bool = False
    """True if all pages and the metadata are known."""
    failure: str | None = None
    reader: str | None = None
    """The reader that asked first; None: none has."""
    reading: dict[int, float] = field(default_factory=dict)
    """Time of the last question of each part of the reader that has not received all."""
    received: set[int] = field(default_factory=set)
    """Parts of the reader that have received all."""
    has_ended: bool = False
    """True if the pages were let go of."""

    @property
    def was_received(self) -> bool:
        """True if all parts of the reader have received all."""
        return bool(self.received) and not self.reading

    def poll(self) -> KVPoll:
        """Progress of the room. Needs no lock."""
        if self.was_received:
            return KVPoll.Success
        if self.failure is not None:
            return KVPoll.Failed
        if self.reader is None:
            return KVPoll.Bootstrapping
        return KVPoll.Transferring if self.is_complete else KVPoll.WaitingForInput
