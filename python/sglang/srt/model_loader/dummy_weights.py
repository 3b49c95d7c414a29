"""Random weights that depend only on (seed, name, position), with equal bytes on every device.

They come from integer operations and one rounding, whose results are equal on every device, so
ranks and hosts agree. A rank computes its own part of a weight alone. On a GPU 16 GB take about a
second.
"""

from __future__ import annotations

from math import prod

import torch
import xxhash

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization_config import Packing
from sglang.srt.layers.layer_weight import SCALES, weight_shape
from sglang.srt.layers.quantization.quantized_tensor import ScaledTensor, TiledTensor, blocks_of
from sglang.srt.layers.weight_format import FormatOf, WeightFormat
from sglang.srt.model_loader.rounded_weights import (
    FP8_MAX,
    format_of_rounded,
    is_rounded,
    rounded,
)
from sglang.srt.model_loader.weight_files import weights_identity
from sglang.srt.model_loader.weight_source import LoadConfig, WeightSlots

_CHUNK = 1 << 20
"""Number of elements that share two keys. The weights depend on it."""
_SCALE_SPREAD = 0.25
"""A scale of fp8 is the least that holds a weight's greatest value, times `1 + spread * [0, 2)`.
Scales differ, so a scale at the wrong place changes words."""

# A bijection of 32 bits with little bias: hash-prospector's `lowbias32` (Wellons, 2018).
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)


class DummyWeights:
    """Random weights, each determined by the seed and its name.

    Linear layers and experts have the weight format of config.json, if it states one: see
    `rounded_weights.is_rounded`. Elements and scales of fp8 are computed directly, in tiles of a
    few million elements. A weight of 4 bits is made whole, then rounded.
    """

    name = "random"

    def __init__(self, model_config: ModelConfig, load_config: LoadConfig) -> None:
        self._seed = load_config.random_seed
        self._dtype = model_config.dtype
        self._config = model_config.quantization
        self._format = (
            None if self._config is None else format_of_rounded(self._config, self._dtype)
        )
        # Computed now, because config.json may change later.
        self._identity = weights_identity(
            model_config.model_path,
            load_format="dummy",
            random_seed=self._seed,
            rounding="" if self._format is None else str(self._config),
            has_draft_layer=model_config.has_draft_layer,
        )

    def formats(self) -> FormatOf:
        """See `WeightSource`."""
        return self._format_of

    def _format_of(self, name: str) -> WeightFormat | None:
        config = self._config
        if config is None or not is_rounded(name, config):
            return None
        return format_of_rounded(config.of(name), self._dtype)

    def has_own_head(self, head: str, embedding: str) -> bool:
        """See `WeightSource`. Random weights are as config.json says."""
        return False

    def identity(self) -> str:
        """See `WeightSource`."""
        return self._identity

    def fill(self, slots: WeightSlots) -> None:
        """See `WeightSource`."""
        for name, slot in slots.take_all():
            shape, device = weight_shape(slot), slot.dest.device
            dtype = slot.dest.dtype
            if slot.below is not None:
                slot.fill(_table(name, shape, self._seed, slot.below, device))
                continue
            if len(shape) < 2 or shape[-2] == 1:  # small
                slot.fill(dummy_tensor(name, shape, self._seed, dtype=dtype, device=device))
                continue
            format_ = self._format_of(name)
            if self._config is None or format_ is None:
                slot.fill(RandomTensor(name, shape, self._seed, dtype, device))
                continue
            config = self._config.of(name)
            if config.packing is Packing.NONE:
                values = RandomTensor(name, shape, self._seed, self._dtype, device)
                slots.fill_quantized(name, slot, values.in_fp8(format_.block))
                continue
            whole = dummy_tensor(name, shape, self._seed, dtype=self._dtype, device=device)
            weight = rounded(whole, config, self._dtype, format_.scales)
            slots.fill_quantized(name, slot, weight)


class RandomTensor(TiledTensor):
    """The random weight of a name, of which any part can be computed. Tiles are in fp32.

    The spread of matrices keeps activations in range and makes outputs depend on the whole context.

    Args:
        shape: Its shape, of at least two dimensions.
        spread: Values lie in `centre + [-spread, spread)`; None: by fan-in.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        seed: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        spread: float | None = None,
        centre: float = 0.0,
    ) -> None:
        super().__init__(shape, dtype, device)
        self._name, self._seed, self._centre = name, seed, centre
        self._spread = (3.0 / shape[-1]) ** 0.5 if spread is None else spread

    def in_fp8(self, block: tuple[int, int]) -> ScaledTensor:
        """The same values, each rounded once to e4m3 times the scale of its block. Unlike those of
        `rounded_weights`, scales do not depend on the values.

        Args:
            block: See `WeightFormat.block`.
        """
        *lead, outputs, inputs = self.shape
        sides = zip((outputs, inputs), block, strict=True)
        height, width = (size if part < 0 else part for size, part in sides)
        grid = (*lead, -(-outputs // height), -(-inputs // width))
        factors = RandomTensor(
            f"{self._name}{SCALES}",
            grid,
            self._seed,
            torch.float32,
            self.device,
            spread=_SCALE_SPREAD,
            centre=1.0 + _SCALE_SPREAD,
        )
        scales = factors[(slice(None),) * len(grid)].mul_(self._spread / FP8_MAX)
        elements = _Fp8Elements(self, scales, (height, width))
        return ScaledTensor(elements, scales, (height, width), self._dtype, self.device)

    def tile(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        *lead, outputs, inputs = self.shape
        first = 0
        for size, at in zip((*lead, outputs), (*place, rows.start), strict=True):
            first = first * size + at
        count = rows.stop - rows.start
        begin = first * inputs + columns.start
        last = (first + count - 1) * inputs + columns.stop - 1
        chunks = range(begin // _CHUNK, last // _CHUNK + 1)
        digests = [
            xxhash.xxh3_64_intdigest(f"{self._seed}:{self._name}:{chunk}".encode())
            for chunk in chunks
        ]
        halves = [[_signed(one & 0xFFFFFFFF), _signed(one >> 32)] for one in digests]
        keys = torch.tensor(halves, dtype=torch.int32, device=self.device)
        at_row = torch.arange(count, device=self.device) * inputs + (begin - chunks[0] * _CHUNK)
        at_column = torch.arange(columns.stop - columns.start, device=self.device)
        index = at_row.unsqueeze(1) + at_column
        chunk = index // _CHUNK
        places = (index % _CHUNK).to(torch.int32)
        bits = _hash(places, keys[:, 0][chunk], keys[:, 1][chunk])
        # The upper 24 bits, signed, are exact in fp32.
        values = bits.__irshift__(8).to(torch.float32).mul_(self._spread / (1 << 23))
        return values.add_(self._centre) if self._centre else values


class _Fp8Elements(TiledTensor):
    """Values, divided by the scales of their blocks: e4m3."""

    def __init__(self, values: RandomTensor, scales: torch.Tensor, block: tuple[int, int]) -> None:
        super().__init__(values.shape, torch.float8_e4m3fn, values.device)
        self._values, self._scales, self._block = values, scales, block

    def tile(self, place: tuple[int, ...], rows: slice, columns: slice) -> torch.Tensor:
        height, width = self._block
        scales = self._scales[place][blocks_of(rows, height)][:, blocks_of(columns, width)]
        return self._values.tile(place, rows, columns).div_(scales)


def dummy_tensor(
    name: str,
    shape: tuple[int, ...],
    seed: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    """The whole weight called `name`.

    A matrix is a `RandomTensor`. A vector has values within 0.1 of 0, a norm's within 0.1 of 1.
    """
    if len(shape) > 1:
        rows = (prod(shape[:-1]), shape[-1])
        return RandomTensor(name, rows, seed, dtype, device)[:, :].view(shape)
    centre = 1.0 if name.endswith("norm.weight") else 0.0
    row = RandomTensor(name, (1, *shape), seed, dtype, device, spread=0.1, centre=centre)
    return row[:, :].view(shape)


def _table(
    name: str, shape: tuple[int, ...], seed: int, below: int, device: torch.device | str
) -> torch.Tensor:
    """Consecutive integers from a random one in each row, modulo `below`."""
    first = RandomTensor(name, (shape[0], 1), seed, torch.float32, device, spread=0.5, centre=0.5)
    begin = (first[:, :] * below).long()
    return (begin + torch.arange(shape[1], device=device)) % below


def _hash(places: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Hash int32 `places` in place, by two keys for each.

    The keys, halves of a digest, are used at different stages; otherwise chunks with similar first
    keys would be shifted copies.
    """
    x = places.add_(first)
    x ^= _shift(x, 16)
    x *= _MIX_1
    x ^= second
    x ^= _shift(x, 15)
    x *= _MIX_2
    x ^= _shift(x, 16)
    return x


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, filling with zeros; torch's shift of int32 fills with the sign."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
