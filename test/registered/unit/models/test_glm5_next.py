"""GLM-5.3-Flash: logits as transformers' around groups, and settings refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from rigs.models.model_oracle import (
    assert_close,
    assert_continued,
    assert_errs_like_bf16,
    assert_greedy_words,
    assert_logits_around,
    assert_logits_in_chunks,
    assert_logits_of_batches,
    logits_of_batches,
    prompt,
)
from rigs.models.quantized_checkpoints import fp8_blocks, write_quantized
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.nightly_cases import nightly
from rigs.schedulers.rank_threads import on_rank_threads
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.attention_registry import default_attention_backend
from sglang.srt.layers.attention_kind import POOLED_DSA
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.model_executor.extend_graph_runner import waits_of
from sglang.srt.model_loader.loader import build_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=34, suite="base-a-test-cpu")

LINEAR, INDEXED = "linear_attention", "indexed_attention"


@pytest.fixture(scope="module", name="model")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("glm5_next")
    return path, save_tiny_checkpoint(path, "glm5_next", max_position_embeddings=8192)


def test_logits_of_batches_equal_transformers(model: tuple[Path, PreTrainedModel]) -> None:
    assert_logits_of_batches(model[1], StepDriver(model[0], page_size=16))


@pytest.mark.parametrize(
    "length",
    [
        *(1, 3, 4, 15, 16, 17, 31, 63, 64, 65),
        *(127, 128, 129, 255, 256, 511, 513, 1024),
        nightly(4097),
    ],
)
def test_logits_around_groups_equal_transformers(
    model: tuple[Path, PreTrainedModel], length: int
) -> None:
    """The whole prompt at once, in chunks that begin within groups, and words after it."""
    path, hf = model
    cuts = (1, 2, 15, 63, 64, 66, 130, 513, 4095)
    driver = StepDriver(path, page_size=64, pool_tokens=8704, max_requests=2)
    assert_logits_around(hf, driver, length, cuts)


@pytest.mark.parametrize("chunk", [1, 3, 15, 16, 17, 37, 63, 64, 100])
def test_any_chunks_of_a_prompt_give_the_same_logits(
    model: tuple[Path, PreTrainedModel], chunk: int
) -> None:
    path, hf = model
    assert_logits_in_chunks(hf, StepDriver(path, page_size=16), prompt(150, 5), chunk)


def test_words_over_edges_equal_transformers(model: tuple[Path, PreTrainedModel]) -> None:
    """Contexts pass the number of tokens from which a token chooses."""
    assert_greedy_words(
        model[1], StepDriver(model[0], page_size=16), prompt(40, 4), count=120, chunk=33
    )


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            {"layer_types": [LINEAR] * 4 + [INDEXED], "indexer_types": ["full"] * 5}, id="last"
        ),
        pytest.param(
            {"layer_types": [INDEXED, INDEXED, LINEAR, INDEXED, INDEXED],
             "indexer_types": ["full", "shared", "full", "full", "shared"]}, id="shared-twice"
        ),
        pytest.param({"mlp_layer_types": ["dense"] * 5}, id="no-experts"),
        pytest.param({"n_group": 4, "topk_group": 2}, id="grouped-experts"),
        pytest.param({"norm_topk_prob": False, "n_shared_experts": 2}, id="two-shared-experts"),
        pytest.param({"hc_mult": 2, "hc_sinkhorn_iters": 1}, id="two-streams"),
        pytest.param({"index_kpool": 4, "index_topk": 8}, id="short-groups"),
        pytest.param({"index_topk": 16}, id="one-group"),
        pytest.param({"linear_lower_bound": -0.5}, id="slow-decay"),
        pytest.param({"attention_bias": True}, id="biases"),
        pytest.param({"tie_word_embeddings": True}, id="tied"),
        pytest.param({"max_shard_size": "60KB"}, id="shards"),
    ],
)  # fmt: skip
def test_variants_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    hf = save_tiny_checkpoint(tmp_path, "glm5_next", **overrides)
    assert_logits_of_batches(hf, StepDriver(tmp_path, page_size=16))


@pytest.mark.parametrize("at", [16, 64, 80])
def test_requests_continue_from_a_snapshot_of_a_prefill(
    model: tuple[Path, PreTrainedModel], at: int
) -> None:
    """A snapshot lies at the end of a page, so no group is open there."""
    path, hf = model
    driver = StepDriver(path, page_size=16, num_states=20)
    assert_continued(hf, driver, at, whole=100, ends=(101, 110))


def test_bf16_errs_like_transformers(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "glm5_next", dtype=torch.bfloat16)
    assert_errs_like_bf16(hf, StepDriver(tmp_path, page_size=16), prompt(120, 3), 40)


def test_items_of_each_pool(model: tuple[Path, PreTrainedModel]) -> None:
    """A latent row for each token in three layers, a key for 16 tokens in two of them."""
    driver = StepDriver(model[0], page_size=16, pool_tokens=64, max_requests=3, num_states=5)
    found = {
        str(name): (pool.spec.layers, [tuple(part[0].shape) for part in pool.parts])
        for name, pool in driver.runner.pools.items()
        if name != "mamba"
    }
    assert found == {
        "kv": ((1, 3, 4), [(80, 1, 32)]),
        "indexer": ((1, 3), [(5, 24)]),
        "open_group": ((1, 3), [(4, 15, 48)]),
    }
    assert driver.runner.pools[PoolName.MAMBA].spec.layers == (0, 2)


def test_captured_prefills_wait_for_pools_that_are_loaded(
    model: tuple[Path, PreTrainedModel],
) -> None:
    """Pools of open groups, which have the attention's layers, know of no loads."""
    pools = StepDriver(model[0], page_size=16).runner.pools
    waits = waits_of(pools)
    assert [layer for layer, _ in waits] == [0, 1, 2, 3, 4]
    assert all(pool is not pools[PoolName.OPEN_GROUP] for _, pool in waits)


def test_a_page_that_cuts_a_group_is_refused_with_a_size_that_works(
    model: tuple[Path, PreTrainedModel],
) -> None:
    with pytest.raises(ValueError, match=r"--page-size 24: .*'indexer'.* 16 .*multiple of 16"):
        StepDriver(model[0], page_size=24)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_lower_bound": None}, "linear_lower_bound=None must be a negative number"),
        ({"linear_lower_bound": 2.0}, "linear_lower_bound=2.0 must be a negative number"),
        ({"index_kpool": 1}, "index_kpool=1 must be at least 2 and divide index_topk=32"),
        ({"index_kpool_always_select_tail": False}, "always_select_tail=False is not supported"),
        ({"qk_rope_head_dim": 8}, "qk_rope_head_dim=8 is not supported"),
        (
            {"indexer_types": ["full", "shared", "full", "full", "full"]},
            "layer 1 is 'shared', which is supported only behind",
        ),
        ({"indexer_types": ["full"]}, "indexer_types=.* must name each of 5 layers"),
        ({"layer_types": [INDEXED] * 5}, "names no layer with linear_attention"),
        ({"layer_types": [LINEAR] * 5}, "at least one with full_attention"),
        ({"layer_types": [LINEAR]}, "must name each of num_hidden_layers=5"),
        (
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [3, 4, 5]}},
            "layer_types contradicts linear_attn_config",
        ),
        ({"linear_attn_config": {"rate": 3}}, "linear_attn_config.rate=3 is not known"),
        ({"swiglu_limit": 0.0}, "swiglu_limit=0.0 must be a positive number"),
        ({"hc_mult": 0}, "hc_mult=0 must be a positive integer"),
        ({"window": 3}, "text_config.window=3"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    model: tuple[Path, PreTrainedModel], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = json.loads((model[0] / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        build_model(ModelConfig.from_path(str(tmp_path)), LoadConfig())


def test_a_checkpoint_as_published_equals_transformers(tmp_path: Path) -> None:
    """In blocks of fp8, with sizes of KDA in an object of their own, and with a draft layer."""
    written = tmp_path / "written"
    model = save_tiny_checkpoint(written, "glm5_next", eos_token_id=None)
    path = write_quantized(written, tmp_path, fp8_blocks())
    hf = type(model).from_pretrained(tmp_path / "plain")
    config = as_published(json.loads((path / "config.json").read_text()))
    (path / "config.json").write_text(json.dumps(config))
    draft = {"model.language_model.layers.5.shared_head.norm.weight": torch.ones(96)}
    save_file(draft, path / "draft.safetensors", metadata={"format": "pt"})
    assert_logits_of_batches(hf, StepDriver(path, page_size=16))
    want = logits_of_batches(StepDriver(path, page_size=16))
    for got in on_rank_threads(
        2, path, lambda driver, group: logits_of_batches(driver), page_size=16
    ):
        assert_close(got, want)


def as_published(config: dict[str, Any]) -> dict[str, Any]:
    text = config["text_config"]
    kinds = [kind.replace("indexed", "full") for kind in text["layer_types"]]
    sizes = {"head_dim": text.pop("linear_head_dim"), "num_heads": text.pop("linear_num_heads")}
    own = {**sizes, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "safe_gate": True}
    text |= {"layer_types": kinds, "linear_attn_config": own, "head_dim": 64}
    return config


def test_settings_as_published_are_read(
    model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    """Sizes of KDA in an object of their own, and the attention's older name."""
    config = as_published(json.loads((model[0] / "config.json").read_text()))
    config["text_config"]["linear_attn_config"]["gate_lower_bound"] = -3.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ModelConfig.from_path(str(tmp_path))
    assert found.linear_attention_layers == (0, 2)
    assert found.hf_config.linear_lower_bound == -3.0 and found.head_dim == 16


def test_every_fourth_layer_is_no_linear_one_unless_the_file_says_so(
    model: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    config = json.loads((model[0] / "config.json").read_text())
    del config["text_config"]["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_path(str(tmp_path)).linear_attention_layers == (0, 1, 2, 4)


def test_rows_in_fp8_are_refused(model: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype"):
        StepDriver(model[0], page_size=16, kv_cache_dtype="fp8_e4m3")


def test_gpus_have_kernels() -> None:
    assert default_attention_backend("cuda:0", POOLED_DSA) == "triton"
    assert default_attention_backend("cpu", POOLED_DSA) == "torch_native"


def test_drafts_are_refused(model: tuple[Path, PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match="Glm5NextForConditionalGeneration has no layer that draf"):
        ModelConfig.from_path(str(model[0]), has_draft_layer=True)
