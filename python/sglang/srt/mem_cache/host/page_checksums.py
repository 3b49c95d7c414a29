"""The checksum of each page of a host pool, which travels with the page.

A checksum is computed where a page's bytes are made: on the device when a page is copied to L2, or
by the engine that wrote it to L3. Every later copy is compared with it, on the side where it
arrives. It is the checksum of an L3 object too (`storage/page_trailer.py`).

Threads: each page's row is written by the flow that owns the page, before the page is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.mem_cache.device.page_digests import DIGEST_BYTES

NO_CHECKSUM: Final = b"no page checksum"
"""Replaces the checksum of a page that has none. A page with this hash is as unlikely as with any
other given hash."""


class PageChecksums:
    """The checksums of the pages of one host pool, 16 bytes each."""

    def __init__(self, page_num: int) -> None:
        none = np.frombuffer(NO_CHECKSUM, np.uint8)
        self._rows = np.tile(none, (page_num, 1))

    def keep(self, pages: npt.NDArray[np.int64], digests: npt.NDArray[np.uint8]) -> None:
        """Set the checksums of `pages`; `digests` is uint8 `[pages, 16]`."""
        self._rows[pages] = digests

    def forget(self, pages: npt.NDArray[np.int64]) -> None:
        """Note that the checksums of `pages` are not known."""
        self._rows[pages] = np.frombuffer(NO_CHECKSUM, np.uint8)

    def of(self, pages: npt.NDArray[np.int64]) -> list[bytes]:
        """The checksum of each page, 16 bytes; `NO_CHECKSUM` if it is not known."""
        raw = self._rows[pages].tobytes()
        return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]

    def have(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """True for each page whose checksum is known."""
        return _are_unlike(self._rows[pages], np.frombuffer(NO_CHECKSUM, np.uint8))

    def differ(
        self, pages: npt.NDArray[np.int64], digests: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.bool_]:
        """True for each page whose known checksum differs from its digest in `digests`."""
        return self.have(pages) & _are_unlike(self._rows[pages], digests)


@dataclass(frozen=True, slots=True)
class PageDigests:
    """Pages of one pool that a copy has moved, and the checksums of their bytes on the device."""

    pool: str
    pages: npt.NDArray[np.int64]
    """int64 `[n]`: pages of the host pool."""
    digests: torch.Tensor | None
    """uint8 `[n * 16]` on the CPU, written by the time the copy has ended; None: the pages are not
    hashed."""

    def rows(self) -> npt.NDArray[np.uint8] | None:
        """The checksums, uint8 `[n, 16]`, of a copy that has ended; None as `digests`."""
        if self.digests is None:
            return None
        found: npt.NDArray[np.uint8] = self.digests.numpy().reshape(-1, DIGEST_BYTES)
        return found


def _are_unlike(
    rows: npt.NDArray[np.uint8], others: npt.NDArray[np.uint8]
) -> npt.NDArray[np.bool_]:
    unlike: npt.NDArray[np.bool_] = (rows != others).any(axis=1)
    return unlike


def as_rows(checksums: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    """Checksums of 16 bytes each, as uint8 `[n, 16]`."""
    return np.frombuffer(b"".join(checksums), np.uint8).reshape(-1, DIGEST_BYTES)
