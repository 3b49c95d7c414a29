"""Lists of plain copies (address, address, bytes), made without a Python loop over pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.host_rows import PartRows


@dataclass(frozen=True, slots=True)
class CopyRuns:
    """Copies of one direction: uint64 arrays of equal length, C-contiguous."""

    destinations: npt.NDArray[np.uint64]
    sources: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.sizes)


def page_runs(
    parts: Sequence[PartRows],
    host_pages: npt.NDArray[np.int64],
    device_pages: npt.NDArray[np.int64],
    page_size: int,
    layers: range,
    *,
    to_host: bool,
) -> CopyRuns:
    """The copies that move whole pages of `layers`; what adjoins on both sides is one copy.

    Args:
        parts: Each with runs per page and layer.
        host_pages: int64 `[n]`: pages of `page_size` tokens.
        device_pages: int64 `[n]`.
        page_size: Tokens.
        layers: Consecutive layers.
        to_host: The direction.
    """
    runs = []
    for part in parts:
        rows = part.rows
        if not rows.has_page_runs(page_size):
            raise ValueError(
                "a layout whose pages have no run per layer is copied with --hicache-io-backend "
                "kernel"
            )
        slots = host_pages * page_size
        in_layer = (slots // rows.page_tokens) * rows.page_stride
        in_layer = in_layer + (slots % rows.page_tokens) * rows.token_stride
        index = np.arange(layers.start, layers.stop, dtype=np.int64)
        host = part.host_address + index[:, None] * rows.layer_stride + in_layer
        bases = np.array(part.device_addresses[layers.start : layers.stop], dtype=np.int64)
        piece = page_size * rows.row_bytes
        device = bases[:, None] + device_pages * piece
        to, source = (host, device) if to_host else (device, host)
        runs.append(merge_pieces(to.reshape(-1), source.reshape(-1), piece))
    return CopyRuns(
        np.concatenate([run.destinations for run in runs]),
        np.concatenate([run.sources for run in runs]),
        np.concatenate([run.sizes for run in runs]),
    )


def merge_pieces(
    destinations: npt.NDArray[np.int64], sources: npt.NDArray[np.int64], piece: int
) -> CopyRuns:
    """Copies of `piece` bytes each; neighbours in the list that adjoin on both sides are one."""
    adjoins = (np.diff(destinations) == piece) & (np.diff(sources) == piece)
    starts = np.concatenate(
        [np.zeros(min(1, len(sources)), dtype=np.int64), np.flatnonzero(~adjoins) + 1]
    )
    counts = np.diff(starts, append=len(sources))
    return CopyRuns(
        destinations[starts].astype(np.uint64),
        sources[starts].astype(np.uint64),
        (counts * piece).astype(np.uint64),
    )
