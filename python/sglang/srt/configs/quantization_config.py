"""The weight format that a checkpoint's `quantization_config` states. Needs no torch.

The object says how quantized weights are encoded. Which weights are quantized is read from the
files: a quantized weight has scales beside it. So lists of exceptions (`ignore`,
`modules_to_not_convert`) need no interpretation.

Sources of the formats: transformers' `FineGrainedFP8Config`, `AwqConfig` and `GPTQConfig`;
compressed-tensors' `QuantizationConfig`; the checkpoint format of AutoGPTQ and its successor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

_FIELD: Final = "quantization_config"


class Packing(Enum):
    """Order of integers in 32-bit words, lowest bits first."""

    NONE = "none"
    """One element per weight: fp8 or int8, with scales."""
    ROWS = "compressed-tensors"
    """`[outputs, inputs / n]`: a word has `n` consecutive inputs of one output."""
    COLUMNS = "gptq"
    """`[inputs / n, outputs]`: a word has `n` consecutive inputs of one output."""
    INTERLEAVED = "awq"
    """`[inputs, outputs / n]`: a word has eight outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How the quantized weights of a checkpoint are encoded."""

    method: str
    """`quant_method` of config.json."""
    packing: Packing = Packing.NONE
    bits: int = 8
    """Bits of a packed integer."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; None: see the shape of the scales. A negative number
    stands for the whole dimension."""
    zero_offset: int = 0
    """Added to packed zero points: GPTQ's first format stores them less one."""
    is_at_load: bool = False
    """True if the files have plain weights, which are rounded to this format at load."""
    is_reordered: bool = False
    """True if the inputs of a group are spread over the weight (GPTQ's `desc_act`)."""

    def __str__(self) -> str:
        """The format in words, for logs."""
        words = f"{self.method}, {self.bits} bits"
        if self.is_at_load:
            words += ", rounded at load"
        if self.block is not None:
            sizes = ("all" if size < 0 else str(size) for size in self.block)
            words += f", a scale for {' x '.join(sizes)}"
        return words


AT_LOAD: Final = QuantizationConfig(method="fp8", block=(128, 128), is_at_load=True)
"""What `--quantization fp8` makes of plain weights: DeepSeek's format."""

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
    return parse(stated)


def _name(method: object) -> str:
    return _ALIASES.get(str(method), str(method))


def _fp8(stated: dict[str, Any]) -> QuantizationConfig:
    """Elements of 8-bit floats, with scales of blocks, of outputs or of the whole weight."""
    _one_of(stated, "fmt", ("e4m3", "float8_e4m3fn", None))
    _one_of(stated, "activation_scheme", ("dynamic", "static", None))
    if stated.get("weight_block_size") is None:
        return QuantizationConfig(method="fp8")
    return QuantizationConfig(method="fp8", block=_block(stated, "weight_block_size"))


def _awq(stated: dict[str, Any]) -> QuantizationConfig:
    _one_of(stated, "bits", (4,))
    _one_of(stated, "version", ("gemm", None))
    return QuantizationConfig(
        method="awq",
        packing=Packing.INTERLEAVED,
        bits=4,
        block=(1, _group_size(stated)),
    )


def _gptq(stated: dict[str, Any]) -> QuantizationConfig:
    _one_of(stated, "bits", (4, 8))
    _one_of(stated, "pack_dtype", ("int32", None))
    _one_of(stated, "is_marlin_format", (False, None))
    _one_of(stated, "checkpoint_format", ("gptq", "gptq_v2", None))
    if any(not str(rule).startswith("-:") for rule in stated.get("dynamic") or {}):
        raise _unsupported("dynamic", stated["dynamic"], "only '-:' rules, which leave layers out,")
    return QuantizationConfig(
        method="gptq",
        packing=Packing.COLUMNS,
        bits=stated["bits"],
        block=(1, _group_size(stated)),
        zero_offset=0 if stated.get("checkpoint_format") == "gptq_v2" else 1,
        is_reordered=bool(stated.get("desc_act")),
    )


_CT_FORMATS: Final = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")


def _compressed_tensors(stated: dict[str, Any]) -> QuantizationConfig:
    _one_of(stated, "quantization_status", ("compressed", None))
    if stated.get("transform_config"):
        raise _unsupported("transform_config", stated["transform_config"], "no transform")
    sparsity = stated.get("sparsity_config") or {}
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
    if not is_packed:
        _one_of(weights, "symmetric", (True, None), prefix)
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
        block=block,
    )


_PARSERS: Final[Mapping[str, Callable[[dict[str, Any]], QuantizationConfig]]] = MappingProxyType(
    {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq}
)


def _block(values: dict[str, Any], name: str, prefix: str = "") -> tuple[int, int]:
    """Outputs and inputs of a block."""
    size = values.get(name)
    if not (isinstance(size, list) and len(size) == 2 and all(map(_is_positive, size))):
        raise _unsupported(f"{prefix}{name}", size, "two positive integers")
    return size[0], size[1]


def _group_size(values: dict[str, Any], prefix: str = "") -> int:
    """Inputs that share a scale; -1: all."""
    size = values.get("group_size")
    if size != -1 and not _is_positive(size):
        raise _unsupported(f"{prefix}group_size", size, "a positive integer or -1")
    assert isinstance(size, int)
    return size


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _one_of(
    values: dict[str, Any], name: str, allowed: tuple[object, ...], prefix: str = ""
) -> None:
    value = values.get(name)
    if isinstance(value, str):
        value = value.lower()
    if value not in allowed:
        words = " or ".join(repr(one) for one in allowed if one is not None)
        raise _unsupported(f"{prefix}{name}", value, words)


def _unsupported(name: str, value: object, works: str) -> ValueError:
    shown = " ".join(repr(value).split())[:60]
    return ValueError(f"config.json: {_FIELD}.{name}={shown} is not supported: {works} is")
