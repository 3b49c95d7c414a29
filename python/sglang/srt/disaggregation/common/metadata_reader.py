"""Metadata of prompts: the results of a prefill besides keys and values.

A decode server reads them from a row of the prefill server, or gets them inline in a message.

Bytes of a row:

0 to 8      the room
8 to 16     checksum of the room and of all later bytes
16 to 20    number of later bytes
from 20     a `FirstToken` as msgpack, encoded like messages
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from sglang.srt.disaggregation.base.conn import AuxBuffers
from sglang.srt.disaggregation.common.sessions import Engine
from sglang.srt.disaggregation.common.staging import take_within
from sglang.srt.disaggregation.control.control_client import POLL_S, RoomFailed
from sglang.srt.disaggregation.control.protocol import KVLayout
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    Transfer,
    TransferError,
    TransferOp,
)
from sglang.srt.messages.first_token import FirstToken

logger = logging.getLogger(__name__)

CONTROL: Final = "control"
"""Sent over the control connection."""
TRANSPORT: Final = "transport"
"""Read over the transport of the pages."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
ROW_BYTES: Final = 4096
"""Bytes of each row without a hidden state; 128 top logprobs take 1,900."""
HEAD_BYTES: Final = 20
_HEAD: Final = struct.Struct("<QQI")
_LENGTH: Final = struct.Struct("<I")
_DECODER: Final = msgspec.msgpack.Decoder(FirstToken)
assert _HEAD.size == HEAD_BYTES


class BadRow(RoomFailed):
    """The row that was read is not the one written for the room."""

    def __init__(self, what: str) -> None:
        super().__init__(f"reading the metadata from the prefill server failed: {what}")


def pack_row(room: int, metadata: FirstToken, row_bytes: int) -> bytes | None:
    """The used bytes of a row; None: they do not fit into one of `row_bytes`."""
    body = msgspec.msgpack.encode(metadata)
    if HEAD_BYTES + len(body) > row_bytes:
        return None
    return _HEAD.pack(room, _checksum(room, body), len(body)) + body


def unpack_row(raw: bytes, room: int) -> FirstToken:
    """Decode the row that was written for `room`.

    Args:
        raw: All bytes of the row.

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


def host_identity() -> str:
    """Name of this machine until its next start; the same in all its containers."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


class MetadataReader:
    """Reads rows of prefill servers into rows of this rank. One for all prompts of a rank; any
    thread.

    A prefill server whose rows cannot be read sends its first tokens over the control connection,
    which is logged once.

    Args:
        rows: Rows of this rank; None: all first tokens are sent over the control connection.
    """

    def __init__(self, rows: AuxBuffers | None = None, host: str = "") -> None:
        self.rows = rows
        self._host = host
        self._inline: set[str] = set()
        self._lock = threading.Lock()

    def reads(self, layout: KVLayout, where: str) -> bool:
        """True if the rows of the server at `where` can be read, as far as is known. This rank has
        rows."""
        assert self.rows is not None, "first tokens may be read"
        if layout.instance_id in self._inline:
            return False
        theirs = layout.rows
        if theirs is None:
            why = "it has no rows (SGLANG_MOONCAKE_CUSTOM_MEM_POOL, SGLANG_MOONCAKE_SEND_AUX_TCP)"
        elif theirs.row_bytes != self.rows.row_bytes:
            why = f"its rows have {theirs.row_bytes} bytes, those here {self.rows.row_bytes}"
        elif theirs.host not in ("", self._host):
            why = "it is on another host, which NVLink within a node does not reach"
        else:
            return True
        self.read_no_more(layout, where, why)
        return False

    def read_no_more(self, layout: KVLayout, where: str, why: str) -> None:
        with self._lock:
            if layout.instance_id in self._inline:
                return
            self._inline.add(layout.instance_id)
        logger.warning(
            "metadata of the prefill server at %s comes over the control connection (TCP), not "
            "over the transport of the pages: %s",
            where,
            why,
        )


class RowRead:
    """The read of a prompt's row into a row of this rank, which it owns until it has settled. Used
    by the prompt's thread.

    Args:
        timeout: Seconds to wait for a free row, and seconds for the read.

    Attributes:
        num_bytes: Bytes read so far.
    """

    def __init__(self, reader: MetadataReader, engine: Engine, timeout: float) -> None:
        self.num_bytes = 0
        self._reader = reader
        self._engine = engine
        self._rows = reader.rows
        self._timeout = timeout
        self._index: int | None = None
        self._transfer: Transfer | None = None

    def run(
        self, layout: KVLayout, row: int, where: str, room: int, heartbeat: Callable[[], None]
    ) -> FirstToken | None:
        """Read row `row` of a prefill server.

        Args:
            heartbeat: Called repeatedly while the read waits; may raise RoomFailed.

        Returns:
            The content of the row; None: the transport cannot read it, so that the token has to be
            sent inline.

        Raises:
            BadRow: The row does not belong to the room.
            RoomFailed: No row of this rank was free in time, or `heartbeat` raised it.
        """
        theirs, rows = layout.rows, self._rows
        assert theirs is not None and rows is not None, "rows are read"
        if not 0 <= row < theirs.num_rows:
            raise BadRow(f"there is no row {row} among {theirs.num_rows}")
        index = take_within(self._timeout, rows.alloc, heartbeat, "row for metadata")
        self._index = index
        rows.clear(index)  # The row of an earlier room could pass for this one's.
        size = rows.row_bytes
        block = Block(rows.address(index), theirs.address + row * size, size)
        why = self._move(layout.session_id, block, heartbeat)
        if why is not None:
            self._reader.read_no_more(layout, where, why)
            self.settle()
            return None
        self.num_bytes = size
        metadata = rows.get_buf(index, room)
        self.settle()
        return metadata

    def _move(self, session_id: str, block: Block, heartbeat: Callable[[], None]) -> str | None:
        """Read one block; return the reason of a failure, or None."""
        try:
            transfer = self._engine.begin(
                session_id, TransferOp.READ, [block], timeout=self._timeout
            )
        except TransferError as error:
            return str(error)
        self._transfer = transfer
        while not transfer.wait(POLL_S):
            if transfer.is_left:
                return f"reading a row failed, and cannot end: {transfer.error}"
            heartbeat()
        if transfer.error is not None:
            return str(transfer.error)
        return None if transfer.is_done else "a row was not read in time, or its address is refused"

    def settle(self) -> bool:
        """Wait until the read has ended, and give the row back. False: the transport never lets go
        of the row, which is lost. Idempotent."""
        index, self._index = self._index, None
        transfer, self._transfer = self._transfer, None
        if index is None:
            return True
        if transfer is not None:
            transfer.abandon()
            if not transfer.wait():
                logger.error("row %d is lost, since the transport does not let go of it", index)
                return False
        assert self._rows is not None, "a row was taken"
        self._rows.free(index)
        return True
