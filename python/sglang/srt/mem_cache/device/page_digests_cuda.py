"""Checksums of pages on CUDA: kernels hash the pages where they are in the pool.

Importing this module needs triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.hardware_backend.cuda.xxh3 import PIECE_BYTES, fits_pieces, piece_digests
from sglang.srt.hardware_backend.leaf_hash import BLOCK_BYTES
from sglang.srt.mem_cache.device.page_digests import PageHasher, Parts, UnfitPages


class CudaPageHasher(PageHasher):
    """Hashes pages of a pool on CUDA, in the current stream.

    Args:
        parts: See `Parts`.
        page_size: Items of a page.
        by_token: True if the bytes of a part are token by token; False: layer by layer.

    Raises:
        UnfitPages: The kernels cannot hash pages of this shape.
    """

    def __init__(self, parts: Parts, page_size: int, *, by_token: bool) -> None:
        super().__init__(parts[0][0].device, page_size)
        runs = [_runs_of(layers, page_size, by_token=by_token) for layers in parts]
        self._piece_bytes = math.gcd(BLOCK_BYTES, *(size for _, size, _ in runs))
        table = np.concatenate([_pieces(run, self._piece_bytes) for run in runs])
        if (
            self._piece_bytes < PIECE_BYTES
            or (table % 8).any()
            or not fits_pieces(len(table) * self._piece_bytes, self._piece_bytes)
        ):
            raise UnfitPages(
                f"pages in runs of {[size for _, size, _ in runs]} bytes are not multiples of "
                f"{PIECE_BYTES} bytes; use a larger --page-size"
            )
        self._pieces = torch.from_numpy(table).to(parts[0][0].device)

    def hash_into(self, digests: torch.Tensor, slots: torch.Tensor) -> None:
        piece_digests(self._pieces, slots, self.page_size, self._piece_bytes, digests.data_ptr())


Runs: TypeAlias = tuple[npt.NDArray[np.int64], int, int]
"""Addresses of the runs of page 0 of a part, in the order of its bytes; bytes of a run; bytes from
page to page."""


def _runs_of(layers: Sequence[torch.Tensor], page_size: int, *, by_token: bool) -> Runs:
    first = layers[0]
    row_bytes = first[0].numel() * first.element_size()
    stride = first.stride(0) * first.element_size()
    bases = np.array([layer.data_ptr() for layer in layers], np.int64)
    if stride == row_bytes and not by_token:
        return bases, row_bytes * page_size, stride * page_size
    tokens = np.arange(page_size, dtype=np.int64) * stride
    addresses = tokens[:, None] + bases if by_token else bases[:, None] + tokens
    return addresses.reshape(-1), row_bytes, stride * page_size


def _pieces(runs: Runs, piece_bytes: int) -> npt.NDArray[np.int64]:
    """The runs cut in pieces: int64 `[pieces, 2]`, see `piece_digests`."""
    addresses, size, page_stride = runs
    starts = np.arange(0, size, max(1, piece_bytes))
    found = np.empty((len(addresses), len(starts), 2), np.int64)
    found[..., 0] = addresses[:, None] + starts
    found[..., 1] = page_stride
    return found.reshape(-1, 2)
