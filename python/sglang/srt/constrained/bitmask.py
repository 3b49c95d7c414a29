"""Masks of allowed tokens: one bit a token, filled on the CPU, applied on the logits' device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xgrammar

from sglang.srt.hardware_backend.device_runtime import device_runtime

_BITS = 32


def allocate_bitmask(batch_size: int, vocab_size: int, *, pin: bool = False) -> torch.Tensor:
    """A mask that allows everything.

    Args:
        batch_size: Rows of the logits.
        vocab_size: Columns of the logits.
        pin: Whether to allocate page-locked memory, for an asynchronous copy to a GPU.

    Returns:
        int32 [batch_size, ceil(vocab_size / 32)] on the CPU; bit i % 32 of word i // 32 is
        token i.
    """
    shape = (batch_size, -(-vocab_size // _BITS))
    return torch.full(shape, -1, dtype=torch.int32, pin_memory=pin)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int]) -> None:
    """Set the logits of the tokens that a row's mask forbids to minus infinity, in place.

    Args:
        logits: float32, float16 or bfloat16 [batch, vocab], any device.
        bitmask: From `allocate_bitmask` for the same batch and vocabulary; on the CPU or on the
            device of the logits.
        rows: Distinct rows to mask; the other rows do not change.

    Raises:
        ValueError: The mask has another shape than the logits need.
    """
    if not rows:
        return
    batch, vocab = logits.shape
    if bitmask.shape != (batch, -(-vocab // _BITS)):
        raise ValueError(
            f"bitmask of shape {tuple(bitmask.shape)} does not belong to logits of shape "
            f"{(batch, vocab)}: allocate it with allocate_bitmask({batch}, {vocab})"
        )
    bitmask = device_runtime(logits.device).stage_to_device(bitmask)
    xgrammar.apply_token_bitmask_inplace(logits, bitmask, vocab_size=vocab, indices=list(rows))
