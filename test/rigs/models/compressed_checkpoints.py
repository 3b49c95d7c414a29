"""Writes checkpoints as the package compressed-tensors does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from transformers import PreTrainedModel


def save_compressed(model: PreTrainedModel, directory: Path, **weights: Any) -> None:
    """Write a model as the package compressed-tensors does.

    Args:
        model: The model, which is changed.
        weights: Fields of `QuantizationArgs`.
    """
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["re:.*lm_head"])
    apply_quantization_config(model, config)
    layer: Any
    for layer in model.modules():
        if hasattr(layer, "quantization_scheme"):
            scales, zeros = calculate_qparams(*_ranges(layer.weight.data, args), args)
            layer.weight_scale.data.copy_(scales)
            if hasattr(layer, "weight_zero_point"):
                layer.weight_zero_point.data.copy_(zeros)
            layer.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(str(directory))
    compressor.update_config(str(directory))


def _ranges(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest value of each block of a weight."""
    outputs, inputs = weight.shape
    height, width = {
        "tensor": (outputs, inputs),
        "channel": (1, inputs),
        "group": (1, args.group_size),
        "block": args.block_structure or (0, 0),
    }[str(args.strategy)]
    blocks = weight.view(outputs // height, height, inputs // width, width)
    least, greatest = blocks.amin((1, 3)), blocks.amax((1, 3))
    if args.strategy == "tensor":
        return least.view(1), greatest.view(1)
    return least, greatest
