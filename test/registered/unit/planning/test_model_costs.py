"""Costs of a model without its weights: those of the engine, and those of published checkpoints."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Final

import pytest
import torch

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.published_configs import PUBLISHED
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.hicache_plan import weights_by_ranks
from sglang.planning.model_costs import (
    costs_of_rank,
    experts_of,
    kept_formats,
    parameters_of,
)
from sglang.planning.tiers import pool_cost
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR, BUILTIN_MODEL_DIR, GB
from sglang.srt.layers.moe.sparse_moe import exchange_bytes_of
from sglang.srt.mem_cache.device.row_pool import RowSpec
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolName,
    StateBuffer,
    StateSpec,
    bytes_per_token,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_sizing import memory_parts
from sglang.srt.model_executor.runner_config import ModelRunnerConfig
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

DOCUMENT: Final = Path(__file__).parents[4] / "docs" / "models.md"
RANKS: Final = (1, 4, 8, 16)


def published(name: str, directory: Path, *, drafts: bool = False) -> ModelConfig:
    return ModelConfig.from_path(str(PUBLISHED[name].write(directory)), has_draft_layer=drafts)


@pytest.mark.parametrize("model", [BUILTIN_MODEL_DIR, BUILTIN_HYBRID_MODEL_DIR])
def test_the_engine_has_the_same_states_and_weights(model: Path) -> None:
    config = ModelConfig.from_path(str(model))
    runner = ModelRunner(ModelRunnerConfig(model_config=config, show_progress=False))
    costs = costs_of_rank(config, config.dtype, tp_size=1, formats=None)
    assert costs.specs == runner.state_specs
    assert costs.weight_bytes == runner.weight_bytes()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *product(("deepseek_v32", "deepseek_v4", "kimi_linear", "qwen3_next"), (1, 2)),
        *product(("nemotron_h", "glm5_next"), (1, 2)),
        ("gpt_oss", 1),  # the second of two ranks lacks biases
    ],
)
def test_memory_planned_from_the_config_is_what_each_rank_allocates(
    tmp_path: Path, family: str, ranks: int
) -> None:
    save_tiny_checkpoint(tmp_path, family)
    config = ModelConfig.from_path(str(tmp_path))
    costs = costs_of_rank(config, config.dtype, tp_size=ranks, formats=None)
    states = 0 if family == "deepseek_v32" else 5
    parts = memory_parts(
        costs.specs, weight_bytes=costs.weight_bytes, tokens=96, states=states, page_size=16,
        graph_bytes=0, exchange_bytes=0, requests=4,
    )  # fmt: skip
    for rank in range(ranks):
        runner = ModelRunner(
            ModelRunnerConfig(
                model_config=config,
                page_size=16,
                tp_group=PlaceInGroup(rank, ranks),
                show_progress=False,
            )
        )
        runner.init_memory_pool(96, 4, num_states=states or None)
        pools = {
            str(name): sum(layer.nbytes for part in pool.parts for layer in part)
            for name, pool in runner.pools.items()
        }
        assert parts == {"weights": runner.weight_bytes(), **pools, "graphs": 0, "exchange": 0}
    assert len(parts) == 3 + len(costs.specs) and all(
        parts[name] for name in parts.keys() - {"graphs", "exchange"}
    )


@pytest.mark.parametrize(("attn_dp_size", "ep_size"), [(1, 2), (2, 1), (2, 2)])
def test_weights_of_groups_and_whole_experts_are_those_of_the_engine(
    tmp_path: Path, attn_dp_size: int, ep_size: int
) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v32")
    args = ServerArgs(
        model_path=str(tmp_path), tp_size=2, attn_dp_size=attn_dp_size, ep_size=ep_size
    )
    config = ModelConfig.from_path(str(tmp_path))
    experts, split = experts_of(config, args), 2 // attn_dp_size
    costs = costs_of_rank(config, config.dtype, tp_size=split, formats=None, experts=experts)
    runner = ModelRunner(
        ModelRunnerConfig(
            model_config=config,
            tp_group=PlaceInGroup(0, split),
            experts=experts,
            show_progress=False,
        )
    )
    assert costs.weight_bytes == runner.weight_bytes()
    assert costs.exchange_bytes == exchange_bytes_of(runner.model)
    assert (costs.exchange_bytes > 0) == (attn_dp_size > 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str, tmp_path: Path) -> None:
    count = parameters_of(published(name, tmp_path)).total
    assert count / 1e9 == pytest.approx(PUBLISHED[name].billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions", "layers"),
    [
        # Its publisher counts 11.5 billion, without embedding and head.
        ("DeepSeek-V3", 11.5, 62),
        # 257 experts of 3 x 6,144 x 2,048; projection and attention.
        ("GLM-5", 9.70 + 0.08 + 0.17, 79),
        # 513 experts of 3 x 2,048 x 512; projection and attention.
        ("Qwen3-Next-80B-A3B", 1.61 + 0.01 + 0.03, 13),
    ],
)
def test_a_draft_layer_adds_its_weights_and_its_state(
    name: str, billions: float, layers: int, tmp_path: Path
) -> None:
    without, whole = (published(name, tmp_path, drafts=drafts) for drafts in (False, True))
    added = parameters_of(whole).total - parameters_of(without).total
    assert added / 1e9 == pytest.approx(billions, rel=0.03)
    specs = costs_of_rank(whole, whole.dtype, tp_size=8, formats=None).specs
    assert len(specs[0].layers) == layers
    assert specs[0].layers[-1] == whole.num_hidden_layers


def test_a_token_uses_some_of_the_experts(tmp_path: Path) -> None:
    # "A22B": 22 billion with the embedding and the head, 2 x 151,936 x 4,096.
    found = parameters_of(published("Qwen3-235B-A22B", tmp_path))
    assert found.active + 2 * 151_936 * 4_096 == pytest.approx(22.2e9, rel=0.01)


def test_int4_is_as_large_as_the_published_files(tmp_path: Path) -> None:
    # The files of Kimi-K2.5 have 594 GB, without the vision tower; experts alone are in 4 bits.
    config = published("Kimi-K2.5", tmp_path)
    costs = costs_of_rank(config, config.dtype, tp_size=1, formats=kept_formats(config))
    assert costs.weight_bytes == pytest.approx(594e9, rel=0.005)


def test_a_router_that_is_left_plain_is_no_part_of_other_names(tmp_path: Path) -> None:
    """modules_to_not_convert names "gate", which "gate_up_proj" contains."""
    formats = kept_formats(published("MiniMax-M2", tmp_path))
    assert formats is not None
    block = "model.layers.0.block_sparse_moe"
    assert formats(f"{block}.gate.weight") is formats("lm_head.weight") is None
    for name in ("gate_up_proj", "0.w1.weight"):
        found = formats(f"{block}.experts.{name}")
        assert found is not None and found.block == (128, 128)


def test_a_latent_row_is_on_every_rank_and_heads_are_divided(tmp_path: Path) -> None:
    config = published("DeepSeek-V3", tmp_path)
    for ranks in (1, 8):
        costs = costs_of_rank(config, torch.float8_e4m3fn, tp_size=ranks, formats=None)
        assert bytes_per_token(costs.specs) == 61 * 656
    config = published("Qwen3-8B", tmp_path)
    sizes = [
        bytes_per_token(costs_of_rank(config, config.dtype, tp_size=n, formats=None).specs)
        for n in (1, 4, 8)
    ]
    assert sizes == [36 * 2 * 8 * 128 * 2, 36 * 2 * 2 * 128 * 2, 36 * 2 * 128 * 2]


def test_the_documents_table_is_what_the_tool_says(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8").split("## Memory of the weights")[1]
    table = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table[2:]]
    assert [row[0] for row in rows] == list(PUBLISHED)
    for name, _, *cells in rows:
        config = published(name, tmp_path)
        formats = kept_formats(config)
        # All columns take a minute.
        for ranks in RANKS if name == "Qwen3-8B" else (8,):
            costs = costs_of_rank(config, config.dtype, tp_size=ranks, formats=formats)
            assert cells[RANKS.index(ranks)] == f"{costs.weight_bytes / GB:.1f}", (name, ranks)


def test_more_ranks_than_a_model_can_have_are_none() -> None:
    (row,) = weights_by_ranks(ModelConfig.from_path(str(BUILTIN_MODEL_DIR)))
    assert row["bytes"][2] is not None and row["bytes"][32] is None


def test_an_item_of_several_tokens_and_a_state_of_a_request_are_priced() -> None:
    rows = pool_cost(RowSpec.of((0, 3), 4, torch.float32, stride=4), 256)
    assert (rows.item, rows.rank_bytes, rows.store_bytes) == ("4 tokens", 32, 32 + 32 / 64)
    own = StateSpec(
        name=PoolName.OPEN_GROUP,
        layers=(0,),
        buffers=(StateBuffer("group", (3,), torch.float32),),
        item=ItemKind.REQUEST,
    )
    cost = pool_cost(own, 256)
    assert (cost.item, cost.rank_bytes, cost.store_bytes) == ("request", 12, 0), "it is not stored"
