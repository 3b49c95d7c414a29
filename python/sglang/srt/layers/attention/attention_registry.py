"""Registry of attention backends by kind of attention, `--attention-backend` name and device.

The first backend registered for a kind and a device is the default there.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Final

import torch

from sglang.srt.hardware_backend.device_kinds import DEVICE_KINDS, device_kind
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.compressed_backend import CompressedTorchBackend
from sglang.srt.layers.attention.dsa_backend import DSATorchNativeBackend
from sglang.srt.layers.attention.mla_backend import MLATorchNativeBackend
from sglang.srt.layers.attention.pooled_dsa_backend import PooledDSABackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.window_backend import WindowTorchBackend
from sglang.srt.layers.attention_kind import (
    COMPRESSED,
    DSA,
    FULL_ATTENTION,
    MLA,
    POOLED_DSA,
    SLIDING_WINDOW,
    AttentionKind,
)
from sglang.srt.mem_cache.device.fp8_rows import FP8
from sglang.srt.mem_cache.device.mla_pool import MLASpec
from sglang.srt.mem_cache.device.nsa_pool import IndexerSpec
from sglang.srt.mem_cache.device.state_spec import PoolName

logger = logging.getLogger(__name__)

MakeBackend = Callable[[AttentionConfig], AttentionBackend]

_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_BACKENDS: dict[tuple[AttentionKind, str, str], MakeBackend] = {}
_TAKE_SINKS: set[tuple[AttentionKind, str, str]] = set()
"""Backends for layers with attention sinks."""


def register_attention_backend(
    kind: AttentionKind,
    name: str,
    device_type: str,
    make: MakeBackend,
    *,
    takes_sinks: bool = False,
) -> None:
    """Register `make` as the backend `name` for layers of `kind` on devices of `device_type`.

    Args:
        device_type: Name of a `DeviceKind`.
        make: Makes the backend; raises ValueError if it does not support the model.
        takes_sinks: True if it reads `RadixAttention.sinks`. Others refuse a model with sinks.

    Raises:
        ValueError: A backend is already registered for these three.
    """
    if (kind, name, device_type) in _BACKENDS:
        raise ValueError(
            f"attention backend {name!r} is already registered for {kind!r} on {device_type!r}"
        )
    _BACKENDS[kind, name, device_type] = make
    if takes_sinks:
        _TAKE_SINKS.add((kind, name, device_type))


def default_attention_backend(device: str, kind: AttentionKind = FULL_ATTENTION) -> str:
    """Name of the default backend for `kind` on `device`, such as "cpu" or "cuda:0".

    Raises:
        ValueError: No backend runs there.
    """
    names = _names(kind, device)
    if not names:
        raise ValueError(
            f"there is no attention backend for layers of kind {kind!r} on {device!r}: "
            "use another device"
        )
    return names[0]


def create_attention_backend(
    name: str, config: AttentionConfig, kind: AttentionKind = FULL_ATTENTION
) -> AttentionBackend:
    """Make the backend called `name` for layers of one kind.

    Raises:
        ValueError: No backend has that name (the error lists the names), or it does not support the
            device or this model.
    """
    key = kind, name, device_kind(config.device).name
    make = _BACKENDS.get(key)
    if make is not None:
        if config.has_sinks and key not in _TAKE_SINKS:
            able = [
                one for one in _names(kind, config.device) if (kind, one, key[2]) in _TAKE_SINKS
            ]
            raise ValueError(
                f"attention backend {name!r} does not support attention sinks, which the model's "
                f"layers of kind {kind!r} have: use --attention-backend {' or '.join(able)}"
            )
        return make(config)
    there = _names(kind, config.device)
    if any((k, n) == (kind, name) for k, n, _ in _BACKENDS):
        raise ValueError(
            f"attention backend {name!r} does not run on {config.device!r}: "
            f"use {' or '.join(there)}"
        )
    raise ValueError(
        f"attention backend {name!r} is not supported: supported are {', '.join(there)}"
    )


def create_attention_backends(
    name: str | None, configs: Mapping[AttentionKind, AttentionConfig]
) -> dict[AttentionKind, AttentionBackend]:
    """Make the backends of a model, one for each kind of its layers.

    Args:
        name: Used for every kind that has a backend of that name. Other kinds use their default,
            and the log says so. None: every kind uses its default.
        configs: One for each kind of the model's layers.

    Raises:
        ValueError: No kind has a backend of that name on the device, a kind has no backend at all,
            a backend does not support the model, or the device does not read its state in fp8.
    """
    for config in configs.values():
        _check_fp8_heads(config)
    made: dict[AttentionKind, AttentionBackend] = {}
    for kind, config in configs.items():
        best = default_attention_backend(config.device, kind)
        device_type = device_kind(config.device).name
        is_there = any((n, d) == (name, device_type) for _, n, d in _BACKENDS)
        if name is None or (is_there and name not in _names(kind, config.device)):
            chosen = best
        else:
            # A name that no kind has on this device is refused below, with the reason.
            chosen = name
        if name not in (None, chosen):
            logger.info("Layers of kind %r run on %r: %r does not support them", kind, chosen, name)
        made[kind] = create_attention_backend(chosen, config, kind)
    return made


def _check_fp8_heads(config: AttentionConfig) -> None:
    """Raise ValueError if keys and values per head are in fp8 and the device does not read them."""
    device = device_kind(config.device)
    heads = [
        f"'{spec.name}'"
        for spec in config.specs.values()
        if spec.dtype is FP8 and not isinstance(spec, (MLASpec, IndexerSpec))
    ]
    if heads and not device.reads_fp8_heads:
        raise ValueError(
            f"--kv-cache-dtype fp8_e4m3: {device.title} keeps only latent rows (MLA) in fp8, and "
            f"this model has state {', '.join(heads)} per head; use --kv-cache-dtype auto or "
            "bfloat16"
        )


def _names(kind: AttentionKind, device: str) -> list[str]:
    """Names of the backends for `kind` on `device`, the default first."""
    device_type = device_kind(device).name
    return [n for k, n, d in _BACKENDS if (k, d) == (kind, device_type)]


def _imported(path: str) -> MakeBackend:
    """A backend class to import on first use, because it needs packages of its device."""
    module, _, name = path.rpartition(".")

    def make(config: AttentionConfig) -> AttentionBackend:
        backend = getattr(importlib.import_module(f"{__package__}.{module}"), name)(config)
        assert isinstance(backend, AttentionBackend)
        return backend

    return make


def _make_flashinfer(config: AttentionConfig) -> AttentionBackend:
    """Raise ValueError if the library is not installed or does not support this model."""
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
    return _imported("flashinfer_backend.FlashInferAttnBackend")(config)


def _make_flashmla(config: AttentionConfig) -> AttentionBackend:
    """Raise ValueError if the package is not installed or its kernel does not take this model."""
    mla = config.mla
    assert mla is not None, "its layers have latent attention"
    if mla.kv_lora_rank != 512 or mla.qk_rope_head_dim not in (0, 64):
        raise ValueError(
            "attention backend 'flashmla' takes a kv_lora_rank of 512 and a qk_rope_head_dim of "
            f"64 or 0, not {mla.kv_lora_rank} and {mla.qk_rope_head_dim}: use triton"
        )
    stored = {spec.dtype for spec in config.specs.values() if isinstance(spec, MLASpec)}
    if {config.dtype, *stored} != {torch.bfloat16}:
        raise ValueError(
            "attention backend 'flashmla' takes --dtype bfloat16 and --kv-cache-dtype auto, not "
            f"{config.dtype} with rows in {', '.join(map(str, stored))}: use triton"
        )
    return _imported("flashmla_backend.FlashMLABackend")(config)


def _make_compressed_flashmla(config: AttentionConfig) -> AttentionBackend:
    """Raise ValueError if the package is not installed or its kernel does not take this model."""
    (ring,) = config.specs[PoolName.SWA].buffers
    if config.num_heads % 64 or ring.shape[-1] != 512:
        raise ValueError(
            "attention backend 'flashmla' takes a head_dim of 512 and a multiple of 64 heads on "
            f"each rank, not {ring.shape[-1]} and {config.num_heads}: use triton"
        )
    if config.dtype != torch.bfloat16:
        raise ValueError(
            f"attention backend 'flashmla' takes --dtype bfloat16, not {config.dtype}: use triton"
        )
    return _imported("compressed_flashmla_backend.CompressedFlashMLABackend")(config)


_LATENT_TRITON: Final = _imported("latent_triton_backend.LatentTritonBackend")
_COMPRESSED_TRITON: Final = _imported("compressed_triton_backend.CompressedTritonBackend")
_WINDOW_TRITON: Final = _imported("window_triton_backend.WindowTritonBackend")
_FULL: Final[dict[str, MakeBackend]] = {
    "torch_native": TorchNativeAttnBackend,
    "triton": _imported("triton_backend.TritonAttnBackend"),
    "flashinfer": _make_flashinfer,
    "ascend": _imported("ascend_backend.AscendAttnBackend"),
}
_FULL_WITH_SINKS: Final = frozenset({"triton", "torch_native"})
for _kind in DEVICE_KINDS.values():
    for _name in _kind.attention_backends:
        if _name in _FULL:
            register_attention_backend(
                FULL_ATTENTION,
                _name,
                _kind.name,
                _FULL[_name],
                takes_sinks=_name in _FULL_WITH_SINKS,
            )
    if "triton" in _kind.attention_backends:
        register_attention_backend(MLA, "triton", _kind.name, _LATENT_TRITON)
        register_attention_backend(DSA, "triton", _kind.name, _LATENT_TRITON)
        register_attention_backend(POOLED_DSA, "triton", _kind.name, _LATENT_TRITON)
        for _of, _make in ((SLIDING_WINDOW, _WINDOW_TRITON), (COMPRESSED, _COMPRESSED_TRITON)):
            register_attention_backend(_of, "triton", _kind.name, _make, takes_sinks=True)
    if "flashmla" in _kind.attention_backends:
        register_attention_backend(DSA, "flashmla", _kind.name, _make_flashmla)
        register_attention_backend(POOLED_DSA, "flashmla", _kind.name, _make_flashmla)
        register_attention_backend(
            COMPRESSED, "flashmla", _kind.name, _make_compressed_flashmla, takes_sinks=True
        )
    register_attention_backend(MLA, "torch_native", _kind.name, MLATorchNativeBackend)
    register_attention_backend(DSA, "torch_native", _kind.name, DSATorchNativeBackend)
    register_attention_backend(POOLED_DSA, "torch_native", _kind.name, PooledDSABackend)
    for _of, _make in ((SLIDING_WINDOW, WindowTorchBackend), (COMPRESSED, CompressedTorchBackend)):
        register_attention_backend(_of, "torch_native", _kind.name, _make, takes_sinks=True)
