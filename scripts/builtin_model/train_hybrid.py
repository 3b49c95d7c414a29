"""Trains the hybrid recall model: python scripts/builtin_model/train_hybrid.py --out DIR

Starts from the built-in model's weights (see `hybrid_model`). First the delta nets imitate the
attention that they replace, then all weights learn the answers. Halfway through some rows of a
batch, the states turn into zeros or into another row's states. The answer to learn is then
"unknown", so a wrong state shows as a wrong answer. Writes a checkpoint to DIR after every stage.
Takes `--seconds` and the time of imports;
`--seconds 240 --device cpu --step-tokens 2176 --lengths 272` is a quick test.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from batches import NO_TARGET, Batch, BatchBuilder, TrainingStream
from hybrid_model import Damage, DeltaNet, convert, hybrid_config
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
from transformers import AutoTokenizer, Qwen3ForCausalLM

from rigs.recall.recall_text import UNKNOWN

NEW_LEARNING_RATE = 2e-3
KEPT_LEARNING_RATE = 3e-4
FINAL_SHARE = 0.01  # of the peak learning rates
WARMUP_SHARE = 0.03  # of the time, at the start and when the kept weights join
DAMAGED_SHARE = 0.25  # of the rows of a training batch
ZEROS_SHARE = 1 / 3  # of the damaged rows; the others get another row's state, harder to notice
ONE_LAYER_SHARE = 0.5  # of the batches; in the others, all layers have damaged states
CUTS = 8  # A state is damaged at one of the boundaries of so many equal parts,
CUT_TOKENS = 16  # rounded down to a multiple of this.
REPORT_SECONDS = 10
STAGE_SEEDS = 1_000_000  # batch seeds of each stage
VALIDATION_LENGTHS = (272, 2160, 4320, 6480)


@dataclass(frozen=True)
class Stage:
    """A share of the training time on conversations of `length` tokens."""

    length: int
    share: float
    imitates: bool = False


STAGES = (
    Stage(1088, 0.12, imitates=True),
    Stage(272, 0.08),
    Stage(1088, 0.20),
    Stage(2160, 0.20),
    Stage(4320, 0.25),
    Stage(6480, 0.15),
)


class HybridTrainer:
    """Has the built-in model, the hybrid with fp32 weights, and the optimizer."""

    def __init__(self, device: str, seed: int, damaged_share: float) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(PACKAGE_DIR)
        built_in: Any = Qwen3ForCausalLM.from_pretrained(PACKAGE_DIR, dtype=torch.float32)
        self.built_in = built_in.to(device).eval().requires_grad_(False)
        self.model = convert(built_in).to(device)
        self.nets: dict[int, DeltaNet] = {
            index: layer.linear_attn
            for index, layer in enumerate(self.model.model.layers)
            if isinstance(getattr(layer, "linear_attn", None), DeltaNet)
        }
        new = {id(weight) for net in self.nets.values() for weight in net.parameters()}
        kept = [weight for weight in self.model.parameters() if id(weight) not in new]
        fresh = [weight for weight in self.model.parameters() if id(weight) in new]
        groups = parameter_groups(fresh, NEW_LEARNING_RATE)
        groups += parameter_groups(kept, KEPT_LEARNING_RATE)
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, fused=device == "cuda")
        self._peaks = [group["lr"] for group in groups]
        self._kept_groups = range(len(groups) // 2, len(groups))
        self._unknown = self.tokenizer(UNKNOWN).input_ids[0]
        self._damaged_share = damaged_share
        self._rng = random.Random(seed)

    def imitation_loss(self, batch: Batch) -> torch.Tensor:
        """Return the squared error of the delta nets, as shares of the attention's variance.

        Each gets what the attention got in the built-in model.
        """
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def keep(index: int) -> Callable[..., None]:
            def hook(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> None:
                seen[index] = inputs["hidden_states"], output[0]

            return hook

        attention = {index: self.built_in.model.layers[index].self_attn for index in self.nets}
        hooks = [
            module.register_forward_hook(keep(index), with_kwargs=True)
            for index, module in attention.items()
        ]
        enabled = self.device != "cpu"
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=enabled):
            with torch.no_grad():
                self.built_in.model(input_ids=batch.ids.to(self.device), use_cache=False)
            outputs = {index: net(seen[index][0]) for index, net in self.nets.items()}
        for hook in hooks:
            hook.remove()
        losses = [
            functional.mse_loss(outputs[index].float(), wanted.float()) / wanted.float().var()
            for index, (_, wanted) in seen.items()
        ]
        return torch.stack(losses).mean()

    def answer_loss(self, batch: Batch) -> torch.Tensor:
        """Return the cross entropy of the answers, with damaged states in some rows."""
        rows, length = batch.ids.shape
        damaged = round(rows * self._damaged_share)
        if damaged == 0:
            return functional.cross_entropy(*answer_logits(self.model, batch, self.device))
        cut = length * self._rng.randrange(1, CUTS) // CUTS // CUT_TOKENS * CUT_TOKENS
        source = torch.arange(rows)
        source[:damaged] = (source[:damaged] + 1) % rows
        source[: math.ceil(damaged * ZEROS_SHARE)] = -1
        batch = Batch(batch.ids, doubted_targets(batch, cut, damaged, self._unknown), batch.answers)
        layers = list(self.nets)
        if self._rng.random() < ONE_LAYER_SHARE:
            layers = [self._rng.choice(layers)]
        self.damage(Damage(cut, source.to(self.device)), layers)
        try:
            return functional.cross_entropy(*answer_logits(self.model, batch, self.device))
        finally:
            self.damage(None, self.nets)

    def damage(self, damage: Damage | None, layers: Iterable[int]) -> None:
        """Let the delta nets of these layers run with wrong states; None: with their own."""
        for layer in layers:
            self.nets[layer].damage = damage

    def step(self, loss: torch.Tensor, progress: float, joined: float) -> None:
        """Take one optimizer step, unless the gradient is not finite.

        Args:
            progress: Share of the training time that has passed.
            joined: The same when the kept weights began to learn; above `progress`: not yet.
        """
        for index, (group, peak) in enumerate(
            zip(self.optimizer.param_groups, self._peaks, strict=True)
        ):
            began = joined if index in self._kept_groups else 0.0
            warmth = min(1.0, max(0.0, progress - began) / WARMUP_SHARE + 1e-3)
            group["lr"] = peak * warmth * cosine(progress, FINAL_SHARE)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        if torch.isfinite(norm):
            self.optimizer.step()

    def save(self, directory: Path) -> None:
        """Write weights, config and tokenizer."""
        save_weights(self.model, directory)
        config = hybrid_config(self.built_in.config)
        config.save_pretrained(directory)
        for name in (
            "chat_template.jinja",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ):
            shutil.copy(PACKAGE_DIR / name, directory / name)


def doubted_targets(batch: Batch, cut: int, damaged: int, unknown: int) -> torch.Tensor:
    """Return the batch's targets; after the cut, the first `damaged` rows answer "unknown"."""
    answers = batch.answers[:damaged]
    earlier = functional.pad(answers, (1, 0), value=-1)[:, :-1]
    is_late = torch.arange(answers.shape[1]) >= cut
    begins = (answers >= 0) & (answers != earlier)
    targets = batch.targets.clone()
    late = targets[:damaged].masked_fill((answers >= 0) & is_late, NO_TARGET)
    targets[:damaged] = late.masked_fill(begins & is_late, unknown)
    return targets


def _batches(
    tokenizer: Any, stages: Sequence[Stage], index: int, step_tokens: int, workers: int
) -> Iterator[Batch]:
    """Start workers that build a stage's batches, more than it can use."""
    lengths = list(dict.fromkeys(stage.length for stage in stages if not stage.imitates))
    own = lengths.index(stages[index].length)
    shapes = [
        batch_shape(rehearsed_length(lengths, own, step), step_tokens)
        for step in range(STAGE_SEEDS // 10)
    ]
    return TrainingStream(tokenizer, shapes, first_seed=index * STAGE_SEEDS).start(workers)


def _ends(stages: Sequence[Stage]) -> list[float]:
    """Return the shares of the training time at which the stages end; the last is 1."""
    total = sum(stage.share for stage in stages)
    return [
        sum(stage.share for stage in stages[: index + 1]) / total for index in range(len(stages))
    ]


class Run:
    """A training run against the clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._began = time.monotonic()
        self._args = args
        self._stages = [stage for stage in STAGES if stage.length in args.lengths]
        if not any(stage.imitates for stage in self._stages):
            self._stages.insert(0, Stage(min(args.lengths), STAGES[0].share, imitates=True))
        self._trainer = HybridTrainer(args.device, args.seed, args.damaged_share)
        self._held_out = {
            length: held_out_batches(self._trainer.tokenizer, length, args.validation)
            for length in VALIDATION_LENGTHS
            if length <= max(args.lengths)
        }
        self._steps = 0

    def train(self) -> None:
        """Train all stages, validate and save after each, and print what the states carry."""
        coming = self._start_workers(0)
        self._warm_up()
        start, ends = self._elapsed(), _ends(self._stages)
        budget = self._args.seconds - self._args.closing_seconds - start
        joined = next(
            (end for stage, end in zip(self._stages, ends, strict=True) if stage.imitates), 0.0
        )
        self._print(f"warm; {budget:.0f} s of training follow")
        for index, (stage, end) in enumerate(zip(self._stages, ends, strict=True)):
            batches = coming
            if index + 1 < len(self._stages):
                coming = self._start_workers(index + 1)
            told = self._elapsed()
            while (progress := (self._elapsed() - start) / budget) < end:
                loss = self._loss(stage, next(batches))
                self._trainer.step(loss, progress, joined)
                self._steps += 1
                if self._elapsed() - told > REPORT_SECONDS:
                    told = self._elapsed()
                    self._print(f"step {self._steps} loss {loss.item():.4f}")
            kind = "imitation" if stage.imitates else "answers"
            self._print(f"stage {stage.length} ({kind}) ends, held-out right: {self._scores()}")
            self._trainer.save(self._args.out)
        self._ablate()

    def _loss(self, stage: Stage, batch: Batch) -> torch.Tensor:
        if stage.imitates:
            return self._trainer.imitation_loss(batch)
        return self._trainer.answer_loss(batch)

    def _warm_up(self) -> None:
        """Run every shape once, forward and backward, before the schedule's clock starts."""
        builder = BatchBuilder(self._trainer.tokenizer)
        for stage in self._stages:
            shape = batch_shape(stage.length, self._args.step_tokens)
            self._loss(stage, builder.build("train", 0, shape)).backward()  # type: ignore[no-untyped-call]

    def _ablate(self) -> None:
        """Print the scores without the delta nets' outputs, and with wrong states halfway."""
        nets, length = self._trainer.nets, list(self._held_out)[:2][-1]
        for layers in (*((index,) for index in nets), tuple(nets)):
            hooks = [
                nets[index].register_forward_hook(lambda _, __, output: output * 0)
                for index in layers
            ]
            score, _ = self._score(length)
            self._print(f"{length}: {score:.4f} right without the outputs of layers {layers}")
            for hook in hooks:
                hook.remove()
        batch = self._held_out[length][0]
        cut = length // 2 // CUT_TOKENS * CUT_TOKENS
        rows = torch.arange(len(batch.ids))
        zeros = torch.full_like(rows, -1)
        for name, source, layers in (
            ("own states", rows, tuple(nets)),
            ("states of zeros", zeros, tuple(nets)),
            *(("states of zeros", zeros, (index,)) for index in nets),
            ("another conversation's states", rows.roll(1), tuple(nets)),
        ):
            self._trainer.damage(Damage(cut, source.to(self._trainer.device)), layers)
            score = self._late_score(batch, cut)
            self._trainer.damage(None, layers)
            self._print(
                f"{length}: {score:.4f} right after token {cut} with {name} in layers {layers}"
            )

    @torch.no_grad()
    def _late_score(self, batch: Batch, cut: int) -> float:
        """Return the share of codes right among the questions answered after the cut."""
        logits, targets = answer_logits(self._trainer.model, batch, self._trainer.device)
        wanted = batch.targets != NO_TARGET
        late = (torch.arange(batch.ids.shape[1]) >= cut).expand_as(wanted)[wanted]
        numbers = batch.answers[wanted]
        wrong = (logits.argmax(-1) != targets).cpu()
        asked = torch.unique(numbers[late & (numbers >= 0)])
        failed = torch.unique(numbers[late & (numbers >= 0) & wrong])
        return 1 - float(failed.numel() / asked.numel())

    def _score(self, length: int) -> tuple[float, int]:
        return held_out_score(self._trainer.model, self._held_out[length], self._trainer.device)

    def _scores(self) -> str:
        scores = []
        for length in self._held_out:
            score, count = self._score(length)
            scores.append(f"{length}: {score:.4f} of {count}")
        return "; ".join(scores)

    def _start_workers(self, index: int) -> Iterator[Batch]:
        args = self._args
        return _batches(
            self._trainer.tokenizer, self._stages, index, args.step_tokens, args.workers
        )

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _print(self, text: str) -> None:
        print(f"{self._elapsed():6.1f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")  # noqa: TID251
    parser.add_argument("--seconds", type=float, default=300.0, help="of the run, without imports")
    parser.add_argument(
        "--closing-seconds", type=float, default=20.0, help="for the last scores; part of --seconds"
    )
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS)
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=sorted({stage.length for stage in STAGES}),
        help="stages to run, by the tokens of their conversations",
    )
    parser.add_argument("--damaged-share", type=float, default=DAMAGED_SHARE)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--validation", type=int, default=64, help="conversations per length")
    parser.add_argument("--seed", type=int, default=0)
    torch.set_float32_matmul_precision("high")  # For the delta rule, which computes in fp32.
    Run(parser.parse_args()).train()


if __name__ == "__main__":
    main()
