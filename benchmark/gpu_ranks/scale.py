"""Sizes of the servers of several ranks: the whole ones, and small ones for a trial on a CPU."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from benchmark.prompts import random_prompt
from benchmark.servers import UnusedLoad
from rigs.models.qwen3_8b import DUMMY_FLAGS, VOCAB_SIZE, dummy_model
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.constants import BUILTIN_MODEL_DIR


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of a run."""

    flags: tuple[str, ...]
    vocab_size: int
    prompts: dict[int, int]
    """Tokens of a prompt to number of prompts; together they do not fit into `small_l1`."""
    small_l1: int
    large_l1: int
    l2_gb: dict[str, float]
    """L2 of one rank alone, in GB, by part; two ranks have half of it each."""
    concurrent: int
    input_len: int
    output_len: int
    requests: int

    def prompt(self, seed: int, length: int) -> list[int]:
        return random_prompt(seed, length, 3, self.vocab_size)

    def unused(self, rounds: int) -> UnusedLoad:
        return UnusedLoad(
            prompt=self.prompt,
            concurrent=self.concurrent,
            input_tokens=self.input_len,
            output_tokens=self.output_len,
            requests=self.requests,
            rounds=rounds,
        )


WHOLE: Final = Scale(
    flags=("--device", "cuda", "--page-size", "64", *DUMMY_FLAGS),
    vocab_size=VOCAB_SIZE,
    prompts={8192: 7, 32768: 3},
    small_l1=40_960,
    large_l1=98_304,
    l2_gb={"ttft": 24.0, "unused": 12.0},
    concurrent=32,
    input_len=2048,
    output_len=128,
    requests=96,
)
TINY_MODEL: Final[dict[str, Any]] = {
    "num_attention_heads": 8,
    "vocab_size": 2176,
    "max_position_embeddings": 4096,
}
TINY: Final = Scale(
    flags=("--device", "cpu", "--page-size", "16", "--tokenizer-path", str(BUILTIN_MODEL_DIR)),
    vocab_size=2048,
    prompts={128: 7, 512: 3},
    small_l1=640,
    large_l1=2048,
    l2_gb={"ttft": 0.01, "unused": 0.002},
    concurrent=4,
    input_len=64,
    output_len=8,
    requests=8,
)


@contextmanager
def model_and_scale(args: argparse.Namespace) -> Iterator[tuple[str, Scale]]:
    """The model's directory and the sizes for `--device`."""
    with ExitStack() as stack:
        if args.device == "cpu":
            model = stack.enter_context(tempfile.TemporaryDirectory())
            save_tiny_checkpoint(model, "qwen3", **TINY_MODEL)
            yield model, TINY
        else:
            yield stack.enter_context(dummy_model()), WHOLE
