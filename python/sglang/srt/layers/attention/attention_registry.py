"""Attention backends by the name that `--attention-backend` takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Final

import torch

from sglang.srt.hardware_backend.device_kinds import device_kind
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def default_attention_backend(device: str) -> str:
    """The name of the backend that is best on `device`, e.g. "cpu" or "cuda:0"."""
    return device_kind(device).attention_backends[0]


def create_attention_backend(name: str, config: AttentionConfig) -> AttentionBackend:
    """Make the backend called `name`.

    Raises:
        ValueError: There is none of that name, which lists those that there are, or it does not
            run on the device, or not this model.
    """
    if name not in _FACTORIES:
        raise ValueError(
            f"attention backend {name!r} is not supported: supported are {', '.join(_FACTORIES)}"
        )
    kind = device_kind(config.device)
    if name not in kind.attention_backends:
        raise ValueError(
            f"attention backend {name!r} does not run on {config.device!r}: "
            f"use {' or '.join(kind.attention_backends)}"
        )
    return _FACTORIES[name](config)


def _make_triton(config: AttentionConfig) -> AttentionBackend:
    # Triton is not installed where there is no CUDA.
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    return TritonAttnBackend(config)


def _make_flashinfer(config: AttentionConfig) -> AttentionBackend:
    _check_flashinfer(config)
    # Installed where somebody wants it.
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    return FlashInferAttnBackend(config)


def _check_flashinfer(config: AttentionConfig) -> None:
    """Raise ValueError where the library cannot be used, or not with this model."""
    if importlib.util.find_spec("flashinfer") is None:
        raise ValueError(
            "attention backend 'flashinfer' needs the package of that name: "
            "pip install flashinfer-python, or use triton"
        )
    if config.dtype not in (torch.bfloat16, torch.float16) or config.kv_dtype != config.dtype:
        raise ValueError(
            "attention backend 'flashinfer' takes --dtype bfloat16 or float16 and "
            f"--kv-cache-dtype auto, not {config.dtype} with keys and values in "
            f"{config.kv_dtype}: use triton"
        )
    if config.head_dim not in _FLASHINFER_HEAD_DIMS:
        raise ValueError(
            "attention backend 'flashinfer' takes a head_dim of "
            f"{', '.join(map(str, _FLASHINFER_HEAD_DIMS))}, not {config.head_dim}: use triton"
        )


_FACTORIES: Final[dict[str, Callable[[AttentionConfig], AttentionBackend]]] = {
    "torch_native": TorchNativeAttnBackend,
    "triton": _make_triton,
    "flashinfer": _make_flashinfer,
}
