"""The forecast of `gpu-eight`: figures by hand, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from benchmark.__main__ import main
from benchmark.gpu_eight.forecast import (
    COPY_BYTES_S,
    INPUT,
    LOST_LATENT_S,
    OUTPUT,
    SUM_S,
    Forecast,
    rank_work,
)
from benchmark.gpu_eight.shapes import SHAPES
from sglang.srt.configs.model_config import ModelConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

LAYERS: Final = 61
SPARSE: Final = LAYERS - 3
EXPERT: Final = 3 * 7168 * 2048
"""Elements of one expert of DeepSeek-V3.2."""


@pytest.fixture(scope="module")
def deepseek() -> Iterator[Forecast]:
    shape = SHAPES["deepseek_v32"]
    with shape.model(8) as model:
        yield Forecast(model, 8, shape.flags)


def test_a_rank_has_an_eighth_of_each_expert(deepseek: Forecast) -> None:
    work = deepseek.work
    # A byte for each element, and four for each block of 128 x 128.
    assert work.expert_bytes == SPARSE * 256 * EXPERT // 8 * (1 + 4 / 128**2)
    assert work.expert_weights == SPARSE * 8 * EXPERT / 8
    # Latent projections and the indexer are whole on each rank.
    assert 16.1e9 / 8 < work.dense_weights < 4e9
    assert work.dense_bytes + work.expert_bytes < deepseek.plan.memory["weights"]


def test_a_step_reads_weights_chosen_rows_and_all_indexer_keys(deepseek: Forecast) -> None:
    work = deepseek.work
    used = 1 - (1 - 8 / 256) ** 16
    moved = work.dense_bytes + used * work.expert_bytes
    moved += 16 * LAYERS * (2048 * 656 + 8192 * 132)
    step = deepseek.decode(16, 8192)
    assert step.limit == pytest.approx(moved / COPY_BYTES_S)
    sums = (2 * LAYERS + 1) * (2 * SUM_S + 2 * 7 / 8 * 16 * 7168 * 2 / 3.94e11)
    assert step.if_constant == pytest.approx(step.limit + LAYERS * LOST_LATENT_S + sums)
    assert deepseek.decode(16, 1000).limit < step.limit < deepseek.decode(64, 8192).limit


def test_prefills_grow_faster_than_their_tokens(deepseek: Forecast) -> None:
    short, long = (deepseek.prefill(tokens).limit for tokens in (8192, 32768))
    assert 4 * short < long < 16 * short


def test_a_tier_takes_its_copy_or_its_step_whichever_is_longer(deepseek: Forecast) -> None:
    copied = deepseek.from_tier(32768, 1e9).limit
    assert copied == pytest.approx(32768 * LAYERS * (656 + 132) / 1e9)
    assert deepseek.from_tier(32768, 1e15).limit == deepseek.decode(1, 32768).limit


def test_throughput_equals_that_by_hand(deepseek: Forecast) -> None:
    assert deepseek.throughput(10, 0.5, 0.01) == pytest.approx(
        10 * (INPUT + OUTPUT) / (10 * 0.5 + OUTPUT * 0.01)
    )
    fits = deepseek.most_requests() * (INPUT + OUTPUT)
    assert fits <= deepseek.plan.tiers[0].tokens < fits + INPUT + OUTPUT


def test_fewer_gpus_have_fewer_experts_and_no_sums_alone() -> None:
    shape = SHAPES["tiny"]
    found: list[Any] = []
    for gpus in (1, 2):
        with shape.model(gpus) as model:
            found.append(rank_work(ModelConfig.from_path(model), gpus))
            if gpus == 1:
                assert Forecast(model, 1).sums(1 << 20) == 0.0
    assert [work.num_experts for work in found] == [8, 16]
    assert found[0].expert_bytes == found[1].expert_bytes, "each rank has as much"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu"], "tiny is for cpu, the others for cuda"),
        (["--device", "cpu", "--sections", "decode"], "--sections forecast tick run with any"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gpu-eight", *words]) == 2
    assert message in capsys.readouterr().err
