"""Attention backends by the name that `--attention-backend` takes."""

from __future__ import annotations

import importlib.util

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

ATTENTION_BACKENDS = ("torch_native", "triton", "flashinfer")
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def default_attention_backend(device: str) -> str:
    """The name of the backend that is best on `device`, e.g. "cpu" or "cuda:0"."""
    return "triton" if torch.device(device).type == "cuda" else "torch_native"


def create_attention_backend(name: str, config: AttentionConfig) -> AttentionBackend:
    """Make the backend called `name`.

    Raises:
        ValueError: There is none of that name, which lists those that there are, or it does not
            run on the device, or not this model.
    """
    if name == "torch_native":
        return TorchNativeAttnBackend(config)
    if name == "triton":
        _check_on_cuda(name, config.device)
        # Triton is not installed where there is no CUDA.
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return TritonAttnBackend(config)
    if name == "flashinfer":
        _check_on_cuda(name, config.device)
        _check_flashinfer(config)
        # Installed where somebody wants it.
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        return FlashInferAttnBackend(config)
    raise ValueError(
        f"attention backend {name!r} is not supported: "
        f"supported are {', '.join(ATTENTION_BACKENDS)}"
    )


def _check_on_cuda(name: str, device: str) -> None:
    if torch.device(device).type != "cuda":
        raise ValueError(
            f"attention backend {name!r} needs a CUDA device, not {device!r}: use torch_native"
        )


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
