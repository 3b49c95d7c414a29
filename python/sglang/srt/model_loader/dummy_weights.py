"""Random weights that depend only on (seed, name, position), with equal bytes on every device.

They come from integer operations and one rounding, whose results are equal on every device, so
ranks and hosts agree. On a GPU 16 GB take about a second.
"""

from __future__ import annotations

import torch
import xxhash

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layer_weight import weight_shape
from sglang.srt.layers.weight_format import FormatOf
from sglang.srt.model_loader.rounded_weights import format_of_rounded, is_rounded, rounded
from sglang.srt.model_loader.weight_files import weights_identity
from sglang.srt.model_loader.weight_source import LoadConfig, WeightSlots

_CHUNK = 1 << 20
"""Number of elements that share two keys. The weights depend on it."""

# A bijection of 32 bits with little bias: hash-prospector's `lowbias32` (Wellons, 2018).
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)


class DummyWeights:
    """Random weights, each determined by the seed and its name.

    A rank generates each whole weight on the device of its part, and keeps the part. Where
    config.json states a weight format, linear layers and experts are rounded to it: see
    `rounded_weights.is_rounded`.
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
        return lambda name: self._format if is_rounded(name) else None

    def identity(self) -> str:
        """See `WeightSource`."""
        return self._identity

    def fill(self, slots: WeightSlots) -> None:
        """See `WeightSource`."""
        for name, slot in slots.take_all():
            shape, device = weight_shape(slot), slot.dest.device
            if self._format is None or len(shape) < 2 or not is_rounded(name):
                dtype = slot.dest.dtype
                slot.fill(dummy_tensor(name, shape, self._seed, dtype=dtype, device=device))
                continue
            assert self._config is not None
            whole = dummy_tensor(name, shape, self._seed, dtype=self._dtype, device=device)
            weight = rounded(whole, self._config, self._dtype, self._format.scales)
            slots.fill_quantized(name, slot, weight)


def dummy_tensor(
    name: str,
    shape: tuple[int, ...],
    seed: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    """The weight called `name`.

    Scales keep activations in range and make outputs depend on the whole context: norms near 1,
    small biases, matrices by fan-in.

    Args:
        shape: Shape of the whole weight, not of a rank's part.
    """
    if len(shape) > 1:
        bound, centre = (3.0 / shape[-1]) ** 0.5, 0.0
    else:
        bound, centre = 0.1, 1.0 if name.endswith("norm.weight") else 0.0
    out = torch.empty(shape, dtype=dtype, device=device)
    flat = out.view(-1)
    places = torch.arange(min(_CHUNK, flat.numel()), dtype=torch.int32, device=device)
    for chunk, begin in enumerate(range(0, flat.numel(), _CHUNK)):
        part = flat[begin : begin + _CHUNK]
        digest = xxhash.xxh3_64_intdigest(f"{seed}:{name}:{chunk}".encode())
        bits = _hash(places[: part.numel()], digest)
        # The upper 24 bits, signed, are exact in fp32.
        values = bits.__irshift__(8).to(torch.float32).mul_(bound / (1 << 23))
        part.copy_(values.add_(centre) if centre else values)
    return out


def _hash(places: torch.Tensor, digest: int) -> torch.Tensor:
    """Hash int32 `[n]` to a new int32 `[n]`, by a 64-bit digest.

    The two halves of the digest are used at different stages; otherwise chunks with similar first
    keys would be shifted copies.
    """
    x = places + _signed(digest & 0xFFFFFFFF)
    x ^= _shift(x, 16)
    x *= _MIX_1
    x ^= _signed(digest >> 32)
    x ^= _shift(x, 15)
    x *= _MIX_2
    x ^= _shift(x, 16)
    return x


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, filling with zeros; torch's shift of int32 fills with the sign."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
