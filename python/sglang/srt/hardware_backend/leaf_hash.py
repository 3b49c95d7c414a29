"""A hash that many threads can compute in parallel. Bytes are cut into leaves of 1 MiB, and each
leaf has an xxh3-128 digest. The last leaf is padded with zeros to whole blocks of 1 KiB."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from sglang.srt.constants import KIB, MIB

HASH_NAME: Final = "xxh3-128 of MiBs"
"""Name of the hash, which hosts compare."""
LEAF_BYTES: Final = MIB
BLOCK_BYTES: Final = KIB
DIGEST_BYTES: Final = 16
_PIECE_BYTES: Final = 16 * LEAF_BYTES


def join_leaves(digests: bytes, num_bytes: int) -> str:
    """The hash of `num_bytes` bytes, from the digests of their leaves: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(digests + num_bytes.to_bytes(8, "little"))


def host_digests(pieces: Iterable[npt.NDArray[np.uint8]]) -> bytes:
    """Digests of the leaves of bytes given in pieces of any length.

    Args:
        pieces: Contiguous arrays; each is used up before the next one is requested.

    Returns:
        16 bytes per leaf, most significant byte first.
    """
    found = bytearray()
    rest = np.empty(0, np.uint8)
    for piece in pieces:
        joined = np.concatenate([rest, piece]) if len(rest) else piece
        end = len(joined) - len(joined) % LEAF_BYTES
        for begin in range(0, end, LEAF_BYTES):
            found += xxhash.xxh3_128_digest(joined[begin : begin + LEAF_BYTES].data)
        rest = joined[end:].copy()
    if len(rest):
        padded = np.pad(rest, (0, -len(rest) % BLOCK_BYTES))
        found += xxhash.xxh3_128_digest(padded.data)
    return bytes(found)


def pieces_of(matrix: torch.Tensor) -> Iterator[torch.Tensor]:
    """All bytes of a matrix, row by row, in contiguous tensors of at most 16 MiB.

    Args:
        matrix: uint8 `[rows, bytes]`; the bytes of a row are contiguous.
    """
    if matrix.is_contiguous():
        yield from torch.split(matrix.view(-1), _PIECE_BYTES)
        return
    count = max(_PIECE_BYTES // matrix.shape[1], 1)
    for rows in torch.split(matrix, count):
        yield from torch.split(rows.reshape(-1), _PIECE_BYTES)
