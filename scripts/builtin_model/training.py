"""What the training scripts share: loss, held-out score, optimizer groups, rehearsal, weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from batches import NO_TARGET, Batch, BatchBuilder, BatchShape
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

GRADIENT_NORM = 1.0
STEP_TOKENS = 69_632
REHEARSAL_EVERY = 4  # steps; so often a stage uses a length of an earlier stage, in turn
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.1


def answer_logits(model: Any, batch: Batch, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 logits [n, vocabulary] at the batch's n targets, and the targets [n].

    An accelerator computes in bfloat16 (autocast), a CPU in the weights' dtype.
    """
    ids = batch.ids.to(device, non_blocking=True)
    targets = batch.targets.to(device, non_blocking=True)
    wanted = targets != NO_TARGET
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        return model.lm_head(hidden[wanted]).float(), targets[wanted]


def held_out_batches(
    tokenizer: PreTrainedTokenizerFast, length: int, conversations: int
) -> list[Batch]:
    """Build held-out conversations of `length` tokens, at least so many: whole batches."""
    rows = max(1, min(conversations, STEP_TOKENS // length))
    builder = BatchBuilder(tokenizer)
    return [
        builder.build("heldout", seed, BatchShape(length, rows))
        for seed in range(math.ceil(conversations / rows))
    ]


@torch.no_grad()
def held_out_score(model: Any, batches: Iterable[Batch], device: str) -> tuple[float, int]:
    """Return the share of codes with all tokens right, and the number of codes."""
    right = total = 0
    for batch in batches:
        logits, targets = answer_logits(model, batch, device)
        numbers = batch.answers[batch.targets != NO_TARGET].to(device)
        wrong = (logits.argmax(-1) != targets) & (numbers >= 0)
        count = int(numbers.max()) + 1
        total += count
        right += count - int(torch.unique(numbers[wrong]).numel())
    return right / total, total


def rehearsed_length(lengths: Sequence[int], stage: int, step: int) -> int:
    """Return the conversation length of a stage's step: the stage's own, or an earlier one's."""
    repeat, off = divmod(step, REHEARSAL_EVERY)
    return lengths[repeat % stage] if stage > 0 and off == 0 else lengths[stage]


def batch_shape(length: int, step_tokens: int) -> BatchShape:
    """Return the batch of about `step_tokens` tokens in conversations of `length`."""
    return BatchShape(length, max(1, step_tokens // length))


def parameter_groups(
    parameters: Iterable[torch.nn.Parameter], learning_rate: float
) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices with weight decay, vectors without."""
    known = list(parameters)
    return [
        {
            "params": [weight for weight in known if weight.dim() > 1],
            "lr": learning_rate,
            "weight_decay": WEIGHT_DECAY,
        },
        {
            "params": [weight for weight in known if weight.dim() == 1],
            "lr": learning_rate,
            "weight_decay": 0.0,
        },
    ]


def cosine(progress: float, floor: float) -> float:
    """Return the factor of a learning rate that falls from 1 to `floor`; `progress` in [0, 1]."""
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def save_weights(model: torch.nn.Module, directory: Path) -> None:
    """Write the weights as bfloat16 under Hugging Face's names, without the tied head."""
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
