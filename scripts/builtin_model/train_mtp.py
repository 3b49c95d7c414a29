"""Trains the hybrid's MTP layer on its frozen trunk: python scripts/builtin_model/train_mtp.py --out DIR

The layer learns what the trunk itself says in recall conversations, in chains of three drafts, so
that the later ones are as good as the first. Writes DIR: the built-in hybrid with the new layer,
its other weights bit by bit as they were. Computes on one CPU core, which `nice` can share.
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
from mtp_model import (
    NUM_STEPS,
    TEACHER_LAYER,
    Chains,
    attention_scores,
    checkpoint_weights,
    draft,
    gathered,
    imitate,
    keys_values,
    load_layer,
    load_trunk,
    new_layer,
)
from safetensors.torch import load_file, save_file
from torch.nn import functional
from training import BETAS, GRADIENT_NORM, batch_shape, cosine, parameter_groups
from transformers import AutoTokenizer

HYBRID_DIR = PACKAGE_DIR.with_name("builtin_hybrid_model")
LEARNING_RATE = 5e-3
FINAL_SHARE = 0.02  # of the learning rate
WARMUP_STEPS = 20
STEP_TOKENS = 2_176
LENGTHS = (272, 272, 1088, 272, 272, 2160)  # of the conversations of batches, in turn
LESSON_USES = 4  # steps for each lesson: one when it is new, the others at random
KEPT_LESSONS = 128
EASY_SHARE = 0.1  # of the anchors whose next tokens need no memory
FIT_BATCHES = 16  # for the first weights of `fc`
ATTENTION_WEIGHT = 1.0  # of the divergence from the trunk's attention
HIDDEN_WEIGHT = 1.0  # of the error of hidden states beside the cross entropy
VALIDATION_LENGTHS = (272, 1088, 2160)
VALIDATION_TOKENS = 8_704  # for each length
AFTER_END = 3  # positions after the last answer that learn; there the trunk repeats the end token
CODE_TOKENS = 5  # of the answer to a question: four digits and the end token


@dataclass(frozen=True)
class Lesson:
    """Conversations with what the trunk says at the positions that draft. Tensors on the CPU.

    Attributes:
        ids: int64 [rows, length]. After the last answer of a row, all are the end token.
        hidden: The trunk's hidden states after its final norm, [rows, length, hidden size].
        anchors: int64 [rows, n], positions of tokens that the trunk said, each the last token
            before a chain of drafts. Rows with fewer have position 1 in their place.
        places: int64 [rows, n], the number of an anchor's token in the code that it belongs to
            (from 0); elsewhere -1.
        targets: int64 [NUM_STEPS, rows, n], what the trunk says at each step of a chain;
            `NO_TARGET` after a step at which the conversation goes on in other words.
        attention: The trunk's own at each step's position, to positions 1 up to the anchor;
            [NUM_STEPS, rows, heads, n, length - 1].
    """

    ids: torch.Tensor
    hidden: torch.Tensor
    anchors: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    attention: torch.Tensor


class Teacher:
    """Writes lessons: the trunk's words about the conversations of `BatchBuilder`."""

    def __init__(self, trunk: Any, seed: int = 0) -> None:
        self._trunk = trunk
        self._random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def teach(self, batch: Batch, easy_share: float = 1.0) -> Lesson:
        """Run the trunk on the conversations of a batch.

        Args:
            easy_share: Share of the anchors whose next tokens need no memory. All others are in.
        """
        end: int = self._trunk.config.eos_token_id
        rows, length = batch.ids.shape
        position = torch.arange(length).expand(rows, -1)
        is_answer = functional.pad(batch.targets != NO_TARGET, (1, 0))[:, :-1]
        answered = (is_answer * position).amax(1, keepdim=True)
        is_after = (position > answered) & (answered > 0)
        ids = batch.ids.masked_fill(is_after, end)
        normed: list[torch.Tensor] = []
        attention = self._trunk.model.layers[TEACHER_LAYER].self_attn
        hook = attention.register_forward_pre_hook(
            lambda _, __, inputs: normed.append(inputs["hidden_states"]), with_kwargs=True
        )
        hidden = self._trunk.model(input_ids=ids, use_cache=False).last_hidden_state
        hook.remove()
        places = _places(batch.answers)
        is_anchor = is_answer | (is_after & (position <= answered + AFTER_END))
        is_easy = (places < 0) | (places >= CODE_TOKENS - 2)
        drawn = torch.rand(is_easy.shape, generator=self._random) < easy_share
        is_anchor &= (~is_easy | drawn) & (position < length - NUM_STEPS)
        anchors = _padded(is_anchor)
        said = self._said(hidden, is_anchor)
        agrees = is_anchor.gather(1, anchors)
        keys, _ = keys_values(self._trunk, attention, normed[0][:, 1:], position[:, 1:])
        seen = position[:, None, 1:] <= anchors[:, :, None]
        targets, looks = [], []
        for step in range(NUM_STEPS):
            at = anchors + step
            target = said.gather(1, at)
            targets.append(target.masked_fill(~agrees, NO_TARGET))
            agrees = agrees & (ids.gather(1, at + 1) == target)
            queries = gathered(normed[0], at)
            scores = attention_scores(self._trunk, attention, queries, at, keys, seen)
            looks.append(scores.softmax(-1))
        places = places.gather(1, anchors).masked_fill(targets[0] == NO_TARGET, -1)
        return Lesson(ids, hidden, anchors, places, torch.stack(targets), torch.stack(looks))

    def _said(self, hidden: torch.Tensor, is_anchor: torch.Tensor) -> torch.Tensor:
        """Return the trunk's next tokens, [rows, length], at anchors and the steps after them."""
        wanted = is_anchor.clone()
        for step in range(1, NUM_STEPS):
            wanted[:, step:] |= is_anchor[:, :-step]
        said = torch.full(is_anchor.shape, NO_TARGET)
        said[wanted] = self._trunk.lm_head(hidden[wanted]).argmax(-1)
        return said


def _padded(is_anchor: torch.Tensor) -> torch.Tensor:
    """Return the true positions of each row, [rows, most of a row], padded with 1."""
    most = max(1, int(is_anchor.sum(1).max()))
    order = is_anchor.int().sort(dim=1, descending=True, stable=True)
    return order.indices[:, :most].masked_fill(order.values[:, :most] == 0, 1)


def _places(answers: torch.Tensor) -> torch.Tensor:
    """Return for each token of a code its number in it, from 0, else -1: [rows, length].

    Args:
        answers: Of a `Batch`: the number of the question whose answer has the *next* token.
    """
    places = torch.full_like(answers, -1)
    for row, numbers in enumerate(answers):
        for number in torch.unique(numbers[numbers >= 0]):
            before = (numbers == number).nonzero()[:, 0]
            if len(before) == CODE_TOKENS and before[-1] + 1 < answers.shape[1]:
                places[row, before + 1] = torch.arange(CODE_TOKENS)
    return places


def loss_of(chains: Chains, lesson: Lesson) -> torch.Tensor:
    """Return the loss of chains that were forced to the lesson's tokens.

    It has the cross entropy; the divergence of each head's attention from that of the trunk's
    head, which finds the codes; and the error of the hidden states, which the next step of a
    chain takes for the trunk's, as a share of the trunk's variance.
    """
    wanted = lesson.targets != NO_TARGET
    words = functional.cross_entropy(chains.logits[wanted], lesson.targets[wanted])
    own, trunk = (part.transpose(2, 3)[wanted] for part in (chains.attention, lesson.attention))
    attention = (torch.xlogy(trunk, trunk) - trunk * own.clamp(min=-1e4)).sum(-1).mean()
    rows = torch.arange(len(lesson.ids))[:, None]
    steps = torch.arange(NUM_STEPS)[:, None, None]
    hidden = lesson.hidden[rows, lesson.anchors + steps][wanted]
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
        groups = parameter_groups(self._layer.parameters(), LEARNING_RATE)
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
                lessons.append(self._teacher.teach(next(batches), EASY_SHARE))
                lesson = lessons[-1]
            else:
                lesson = self._rng.choice(lessons)
            losses, right = self._step(lesson, step, passed / args.seconds)
            step += 1
            if time.monotonic() - reported > args.report_seconds:
                reported = time.monotonic()
                self._print(
                    f"step {step} losses {[round(loss, 3) for loss in losses]}, right by step {right}; {self._scores()}"
                )
                self._save()
        if step:
            self._save()
            self._print(f"step {step}, held out: {self._scores()}")

    def _step(self, lesson: Lesson, step: int, progress: float) -> tuple[list[float], list[float]]:
        warmth = min(1.0, (step + 1) / WARMUP_STEPS)
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warmth * cosine(progress, FINAL_SHARE)
        after = torch.arange(1, NUM_STEPS)[:, None, None]
        forced = lesson.ids[torch.arange(len(lesson.ids))[:, None], lesson.anchors + after]
        chains = draft(self._trunk, self._layer, lesson.ids, lesson.hidden, lesson.anchors, forced)
        losses = loss_of(chains, lesson)
        self._optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._layer.parameters(), GRADIENT_NORM)
        self._optimizer.step()
        wanted = lesson.targets != NO_TARGET
        right = (chains.logits.argmax(-1) == lesson.targets).sum((1, 2)) / wanted.sum((1, 2))
        return losses.tolist(), [round(share, 3) for share in right.tolist()]

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
    parser.add_argument("--layer", type=Path, help="checkpoint whose layer goes on learning")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS)
    parser.add_argument("--first-batch", type=int, default=0, help="of the training stream")
    parser.add_argument("--validation-lengths", type=int, nargs="+", default=VALIDATION_LENGTHS)
    parser.add_argument("--validation-tokens", type=int, default=VALIDATION_TOKENS)
    parser.add_argument("--report-seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()
