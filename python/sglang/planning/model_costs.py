"""Bytes of a model's weights and states on one rank, without its weights.

The engine's own model is built on torch's `meta` device, whose tensors have shapes and no memory.
Its states make the pools of a server, and its weights have the sizes that a server allocates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_group import SingleTensorGroup
from sglang.srt.layers.moe.experts import RoutedExperts
from sglang.srt.layers.moe.sparse_moe import exchange_bytes_of
from sglang.srt.layers.placement import ExpertRanks, TensorPlacement
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.layers.weight_format import FormatOf, WeightFormats
from sglang.srt.mem_cache.device.state_spec import StateSpec
from sglang.srt.model_executor.expert_ranks import ranks_of_experts
from sglang.srt.model_loader.loader import KEPT_DTYPES, WEIGHT_SOURCES, with_own_head
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.models.registry import MODEL_CLASSES
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.json_files import read_json

_META: Final = "meta"
_EXPERTS_PER_TOKEN: Final = "num_experts_per_tok"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """Memory that one rank of a model takes."""

    weight_bytes: int
    specs: tuple[StateSpec, ...]
    """Specs of the model's states, the primary pool's first."""
    exchange_bytes: int
    """Bytes that experts exchange at once for each token of a DP group's step; see
    `exchange_bytes_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameters:
    """Numbers of parameters of a whole model, with its draft layer if that is loaded."""

    total: int
    active: int
    """Parameters that a token of a prompt is multiplied with: no embedding, no head, and only the
    routed experts that a token uses."""


class _FirstRank(SingleTensorGroup):
    """The first of several ranks, for shapes alone."""

    def __init__(self, size: int) -> None:
        self.size = size


def build_on_meta(
    config: ModelConfig,
    tp_size: int = 1,
    formats: FormatOf | None = None,
    experts: ExpertRanks | None = None,
) -> CausalLM:
    """The first rank's share of a model, without memory.

    Args:
        tp_size: Ranks that split the layers.
        formats: Formats of weights that stay quantized in memory; None: none does.
        experts: Ranks that share the experts; None: `tp_size` ranks split them, too.

    Raises:
        ValueError: The model cannot be split over so many ranks; names the number.
    """
    placement = TensorPlacement(
        dtype=config.dtype,
        device=_META,
        tp_group=_FirstRank(tp_size),
        formats=None if formats is None else WeightFormats(of=formats),
        experts=experts,
    )
    with torch.inference_mode():
        return MODEL_CLASSES[config.architecture](config, placement)


def experts_of(config: ModelConfig, args: ServerArgs) -> ExpertRanks | None:
    """How the ranks of a server share the experts, for shapes alone."""
    return ranks_of_experts(
        config,
        attn_dp_size=args.attn_dp_size,
        ep_size=args.ep_size,
        world=lambda: _FirstRank(args.tp_size),
        across_dp=lambda: _FirstRank(args.attn_dp_size),
    )


def costs_of_rank(
    config: ModelConfig,
    kv_dtype: torch.dtype,
    *,
    tp_size: int,
    formats: FormatOf | None,
    experts: ExpertRanks | None = None,
) -> ModelCosts:
    """Memory that each of the ranks takes. Arguments, and what it raises, as of `build_on_meta`."""
    model = build_on_meta(config, tp_size, formats, experts)
    return ModelCosts(
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        specs=model.state_specs(kv_dtype),
        exchange_bytes=exchange_bytes_of(model),
    )


def parameters_of(config: ModelConfig) -> ModelParameters:
    """Count the parameters of the whole model."""
    model = build_on_meta(config)
    total = sum(p.numel() for p in model.parameters())
    active = total
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            used = getattr(config.hf_config, _EXPERTS_PER_TOKEN)
            own = sum(p.numel() for p in module.parameters())
            active -= own - own * used // module.num_experts
        elif isinstance(module, VocabParallelEmbedding):
            active -= sum(p.numel() for p in module.parameters())
    return ModelParameters(total=total, active=active)


def used_experts(config: ModelConfig) -> tuple[int, int]:
    """Routed experts that a token uses, and all of a layer; (0, 0): the model has none."""
    experts = getattr(config.hf_config, _EXPERTS_PER_TOKEN, None)
    for module in build_on_meta(config).modules():
        if isinstance(module, RoutedExperts):
            assert experts is not None, "the model was built with it"
            return int(experts), module.num_experts
    return 0, 0


def config_of_files(config: ModelConfig) -> ModelConfig:
    """The config of the model that the weight files have, if there are any: a head of their own may
    contradict config.json, see `with_own_head`."""
    if not _has_files(config):
        return config
    return with_own_head(config, WEIGHT_SOURCES["auto"](config, LoadConfig()))


def _has_files(config: ModelConfig) -> bool:
    return any(Path(config.model_path).glob("*.safetensors"))


def kept_formats(config: ModelConfig) -> FormatOf | None:
    """Formats of the weights that stay quantized in a GPU's memory; None: none does.

    They are read from the headers of the weight files. Without these, they are those of random
    weights (`--load-format dummy`), except for the layers that config.json leaves plain.
    """
    if config.quantization is None or config.dtype not in KEPT_DTYPES:
        return None
    if _has_files(config):
        return WEIGHT_SOURCES["auto"](config, LoadConfig()).formats()
    found = WEIGHT_SOURCES["dummy"](config, LoadConfig()).formats()
    raw = read_json(Path(config.model_path) / "config.json") or {}
    patterns = _plain_layers(raw)
    return lambda name: None if _is_listed(name, patterns) else found(name)


def _plain_layers(raw: dict[str, Any]) -> Sequence[str]:
    """The layers that `quantization_config` leaves plain: names, parts of names between dots, or
    patterns after `re:`."""
    text = raw.get("text_config")
    stated = raw.get("quantization_config") or (text or {}).get("quantization_config") or {}
    found = []
    for key in ("ignore", "modules_to_not_convert"):
        names = stated.get(key) or ()
        if not isinstance(names, list | tuple):
            raise ValueError(f"config.json: quantization_config.{key}={names!r} must be a list")
        found += [_checked_pattern(str(name)) for name in names]
    return found


def _checked_pattern(pattern: str) -> str:
    """The pattern of a layer's name. Raises ValueError if it is no regular expression."""
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        raise ValueError(
            f"config.json: quantization_config.ignore has {pattern!r}, which is no regular "
            f"expression ({error})"
        ) from error
    return pattern


def _is_listed(name: str, patterns: Sequence[str]) -> bool:
    module = name.removesuffix(".weight")
    return any(
        re.match(pattern.removeprefix("re:"), module) is not None
        if pattern.startswith("re:")
        else f".{pattern}." in f".{module}."
        for pattern in patterns
    )
