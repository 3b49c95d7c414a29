"""Quantized weights of a checkpoint, dequantized where they are read, or in memory's layout.

A weight is `[outputs, inputs]`, or such matrices stacked in leading dimensions. Each element is an
integer or a float of 4 or 8 bits; it stands for (element - zero point) * scale. A scale belongs to
a block of outputs and inputs. Values are computed in fp32 and rounded once to the dtype of the
result.

A rank reads only the elements that its part needs. Its part may begin and end anywhere: within a
block, and within a word of packed integers. Scales and zero points are read whole.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch

from sglang.srt.configs.quantization_config import Packing
from sglang.srt.layers.placement import Sliceable
from sglang.srt.layers.triton_ops.arguments import (
    LEAST_PACKED,
    fp4_words,
    inputs_of_bytes,
    packed_block,
)

_TILE_ELEMENTS: Final = 1 << 22
"""About this many elements are dequantized at a time: 16 MiB in fp32."""
WORD_BITS: Final = 32
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word, counted from the lowest bits, of each of eight consecutive outputs."""
E2M1: Final = tuple(
    sign * one for sign in (1.0, -1.0) for one in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
)
"""Values of 4-bit floats, by their bits."""
NO_SCALE: Final = 255
"""NaN among e8m0 scales, which are exponents."""
E8M0: Final = tuple(2.0 ** (bits - 127) for bits in range(NO_SCALE))
"""Values of the other scales, by their bits."""


class RawTensor(Sliceable, Protocol):
    """A tensor of a checkpoint as it is stored."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class StoredParts(NamedTuple):
    """The tensors of a whole weight in the layout of `ScaledWeight`."""

    elements: Sliceable
    scales: torch.Tensor
    zeros: torch.Tensor | None


class TiledTensor(ABC):
    """A whole tensor: a `Sliceable` whose elements are computed tile by tile where it is read.

    Args:
        shape: Its shape, `[..., outputs, inputs]`.
        dtype: Dtype of the results.
        device: Device of the results, where they are computed too.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.shape, self.device = shape, device
        self._dtype = dtype

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        spans = [one.indices(size) for one, size in zip(index, self.shape, strict=True)]
        assert all(step == 1 for *_, step in spans)
        *lead, rows, columns = [(begin, max(begin, end)) for begin, end, _ in spans]
        sizes = [end - begin for begin, end in (*lead, rows, columns)]
        out = torch.empty(sizes, dtype=self._dtype, device=self.device)
        height = max(1, _TILE_ELEMENTS // max(1, sizes[-1]))
        for place in itertools.product(*(range(*span) for span in lead)):
            matrix = out[tuple(at - span[0] for at, span in zip(place, lead, strict=True))]
            for begin in range(*rows, height):
                end = min(begin + height, rows[1])
                tile = self.tile(place, slice(begin, end), slice(*columns))
                matrix[begin - rows[0] : end - rows[0]] = tile
        return out

    @abstractmethod
    def tile(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        """Elements `[rows, columns]` of the matrix at `place` of the leading dimensions, of any
        dtype."""


class QuantizedTensor(TiledTensor):
    """A whole weight, which is dequantized as it is read; tiles are in fp32."""

    @abstractmethod
    def stored(self, height: int, group: int) -> StoredParts:
        """The weight as it is kept in memory, where `height` outputs and `group` inputs have one
        scale; blocks of the weight are multiples of these.

        Raises:
            ValueError: The inputs of a group are not consecutive.
        """


class ScaledTensor(QuantizedTensor):
    """One element per weight: fp8 or int8, with scales.

    Args:
        raw: `[..., outputs, inputs]`, fp8 or int8.
        scales: One for each block, `[..., ceil(outputs / block), ceil(inputs / block)]`; dimensions
            of size 1 may be absent.
        block: See `QuantizationConfig`; None: one scale for a matrix, or one for each output.

    Raises:
        ValueError: The scales fit neither the weight nor the blocks.
    """

    def __init__(
        self,
        raw: RawTensor,
        scales: torch.Tensor,
        block: tuple[int, int] | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(tuple(raw.shape), dtype, device)
        self._raw = raw
        *lead, outputs, inputs = self.shape
        grid = list(scales.shape[len(lead) :])
        if block is None:
            block = (-1, -1) if grid in ([], [1], [1, 1]) else (1, -1)
        height, width = block
        self._block = (outputs if height < 0 else height, inputs if width < 0 else width)
        sizes = zip((outputs, inputs), self._block, strict=True)
        blocks = [-(-size // part) for size, part in sizes]
        is_of_each = list(scales.shape[: len(lead)]) == lead
        is_grid = len(grid) <= 2 and [n for n in grid if n != 1] == [n for n in blocks if n != 1]
        if not is_of_each or not is_grid:
            of_blocks = " x ".join("all" if n < 0 else str(n) for n in block)
            raise ValueError(
                f"scales {list(scales.shape)} do not fit the weight {list(self.shape)} in blocks "
                f"of {of_blocks}"
            )
        self._scales = scales.to(device=device, dtype=torch.float32).reshape(*lead, *blocks)

    def stored(self, height: int, group: int) -> StoredParts:
        *_, outputs, inputs = self.shape
        device = self._scales.device
        rows = torch.arange(0, outputs, height, device=device) // self._block[0]
        columns = torch.arange(0, inputs, group, device=device) // self._block[1]
        return StoredParts(self._raw, self._scales[..., rows, :][..., columns], None)

    def tile(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        lead = tuple(slice(at, at + 1) for at in place)
        raw = self._raw[(*lead, rows, columns)].to(self.device).to(torch.float32)
        raw = raw.view(rows.stop - rows.start, columns.stop - columns.start)
        height, width = self._block
        scales = self._scales[place][blocks_of(rows, height)][:, blocks_of(columns, width)]
        return raw.mul_(scales)


class PackedTensor(QuantizedTensor):
    """Integers of 4 or 8 bits, packed in words; see `Packing`.

    Args:
        packed: The words, int32.
        shape: Outputs and inputs.
        scales: `[outputs, groups]`, floating point.
        zeros: Zero points `[outputs, groups]`, integers; None: half of the integers' range.
        groups: The group of each input, int64 `[inputs]`.
    """

    def __init__(
        self,
        packed: Sliceable,
        shape: tuple[int, int],
        packing: Packing,
        bits: int,
        *,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        groups: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(shape, dtype, device)
        self._packed, self._packing, self._bits = packed, packing, bits
        self._scales = scales.to(device=device, dtype=torch.float32)
        self._zeros = None if zeros is None else zeros.to(device=device, dtype=torch.float32)
        self._groups = groups.to(device)

    def stored(self, height: int, group: int) -> StoredParts:
        assert height == 1 and self._bits == 4
        first = self._groups[::group]
        if not torch.equal(first.repeat_interleave(group), self._groups):
            raise ValueError("its groups are reordered, which quantization_config does not say")
        zeros = None if self._zeros is None else self._zeros[:, first]
        pairs = _PairsInBytes(self, packed_block(group))
        return StoredParts(pairs, self._scales[:, first], zeros)

    def integers(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        """See `_FourBits`."""
        assert not place, "the files stack no integers"
        packing = self._packing
        if packing is Packing.ROWS:
            return self._unpack(rows, columns, packed_dim=1)
        if packing is Packing.COLUMNS:
            return self._unpack(columns, rows, packed_dim=0).t()
        return self._unpack(columns, rows, packed_dim=1, order=AWQ_ORDER).t()

    def tile(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        bits, elements = self._bits, self.integers(place, rows, columns)
        groups = self._groups[columns]
        values = elements.to(torch.float32)
        if self._zeros is None:
            values = values.sub_(1 << (bits - 1))
        else:
            values = values.sub_(self._zeros[rows][:, groups])
        return values.mul_(self._scales[rows][:, groups])

    def _unpack(
        self, first: slice, second: slice, *, packed_dim: int, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Elements `[first, second]` of the words, int32; `packed_dim` is the packed dimension."""
        count = WORD_BITS // self._bits
        spans = [first, second]
        wanted = spans[packed_dim]
        spans[packed_dim] = slice(wanted.start // count, -(-wanted.stop // count))
        words = self._packed[tuple(spans)].to(self.device)
        begin = wanted.start % count
        elements = unpack_words(words, self._bits, dim=packed_dim, order=order)
        return elements.narrow(packed_dim, begin, wanted.stop - wanted.start)


class BlockFloatTensor(QuantizedTensor):
    """MXFP4: 4-bit floats (e2m1), two in a byte, with scales that are exponents (e8m0).

    Args:
        blocks: uint8 `[..., outputs, groups, group / 2]`; the first of two inputs is in the low
            bits.
        scales: uint8 `[..., outputs, groups]`: indices into `E8M0`.

    Raises:
        ValueError: The scales do not fit the blocks.
    """

    def __init__(
        self,
        blocks: RawTensor,
        scales: torch.Tensor,
        group: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        *lead, groups, width = blocks.shape
        super().__init__((*lead, groups * group), dtype, device)
        assert 2 * width == group, "otherwise it is no weight"
        if list(scales.shape) != [*lead, groups]:
            raise ValueError(f"scales {list(scales.shape)} must be {[*lead, groups]}")
        self._blocks, self._group = blocks, group
        self._scales = scales.to(device)

    def stored(self, height: int, group: int) -> StoredParts:
        assert height == 1 and self._group % group == 0 and group % LEAST_PACKED == 0
        scales = self._scales.repeat_interleave(self._group // group, -1)
        return StoredParts(_WordsOfFloats(self), scales, None)

    def integers(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        """See `_FourBits`: the bits of the floats."""
        size = self._group
        groups = slice(columns.start // size, -(-columns.stop // size))
        lead = tuple(slice(at, at + 1) for at in place)
        pairs = self._blocks[(*lead, rows, groups, slice(None))].to(self.device)
        pairs = pairs.view(rows.stop - rows.start, -1)
        integers = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
        return integers.narrow(1, columns.start % size, columns.stop - columns.start)

    def tile(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        floats, scales = (torch.tensor(one, device=self.device) for one in (E2M1, E8M0))
        values = floats[self.integers(place, rows, columns).int()]
        factors = scales[self._scales[place][rows].int()]
        return values.mul_(factors[:, blocks_of(columns, self._group)])


class GroupedBytes:
    """Bytes `[outputs, bytes]` of a checkpoint, as the blocks of a `BlockFloatTensor`.

    Args:
        raw: int8 or uint8.
        size: Bytes of a group.

    Raises:
        ValueError: An output has no whole groups.
    """

    def __init__(self, raw: RawTensor, size: int) -> None:
        outputs, width = raw.shape
        if width % size:
            raise ValueError(f"{width} bytes of an output are no groups of {size}")
        self._raw, self._size = raw, size
        self.shape: tuple[int, ...] = (outputs, width // size, size)

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        rows, groups, within = index
        begin, end, _ = groups.indices(self.shape[1])
        found = self._raw[rows, begin * self._size : end * self._size]
        grouped = found.contiguous().view(torch.uint8).view(len(found), -1, self._size)
        return grouped[..., within].contiguous()


class _FourBits(Protocol):
    """A weight of elements of 4 bits."""

    shape: tuple[int, ...]
    device: torch.device | str

    def integers(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        """The elements `[rows, columns]` of the matrix at `place` of the leading dimensions, as
        unsigned integers of any dtype."""


class _PairsInBytes(TiledTensor):
    """The elements of a weight, two inputs in a byte: uint8 `[..., outputs, inputs / 2]`. Tiles are
    whole blocks.

    Args:
        block: See `ScaledWeight.block`.
    """

    def __init__(self, weight: _FourBits, block: int) -> None:
        *lead, inputs = weight.shape
        super().__init__((*lead, inputs // 2), torch.uint8, weight.device)
        self._weight, self._block = weight, block
        self._order = inputs_of_bytes(block).to(weight.device)

    def tile(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        inputs = slice(2 * columns.start, 2 * columns.stop)
        integers = self._weight.integers(place, rows, inputs)
        halves = integers.reshape(len(integers), -1, 2, self._block // 2)[..., self._order]
        pairs: torch.Tensor = halves[:, :, 0] | halves[:, :, 1] << 4
        return pairs.flatten(1)


class _WordsOfFloats(TiledTensor):
    """The elements of a weight in the order of `fp4_words`: uint8 `[..., outputs, inputs / 2]`.
    Tiles are whole blocks."""

    def __init__(self, weight: _FourBits) -> None:
        *lead, inputs = weight.shape
        super().__init__((*lead, inputs // 2), torch.uint8, weight.device)
        self._weight = weight

    def tile(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        inputs = slice(2 * columns.start, 2 * columns.stop)
        return fp4_words(self._weight.integers(place, rows, inputs))


def unpack_words(
    words: torch.Tensor, bits: int, *, dim: int, order: Sequence[int] | None = None
) -> torch.Tensor:
    """The integers in words.

    Args:
        words: int32 matrix.
        bits: Bits of an integer, which is unsigned.
        dim: The dimension that is packed.
        order: Place in a word of each integer; None: ascending, from the lowest bits.

    Returns:
        int32, with `32 / bits` times as many elements in `dim`.
    """
    count = WORD_BITS // bits
    places = torch.tensor(order or range(count), dtype=torch.int32, device=words.device)
    shifts = (places * bits).view(-1, 1) if dim == 0 else places * bits
    elements = (words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)
    return elements.flatten(dim, dim + 1)


def blocks_of(span: slice, size: int) -> torch.Tensor:
    """The block of each position of `span`."""
    return torch.arange(span.start, span.stop) // size
