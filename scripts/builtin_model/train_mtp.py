"""Trains the hybrid's MTP layer: python scripts/builtin_model/train_mtp.py --out DIR

The trunk is frozen. The layer learns the trunk's answers in recall conversations, in chains of
three drafts, so later drafts become as good as the first. Writes DIR: the built-in hybrid with the
layer, its other weights bit by bit as they were. Computes on one CPU core or one GPU.
`--seconds 60 --lengths 272` is a quick test; `--seconds 0 --layer DIR` scores the layer of DIR.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from batches import NO_TARGET, Batch, BatchBuilder, TrainingStream
from make_tokenizer import PACKAGE_DIR
from mtp_lessons import CODE_TOKENS, Lesson, Teacher
from mtp_model import (
    NUM_STEPS,
    Chains,
    checkpoint_weights,
    draft,
    imitate,
    load_layer,
    load_trunk,
    new_layer,
)
from safetensors.torch import load_file, save_file
from torch.nn import functional
from training import BETAS, GRADIENT_NORM, batch_shape, cosine, parameter_groups
from transformers import AutoTokenizer

HYBRID_DIR = PACKAGE_DIR.with_name("builtin_hybrid_model")
LEARNING_RATE = 8e-3
FINAL_SHARE = 0.02  # of the learning rate
WARMUP_STEPS = 20
STEP_TOKENS = 2_176
LENGTHS = (272, 272, 1088, 272, 272, 2160)  # of the conversations of batches, in turn
LESSON_USES = 12  # steps for each lesson: one when it is new, the others at random
KEPT_LESSONS = 128
FIRST_SHARE = 0.4  # of the time, in which chains have one step: the attention learns where to look
OTHER_SHARE = 0.2  # of the anchors that are not the first digit of a code
FIT_BATCHES = 16  # for the first weights of `fc`
ATTENTION_WEIGHT = 1.0  # of the divergence from the trunk's attention
HIDDEN_WEIGHT = 1.0  # of the error of hidden states beside the cross entropy
VALIDATION_LENGTHS = (272, 1088, 2160)
VALIDATION_TOKENS = 8_704  # for each length


def loss_of(chains: Chains, lesson: Lesson) -> torch.Tensor:
    """Return the three parts of the loss, [3], of chains that were forced to the lesson's tokens.

    They are the cross entropy; the divergence of each head's attention from that of the trunk's
    head, which finds the codes; and the error of the hidden states, which the next step of a
    chain takes for the trunk's, as a share of the trunk's variance.
    """
    steps = len(chains.logits)
    targets, looks = lesson.targets[:steps], lesson.attention[:steps]
    wanted = targets != NO_TARGET
    words = functional.cross_entropy(chains.logits[wanted], targets[wanted])
    own, trunk = (part.transpose(2, 3)[wanted] for part in (chains.attention, looks))
    attention = (torch.xlogy(trunk, trunk) - trunk * own.clamp(min=-1e4)).sum(-1).mean()
    rows = torch.arange(len(lesson.ids))[:, None]
    after = torch.arange(steps)[:, None, None]
    hidden = lesson.hidden[rows, lesson.anchors + after][wanted]
    error = functional.mse_loss(chains.hidden[wanted], hidden) / hidden.var()
    return torch.stack([words, ATTENTION_WEIGHT * attention, HIDDEN_WEIGHT * error])


def accepted(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the number of leading drafts that the trunk says too, int64 [rows, n].

    Args:
        logits: [steps, rows, n, vocabulary].
        targets: int64 [steps, rows, n].
    """
    return (logits.argmax(-1) == targets).long().cumprod(0).sum(0)


def verify_steps(drafts: Sequence[int]) -> int:
    """Return the verify steps of an answer after its first token, which the prompt's pass gives.

    Args:
        drafts: For each token of the answer but the last, the accepted drafts of a chain there.
    """
    place = steps = 0
    while place < len(drafts):
        place += drafts[place] + 1
        steps += 1
    return steps


@dataclass(frozen=True)
class Score:
    """How often drafts at codes are right.

    Attributes:
        codes: Number of codes.
        verifies: Verify steps of all codes.
        accepted: Share of chains with at least 1, 2 and 3 accepted drafts, for chains that begin
            at the first to the fourth digit: [4, NUM_STEPS].
    """

    codes: int
    verifies: int
    accepted: torch.Tensor

    @property
    def tokens_per_verify(self) -> float:
        """Accepted drafts + 1; at most 4, since 4 tokens follow the first digit."""
        return self.codes * (CODE_TOKENS - 1) / self.verifies

    def __str__(self) -> str:
        rows = "; ".join(" ".join(f"{share:.3f}" for share in row) for row in self.accepted)
        return f"{self.tokens_per_verify:.3f} tokens a verify, {self.codes} codes, by digit {rows}"


@torch.no_grad()
def score_of(trunk: Any, layer: Any, lessons: Iterable[Lesson]) -> Score:
    """Score greedy chains at every code of the lessons."""
    codes: list[torch.Tensor] = []
    for lesson in lessons:
        chains = draft(trunk, layer, lesson.ids, lesson.hidden, lesson.anchors)
        counts = accepted(chains.logits, lesson.targets)
        for row, places in enumerate(lesson.places):
            for first in (places == 0).nonzero()[:, 0].tolist():
                if first + CODE_TOKENS <= len(places) and places[first + CODE_TOKENS - 1] >= 0:
                    codes.append(counts[row, first : first + CODE_TOKENS - 1])
    counts = torch.stack(codes)
    reached = counts[:, :, None] > torch.arange(NUM_STEPS)
    return Score(
        len(codes), sum(verify_steps(code.tolist()) for code in codes), reached.float().mean(0)
    )


class Run:
    """A training run against the clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self._args = args
        self._rng = random.Random(args.seed)
        self._began = time.monotonic()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(HYBRID_DIR)
        self._trunk = load_trunk(HYBRID_DIR)
        self._teacher = Teacher(self._trunk)
        if args.layer:
            self._layer = load_layer(self._trunk, args.layer)
        else:
            self._layer = new_layer(self._trunk.config)
        groups = parameter_groups(self._layer.parameters(), args.learning_rate)
        self._optimizer = torch.optim.AdamW(groups, betas=BETAS)
        self._held_out = {
            length: self._held_out_lessons(length) for length in args.validation_lengths
        }

    def train(self) -> None:
        """Train until the time is up, then write the checkpoint."""
        args = self._args
        batches = self._batches()
        if args.layer is None:
            imitate(self._trunk, self._layer, (next(batches).ids for _ in range(FIT_BATCHES)))
        self._print(f"first weights, held out: {self._scores()}")
        lessons: deque[Lesson] = deque(maxlen=KEPT_LESSONS)
        began, step, reported = time.monotonic(), 0, time.monotonic()
        while (passed := time.monotonic() - began) < args.seconds:
            if step % LESSON_USES == 0:
                lessons.append(self._teacher.teach(next(batches), OTHER_SHARE))
                lesson = lessons[-1]
            else:
                lesson = self._rng.choice(lessons)
            losses = self._step(lesson, step, passed / args.seconds)
            step += 1
            if time.monotonic() - reported > args.report_seconds:
                reported = time.monotonic()
                self._print(f"step {step}, losses {losses}, held out: {self._scores()}")
                self._save()
        if step:
            self._save()
            self._print(f"step {step}, held out: {self._scores()}")

    def _step(self, lesson: Lesson, step: int, progress: float) -> str:
        """Take one optimizer step; return the parts of the loss."""
        warmth = min(1.0, (step + 1) / WARMUP_STEPS)
        for group in self._optimizer.param_groups:
            group["lr"] = self._args.learning_rate * warmth * cosine(progress, FINAL_SHARE)
        after = torch.arange(1, NUM_STEPS)[:, None, None]
        forced = lesson.ids[torch.arange(len(lesson.ids))[:, None], lesson.anchors + after]
        steps = NUM_STEPS if progress >= self._args.first_share else 1
        chains = draft(
            self._trunk, self._layer, lesson.ids, lesson.hidden, lesson.anchors, forced, steps
        )
        losses = loss_of(chains, lesson)
        self._optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._layer.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        return ", ".join(f"{part:.3f}" for part in losses.tolist())

    def _batches(self) -> Iterator[Batch]:
        lengths = self._args.lengths
        shapes = [
            batch_shape(lengths[step % len(lengths)], self._args.step_tokens)
            for step in range(100_000)
        ]
        return TrainingStream(self._tokenizer, shapes, self._args.first_batch).start(workers=0)

    def _held_out_lessons(self, length: int) -> list[Lesson]:
        builder = BatchBuilder(self._tokenizer)
        shape = batch_shape(length, STEP_TOKENS)
        return [
            self._teacher.teach(builder.build("heldout", seed, shape))
            for seed in range(self._args.validation_tokens // STEP_TOKENS)
        ]

    def _scores(self) -> str:
        scores = (
            f"{length}: {score_of(self._trunk, self._layer, lessons)}"
            for length, lessons in self._held_out.items()
        )
        return " | ".join(scores)

    def _save(self) -> None:
        """Write the hybrid with the layer: weights, config and what belongs to the text."""
        out: Path = self._args.out
        out.mkdir(parents=True, exist_ok=True)
        for file in HYBRID_DIR.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copy(file, out / file.name)
        config = json.loads((HYBRID_DIR / "config.json").read_text())
        config = dict(sorted({**config, "mtp_num_hidden_layers": 1}.items()))
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        weights = load_file(HYBRID_DIR / "model.safetensors")
        trunk = {name: value for name, value in weights.items() if not name.startswith("mtp.")}
        weights = trunk | checkpoint_weights(self._layer)
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})

    def _print(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1500.0, help="of training")
    parser.add_argument("--first-share", type=float, default=FIRST_SHARE)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="at the peak")
    parser.add_argument("--layer", type=Path, help="checkpoint whose layer goes on learning")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS)
    parser.add_argument("--first-batch", type=int, default=0, help="of the training stream")
    parser.add_argument("--validation-lengths", type=int, nargs="+", default=VALIDATION_LENGTHS)
    parser.add_argument("--validation-tokens", type=int, default=VALIDATION_TOKENS)
    parser.add_argument("--report-seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_device(args.device)
    Run(args).train()


if __name__ == "__main__":
    main()
