"""Messages of the control connection between a decode and a prefill server, as msgpack.

A decode server asks, a prefill server answers. Every question may be repeated: it asks for a state,
and changes nothing that it has changed already. So messages may be lost, doubled or late.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from sglang.srt.disaggregation.common.bootstrap_route import MAX_RANK
from sglang.srt.managers.messages.io_struct import CachedTokensDetails, TopLogprobs

VERSION: Final = 3
"""The version of these messages and of their meaning."""
Reader: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
"""Who reads a prompt, drawn for each, the same on all ranks of the decode server: a room belongs to
the first reader that asks for it."""
Part: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
"""Which of the reader's ranks asks, counted among those that read from this rank."""


class PoolBuffer(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a pool in a rank's memory: pages, or states, that follow one another."""

    address: int
    page_bytes: int
    head_parts: list[int] = []
    """Bytes of the runs of an item (a token, or a state) that each are split evenly by heads;
    together the whole item. Empty: it cannot be cut."""


class PoolOffer(msgspec.Struct, frozen=True, array_like=True):
    """One pool of a rank."""

    name: str
    is_state: bool
    """It has recurrent states, each of a whole prompt; else pages of tokens."""
    page_size: int
    begin: int
    """Heads of the model `[begin, end)` are here. What has no heads is one head of all ranks."""
    end: int
    buffers: list[PoolBuffer]


class RowsOffer(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a rank's `MetadataBuffers`, one for each room that is complete."""

    address: int
    row_bytes: int
    num_rows: int
    host: str = ""
    """Host on which alone the rows can be read, from `host_identity`; "": wherever pages can be."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The pages and states that a prefill server holds, and their addresses."""

    version: int
    instance_id: str
    """Drawn when the server starts."""
    session_id: str
    """The session of its Transfer Engine."""
    layout: str
    """Digest of all that determines a head's bytes: equal ones can be exchanged."""
    layout_facts: dict[str, str]
    """The facts that the digest is made of, for errors."""
    pools: list[PoolOffer]
    unit_bytes: int = 0
    """Most bytes of a unit that pages are packed into; 0: they are not packed."""
    rows: RowsOffer | None = None
    """Rows of metadata; None: the control connection tells the metadata."""


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a prefill beside keys and values."""

    token_id: int | None
    """None: the request wants no token."""
    prompt_len: int
    prompt_digest: str
    """The digest of the prompt's token ids: both servers must mean the same prompt."""
    sampling_digest: str = ""
    """See `sampling_digest`: also where two requests share a room and a prompt."""
    logprob: float | None = None
    top_logprobs: TopLogprobs | None = None
    cached: CachedTokensDetails | None = None
    state_slot: int | None = None
    """Slot, in the prefill server's pool, of the recurrent state after the prompt's last token;
    None: the model has none."""
    queue_seconds: float = 0.0
    """Seconds from the first question for it to its first step, by the prefill server's clock."""
    prefill_seconds: float = 0.0
    """Seconds from that step to the token."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A decode server begins a conversation: who answers, and what is there?"""

    version: int = VERSION


class Ask(msgspec.Struct, frozen=True, tag=True):
    """How far is a room? The answer may wait until there is more than the asker has."""

    room: int
    reader: Reader
    have_pages: int
    """How many pages of the prompt, from its first on."""
    has_token: bool = False
    may_wait: bool = True
    """False: only to be heard, and to hear of a failure."""
    part: Part = 0
    num_parts: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK + 1)] = 1
    """How many of the reader's ranks read from this rank."""
    wants_words: bool = True
    """False: the first token is read from its row, where it has one."""


class Pack(msgspec.Struct, frozen=True, tag=True):
    """Copy pages of a room into units of contiguous memory, which are then read each at once. How
    far is that? The answer may wait until there are units that the asker does not know.

    Both servers know by `rounds` which pages are in which unit. A unit's memory belongs to the
    asker until it says that it has read it, or the room ends.
    """

    room: int
    reader: Reader
    part: Part
    number: Annotated[int, msgspec.Meta(ge=0)]
    """This packing's among those of this room and part. A larger one ends those before it."""
    buffers: list[int]
    """Addresses of the buffers whose pages are wanted."""
    first_page: Annotated[int, msgspec.Meta(ge=0)]
    """Its place in the prompt."""
    num_pages: Annotated[int, msgspec.Meta(ge=1)]
    unit_bytes: Annotated[int, msgspec.Meta(ge=1)]
    """Most bytes of a unit."""
    done: Annotated[int, msgspec.Meta(ge=0)] = 0
    """So many units were read, or are not wanted any more."""
    known: int = 0
    """So many the asker has been told of."""


class Received(msgspec.Struct, frozen=True, tag=True):
    """A rank of the decode server has all: once all parts do, the prefill server may let go of the
    room."""

    room: int
    reader: Reader
    part: Part = 0


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """The decode server does not want the room any more, or never has."""

    room: int
    reader: Reader
    reason: str


class RoomNews(msgspec.Struct, frozen=True, tag=True):
    """The state of a room."""

    room: int
    is_known: bool
    """The prefill server has been sent the request."""
    first_page: int = 0
    pages: list[int] = []
    """Pages of the prefill server's pools that hold the prompt, from `first_page` on."""
    first_token: FirstToken | None = None
    """Set once all pages are there, but where `row` is."""
    row: int | None = None
    """Set once all pages are there: the first token is in this row of `Offer.rows`."""
    failure: str | None = None
    """Why the room has ended without success."""

    @property
    def is_complete(self) -> bool:
        """Whether all pages are there."""
        return self.first_token is not None or self.row is not None


class Packed(msgspec.Struct, frozen=True, tag=True):
    """How far a packing is."""

    room: int
    number: int
    first: int = 0
    """The first unit that was not read yet."""
    places: list[int] = []
    """Addresses of units that are there, from `first` on."""
    failure: str | None = None
    """Why there will be no further ones."""


class Released(msgspec.Struct, frozen=True, tag=True):
    """The prefill server has let go of the room."""

    room: int
    was_held: bool
    """Until now nothing else was written to its pages: what was read of them is right."""


Question = Hello | Ask | Pack | Received | GiveUp
Answer = Offer | RoomNews | Packed | Released


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A question with its number in a conversation."""

    number: int
    question: Question


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """The answer to the question of that number."""

    number: int
    instance_id: str
    answer: Answer
