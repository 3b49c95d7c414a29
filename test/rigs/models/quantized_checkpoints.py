"""Writes checkpoints in published weight formats, each with a plain twin of the same values.

The encoders are written from the formats' definitions with numpy, and share no code with the
decoders under test.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from rigs.models.gptq_rounding import NO_MOMENTS, Floats, Moments, compensated

Encoded: TypeAlias = tuple[dict[str, torch.Tensor], Floats]
"""The tensors of one weight by their full names, and the values that they stand for."""

_CLIPS: Final = 20
_CLIP_STEP: Final = 0.02
_CLIP_NORM: Final = 2.4
"""GPTQ's groups of integers: ranges that are tried, the share by which each is smaller, and the
norm of the errors by which one is chosen."""
_LEFT_PLAIN = re.compile(r"embed_tokens|lm_head|norm|conv1d|\.gate\.weight|shared_expert_gate")
_STACKED = re.compile(r"experts\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True, slots=True)
class Format:
    """One weight format.

    Attributes:
        config: `quantization_config` of config.json.
        encode: Encodes a weight `[outputs, inputs]` of this name.
        multiple: Outputs and inputs of a weight are multiples of this; others are left plain.
        takes_stacks: True if stacks of weights can be encoded.
        only: Pattern in the names of the weights that are encoded.
    """

    config: dict[str, Any]
    encode: Callable[[str, Floats], Encoded]
    multiple: int = 1
    takes_stacks: bool = False
    only: str = ""


def write_quantized(plain: Path, directory: Path, form: Format, *, files: int = 1) -> Path:
    """Write the checkpoint `plain` in a weight format.

    Args:
        directory: An empty directory for two checkpoints.
        files: Number of files, over which the tensors of each weight are spread.

    Returns:
        Path of the quantized checkpoint. `directory / "plain"` has the same values without a
        format.
    """
    names = ("quantized", "plain")
    for name in names:
        shutil.copytree(plain, directory / name, ignore=shutil.ignore_patterns("*.safetensors*"))
    quantized: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for file in sorted(plain.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            is_stacked = form.takes_stacks and _STACKED.search(name) is not None
            is_matrix = tensor.dim() == 2 and name.endswith(".weight")
            fits = not any(size % form.multiple for size in tensor.shape[-2:])
            fits = fits and re.search(form.only, name) is not None
            if _LEFT_PLAIN.search(name) or not (is_matrix or is_stacked) or not fits:
                quantized[name] = values[name] = tensor
                continue
            encoded, found = form.encode(name, tensor.to(torch.float32).numpy())
            quantized |= encoded
            values[name] = torch.from_numpy(np.ascontiguousarray(found)).to(tensor.dtype)
    assert len(quantized) > len(values), "no weight was quantized"
    for part in range(files):
        own = {key: quantized[key].contiguous() for key in sorted(quantized)[part::files]}
        number = "" if files == 1 else f"-{part}"
        save_file(own, directory / names[0] / f"model{number}.safetensors")
    save_file(values, directory / names[1] / "model.safetensors")
    path = directory / names[0] / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": form.config}
    path.write_text(json.dumps(config))
    return directory / names[0]


def fp8_blocks(height: int = 128, width: int = 128, *, moments: Moments = NO_MOMENTS) -> Format:
    """DeepSeek's format: fp8 with a scale for each block.

    Args:
        moments: Moments of the inputs, here and below. GPTQ rounds the weights that have some;
            others are rounded to the nearest value.
    """
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [height, width],
    }

    def encode(name: str, weight: Floats) -> Encoded:
        elements, scales, values = _fp8(weight, height, width, moments.get(name))
        return {name: elements, f"{name}_scale_inv": scales}, values

    return Format(config, encode, takes_stacks=True)


def fp8_per_tensor() -> Format:
    """fp8 with one scale for a weight, and one for the activations."""
    config = {"quant_method": "fp8", "activation_scheme": "static"}

    def encode(name: str, weight: Floats) -> Encoded:
        elements, scales, values = _fp8(weight, *weight.shape)
        layer = name.removesuffix(".weight")
        beside = {f"{layer}.weight_scale": scales.view(()), f"{layer}.input_scale": torch.ones(())}
        return {name: elements, **beside}, values

    return Format(config, encode)


def _fp8(
    weight: Floats, height: int, width: int, moments: Floats | None = None
) -> tuple[torch.Tensor, torch.Tensor, Floats]:
    *lead, outputs, inputs = weight.shape
    blocks = (-(-outputs // height), -(-inputs // width))
    scales = np.zeros((*lead, *blocks), np.float32)
    for row in range(blocks[0]):
        for column in range(blocks[1]):
            block = weight[
                ...,
                row * height : (row + 1) * height,
                column * width : (column + 1) * width,
            ]
            scales[..., row, column] = np.abs(block).max(axis=(-1, -2)) / 448.0
    of_each = scales.repeat(height, axis=-2)[..., :outputs, :].repeat(width, axis=-1)[..., :inputs]

    def nearest(weight: Floats, scales: Floats) -> torch.Tensor:
        return torch.from_numpy(weight / scales).to(torch.float8_e4m3fn)

    if moments is not None:

        def of_column(values: Floats, column: int) -> Floats:
            scales = of_each[:, column]
            return nearest(values, scales).to(torch.float32).numpy() * scales

        weight = compensated(weight, moments, of_column)
    elements = nearest(weight, of_each)
    return elements, torch.from_numpy(scales), elements.to(torch.float32).numpy() * of_each


def packed_experts(group: int = 32) -> Format:
    """compressed-tensors' symmetric int4 with scales in bf16, for experts alone, as Kimi's."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {**weights, "group_size": group}}},
    }

    def encode(name: str, weight: Floats) -> Encoded:
        integers, scales, _ = _centred(weight, np.arange(weight.shape[1]) // group, 4)
        stored = torch.from_numpy(scales).to(torch.bfloat16)
        of_each = stored.to(torch.float32).numpy().repeat(group, axis=1)
        return {
            f"{name}_packed": _pack(integers, 4, axis=1),
            f"{name}_scale": stored,
            f"{name}_shape": torch.tensor(weight.shape),
        }, (integers - 8) * of_each

    return Format(config, encode, multiple=group, only=r"\.experts\.")


def mxfp4() -> Format:
    """gpt-oss's format: stacks of experts in 4-bit floats. A plain stack has its inputs first."""
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}

    def encode(name: str, weight: Floats) -> Encoded:
        by_output = np.swapaxes(weight, -1, -2)
        groups = by_output.reshape(*by_output.shape[:-1], -1, 32)
        most = np.abs(groups).max(axis=-1, keepdims=True)
        exponents = np.floor(np.log2(most)) - 2
        floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        parts = groups / 2.0**exponents
        integers = np.abs(parts[..., None] - floats).argmin(axis=-1)
        values = (floats[integers] * 2.0**exponents).reshape(by_output.shape)
        blocks = (integers[..., ::2] | integers[..., 1::2] << 4).astype(np.uint8)
        scales = (exponents[..., 0] + 127).astype(np.uint8)
        return {
            f"{name}_blocks": torch.from_numpy(blocks),
            f"{name}_scales": torch.from_numpy(scales),
        }, np.swapaxes(values, -1, -2).astype(np.float32)

    return Format(config, encode, multiple=32, takes_stacks=True, only=r"\.experts\.")


def awq(group: int = 32, *, moments: Moments = NO_MOMENTS) -> Format:
    """AutoAWQ's layout for its GEMM kernels."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
    }

    def encode(name: str, weight: Floats) -> Encoded:
        integers, zeros, scales, values = _integers(
            weight, np.arange(weight.shape[1]) // group, 4, moments=moments.get(name)
        )
        layer = name.removesuffix(".weight")
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            f"{layer}.qweight": _pack(integers.T, 4, axis=1, order=order),
            f"{layer}.qzeros": _pack(zeros.T, 4, axis=1, order=order),
            f"{layer}.scales": torch.from_numpy(scales.T.astype(np.float16)),
        }, values

    return Format(config, encode, multiple=8)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    act_order: bool = False,
    version: int = 1,
    stored_zero: int | None = None,
    moments: Moments = NO_MOMENTS,
) -> Format:
    """The layout of AutoGPTQ (version 1), and of GPTQModel (version 2).

    Args:
        group: Inputs of a group; -1: all.
        act_order: True if the inputs of a group are spread over the weight.
        stored_zero: Zero point that the files hold; None: the weights are not symmetric. The true
            zero point of symmetric weights is half of the range, and half of their scales are
            negative, as AutoRound's.
    """
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": act_order,
        "sym": stored_zero is not None,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }

    def encode(name: str, weight: Floats) -> Encoded:
        inputs = weight.shape[1]
        groups = np.arange(inputs) // (inputs if group < 0 else group)
        if act_order:
            np.random.default_rng(3).shuffle(groups)
        if stored_zero is None:
            integers, zeros, scales, values = _integers(
                weight, groups, bits, least_zero=1, moments=moments.get(name)
            )
            zeros = zeros - (1 if version == 1 else 0)
        else:
            integers, scales, values = _centred(weight, groups, bits)
            zeros = np.full(scales.shape, stored_zero)
        layer = name.removesuffix(".weight")
        return {
            f"{layer}.qweight": _pack(integers.T, bits, axis=0),
            f"{layer}.qzeros": _pack(zeros.T, bits, axis=1),
            f"{layer}.scales": torch.from_numpy(scales.T.astype(np.float16)),
            f"{layer}.g_idx": torch.from_numpy(groups.astype(np.int32)),
        }, values

    return Format(config, encode, multiple=8)


def _centred(
    weight: Floats, groups: npt.NDArray[np.int64], bits: int
) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Integers `[outputs, inputs]` around half of their range, scales `[outputs, groups]`, and
    values. A group's greatest magnitude has the lowest integer, so a positive one has a negative
    scale."""
    half, count = 1 << (bits - 1), int(groups.max()) + 1
    scales = np.zeros((len(weight), count), np.float32)
    for group in range(count):
        part = weight[:, groups == group]
        greatest = part[np.arange(len(part)), np.abs(part).argmax(axis=1)]
        scales[:, group] = (greatest / -half).astype(np.float16)
    signed = np.clip(np.round(weight / scales[:, groups]), -half, half - 1)
    return signed.astype(np.int64) + half, scales, signed * scales[:, groups]


def _integers(
    weight: Floats,
    groups: npt.NDArray[np.int64],
    bits: int,
    least_zero: int = 0,
    moments: Floats | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats, Floats]:
    """Integers `[outputs, inputs]`, zero points and scales `[outputs, groups]`, and values."""
    most, count = (1 << bits) - 1, int(groups.max()) + 1
    scales = np.zeros((len(weight), count), np.float32)
    zeros = np.zeros((len(weight), count), np.float32)

    def nearest(weight: Floats, scales: Floats, zeros: Floats) -> Floats:
        return np.clip(np.round(weight / scales), -zeros, most - zeros) * scales

    for group in range(count):
        part = weight[:, groups == group]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        least = np.full(len(weight), np.inf)
        for clip in range(1 if moments is None else _CLIPS):
            share = 1 - clip * _CLIP_STEP
            scale = (share * (high - low) / most).astype(np.float16).astype(np.float32)
            zero = np.clip(np.round(-share * low / scale), least_zero, most)
            off = np.abs(nearest(part, scale[:, None], zero[:, None]) - part) ** _CLIP_NORM
            is_less = off.sum(axis=1) < least
            least[is_less] = off.sum(axis=1)[is_less]
            scales[is_less, group], zeros[is_less, group] = scale[is_less], zero[is_less]
    if moments is not None:

        def of_column(values: Floats, column: int) -> Floats:
            group = groups[column]
            return nearest(values, scales[:, group], zeros[:, group])

        weight = compensated(weight, moments, of_column)
    values = nearest(weight, scales[:, groups], zeros[:, groups])
    integers = np.round(values / scales[:, groups]) + zeros[:, groups]
    return integers.astype(np.int64), zeros.astype(np.int64), scales, values


def _pack(
    integers: npt.NDArray[np.int64], bits: int, *, axis: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Pack along `axis`; the i-th of the bit fields of a word, lowest first, has integer
    `order[i]` of those that share it."""
    count = 32 // bits
    moved = np.moveaxis(integers, axis, -1)
    by_word = moved.reshape(*moved.shape[:-1], -1, count)
    words = np.zeros(by_word.shape[:-1], np.uint64)
    for place, which in enumerate(order or range(count)):
        words |= by_word[..., which].astype(np.uint64) << np.uint64(bits * place)
    packed = np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)
    return torch.from_numpy(packed.copy())
