"""Names of the tensors of quantized weights in a checkpoint, and how each weight is put together.

Layers know weights by one name, `{layer}.weight`. A quantized weight has several tensors in the
files: its elements, scales, and sometimes zero points, groups and its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from sglang.srt.configs.quantization_config import (
    FP8,
    Packing,
    QuantizationConfig,
    ZeroPoints,
)
from sglang.srt.layers.quantization.quantized_tensor import (
    AWQ_ORDER,
    NO_SCALE,
    WORD_BITS,
    BlockFloatTensor,
    GroupedBytes,
    PackedTensor,
    QuantizedTensor,
    RawTensor,
    ScaledTensor,
    unpack_words,
)
from sglang.srt.layers.triton_ops.arguments import MOST_FP4_SCALE
from sglang.srt.layers.weight_format import EXPONENTS, WeightFormat
from sglang.srt.model_loader.weight_files import REMEDY

_SCALES: Final = ("_scale_inv", "_scale")
"""Suffixes that turn a weight's name into the name of its scales. Weights are multiplied by either
tensor, although the first name says inverse."""
_WEIGHT: Final = ".weight"
"""DeepSeek-V4's files have `.scale` in its place."""
_OF_ACTIVATIONS: Final = frozenset(
    """input_scale input_zero_point input_global_scale output_scale output_zero_point
    q_scale k_scale v_scale prob_scale""".split()
)
"""Tensors that quantize a layer's activations, keys or values. They are not used: this engine does
not quantize those."""

_SCALE_DTYPES: Final = MappingProxyType({"F16": torch.float16, "BF16": torch.bfloat16})
"""Dtypes of the scales of 4-bit integers in memory, as safetensors names them."""

_MARKERS: Final = MappingProxyType(
    {
        Packing.ROWS: "_packed",
        Packing.COLUMNS: ".qweight",
        Packing.INTERLEAVED: ".qweight",
        Packing.BLOCKS: "_blocks",
    }
)
"""Ends of the names of tensors with packed elements."""

ReadTensor = Callable[[str], torch.Tensor]
"""Reads a whole tensor of the checkpoint by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """The tensors of one quantized weight. All but `name` are names in the files.

    Attributes:
        name: Name of the weight in the model.
        elements: Tensor of the elements.
        scales: Tensor of the scales.
        zeros: Tensor of the zero points; None: they are half of the integers' range.
        groups: Tensor with the group of each input; None: groups are consecutive.
    """

    name: str
    elements: str
    scales: str
    zeros: str | None = None
    groups: str | None = None

    def shape(self, stored: tuple[int, ...], config: QuantizationConfig) -> tuple[int, ...]:
        """Shape of the weight, whose elements are stored in the shape `stored`; words that are no
        matrix are no weight, and keep theirs, and so do blocks of another size."""
        config = config.of(self.name)
        if config.packing is Packing.BLOCKS:
            assert config.block is not None
            if len(stored) < 3 or 2 * stored[-1] != config.block[1]:
                return stored
            *lead, groups, _ = stored
            return (*lead, groups * config.block[1])
        if len(stored) != 2:
            return stored
        count = WORD_BITS // config.bits
        match config.packing:
            case Packing.PAIRS:
                return stored[0], 2 * stored[1]
            case Packing.ROWS:
                return stored[0], stored[1] * count
            case Packing.COLUMNS:
                return stored[1], stored[0] * count
            case Packing.INTERLEAVED:
                return stored[1] * count, stored[0]
            case _:
                return stored

    def format(self, config: QuantizationConfig, dtype_of: Callable[[str], str]) -> WeightFormat:
        """The format of the weight, as layers ask for it.

        Args:
            dtype_of: The dtype of a tensor in the files, as safetensors names it.
        """
        config = config.of(self.name)
        if config.packing is Packing.NONE:
            dtype = dtype_of(self.elements)
            why = None if dtype == FP8 else f"elements of {dtype}"
            return WeightFormat(block=config.block or (1, -1), why_dequantized=why)
        assert config.block is not None
        if config.is_float4:
            return WeightFormat(bits=4, block=config.block, scales=EXPONENTS)
        scales = _SCALE_DTYPES.get(dtype_of(self.scales))
        why = None
        if config.bits != 4:
            why = f"integers of {config.bits} bits"
        elif config.is_reordered or (config.packing is Packing.ROWS and self.groups is not None):
            why = "groups of reordered inputs"
        elif scales is None:
            why = f"integers with scales of {dtype_of(self.scales)}"
        return WeightFormat(
            bits=4,
            block=config.block,
            scales=scales or torch.float32,
            has_zeros=self.zeros is not None,
            why_dequantized=why,
        )

    def check_elements(self, dtype: str, config: QuantizationConfig) -> None:
        """Raise ValueError if elements of this dtype, as safetensors names it, are not those that
        quantization_config says."""
        wanted = config.of(self.name).elements
        if dtype != wanted:
            raise ValueError(f"elements of {dtype} must be {wanted}")

    def open(
        self,
        elements: RawTensor,
        read: ReadTensor,
        config: QuantizationConfig,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> QuantizedTensor:
        """The weight, of which parts can be read.

        Args:
            elements: The tensor of that name.
            read: Reads the others.
            dtype: Dtype of the parts.
            device: Device of the parts.

        Raises:
            ValueError: Scales, zero points or groups do not fit the weight, or are impossible.
        """
        scales = read(self.scales)
        config = config.of(self.name)
        if config.is_float4:
            assert config.block is not None
            if config.packing is Packing.PAIRS:
                elements = GroupedBytes(elements, config.block[1] // 2)
                if scales.dtype == torch.float8_e8m0fnu:
                    scales = scales.view(torch.uint8)
            self._check_exponents(scales)
            return BlockFloatTensor(elements, scales, config.block[1], dtype, device)
        if not scales.dtype.is_floating_point:
            raise ValueError(f"tensor {self.scales!r} has scales of {scales.dtype}")
        if config.packing is Packing.NONE:
            weight = ScaledTensor(elements, scales, config.block, dtype, device)
            self._check_scales(scales, config)
            return weight
        shape = self.shape(tuple(elements.shape), config)
        assert len(shape) == 2 and config.block is not None
        outputs, inputs = shape
        zeros = None if self.zeros is None else self._zeros(read(self.zeros), config)
        if config.packing is not Packing.ROWS and scales.dim() == 2:
            scales = scales.t()
        size = inputs if config.block[1] < 0 else config.block[1]
        groups = torch.arange(inputs) // size
        if self.groups is not None:
            # A group of -1 stands for inputs that were not reordered.
            told = read(self.groups)
            if told.is_floating_point() or told.is_complex():
                raise ValueError(f"tensor {self.groups!r} has groups of {told.dtype}")
            told = told.to(torch.int64)
            is_told = told.shape != groups.shape or not bool((told < 0).all())
            groups = told if is_told else groups
        count = -(-inputs // size)
        if zeros is None and config.zero_points is ZeroPoints.STORED:
            raise ValueError("its zero points are missing, which quantization_config says it has")
        for what, found in (("scales", scales), ("zero points", zeros)):
            if found is not None and list(found.shape) != [outputs, count]:
                raise ValueError(f"{what} {list(found.shape)} must be {[outputs, count]}")
        self._check_scales(scales, config)
        if list(groups.shape) != [inputs] or groups.min() < 0 or groups.max() >= count:
            raise ValueError(f"groups must name one of {count} groups for each of {inputs} inputs")
        return PackedTensor(
            elements,
            (outputs, inputs),
            config.packing,
            config.bits,
            scales=scales,
            zeros=zeros,
            groups=groups,
            dtype=dtype,
            device=device,
        )

    def _check_scales(self, scales: torch.Tensor, config: QuantizationConfig) -> None:
        """Refuse scales that no quantizer writes, such as those of a torn file: NaN, infinity, zero
        (for a group of zeros all of them write a positive scale), and, where the greatest magnitude
        is divided by a positive number, negative ones.

        Reads the scales once, in a hundredth of the time in which they are converted to fp32.
        """
        # torch finds no extremes of fp8.
        numbers = scales if scales.element_size() > 1 else scales.to(torch.float32)
        least, most = (float(one) for one in torch.aminmax(numbers))
        if config.may_have_negative_scales:
            is_possible = math.isfinite(least) and math.isfinite(most) and bool(numbers.all())
            wanted = "finite and not zero"
        else:
            is_possible = least > 0 and math.isfinite(most)
            wanted = "finite and above 0"
        if not is_possible:
            raise ValueError(
                f"tensor {self.scales!r} has scales from {least:g} to {most:g}, which must be "
                f"{wanted}: {REMEDY}"
            )

    def _check_exponents(self, scales: torch.Tensor) -> None:
        """Refuse scales that are no exponents, or not all. A scale of 0 is one: 2^-127, which
        writers give to groups of zeros."""
        if scales.dtype != torch.uint8:
            raise ValueError(
                f"tensor {self.scales!r} has scales of {scales.dtype}, which must be torch.uint8"
            )
        count, wide = (int((scales > most).sum()) for most in (NO_SCALE - 1, MOST_FP4_SCALE))
        if count:
            raise ValueError(
                f"tensor {self.scales!r} has {NO_SCALE}, which is NaN, for {count} of "
                f"{scales.numel()} scales: {REMEDY}"
            )
        if wide:
            raise ValueError(
                f"tensor {self.scales!r} has more than {MOST_FP4_SCALE}, which is 2^33, for {wide} "
                f"of {scales.numel()} scales; no weight is so large: {REMEDY}"
            )

    def _zeros(self, packed: torch.Tensor, config: QuantizationConfig) -> torch.Tensor:
        """Zero points `[outputs, groups]`."""
        if packed.dtype != torch.int32 or packed.dim() != 2:
            raise ValueError(
                f"tensor {self.zeros!r} must have packed zero points, int32 in two dimensions, not "
                f"{packed.dtype} {list(packed.shape)}"
            )
        if config.packing is Packing.ROWS:
            return unpack_words(packed, config.bits, dim=0)
        is_interleaved = config.packing is Packing.INTERLEAVED
        order = AWQ_ORDER if is_interleaved else None
        zeros = unpack_words(packed, config.bits, dim=1, order=order)
        return zeros.t() + config.zero_offset


class QuantizedNames:
    """Tells the tensors of quantized weights from the other tensors of a checkpoint.

    Args:
        names: Names of all tensors in the files.
        config: The checkpoint's weight format.
    """

    def __init__(self, names: Collection[str], config: QuantizationConfig) -> None:
        self._names = names
        self._config = config
        weights = filter(None, (self._weight(name, config.packing) for name in names))
        self.by_elements = {weight.elements: weight for weight in weights}
        """Quantized weights by the name of the tensor that has their elements."""
        self._beside = {
            name
            for weight in self.by_elements.values()
            for name in (
                weight.scales,
                _name_of_zeros(weight.name, config.packing),
                weight.groups,
                f"{weight.name}_shape",
            )
        }

    def is_beside(self, name: str) -> bool:
        """True for a tensor that is no weight of its own: it is part of a quantized weight, or
        quantizes activations."""
        return name in self._beside or name.rpartition(".")[2] in _OF_ACTIVATIONS

    def _weight(self, name: str, packing: Packing) -> QuantizedWeight | None:
        """The quantized weight whose elements are in tensor `name`; None: there is none."""
        if packing is Packing.NONE:
            others = [name + suffix for suffix in _SCALES]
            if name.endswith(_WEIGHT):
                others.append(f"{name.removesuffix(_WEIGHT)}.scale")
            scales = self._first(*others)
            if scales is None:
                return None
            return QuantizedWeight(name=name, elements=name, scales=scales)
        marker = _MARKERS[packing]
        if not name.endswith(marker):
            return None
        start = name.removesuffix(marker)
        if packing is Packing.BLOCKS:
            # The plain twin of a stack, called `start`, has its inputs first: another weight.
            return QuantizedWeight(name=name, elements=name, scales=f"{start}_scales")
        if packing is Packing.ROWS:
            return QuantizedWeight(
                name=start,
                elements=name,
                scales=f"{start}_scale",
                zeros=self._zeros(start),
                groups=self._first(f"{start}_g_idx"),
            )
        return QuantizedWeight(
            name=f"{start}.weight",
            elements=name,
            scales=f"{start}.scales",
            zeros=self._zeros(f"{start}.weight"),
            groups=self._first(f"{start}.g_idx"),
        )

    def _zeros(self, name: str) -> str | None:
        """The tensor with the zero points of the weight `name`, if that is read."""
        if self._config.zero_points is ZeroPoints.CENTRE:
            return None
        return self._first(_name_of_zeros(name, self._config.packing))

    def _first(self, *names: str) -> str | None:
        return next((name for name in names if name in self._names), None)


def _name_of_zeros(name: str, packing: Packing) -> str:
    """The tensor that has the zero points of the weight `name`, where files have them."""
    if packing in (Packing.COLUMNS, Packing.INTERLEAVED):
        return f"{name.removesuffix('.weight')}.qzeros"
    return f"{name}_zero_point"
