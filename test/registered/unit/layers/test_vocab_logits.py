"""Logits that the ranks have in parts: gathered as they are, and the greatest without gathering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import pytest
import torch

from rigs.schedulers.rank_threads import RankThreads
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.placement import TensorPlacement
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
from sglang.srt.layers.vocab_parallel_embedding import VocabLogits, VocabParallelEmbedding
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

T = TypeVar("T")
NAN, INF = float("nan"), float("inf")
ROWS: Final = [
    # Equal ones on two ranks, and on one.
    [1.0, 5.0, 0.0, 5.0, 2.0, 3.0, 5.0],
    [0.0, 1.0, 2.0, 3.0, 7.0, 7.0, 6.0],
    [-3.0, -2.0, -2.5, -9.0, -2.0, -4.0, -5.0],
    [-0.0, 0.0, -1.0, 0.0, -1.0, -1.0, -1.0],
    # Masked, and damaged.
    [-INF] * 7,
    [-INF, -INF, -INF, -INF, -INF, -8.0, -INF],
    [1.0, INF, 0.0, 2.0, NAN, 3.0, NAN],
]
BEST: Final = [1, 4, 1, 0, 0, 5, 4]


def of_rank(threads: RankThreads, rank: int, whole: torch.Tensor) -> VocabLogits:
    """A rank's logits, as the head has them: as wide on all ranks, zeros behind the last token."""
    group = threads.tp_groups[rank]
    placement = TensorPlacement(dtype=torch.float32, device="cpu", tp_group=group)
    head = VocabParallelEmbedding(whole.shape[1], len(whole), placement=placement)
    head.weight[: head.tokens.size] = whole.t()[head.tokens.begin : head.tokens.end]
    logits = head.logits(torch.eye(len(whole)))
    assert logits.part.shape == (len(whole), -(-whole.shape[1] // group.size))
    return logits


def on_ranks(size: int, whole: torch.Tensor, work: Callable[[VocabLogits], T]) -> list[T]:
    threads = RankThreads(size, 1)

    def on(rank: int) -> T:
        logits = VocabLogits.of(whole) if size == 1 else _parts(threads, rank, whole)
        return work(logits)

    try:
        return threads.run(on)
    finally:
        threads.close()


def _parts(threads: RankThreads, rank: int, whole: torch.Tensor) -> VocabLogits:
    if whole.isfinite().all():
        return of_rank(threads, rank, whole)
    # Products with infinite weights are NaN.
    placed = of_rank(threads, rank, torch.zeros_like(whole))
    tokens = placed.tokens
    part = torch.full_like(placed.part, 99.0)
    part[:, : tokens.size] = whole[:, tokens.begin : tokens.end]
    return VocabLogits(part, tokens, threads.tp_groups[rank])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_greatest_is_that_of_the_whole(size: int) -> None:
    """The last of 3 or 4 ranks has one token."""
    whole = torch.tensor(ROWS)
    for found in on_ranks(size, whole, VocabLogits.argmax):
        assert found.dtype == torch.int64
        assert found.tolist() == whole.argmax(-1).tolist() == BEST


def test_a_rank_without_tokens_has_nothing_to_offer() -> None:
    whole = torch.tensor([[-2.0, -3.0, -1.0, -4.0, -9.0], [-INF] * 5])
    assert [one.tolist() for one in on_ranks(4, whole, VocabLogits.argmax)] == [[2, 0]] * 4


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_whole_is_what_one_rank_would_have(size: int) -> None:
    whole = torch.randn(3, 7, generator=torch.Generator().manual_seed(size))

    def read(logits: VocabLogits) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.whole(), logits.first(2).whole()

    for all_rows, two_rows in on_ranks(size, whole, read):
        torch.testing.assert_close(all_rows, whole)
        assert torch.equal(two_rows, all_rows[:2]) and all_rows.is_contiguous()


@pytest.mark.parametrize(
    ("params", "return_logprob", "is_gathered"),
    [
        ([SamplingParams(temperature=0.0)] * 2, False, False),
        ([SamplingParams(temperature=0.0)] * 2, True, True),
        ([SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)], False, True),
        ([SamplingParams(temperature=0.0, logit_bias={"3": 100.0})] * 2, False, True),
    ],
    ids=["greedy", "logprobs", "sampled", "biased"],
)
def test_only_some_sampling_gathers_whole_logits(
    params: list[SamplingParams], return_logprob: bool, is_gathered: bool
) -> None:
    """The tokens are those of one rank, whichever way the ranks find them."""
    whole = torch.randn(2, 7, generator=torch.Generator().manual_seed(5))
    for one in params:
        one.normalize()

    def sample(logits: VocabLogits) -> tuple[list[int], bool]:
        output = LogitsProcessorOutput(logits=logits)
        info = SamplingBatchInfo.from_reqs(params, 7, "cpu")
        seeds, steps = torch.tensor([3, 4]), torch.zeros(2, dtype=torch.int64)
        tokens = Sampler().forward(output, info, seeds, steps, return_logprob)
        return tokens.tolist(), logits._whole is not None

    ((alone, _),) = on_ranks(1, whole, sample)
    assert on_ranks(2, whole, sample) == [(alone, is_gathered)] * 2
