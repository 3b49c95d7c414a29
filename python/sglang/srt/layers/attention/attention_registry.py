"""Attention backends by the name that `--attention-backend` takes."""

from __future__ import annotations

import importlib.util

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

ATTENTION_BACKENDS = ("torch_native", "triton", "flashinfer")
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def default_attention_backend(device: str) -> str:
    """The name of the backend that is best on `device`, e.g. "cpu" or "cuda:0"."""
    return "triton" if torch.device(device).type == "cuda" else "torch_native"


def create_attention_backend(
    name: str,
    *,
    kv_bytes_per_layer: int,
    page_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 1,
    kv_dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Make the backend called `name`.

    Args:
        kv_bytes_per_layer: Bytes of one token's keys and values in one layer of the pool.
        page_size: Tokens per page.
        dtype: Of the model's activations.
        device: Of the model.
        num_heads: Query heads of this rank; `num_kv_heads` likewise.
        head_dim: Elements of one head.
        kv_dtype: Of the pool; None: `dtype`.

    Raises:
        ValueError: There is none of that name, which lists those that there are, or it does not
            run on the device, or not this model.
    """
    if name == "torch_native":
        return TorchNativeAttnBackend(
            kv_bytes_per_layer=kv_bytes_per_layer, page_size=page_size, dtype=dtype
        )
    if name == "triton":
        _check_on_cuda(name, device)
        # Triton is not installed where there is no CUDA.
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return TritonAttnBackend(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
        )
    if name == "flashinfer":
        _check_on_cuda(name, device)
        _check_flashinfer(head_dim, dtype, dtype if kv_dtype is None else kv_dtype)
        # Installed where somebody wants it.
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        return FlashInferAttnBackend(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            device=device,
        )
    raise ValueError(
        f"attention backend {name!r} is not supported: "
        f"supported are {', '.join(ATTENTION_BACKENDS)}"
    )


def _check_on_cuda(name: str, device: str) -> None:
    if torch.device(device).type != "cuda":
        raise ValueError(
            f"attention backend {name!r} needs a CUDA device, not {device!r}: use torch_native"
        )


def _check_flashinfer(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Raise ValueError where the library cannot be used, or not with this model."""
    if importlib.util.find_spec("flashinfer") is None:
        raise ValueError(
            "attention backend 'flashinfer' needs the package of that name: "
            "pip install flashinfer-python, or use triton"
        )
    if dtype not in (torch.bfloat16, torch.float16) or kv_dtype != dtype:
        raise ValueError(
            "attention backend 'flashinfer' takes --dtype bfloat16 or float16 and "
            f"--kv-cache-dtype auto, not {dtype} with keys and values in {kv_dtype}: use triton"
        )
    if head_dim not in _FLASHINFER_HEAD_DIMS:
        raise ValueError(
            "attention backend 'flashinfer' takes a head_dim of "
            f"{', '.join(map(str, _FLASHINFER_HEAD_DIMS))}, not {head_dim}: use triton"
        )
