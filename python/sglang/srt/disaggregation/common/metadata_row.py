"""A row of metadata: the results of a prefill besides keys and values, as bytes.

bytes 0 to 8     the room
8 to 16          a checksum of all that follows, and of the room
16 to 20         the number of bytes that follow
from 20          a `FirstToken` as msgpack, as messages have it
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec
import xxhash

from sglang.srt.disaggregation.base.first_token import FirstToken
from sglang.srt.disaggregation.common.control_connection import RoomFailed

ROW_BYTES: Final = 4096
"""Bytes of each row; 128 top logprobs take 1,900."""
HEAD_BYTES: Final = 20
_HEAD: Final = struct.Struct("<QQI")
_LENGTH: Final = struct.Struct("<I")
_DECODER: Final = msgspec.msgpack.Decoder(FirstToken)
assert _HEAD.size == HEAD_BYTES


class BadRow(RoomFailed):
    """The row that was read is not the one written for the room."""

    def __init__(self, what: str) -> None:
        super().__init__(f"reading the metadata from the prefill server failed: {what}")


def pack_row(room: int, metadata: FirstToken) -> bytes | None:
    """The used bytes of a row; None: they do not fit into a row."""
    body = msgspec.msgpack.encode(metadata)
    if HEAD_BYTES + len(body) > ROW_BYTES:
        return None
    return _HEAD.pack(room, _checksum(room, body), len(body)) + body


def unpack_row(raw: bytes, room: int) -> FirstToken:
    """Decode the row that was written for `room`.

    Args:
        raw: `ROW_BYTES` bytes.

    Raises:
        BadRow: The row is empty, or has other content.
    """
    if not any(raw[:HEAD_BYTES]):
        raise BadRow("the row is empty")
    written_for, checksum, length = _HEAD.unpack_from(raw)
    if written_for != room:
        raise BadRow(f"the row is stale: it was written for room {written_for}, not for {room}")
    body = raw[HEAD_BYTES : HEAD_BYTES + length]
    if len(body) != length or _checksum(room, body) != checksum:
        raise BadRow("the row is torn: its checksum is of other bytes")
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:  # For example, the other server has another version.
        raise BadRow(f"the row is malformed: {error}") from error


def _checksum(room: int, body: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_LENGTH.pack(len(body)) + body, seed=room)
