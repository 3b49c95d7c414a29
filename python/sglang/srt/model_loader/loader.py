"""Builds a model with weights from files, random weights, or weights of a running server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quantization_config import QuantizationConfig
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.layer_weight import SCALES
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.weight_format import WeightFormats
from sglang.srt.model_loader.checkpoint_files import CheckpointFiles
from sglang.srt.model_loader.dummy_weights import DummyWeights
from sglang.srt.model_loader.remote_weights import RemoteInstanceWeights
from sglang.srt.model_loader.weight_source import LoadConfig, WeightSlots, WeightSource
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.models.registry import MODEL_CLASSES
from sglang.srt.utils.progress import progress_bar

logger = logging.getLogger(__name__)

KEPT_DTYPES: Final = frozenset((torch.bfloat16, torch.float16))
"""Dtypes of models whose quantized weights stay so in memory, where there are fused kernels. These
multiply activations of these dtypes."""

WEIGHT_SOURCES: Mapping[str, Callable[[ModelConfig, LoadConfig], WeightSource]] = MappingProxyType(
    {
        "auto": CheckpointFiles,
        "safetensors": CheckpointFiles,
        "pt": CheckpointFiles,
        "dummy": DummyWeights,
        "remote_instance": RemoteInstanceWeights,
    }
)
"""Sources of weights by value of `--load-format`."""


def get_model(model_config: ModelConfig, load_config: LoadConfig) -> CausalLM:
    """This rank's share of a model with its weights. Raises like `build_model` and
    `load_weights`."""
    model = build_model(model_config, load_config)
    load_weights(model, model_config, load_config)
    return model


def build_model(model_config: ModelConfig, load_config: LoadConfig) -> CausalLM:
    """This rank's share of a model, on its device, with uninitialized weights.

    Raises:
        ValueError: The model cannot be split over this number of ranks; or see `load_weights`.
    """
    keeps_formats = (
        model_config.dtype in KEPT_DTYPES and fused_kernels(load_config.device) is not None
    )
    formats = None
    if keeps_formats or model_config.tie_word_embeddings:
        source = _make_source(model_config, load_config)
        model_config = with_own_head(model_config, source)
        if keeps_formats:
            formats = WeightFormats(of=source.formats())
    placement = TensorPlacement(
        dtype=model_config.dtype,
        device=load_config.device,
        tp_group=load_config.tp_group,
        formats=formats,
        experts=load_config.experts,
    )
    with torch.inference_mode():
        model = MODEL_CLASSES[model_config.architecture](model_config, placement)
    if model_config.quantization is not None:
        _log_formats(model, model_config.quantization, formats)
    return model


def with_own_head(model_config: ModelConfig, source: WeightSource) -> ModelConfig:
    """The config of the model that `source` has. A head that differs from the embedding counts,
    although config.json says that they are one tensor: transformers decides so, too.

    Raises:
        ValueError: See `WeightSource.has_own_head`.
    """
    head, embedding = MODEL_CLASSES[model_config.architecture].head_names()
    if not model_config.tie_word_embeddings or not source.has_own_head(head, embedding):
        return model_config
    logger.warning(
        "config.json: tie_word_embeddings=true is not followed: %s has a %s that differs from %s, "
        "and is the head",
        source.name,
        head,
        embedding,
    )
    return replace(model_config, tie_word_embeddings=False)


def _log_formats(
    model: CausalLM, quantization: QuantizationConfig, formats: WeightFormats | None
) -> None:
    """Say which weights stay quantized in memory."""
    names = {name for name, _ in model.weight_slots()}
    if formats is None:
        logger.info(
            "weights are quantized (%s): they are dequantized at load, and activations are not "
            "quantized",
            quantization,
        )
        return
    kept = {name for name in names if name + SCALES in names}
    reasons = formats.dequantized
    others = sum(formats.of(name) is not None for name in names - kept) - reasons.total()
    if others > 0:
        reasons["no plain products"] = others
    logger.info(
        "weights are quantized (%s): %d stay so in memory, %d are dequantized at load%s",
        quantization,
        len(kept),
        reasons.total(),
        "".join(f"; {count}: {reason}" for reason, count in reasons.items()),
    )


def _make_source(model_config: ModelConfig, load_config: LoadConfig) -> WeightSource:
    make_source = WEIGHT_SOURCES.get(load_config.load_format)
    if make_source is None:
        raise ValueError(
            f"load format {load_config.load_format!r} is not supported: "
            f"supported are {', '.join(WEIGHT_SOURCES)}"
        )
    return make_source(model_config, load_config)


def load_weights(
    model: CausalLM, model_config: ModelConfig, load_config: LoadConfig
) -> WeightSource:
    """Fill all weights of a model from `build_model`, and return their source.

    Raises:
        ValueError: In one line: the unknown load format, or the source, the tensor that is missing,
            unexpected, torn or of another shape, and the remedy.
    """
    started = time.monotonic()
    source = _make_source(model_config, load_config)
    with (
        torch.inference_mode(),
        progress_bar(
            logger.info,
            desc="Loading weights",
            unit="tensor",
            disable=not load_config.show_progress,
        ) as progress,
    ):
        slots = WeightSlots(model, progress.update)
        progress.total = len(slots)
        source.fill(slots)
        slots.check_filled(source.name)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    logger.info(
        "Loaded %s from %s: %d tensors, %.1f MiB, %s, %.2f s",
        model_config.architecture,
        source.name,
        len(slots),
        num_bytes / (1 << 20),
        str(model_config.dtype).removeprefix("torch."),
        time.monotonic() - started,
    )
    return source
