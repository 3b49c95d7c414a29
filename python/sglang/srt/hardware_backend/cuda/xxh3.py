"""xxh3-128 of device memory, by two kernels.

A hash processes blocks of 1 KiB. A block's contribution to the hash's eight accumulators does not
depend on them, so one kernel computes the contributions of all blocks at once. The accumulators are
scrambled between two blocks; a second kernel does that with eight threads per hash.

Source: "XXH3 algorithm overview" in the xxHash specification, for more than 240 bytes, seed 0.

Importing this module needs triton.
"""

# ruff: noqa: ANN001, ANN202  (the language below the decorator is not Python)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from sglang.srt.constants import MIB
from sglang.srt.hardware_backend.cuda.bound_kernel import BoundKernel, unspecialized
from sglang.srt.hardware_backend.leaf_hash import BLOCK_BYTES, DIGEST_BYTES, LEAF_BYTES

_WORD: Final = 8
_STRIPES: Final = tl.constexpr(16)
_LANES: Final = tl.constexpr(8)
_BLOCK_WORDS: Final = tl.constexpr(BLOCK_BYTES // _WORD)
_LEAF_BLOCKS: Final = tl.constexpr(LEAF_BYTES // BLOCK_BYTES)
_BLOCKS_AT_ONCE: Final = 16
_LEAVES_AT_ONCE: Final = 8
_GROUP: Final = 256 * MIB // LEAF_BYTES
"""Leaves of one launch. The contributions of their blocks take a sixteenth of their bytes."""
_MOST_BYTES: Final = _WORD << 31
_COLUMNS: Final = 5
"""Columns of the table of leaves: address of the cell, first word, number of words, words of a row,
words from row to row."""

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64: Final = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)  # fmt: skip
_START: Final = (
    _PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0],
)  # fmt: skip

# Rows of eight words of the constants: see `_constants`.
_LAST_KEYS: Final = tl.constexpr(16)
_SCRAMBLE: Final = tl.constexpr(17)
_LOW: Final = tl.constexpr(18)
_HIGH: Final = tl.constexpr(19)
_FIRST: Final = tl.constexpr(20)
_PRIMES: Final = tl.constexpr(21)


@triton.jit
def _words(constants, row):
    return tl.load(constants + row * _LANES + tl.arange(0, _LANES)).to(tl.uint64, bitcast=True)


@triton.jit
def _load_words(cell, first, index, count, row_words, stride):
    """Words `index` of a leaf; zeros after its last word."""
    word = first + index
    row = word // row_words
    address = cell + row.to(tl.int64) * stride + (word - row * row_words)
    return tl.load(address, mask=index < count, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def _sum_blocks(table, constants, sums, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr):
    """Contributions of each block of a leaf to the accumulators: int64 `[leaves, blocks, 8]`."""
    leaf = tl.program_id(0)
    entry = table + leaf * COLUMNS
    cell = tl.load(entry).to(tl.pointer_type(tl.int64))
    first = tl.load(entry + 1).to(tl.int32)
    count = tl.load(entry + 2).to(tl.int32)
    row_words = tl.load(entry + 3).to(tl.int32)
    stride = tl.load(entry + 4)
    blocks = tl.cdiv(count, _BLOCK_WORDS)
    begin = tl.program_id(1) * BLOCKS
    if begin < blocks:
        block = begin + tl.arange(0, BLOCKS)[:, None, None]
        stripe = tl.arange(0, _STRIPES)[None, :, None]
        lane = tl.arange(0, _LANES)[None, None, :]
        at = block * _BLOCK_WORDS + stripe * _LANES
        own = _load_words(cell, first, at + lane, count, row_words, stride)
        other = _load_words(cell, first, at + (lane ^ 1), count, row_words, stride)
        # The last stripe of a leaf has different keys.
        is_last = (block == blocks - 1) & (stripe == _STRIPES - 1)
        keys = tl.load(constants + tl.where(is_last, _LAST_KEYS, stripe) * _LANES + lane)
        mixed = own ^ keys.to(tl.uint64, bitcast=True)
        added = other + (mixed & 0xFFFFFFFF) * (mixed >> 32)
        total = tl.sum(added.to(tl.int64, bitcast=True), axis=1)
        block = begin + tl.arange(0, BLOCKS)[:, None]
        lane = tl.arange(0, _LANES)[None, :]
        place = (leaf.to(tl.int64) * _LEAF_BLOCKS + block) * _LANES + lane
        tl.store(sums + place, total, mask=block < blocks)


@triton.jit
def _merge(accumulators, keys, start, LEAVES: tl.constexpr):
    mixed = accumulators ^ keys[None, :]
    left, right = tl.split(tl.reshape(mixed, (LEAVES, _LANES // 2, 2)))
    folded = (left * right) ^ tl.umulhi(left, right)
    total = (tl.sum(folded.to(tl.int64, bitcast=True), axis=1) + start).to(tl.uint64, bitcast=True)
    total ^= total >> 37
    total *= 0x165667919E3779F9
    return total ^ (total >> 32)


@triton.jit
def _first_accumulators(constants, MESSAGES: tl.constexpr):
    """The accumulators before the first block, `[messages, 8]`; the keys and the prime of
    `_add_block`."""
    none = tl.zeros((MESSAGES, _LANES), tl.int64).to(tl.uint64, bitcast=True)
    keys = _words(constants, _SCRAMBLE)[None, :]
    prime = tl.load(constants + _PRIMES * _LANES + 2).to(tl.uint64, bitcast=True)
    return none + _words(constants, _FIRST)[None, :], keys, prime


@triton.jit
def _add_block(accumulators, added, keys, prime, block, num_blocks):
    """Add a block's contributions; scramble, unless it is the last or comes after it."""
    accumulators += added
    scrambled = (accumulators ^ (accumulators >> 47) ^ keys) * prime
    return tl.where(block < num_blocks - 1, scrambled, accumulators)


@triton.jit
def _swap_bytes(words):
    """The most significant byte first."""
    words = ((words & 0x00FF00FF00FF00FF) << 8) | ((words >> 8) & 0x00FF00FF00FF00FF)
    words = ((words & 0x0000FFFF0000FFFF) << 16) | ((words >> 16) & 0x0000FFFF0000FFFF)
    return (words << 32) | (words >> 32)


@triton.jit
def _store_digests(digests, message, is_there, accumulators, constants, num_bytes,
                   MESSAGES: tl.constexpr):  # fmt: skip
    """Digests of messages of `num_bytes` `[messages]` from their accumulators, 16 bytes each, the
    most significant first."""
    low_start = num_bytes * tl.load(constants + _PRIMES * _LANES)
    high_start = ~(num_bytes * tl.load(constants + _PRIMES * _LANES + 1))
    low = _swap_bytes(_merge(accumulators, _words(constants, _LOW), low_start, MESSAGES))
    high = _swap_bytes(_merge(accumulators, _words(constants, _HIGH), high_start, MESSAGES))
    tl.store(digests + message * 2, high.to(tl.int64, bitcast=True), mask=is_there)
    tl.store(digests + message * 2 + 1, low.to(tl.int64, bitcast=True), mask=is_there)


@triton.jit
def _join_blocks(table, constants, sums, digests, leaves, COLUMNS: tl.constexpr,
                 LEAVES: tl.constexpr):  # fmt: skip
    """Digests of leaves from the contributions of their blocks: 16 bytes each."""
    leaf = tl.program_id(0) * LEAVES + tl.arange(0, LEAVES)
    is_there = leaf < leaves
    count = tl.load(table + leaf * COLUMNS + 2, mask=is_there, other=1).to(tl.int32)
    blocks = tl.cdiv(count, _BLOCK_WORDS)[:, None]
    lane = tl.arange(0, _LANES)[None, :]
    own = sums + (leaf.to(tl.int64) * _LEAF_BLOCKS)[:, None] * _LANES + lane
    accumulators, keys, prime = _first_accumulators(constants, LEAVES)
    for block in tl.range(0, tl.max(blocks), loop_unroll_factor=8):
        is_held = is_there[:, None] & (block < blocks)
        added = tl.load(own + block * _LANES, mask=is_held, other=0)
        added = added.to(tl.uint64, bitcast=True)
        accumulators = _add_block(accumulators, added, keys, prime, block, blocks)
    num_bytes = tl.reshape(blocks, (LEAVES,)).to(tl.int64) * (_BLOCK_WORDS * 8)
    _store_digests(digests, leaf, is_there, accumulators, constants, num_bytes, LEAVES)


@triton.jit
def _words_at(address):
    """A pointer to words that begin at a multiple of 16."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)


@unspecialized
def _sum_piece_blocks(
    pieces: tl.int64, slots: tl.int64, constants: tl.int64, sums: tl.int64, begin: tl.int32,
    page_size: tl.int32, num_words: tl.int32, num_blocks: tl.int32, PIECE: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Like `_sum_blocks`, for messages scattered in pieces: int64 `[messages, blocks, 8]`."""
    pieces = pieces.to(tl.int64).to(tl.pointer_type(tl.int64))
    slots = slots.to(tl.int64).to(tl.pointer_type(tl.int64))
    constants, sums = _words_at(constants), _words_at(sums)
    message = tl.program_id(0)
    place = tl.load(slots + (begin + message).to(tl.int64) * page_size) // page_size
    first = tl.program_id(1) * BLOCKS
    block = first + tl.arange(0, BLOCKS)[:, None, None]
    in_block: tl.constexpr = _BLOCK_WORDS // PIECE
    piece = block * in_block + tl.arange(0, in_block)[None, :, None]
    is_there = piece * PIECE < num_words
    entry = pieces + piece * 2
    address = tl.load(entry, mask=is_there, other=0)
    address += place * tl.load(entry + 1, mask=is_there, other=0)
    cell = address.to(tl.pointer_type(tl.int64))
    word = tl.arange(0, PIECE)[None, None, :]
    is_whole = is_there & (word < PIECE)
    own = tl.load(cell + word, mask=is_whole, other=0)
    other = tl.load(cell + (word ^ 1), mask=is_whole, other=0)
    own = tl.reshape(own, (BLOCKS, _STRIPES, _LANES)).to(tl.uint64, bitcast=True)
    other = tl.reshape(other, (BLOCKS, _STRIPES, _LANES)).to(tl.uint64, bitcast=True)
    stripe = tl.arange(0, _STRIPES)[None, :, None]
    lane = tl.arange(0, _LANES)[None, None, :]
    # The last stripe of a message has different keys; there is none after it.
    left = num_words - (block * _BLOCK_WORDS + stripe * _LANES)
    keys = tl.load(constants + tl.where(left == _LANES, _LAST_KEYS, stripe) * _LANES + lane)
    mixed = own ^ keys.to(tl.uint64, bitcast=True)
    added = (other + (mixed & 0xFFFFFFFF) * (mixed >> 32)).to(tl.int64, bitcast=True)
    total = tl.sum(tl.where(left > 0, added, 0), axis=1)
    block = first + tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, _LANES)[None, :]
    at = (message.to(tl.int64) * num_blocks + block) * _LANES + lane
    tl.store(sums + at, total, mask=block < num_blocks)


@triton.jit
def _load_sums(own, block, num_blocks, is_there):
    at = tl.zeros_like(is_there).to(tl.int32) + block
    is_held = (is_there & (at < num_blocks))[:, None]
    return tl.load(own + block * _LANES, mask=is_held, other=0).to(tl.uint64, bitcast=True)


@unspecialized
def _join_piece_blocks(
    constants: tl.int64, sums: tl.int64, digests: tl.int64, messages: tl.int32,
    num_blocks: tl.int32, num_bytes: tl.int64, MESSAGES: tl.constexpr,
):  # fmt: skip
    """Like `_join_blocks`, for messages of equal length. All but numbers are addresses."""
    constants, sums = _words_at(constants), _words_at(sums)
    message = tl.program_id(0) * MESSAGES + tl.arange(0, MESSAGES)
    is_there = message < messages
    lane = tl.arange(0, _LANES)[None, :]
    own = sums + (message.to(tl.int64) * num_blocks)[:, None] * _LANES + lane
    accumulators, keys, prime = _first_accumulators(constants, MESSAGES)
    # The next eight loads are under way during eight steps: each takes much longer than a step.
    sum0 = _load_sums(own, 0, num_blocks, is_there)
    sum1 = _load_sums(own, 1, num_blocks, is_there)
    sum2 = _load_sums(own, 2, num_blocks, is_there)
    sum3 = _load_sums(own, 3, num_blocks, is_there)
    sum4 = _load_sums(own, 4, num_blocks, is_there)
    sum5 = _load_sums(own, 5, num_blocks, is_there)
    sum6 = _load_sums(own, 6, num_blocks, is_there)
    sum7 = _load_sums(own, 7, num_blocks, is_there)
    for block in tl.range(0, num_blocks, 8):
        next0 = _load_sums(own, block + 8, num_blocks, is_there)
        next1 = _load_sums(own, block + 9, num_blocks, is_there)
        next2 = _load_sums(own, block + 10, num_blocks, is_there)
        next3 = _load_sums(own, block + 11, num_blocks, is_there)
        next4 = _load_sums(own, block + 12, num_blocks, is_there)
        next5 = _load_sums(own, block + 13, num_blocks, is_there)
        next6 = _load_sums(own, block + 14, num_blocks, is_there)
        next7 = _load_sums(own, block + 15, num_blocks, is_there)
        accumulators = _add_block(accumulators, sum0, keys, prime, block, num_blocks)
        accumulators = _add_block(accumulators, sum1, keys, prime, block + 1, num_blocks)
        accumulators = _add_block(accumulators, sum2, keys, prime, block + 2, num_blocks)
        accumulators = _add_block(accumulators, sum3, keys, prime, block + 3, num_blocks)
        accumulators = _add_block(accumulators, sum4, keys, prime, block + 4, num_blocks)
        accumulators = _add_block(accumulators, sum5, keys, prime, block + 5, num_blocks)
        accumulators = _add_block(accumulators, sum6, keys, prime, block + 6, num_blocks)
        accumulators = _add_block(accumulators, sum7, keys, prime, block + 7, num_blocks)
        sum0, sum1, sum2, sum3 = next0, next1, next2, next3
        sum4, sum5, sum6, sum7 = next4, next5, next6, next7
    length = tl.zeros((MESSAGES,), tl.int64) + num_bytes
    digests = digests.to(tl.int64).to(tl.pointer_type(tl.int64))
    _store_digests(digests, message, is_there, accumulators, constants, length, MESSAGES)


@functools.cache
def _constants(device: torch.device) -> torch.Tensor:
    """Int64 `[22, 8]`: keys of the stripes, of the last one, of the scrambling and of both halves;
    the first accumulators; primes."""

    def keys(offset: int) -> npt.NDArray[np.uint64]:
        return np.frombuffer(_SECRET, "<u8", 8, offset)

    end = len(_SECRET) - 64
    offsets = [*range(0, 128, _WORD), end - 7, end, 11, end - 11]
    rows = [*map(keys, offsets), np.array(_START, np.uint64)]
    rows.append(np.array([*_PRIME64[:2], _PRIME32[0], 0, 0, 0, 0, 0], np.uint64))
    return torch.from_numpy(np.stack(rows).view(np.int64)).to(device)


def _aligned(cell: torch.Tensor) -> torch.Tensor:
    """The cell itself or, if its rows are not whole words, a copy in one row, padded with zeros."""
    step = cell.stride(0) if len(cell) > 1 else 0
    if not (cell.data_ptr() % _WORD or cell.shape[1] % _WORD or step % _WORD):
        return cell
    padded = torch.zeros(1, -(-cell.numel() // _WORD) * _WORD, dtype=cell.dtype, device=cell.device)
    padded[0, : cell.numel()].view(cell.shape).copy_(cell)
    return padded


def _table(cells: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """A row for each leaf."""
    parts = []
    for cell in cells:
        words, leaf_words = cell.numel() // _WORD, LEAF_BYTES // _WORD
        first = np.arange(0, words, leaf_words)
        part = np.empty((len(first), _COLUMNS), np.int64)
        part[:, 0] = cell.data_ptr()
        part[:, 1] = first
        part[:, 2] = np.minimum(words - first, leaf_words)
        part[:, 3] = cell.shape[1] // _WORD
        part[:, 4] = cell.stride(0) // _WORD
        parts.append(part)
    return np.concatenate(parts)


def leaf_digests(cells: Sequence[torch.Tensor]) -> list[bytes]:
    """Digests of the leaves of each cell, one behind the other; see `leaf_hash`.

    Args:
        cells: uint8 `[rows, bytes]` on one CUDA device, of less than 16 GiB each; the bytes of a
            row are contiguous.

    Returns:
        For each cell 16 bytes a leaf, the most significant byte first. They are computed on the
        current stream; the call waits for it.
    """
    assert all(cell.numel() < _MOST_BYTES for cell in cells), "places in a cell are 32 bits"
    sources = [_aligned(cell) for cell in cells]
    device = cells[0].device
    table = _table(sources)
    rows = torch.from_numpy(table).to(device)
    digests = torch.empty(len(table), 2, dtype=torch.int64, device=device)
    constants = _constants(device)
    sums = torch.empty(
        min(len(table), _GROUP), _LEAF_BLOCKS.value, _LANES.value, dtype=torch.int64, device=device
    )
    for begin in range(0, len(table), _GROUP):
        part, found = rows[begin : begin + _GROUP], digests[begin : begin + _GROUP]
        most = -(-int(table[begin : begin + _GROUP, 2].max()) // _BLOCK_WORDS.value)
        _sum_blocks[(len(part), triton.cdiv(most, _BLOCKS_AT_ONCE))](
            part, constants, sums, COLUMNS=_COLUMNS, BLOCKS=_BLOCKS_AT_ONCE
        )
        _join_blocks[(triton.cdiv(len(part), _LEAVES_AT_ONCE),)](
            part, constants, sums, found, len(part), COLUMNS=_COLUMNS, LEAVES=_LEAVES_AT_ONCE,
            num_warps=2,
        )  # fmt: skip
    raw = digests.cpu().numpy().tobytes()
    counts = [-(-source.numel() // LEAF_BYTES) * DIGEST_BYTES for source in sources]
    ends = np.cumsum(counts)
    return [raw[end - count : end] for end, count in zip(ends, counts, strict=True)]


PIECE_BYTES: Final = 64
"""Pieces are multiples of this, up to `BLOCK_BYTES`."""
_SHORTEST_BYTES: Final = 256
"""xxh3 treats messages of at most 240 bytes in another way."""
_SUM_BYTES: Final = 64 * MIB
"""Memory for the contributions of blocks, which take a sixteenth of the bytes."""


def fits_pieces(num_bytes: int, piece_bytes: int) -> bool:
    """True if `piece_digests` hashes messages of `num_bytes` in such pieces."""
    is_power = piece_bytes & (piece_bytes - 1) == 0
    fits = is_power and PIECE_BYTES <= piece_bytes <= BLOCK_BYTES
    return fits and num_bytes >= _SHORTEST_BYTES and num_bytes % piece_bytes == 0


def piece_digests(
    pieces: torch.Tensor, slots: torch.Tensor, page_size: int, piece_bytes: int, into: int
) -> None:
    """Queue xxh3-128 of messages of equal length that are scattered in the same way, on the current
    stream.

    Args:
        pieces: int64 `[pieces, 2]` on the device: for each piece of a message, in order, its
            address at place 0, and the bytes from place to place. Both are multiples of 8.
        slots: int64 `[n * page_size]` on the device: message i is at place
            `slots[i * page_size] // page_size`.
        piece_bytes: Bytes of a piece; see `fits_pieces`.
        into: Address of 16 bytes for each message, which the device can write: its digest, the
            most significant byte first.
    """
    num_bytes = len(pieces) * piece_bytes
    assert fits_pieces(num_bytes, piece_bytes), f"{num_bytes} bytes in pieces of {piece_bytes}"
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    device, count = pieces.device, len(slots) // page_size
    at_once = max(1, _SUM_BYTES // (num_blocks * _LANES.value * _WORD))
    sums = torch.empty(
        min(count, at_once), num_blocks, _LANES.value, dtype=torch.int64, device=device
    )
    constants, sums_at = _constants(device).data_ptr(), sums.data_ptr()
    add_up, join = _piece_kernels(piece_bytes // _WORD)
    for begin in range(0, count, at_once):
        messages = min(at_once, count - begin)
        add_up(
            (messages, -(-num_blocks // _BLOCKS_AT_ONCE), 1), pieces.data_ptr(), slots.data_ptr(),
            constants, sums_at, begin, page_size, num_bytes // _WORD, num_blocks,
        )  # fmt: skip
        join(
            (-(-messages // _LEAVES_AT_ONCE), 1, 1), constants, sums_at,
            into + begin * DIGEST_BYTES, messages, num_blocks, num_bytes,
        )  # fmt: skip


@functools.cache
def _piece_kernels(piece_words: int) -> tuple[BoundKernel, BoundKernel]:
    """The kernels of `piece_digests`."""
    add_up = BoundKernel(_sum_piece_blocks, PIECE=piece_words, BLOCKS=_BLOCKS_AT_ONCE)
    return add_up, BoundKernel(_join_piece_blocks, MESSAGES=_LEAVES_AT_ONCE, num_warps=2)
