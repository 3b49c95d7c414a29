"""The limits of a device: measured copy and matrix rates, and the least time of a step.

A step cannot move bytes faster than a large copy, nor multiply faster than a large product. The
ratio to these limits shows, on any machine, how much faster a step could become.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware_backend.device_runtime import device_runtime

_GROUPS: Final = 9
_PER_GROUP: Final = 5
"""Runs between two readings of the clock, so that waiting for the device costs little."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates measured on a device."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written by a copy much larger than any cache."""
    product_flop_per_s: float
    """Rate of a large product in the model's dtype; addition and multiplication count as two."""


@dataclass(frozen=True, slots=True)
class StepWork:
    new_tokens: int
    """New tokens of all requests."""
    pairs: float
    """Pairs of a query and a key visible to it, of all requests, for one layer and head."""
    read_kv_bytes: int
    """Bytes of keys and values read in all layers."""
    last_pairs: float
    """Pairs in the last layer, where only tokens with logits need attention."""
    logits: int
    """Tokens that pass the output head, and therefore all of the last layer."""


def measure_limits(device: torch.device | str, dtype: torch.dtype) -> Limits:
    """Measure both rates; takes up to 8 GiB of a GPU's memory for a moment, 0.5 GiB of a CPU's."""
    is_large = device_runtime(device).kind.has_own_memory
    size, width = (1 << 32, 8192) if is_large else (1 << 28, 1024)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_seconds(lambda: target.copy_(source), device)
    # Random values, because a GPU multiplies zeros with less power and thus at a higher clock.
    x, y = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    product_s = _median_seconds(lambda: x @ y, device)
    return Limits(2 * size / copy_s, 2 * width**3 / product_s)


def least_seconds(model: ModelConfig, work: StepWork, limits: Limits) -> float:
    """The larger of the times for arithmetic and for memory at the limits.

    Every weight except the embedding is read once, in the model's dtype. In the last layer, tokens
    without logits need only their keys and values.
    """
    attention_width = model.num_attention_heads * model.head_dim
    kv_weights = 2 * model.hidden_size * model.num_key_value_heads * model.head_dim
    other_weights = model.hidden_size * (2 * attention_width + 3 * model.intermediate_size)
    layers = model.num_hidden_layers
    body = layers * (kv_weights + other_weights)
    head = model.vocab_size * model.hidden_size
    flops = 2.0 * (body - other_weights) * work.new_tokens
    flops += 2.0 * (other_weights + head) * work.logits
    flops += 4.0 * attention_width * ((layers - 1) * work.pairs + work.last_pairs)
    moved = model.dtype.itemsize * (body + head) + work.read_kv_bytes
    return max(flops / limits.product_flop_per_s, moved / limits.copy_bytes_per_s)


def prefill_work(batch_size: int, input_len: int) -> StepWork:
    """The work for `batch_size` prompts of `input_len` tokens, without a cached prefix."""
    return StepWork(
        new_tokens=batch_size * input_len,
        pairs=batch_size * input_len * (input_len + 1) / 2,
        last_pairs=batch_size * input_len,
        read_kv_bytes=0,
        logits=batch_size,
    )


def decode_work(batch_size: int, context_len: int, kv_bytes_per_token: int) -> StepWork:
    """The work for one token of each of `batch_size` requests with `context_len` tokens."""
    context = batch_size * context_len
    return StepWork(
        new_tokens=batch_size,
        pairs=context,
        last_pairs=context,
        read_kv_bytes=context * kv_bytes_per_token,
        logits=batch_size,
    )


def _median_seconds(work: Callable[[], object], device: torch.device | str) -> float:
    synchronize = device_runtime(device).synchronize
    work()
    seconds = []
    for _ in range(_GROUPS):
        synchronize()
        begun = time.perf_counter()
        for _ in range(_PER_GROUP):
            work()
        synchronize()
        seconds.append((time.perf_counter() - begun) / _PER_GROUP)
    return statistics.median(seconds)
