"""Trains the built-in model: python scripts/builtin_model/train.py --out DIR [--scale 1.0]

Reads the architecture and the tokenizer from the package folder, and writes DIR/model.safetensors
(bfloat16) after every stage. Takes minutes on one GPU; `--scale 0.01 --device cpu` is a quick test.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from batches import Batch, BatchShape, TrainingStream
from make_tokenizer import PACKAGE_DIR
from torch.nn import functional
from training import (
    BETAS,
    GRADIENT_NORM,
    STEP_TOKENS,
    answer_logits,
    batch_shape,
    cosine,
    held_out_batches,
    held_out_score,
    parameter_groups,
    rehearsed_length,
    save_weights,
)
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

PEAK_LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE = 2e-5
WARMUP_STEPS = 100
VALIDATION_LENGTHS = (272, 2160, 6480, 16320)


@dataclass(frozen=True)
class Stage:
    """`steps` optimizer steps on conversations of `length` tokens."""

    length: int
    steps: int


STAGES = (
    Stage(272, 1200),
    Stage(1088, 2000),
    Stage(2160, 1600),
    Stage(6480, 2000),
    Stage(16320, 1200),
)


class Trainer:
    """Has fp32 weights, the optimizer and the schedule."""

    def __init__(self, device: str, step_tokens: int, scale: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(PACKAGE_DIR)
        config = AutoConfig.from_pretrained(PACKAGE_DIR)
        self.model: Qwen3ForCausalLM = Qwen3ForCausalLM._from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        ).to(device)
        self.plan = [Stage(stage.length, max(1, round(stage.steps * scale))) for stage in STAGES]
        self.shapes = _shapes(self.plan, step_tokens)
        groups = parameter_groups(self.model.parameters(), PEAK_LEARNING_RATE)
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=device == "cuda")
        warmup = min(WARMUP_STEPS, len(self.shapes) // 4 + 1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _rate(step, warmup, len(self.shapes))
        )

    def step(self, batch: Batch) -> torch.Tensor:
        """Take one optimizer step and return the loss (a scalar on the device)."""
        logits, targets = answer_logits(self.model, batch, self.device)
        loss = functional.cross_entropy(logits, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


def _shapes(plan: list[Stage], step_tokens: int) -> list[BatchShape]:
    lengths = [stage.length for stage in plan]
    return [
        batch_shape(rehearsed_length(lengths, index, step), step_tokens)
        for index, stage in enumerate(plan)
        for step in range(stage.steps)
    ]


def _rate(step: int, warmup: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, then cosine to the final one."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return cosine(progress, FINAL_LEARNING_RATE / PEAK_LEARNING_RATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")  # noqa: TID251
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps of stages")
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--validation", type=int, default=128, help="conversations per length")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    trainer = Trainer(args.device, args.step_tokens, args.scale, args.seed)
    stream = TrainingStream(trainer.tokenizer, trainer.shapes)
    loader = stream.start(args.workers)
    began, done = time.monotonic(), 0
    for stage in trainer.plan:
        for _ in range(stage.steps):
            loss = trainer.step(next(loader))
            done += 1
            if done % 250 == 0:
                seconds = time.monotonic() - began
                steps = len(trainer.shapes)
                print(f"step {done}/{steps} loss {loss:.4f} {seconds:.0f} s", flush=True)
        scores = []
        for length in VALIDATION_LENGTHS:
            if length <= stage.length or stage is trainer.plan[-1]:
                batches = held_out_batches(trainer.tokenizer, length, args.validation)
                score, count = held_out_score(trainer.model, batches, trainer.device)
                scores.append(f"{length}: {score:.4f} of {count};")
        seconds = time.monotonic() - began
        print(f"stage {stage.length}, {seconds:.0f} s, held-out right:", *scores, flush=True)
        save_weights(trainer.model, args.out)


if __name__ == "__main__":
    main()
