"""The weight format that a checkpoint's `quantization_config` states. Needs no torch.

The object says how quantized weights are encoded. The files say which weights are quantized: a
quantized weight has scales beside it. Lists of exceptions (`ignore`, `modules_to_not_convert`)
therefore need no interpretation.

Sources of the formats: transformers' `FineGrainedFP8Config`, `AwqConfig`, `GPTQConfig` and
`Mxfp4Config`; compressed-tensors' `QuantizationConfig`; the checkpoint format of AutoGPTQ and its
successor; OCP's "Microscaling Formats (MX)" for MXFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

_FIELD: Final = "quantization_config"
_MAX_SIZE: Final = (1 << 31) - 1
"""Greatest number of outputs or inputs of a block."""
FP8: Final = "F8_E4M3"
INT8: Final = "I8"
WORDS: Final = "I32"
BYTES: Final = "U8"
"""Dtypes of elements, as safetensors names them."""
OF_EXPERT: Final = ".experts."
"""Part of the name of a routed expert's tensor."""


class Packing(Enum):
    """Order of 4-bit floats in bytes, or of integers in 32-bit words; lowest bits first."""

    NONE = "none"
    """One element per weight: fp8 or int8, with scales."""
    ROWS = "compressed-tensors"
    """`[outputs, inputs / n]`: a word has `n` consecutive inputs of one output."""
    COLUMNS = "gptq"
    """`[inputs / n, outputs]`: a word has `n` consecutive inputs of one output."""
    INTERLEAVED = "awq"
    """`[inputs, outputs / n]`: a word has eight outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    BLOCKS = "mxfp4"
    """`[..., outputs, groups, bytes of a group]`: a byte has two consecutive inputs of one output,
    which are e2m1 floats."""
    PAIRS = "fp4"
    """`[outputs, inputs / 2]`: likewise, without a dimension of groups."""


class ZeroPoints(Enum):
    """Source of the zero points of integers."""

    CENTRE = "centre"
    """Half of the integers' range, whatever the files hold."""
    STORED = "stored"
    """In the files, beside each weight."""
    IF_STORED = "if stored"
    """In the files; half of the range for a weight that has none there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How the quantized weights of a checkpoint are encoded."""

    method: str
    """`quant_method` of config.json."""
    packing: Packing = Packing.NONE
    bits: int = 8
    """Bits of a packed integer or float."""
    elements: str = FP8
    """Dtype of the tensor with the elements: `FP8`, `INT8`, `WORDS` of packed integers, or `BYTES`
    of packed floats."""
    zero_points: ZeroPoints = ZeroPoints.CENTRE
    """Zero points of integers."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: see the shape of the scales. A negative number
    stands for the whole dimension."""
    zero_offset: int = 0
    """Added to packed zero points: GPTQ's first format stores them less one."""
    is_at_load: bool = False
    """True if the files have plain weights, which are rounded to this format at load."""
    is_reordered: bool = False
    """True if the inputs of a group are spread over the weight (GPTQ's `desc_act`)."""
    experts: QuantizationConfig | None = None
    """Format of the routed experts' weights; None: as the others'."""

    def of(self, name: str) -> QuantizationConfig:
        """The format of the weight with this name."""
        return self.experts if self.experts is not None and OF_EXPERT in name else self

    @property
    def is_float4(self) -> bool:
        """True for 4-bit floats with scales that are exponents."""
        return self.packing in (Packing.BLOCKS, Packing.PAIRS)

    @property
    def may_have_negative_scales(self) -> bool:
        """True for integers around the centre of their range: AutoRound scales a group whose
        greatest magnitude is positive by a negative number, because -8 has no counterpart."""
        return self.elements in (INT8, WORDS) and self.zero_points is not ZeroPoints.STORED

    def __str__(self) -> str:
        """The format in words, for logs."""
        words = f"{self.method}, {self.bits} bits"
        if self.is_at_load:
            words += ", rounded at load"
        if self.block is not None:
            sizes = ("all" if size < 0 else str(size) for size in self.block)
            words += f", a scale for {' x '.join(sizes)}"
        if self.experts is not None:
            words += f"; experts of {self.experts.bits} bits"
        return words


_MX_GROUP: Final = 32
"""Inputs that share a scale in OCP's MX formats."""
_FP4_EXPERTS: Final = QuantizationConfig(
    method="fp8", packing=Packing.PAIRS, bits=4, elements=INT8, block=(1, _MX_GROUP)
)
AT_LOAD: Final = QuantizationConfig(method="fp8", block=(128, 128), is_at_load=True)
"""DeepSeek's format, to which `--quantization fp8` converts plain weights."""

_ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"awq_marlin": "awq", "gptq_marlin": "gptq", "compressed_tensors": "compressed-tensors"}
)
"""Names of SGLang's kernels, and older names, for the same encodings."""


def quantization_of(
    config: Mapping[str, Any], *, asked: str | None = None
) -> QuantizationConfig | None:
    """The weight format of a checkpoint; None: its weights are not quantized.

    Args:
        config: Values of config.json. The format may be stated beside the text model's values.
        asked: Value of `--quantization`; None: what the checkpoint says.

    Raises:
        ValueError: The format is not supported, or is not what was asked for. One line with the
            field and the formats that work.
    """
    stated, text = config.get(_FIELD), config.get("text_config")
    if stated is None and isinstance(text, dict):
        stated = text.get(_FIELD)
    if stated is None:
        if asked is None:
            return None
        if _name(asked) == AT_LOAD.method:
            return AT_LOAD
        raise ValueError(
            f"--quantization {asked}: the checkpoint's weights are not quantized, and only fp8 is "
            "computed at load: leave the flag out, give --quantization fp8, or serve a quantized "
            "checkpoint"
        )
    if not isinstance(stated, dict):
        raise ValueError(f"config.json: {_FIELD} must be an object: copy the checkpoint again")
    method = _name(stated.get("quant_method"))
    if asked is not None and _name(asked) != method:
        raise ValueError(
            f"--quantization {asked}: config.json says quant_method={method!r}: leave the flag out"
        )
    parse = _PARSERS.get(method)
    if parse is None:
        raise ValueError(
            f"config.json: {_FIELD}.quant_method={method!r} is not supported: "
            f"supported are {', '.join(_PARSERS)}"
        )
    if "expert_dtype" in config:
        # DeepSeek-V4 has it beside the object, and later models in it.
        stated = {"expert_dtype": config["expert_dtype"], **stated}
    return parse(stated)


def _name(method: object) -> str:
    return _ALIASES.get(str(method), str(method))


def _fp8(stated: dict[str, Any]) -> QuantizationConfig:
    """Elements of 8-bit floats, with scales of blocks, of outputs or of the whole weight."""
    _one_of(stated, "fmt", ("e4m3", "float8_e4m3fn", None))
    _one_of(stated, "activation_scheme", ("dynamic", "static", None))
    _one_of(stated, "scale_fmt", ("ue8m0", "float", None))
    _one_of(stated, "expert_dtype", ("fp8", "fp4", None))
    experts = _FP4_EXPERTS if stated.get("expert_dtype") == "fp4" else None
    has_blocks = stated.get("weight_block_size") is not None
    block = _block(stated, "weight_block_size") if has_blocks else None
    return QuantizationConfig(method="fp8", block=block, experts=experts)


def _awq(stated: dict[str, Any]) -> QuantizationConfig:
    _one_of(stated, "bits", (4,))
    _one_of(stated, "version", ("gemm", None))
    _one_of(stated, "zero_point", (True, False, None))
    is_centred = stated.get("zero_point") is False
    return QuantizationConfig(
        method="awq",
        packing=Packing.INTERLEAVED,
        bits=4,
        elements=WORDS,
        zero_points=ZeroPoints.IF_STORED if is_centred else ZeroPoints.STORED,
        block=(1, _group_size(stated)),
    )


_GPTQ_ZERO_POINTS: Final = MappingProxyType(
    {True: ZeroPoints.CENTRE, False: ZeroPoints.STORED, None: ZeroPoints.IF_STORED}
)
"""Source of zero points by `sym`. Symmetric files may hold 7 or 8 as zero points in either
checkpoint format: readers of symmetric weights ignore them."""


def _gptq(stated: dict[str, Any]) -> QuantizationConfig:
    _one_of(stated, "bits", (4, 8))
    _one_of(stated, "pack_dtype", ("int32", None))
    _one_of(stated, "is_marlin_format", (False, None))
    _one_of(stated, "checkpoint_format", ("gptq", "gptq_v2", None))
    _one_of(stated, "desc_act", (True, False, None))
    _one_of(stated, "sym", (True, False, None))
    rules = stated.get("dynamic") or {}
    if not isinstance(rules, dict) or any(not str(rule).startswith("-:") for rule in rules):
        raise _unsupported("dynamic", rules, "only '-:' rules, which leave layers out,")
    return QuantizationConfig(
        method="gptq",
        packing=Packing.COLUMNS,
        bits=stated["bits"],
        elements=WORDS,
        zero_points=_GPTQ_ZERO_POINTS[stated.get("sym")],
        block=(1, _group_size(stated)),
        zero_offset=0 if stated.get("checkpoint_format") == "gptq_v2" else 1,
        is_reordered=bool(stated.get("desc_act")),
    )


def _mxfp4(stated: dict[str, Any]) -> QuantizationConfig:
    """Elements of 4-bit floats (e2m1), with scales that are powers of two (e8m0)."""
    _one_of(stated, "bits", (4, None))
    _one_of(stated, "group_size", (_MX_GROUP, None))
    return QuantizationConfig(
        method="mxfp4", packing=Packing.BLOCKS, bits=4, elements=BYTES, block=(1, _MX_GROUP)
    )


_CT_FORMATS: Final = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")


def _compressed_tensors(stated: dict[str, Any]) -> QuantizationConfig:
    _one_of(stated, "quantization_status", ("compressed", None))
    if stated.get("transform_config"):
        raise _unsupported("transform_config", stated["transform_config"], "no transform")
    sparsity = stated.get("sparsity_config") or {}
    if not isinstance(sparsity, dict):
        raise _unsupported("sparsity_config", sparsity, "an object")
    if sparsity.get("format", "dense") != "dense":
        raise _unsupported("sparsity_config.format", sparsity["format"], "'dense'")
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported("config_groups", groups, "at least one group of weights")
    found = {_ct_group(stated, name, group) for name, group in groups.items()}
    if len(found) > 1:
        raise _unsupported("config_groups", sorted(groups), "one weight format for all groups")
    return found.pop()


def _ct_group(stated: dict[str, Any], name: str, group: object) -> QuantizationConfig:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise _unsupported(f"config_groups.{name}", group, "an object with weights")
    prefix = f"config_groups.{name}.weights."
    encoding = group.get("format") or stated.get("format")
    if encoding not in _CT_FORMATS:
        raise _unsupported("format", encoding, " or ".join(map(repr, _CT_FORMATS)))
    is_packed = encoding == "pack-quantized"
    kinds = ("int",) if is_packed or encoding == "int-quantized" else ("float", "int")
    _one_of(weights, "type", kinds, prefix)
    _one_of(weights, "num_bits", (4, 8) if is_packed else (8,), prefix)
    _one_of(weights, "symmetric", (True, False, None) if is_packed else (True, None), prefix)
    strategy = weights.get("strategy")
    block: tuple[int, int] | None
    if strategy == "group":
        block = (1, _group_size(weights, prefix))
    elif strategy == "block":
        block = _block(weights, "block_structure", prefix)
    else:
        _one_of(weights, "strategy", ("tensor", "channel"), prefix)
        block = (1, -1) if strategy == "channel" else (-1, -1)
    return QuantizationConfig(
        method="compressed-tensors",
        packing=Packing.ROWS if is_packed else Packing.NONE,
        bits=weights["num_bits"],
        elements=WORDS if is_packed else FP8 if weights["type"] == "float" else INT8,
        zero_points=(ZeroPoints.STORED if weights.get("symmetric") is False else ZeroPoints.CENTRE),
        block=block,
    )


_PARSERS: Final[Mapping[str, Callable[[dict[str, Any]], QuantizationConfig]]] = MappingProxyType(
    {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }
)


def _block(values: dict[str, Any], name: str, prefix: str = "") -> tuple[int, int]:
    """Outputs and inputs of a block."""
    size = values.get(name)
    if not (isinstance(size, list) and len(size) == 2 and all(map(_is_size, size))):
        raise _unsupported(f"{prefix}{name}", size, f"two integers from 1 to {_MAX_SIZE}")
    return size[0], size[1]


def _group_size(values: dict[str, Any], prefix: str = "") -> int:
    """Inputs that share a scale; -1: all."""
    size = values.get("group_size")
    if size != -1 and not _is_size(size):
        raise _unsupported(f"{prefix}group_size", size, f"an integer from 1 to {_MAX_SIZE}, or -1,")
    assert isinstance(size, int)
    return size


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_SIZE


def _one_of(
    values: dict[str, Any], name: str, allowed: tuple[object, ...], prefix: str = ""
) -> None:
    value = values.get(name)
    if isinstance(value, str):
        value = value.lower()
    # True equals 1 and 4.0 equals 4, and both are other values.
    if not any(type(value) is type(one) and value == one for one in allowed):
        words = " or ".join(repr(one) for one in allowed if one is not None)
        raise _unsupported(f"{prefix}{name}", value, words)


def _unsupported(name: str, value: object, works: str) -> ValueError:
    shown = " ".join(repr(value).split())[:60]
    return ValueError(f"config.json: {_FIELD}.{name}={shown} is not supported: {works} is")
