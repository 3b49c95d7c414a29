"""Estimated prefills against measured ones of benchmark/results: dense, sparse (DSA), hybrid."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from benchmark.gpu_hybrid.families import model_of
from rigs.models.published_configs import PUBLISHED
from sglang.planning.machine import MACHINES
from sglang.planning.prefill_cost import PrefillCost
from sglang.srt.configs.model_config import ModelConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

REPO: Final = Path(__file__).parents[4]
TOLERANCE: Final = 0.15
FLOP_S: Final = MACHINES["h200"].flop_per_s


@pytest.fixture(name="cost", scope="module")
def make_cost(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefillCost]:
    if request.param == "dense":
        folder = tmp_path_factory.mktemp("dense")
        yield PrefillCost(ModelConfig.from_path(str(PUBLISHED["Qwen3-8B"].write(folder))))
        return
    with model_of(request.param) as directory:
        yield PrefillCost(ModelConfig.from_path(directory))


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (REPO / name).read_text().splitlines()]


def row(name: str, begin: str) -> list[float]:
    """Numbers of the row of a table that begins so, in seconds, by column."""
    (found,) = (one for one in (REPO / name).read_text().splitlines() if one.startswith(begin))
    cells = found.removeprefix(begin).split("|")[1:]
    return [float(numbers[-1]) / 1e3 for one in cells if (numbers := re.findall(r"[\d.]+", one))]


def check(cost: PrefillCost, measured: float, tokens: int, before: int = 0) -> None:
    estimated = cost.operations(tokens, before) / FLOP_S
    assert estimated == pytest.approx(measured, rel=TOLERANCE), (estimated, measured)


@pytest.mark.parametrize("cost", ["dense"], indirect=True)
def test_dense(cost: PrefillCost) -> None:
    """Short prefills are left out: their time is that of the launches."""
    found = 0
    for one in lines("benchmark/results/2026-11-24-gpu-dense.jsonl"):
        case = re.fullmatch(r"prefill (8192|32768) after (\d+)", one["what"])
        if case is not None:
            found += 1
            check(cost, one.get("rested_s", one["s"]), int(case[1]), int(case[2]))
    assert found >= 9


@pytest.mark.parametrize("cost", ["deepseek_v32"], indirect=True)
def test_dsa(cost: PrefillCost) -> None:
    name = "benchmark/results/2026-11-27-gpu-flashmla.md"
    check(cost, row(name, "| prefill of 8,192, ms")[1], 8192)
    check(cost, row(name, "| prefill of 32,768, bf16, ms")[1], 32768)


@pytest.mark.parametrize("cost", ["qwen3_next"], indirect=True)
def test_delta_nets(cost: PrefillCost) -> None:
    begin = "| prefill of 8,192, Qwen3-Next: bf16, fp8"
    text = (REPO / "benchmark/results/2026-11-28-gpu-experts.md").read_text()
    (bf16,) = re.findall(re.escape(begin) + r" \| ([\d.]+),", text)
    check(cost, float(bf16) / 1e3, 8192)


@pytest.mark.parametrize("cost", ["nemotron_h", "kimi_linear"], indirect=True)
def test_scans(cost: PrefillCost, request: pytest.FixtureRequest) -> None:
    family = request.node.callspec.params["cost"]
    # Kimi-Linear's kernels are younger than the first run.
    name = "2026-11-29-gpu-scans" + ("-evening" if family == "kimi_linear" else "")
    found = [
        one["value"]
        for one in lines(f"benchmark/results/{name}.jsonl")
        if one["metric"] == "prefill_8192" and one["case"]["family"] == family
    ]
    assert found
    for measured in found:
        check(cost, measured, 8192)


@pytest.mark.parametrize("cost", ["dense", "deepseek_v32"], indirect=True)
def test_a_prompt_takes_as_long_in_parts(cost: PrefillCost) -> None:
    whole = cost.operations(32768)
    parts = sum(cost.operations(8192, before) for before in range(0, 32768, 8192))
    assert parts == pytest.approx(whole, rel=0.05)
    assert cost.operations(8192, 24576) > 1.2 * cost.operations(8192), "attention counts"


def cost_of(folder: Path, name: str, **changed: Any) -> PrefillCost:
    """Cost of a published model with other fields."""
    folder.mkdir()
    published = PUBLISHED[name]
    changed_one = replace(published, config=published.config | changed)
    return PrefillCost(ModelConfig.from_path(str(changed_one.write(folder))))


def test_the_last_layer_computes_the_outputs_of_one_token(tmp_path: Path) -> None:
    one, two, three = (
        cost_of(tmp_path / str(count), "Qwen3-8B", num_hidden_layers=count) for count in (1, 2, 3)
    )
    layer = three.operations(64) - two.operations(64)
    assert two.operations(64) - one.operations(64) == pytest.approx(layer)
    assert 0 < one.operations(64) < 0.1 * layer, "keys and values alone"


def test_a_window_bounds_the_keys(tmp_path: Path) -> None:
    small, large = (
        cost_of(tmp_path / str(window), "gpt-oss-20b", sliding_window=window)
        for window in (64, 256)
    )
    assert small.operations(64) == large.operations(64)
    assert small.operations(64, 8192) < large.operations(64, 8192)
