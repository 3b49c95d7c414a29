"""How a rank of a decode server gets the first token of a prompt: read from its row, or told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from sglang.srt.disaggregation.common.metadata_row import ROW_BYTES, BadRow
from sglang.srt.disaggregation.common.protocol import FirstToken, Offer
from sglang.srt.distributed.device_communicators.transfer_types import Block

logger = logging.getLogger(__name__)

CONTROL: Final = "control"
"""Told, over the control connection."""
TRANSPORT: Final = "transport"
"""Read, as pages are."""


class Rows(Protocol):
    """Rows of this rank, in registered memory; see `MetadataBuffers`. Any thread."""

    def take(self, timeout: float) -> int | None: ...
    def give_back(self, index: int) -> None: ...
    def clear(self, index: int) -> None: ...
    def address(self, index: int) -> int: ...
    def get_buf(self, index: int, room: int) -> FirstToken: ...


class MetadataReader:
    """Reads rows of prefill servers into rows here. One for all prompts of a rank; any thread.

    A prefill server whose rows cannot be read tells its first tokens from then on, and the log has
    one warning about that.

    Args:
        rows: Here; None: all are told.
        host: This one, as `host_identity` says.
    """

    def __init__(self, rows: Rows | None = None, host: str = "") -> None:
        self._rows = rows
        self._host = host
        self._telling: set[str] = set()
        """Instances of prefill servers whose rows cannot be read."""
        self._lock = threading.Lock()

    def reads(self, offer: Offer, where: str) -> bool:
        """Whether to read the rows of the server at `where`, for all that is known."""
        if self._rows is None:
            return False
        with self._lock:
            if offer.instance_id in self._telling:
                return False
        theirs = offer.rows
        if theirs is None:
            why = (
                "it offers no rows (SGLANG_MOONCAKE_CUSTOM_MEM_POOL, SGLANG_MOONCAKE_SEND_AUX_TCP)"
            )
        elif theirs.row_bytes != ROW_BYTES:
            why = f"its rows have {theirs.row_bytes} bytes, those here {ROW_BYTES}"
        elif theirs.host not in ("", self._host):
            why = "it is on another host, which NVLink within a node does not reach"
        else:
            return True
        self.be_told(offer, where, why)
        return False

    def be_told(self, offer: Offer, where: str, why: str) -> None:
        """Read no more rows of this server."""
        with self._lock:
            if offer.instance_id in self._telling:
                return
            self._telling.add(offer.instance_id)
        logger.warning(
            "metadata of the prefill server at %s comes over the control connection (TCP), not "
            "over the transport of the pages: %s",
            where,
            why,
        )

    def take(self, timeout: float) -> int | None:
        """A row here; None: all were in use for `timeout` seconds."""
        assert self._rows is not None, "rows are read"
        return self._rows.take(timeout)

    def give_back(self, index: int) -> None:
        """Nothing is read into this row any more."""
        assert self._rows is not None, "it was taken"
        self._rows.give_back(index)

    def read(
        self, offer: Offer, row: int, index: int, room: int, move: Callable[[Block], None]
    ) -> FirstToken:
        """Read row `row` of a prefill server, by way of row `index` here, which was taken.

        Args:
            move: Moves a block. Returns when nothing is in flight to it; its errors pass through.

        Raises:
            BadRow: It is not the row of `room`.
        """
        theirs, rows = offer.rows, self._rows
        assert theirs is not None and rows is not None, "rows are read"
        if not 0 <= row < theirs.num_rows:
            raise BadRow(f"there is no row {row} among {theirs.num_rows}")
        rows.clear(index)  # What an earlier room has left could pass for this one's.
        move(Block(rows.address(index), theirs.address + row * ROW_BYTES, ROW_BYTES))
        return rows.get_buf(index, room)
