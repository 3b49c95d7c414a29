"""Trains the built-in model: python scripts/builtin_model/train.py --out DIR [--scale 1.0]

Reads the architecture and the tokenizer from the package folder, and writes DIR/model.safetensors
(bfloat16) after every stage. Takes minutes on one GPU; `--scale 0.01 --device cpu` is a quick test.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from batches import NO_TARGET, Batch, BatchBuilder, BatchShape, TrainingStream
from make_tokenizer import PACKAGE_DIR
from safetensors.torch import save_file
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

PEAK_LEARNING_RATE = 2e-3
FINAL_LEARNING_RATE = 2e-5
WARMUP_STEPS = 100
GRADIENT_NORM = 1.0
STEP_TOKENS = 69_632
REHEARSAL_EVERY = 4  # steps; so often a stage uses a length of an earlier stage, in turn
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
    """Has fp32 weights, the optimizer and the schedule. Forward and backward run in bfloat16."""

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
        self.optimizer = _optimizer(self.model, fused=device == "cuda")
        warmup = min(WARMUP_STEPS, len(self.shapes) // 4 + 1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: _rate(step, warmup, len(self.shapes))
        )

    def logits(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits [n, vocabulary] at the batch's n targets, and the targets [n]."""
        ids = batch.ids.to(self.device, non_blocking=True)
        targets = batch.targets.to(self.device, non_blocking=True)
        wanted = targets != NO_TARGET
        with torch.autocast(self.device, dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            return self.model.lm_head(hidden[wanted]).float(), targets[wanted]

    def step(self, batch: Batch) -> torch.Tensor:
        """Take one optimizer step and return the loss (a scalar on the device)."""
        logits, targets = self.logits(batch)
        loss = functional.cross_entropy(logits, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    @torch.no_grad()
    def validate(self, length: int, conversations: int) -> tuple[float, int]:
        """Return the share of held-out codes with all tokens right, and the number of codes."""
        rows = max(1, min(conversations, STEP_TOKENS // length))
        builder = BatchBuilder(self.tokenizer)
        right = total = 0
        for seed in range(math.ceil(conversations / rows)):
            batch = builder.build("heldout", seed, BatchShape(length, rows))
            logits, targets = self.logits(batch)
            numbers = batch.answers[batch.targets != NO_TARGET].to(self.device)
            wrong = (logits.argmax(-1) != targets) & (numbers >= 0)
            count = int(numbers.max()) + 1
            total += count
            wrong_codes = numbers[wrong].unique()  # type: ignore[no-untyped-call]
            right += count - int(wrong_codes.numel())
        return right / total, total

    def save(self, directory: Path) -> None:
        """Write the weights as bfloat16 under Hugging Face's names, without the tied head."""
        weights = {
            name: value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in self.model.state_dict().items()
            if name != "lm_head.weight"
        }
        directory.mkdir(parents=True, exist_ok=True)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _shapes(plan: list[Stage], step_tokens: int) -> list[BatchShape]:
    shapes = []
    for index, stage in enumerate(plan):
        for step in range(stage.steps):
            repeat, off = divmod(step, REHEARSAL_EVERY)
            rehearses = index > 0 and off == 0
            length = plan[repeat % index].length if rehearses else stage.length
            shapes.append(BatchShape(length, max(1, step_tokens // length)))
    return shapes


def _optimizer(model: Qwen3ForCausalLM, fused: bool) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), fused=fused)


def _rate(step: int, warmup: int, steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, then cosine to the final one."""
    if step < warmup:
        return (step + 1) / warmup
    floor = FINAL_LEARNING_RATE / PEAK_LEARNING_RATE
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


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
    loader = iter(DataLoader(stream, batch_size=None, num_workers=args.workers, prefetch_factor=4))
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
                score, count = trainer.validate(length, args.validation)
                scores.append(f"{length}: {score:.4f} of {count};")
        seconds = time.monotonic() - began
        print(f"stage {stage.length}, {seconds:.0f} s, held-out right:", *scores, flush=True)
        trainer.save(args.out)


if __name__ == "__main__":
    main()
