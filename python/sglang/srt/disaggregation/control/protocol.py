"""Messages of the control connection between a decode and a prefill server, as msgpack.

A decode server asks, a prefill server answers. All questions are idempotent and may be repeated, so
messages may be lost, doubled or late.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from sglang.srt.disaggregation.base.bootstrap_route import MAX_RANK
from sglang.srt.messages.first_token import FirstToken

VERSION: Final = 8
"""Version of the messages and of their meaning."""
MAX_POLLED_ROOMS: Final = 1024
"""Most rooms of each kind in a `RoomsPoll`."""
MAX_DECLINED: Final = 32
MAX_REASON_CHARS: Final = 500
Reader: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
"""Id of a reader, drawn for each prompt, the same on all ranks of the decode server. A room belongs
to the first reader that asks for it."""
Part: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
"""Index of the asking rank among the reader's ranks that read from this rank."""


Checksum: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=16)]
"""xxh3-128 of a page or a state in one pool; empty: it is not known."""
Checksums: TypeAlias = Annotated[list[Checksum], msgspec.Meta(max_length=16)]
"""Checksums of one page or state, one for each pool that has it."""


class PoolBuffer(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a pool in a rank's memory: consecutive pages or states."""

    address: int
    page_bytes: int
    head_parts: list[int] = []
    """Bytes of the runs of an item (of tokens, or a state), together the whole item; each run is
    split evenly by heads. Empty if the item cannot be cut."""


class PoolLayout(msgspec.Struct, frozen=True, array_like=True):
    name: str
    is_state: bool
    """True if the pool has states, each of a whole prompt or of a request, and not pages."""
    page_size: int
    begin: int
    """First of the model's heads `[begin, end)` in the pool. State without heads is one head, which
    all ranks have."""
    end: int
    buffers: list[PoolBuffer]


class RowsLayout(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a rank's `MetadataBuffers`; each complete room has one."""

    address: int
    row_bytes: int
    num_rows: int
    host: str = ""
    """The only host from which the rows can be read, as `host_identity`; "": every host that can
    read pages."""


class KVLayout(msgspec.Struct, frozen=True, tag=True):
    """The pages and states that a prefill server holds, and their addresses."""

    version: int
    instance_id: str
    session_id: str
    digest: str
    """Digest of all facts that determine a head's bytes: servers with equal digests can exchange
    heads."""
    facts: dict[str, str]
    pools: list[PoolLayout]
    unit_bytes: int = 0
    """Most bytes of a unit of packed pages; 0: pages are not packed."""
    rows: RowsLayout | None = None


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Opens a connection: asks for the `KVLayout` of the prefill server."""

    version: int = VERSION


class RoomsPoll(msgspec.Struct, frozen=True, tag=True):
    """Asks which of some rooms the prefill server has, and declines others. It claims no room: the
    decode server has no slots for them yet. The answer may wait until something changes."""

    serial: int
    """Number of this question; it increases. The answer repeats it."""
    rooms: Annotated[list[int], msgspec.Meta(max_length=MAX_POLLED_ROOMS)]
    known: Annotated[list[int], msgspec.Meta(max_length=MAX_POLLED_ROOMS)] = []
    """Rooms that the asker knows to be there; it asks for their failure."""
    declined: Annotated[dict[int, str], msgspec.Meta(max_length=MAX_DECLINED)] = {}
    """Reasons for which rooms are not wanted, by room."""


class Poll(msgspec.Struct, frozen=True, tag=True):
    """Asks for the progress of a room. The answer may wait until there is more than the asker
    has."""

    room: int
    reader: Reader
    have_pages: int
    has_token: bool = False
    may_wait: bool = True
    """True if the answer may wait. False: the question only shows that the asker is alive, and asks
    for a failure."""
    part: Part = 0
    num_parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK + 1)] = 1
    wants_inline: bool = True
    """True to send the first token. False: it is read from its row, if it has one."""


class Pack(msgspec.Struct, frozen=True, tag=True):
    """Asks to pack pages of a room into units, and for the progress. A unit is contiguous memory
    that one read takes. The answer may wait until there are units that the asker does not know.

    `rounds` tells each server the pages of each unit. A unit's memory belongs to the asker until it
    confirms the read, or the room ends.
    """

    room: int
    reader: Reader
    part: Part
    number: Annotated[int, msgspec.Meta(ge=0)]
    """Number of the packing in this room and part. A larger one ends the packings before it."""
    buffers: list[int]
    first_page: Annotated[int, msgspec.Meta(ge=0)]
    num_pages: Annotated[int, msgspec.Meta(ge=1)]
    unit_bytes: Annotated[int, msgspec.Meta(ge=1)]
    done: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of leading units that were read, or are not wanted any more."""
    known: int = 0
    """Number of leading units that were announced to the asker."""


class Received(msgspec.Struct, frozen=True, tag=True):
    """Confirms that a rank of the decode server has all. Once all parts have confirmed, the prefill
    server may let go of the room."""

    room: int
    reader: Reader
    part: Part = 0


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """Says that the decode server does not want the room any more, or never wanted it."""

    room: int
    reader: Reader
    reason: str


class RoomsStatus(msgspec.Struct, frozen=True, tag=True):
    """Status of rooms without a reader."""

    serial: int
    """Number of the question; all rooms that it declined are declined."""
    known: list[int] = []
    """The rooms of the question's `rooms` that the prefill server has."""
    ended: dict[int, str] = {}
    """Reasons of the question's rooms that have ended without success."""


class RoomStatus(msgspec.Struct, frozen=True, tag=True):
    room: int
    is_known: bool
    first_page: int = 0
    pages: list[int] = []
    """Pages of the prefill server's pools that hold the prompt, from `first_page` on."""
    first_token: FirstToken | None = None
    """The first token, set once all pages are there, unless `row` is set."""
    row: int | None = None
    """Index of the row of `KVLayout.rows` with the first token; set once all pages are there."""
    failure: str | None = None
    checksums: list[Checksums] = []
    """One for each of `pages`; empty: they are not known."""
    state_checksums: Checksums = []
    """Checksums of the recurrent state, if the model has one; set once all pages are there."""


class Packed(msgspec.Struct, frozen=True, tag=True):
    room: int
    number: int
    first: int = 0
    """Number of the first unit that was not read yet."""
    places: list[int] = []
    """Addresses of the packed units, from `first` on."""
    failure: str | None = None


class Released(msgspec.Struct, frozen=True, tag=True):
    """The prefill server has let go of the room."""

    room: int
    was_held: bool
    """True if its pages were held until now, so that the data read from them is right."""


Waitable = RoomsPoll | Poll | Pack
"""Questions whose answer may wait until something changes."""
Question = Hello | RoomsPoll | Poll | Pack | Received | GiveUp
Answer = KVLayout | RoomsStatus | RoomStatus | Packed | Released


class Asked(msgspec.Struct, frozen=True, array_like=True):
    number: int
    question: Question


class Answered(msgspec.Struct, frozen=True, array_like=True):
    number: int
    instance_id: str
    answer: Answer


ASKED_DECODER: Final = msgspec.msgpack.Decoder(Asked)
ANSWERED_DECODER: Final = msgspec.msgpack.Decoder(Answered)
