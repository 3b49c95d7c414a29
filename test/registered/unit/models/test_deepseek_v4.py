"""DeepSeek-V4: logits as transformers' around windows and groups, and settings refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rigs.mixed.poisoned_pools import poison_free
from rigs.models.model_oracle import (
    assert_close,
    assert_continued,
    assert_errs_like_bf16,
    assert_greedy_words,
    assert_logits_around,
    assert_logits_in_chunks,
    assert_logits_of_batches,
    prompt,
    reference,
)
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint, tiny_config
from rigs.nightly_cases import nightly
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import ItemKind, PoolName
from sglang.srt.model_executor.pool_sizing import lines_of_kinds
from sglang.srt.model_loader.loader import build_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")

PUBLISHED: dict[str, Any] = {
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "sliding_window": 128,
    "hc_sinkhorn_iters": 20,
    "index_topk": 40,
    "max_position_embeddings": 8192,
    "eos_token_id": None,
}
"""Ratios and window as published."""


@pytest.fixture(scope="module", name="model")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("deepseek_v4")
    return path, save_tiny_checkpoint(path, "deepseek_v4", **PUBLISHED)


def test_logits_of_batches_equal_transformers(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4")
    assert_logits_of_batches(hf, StepDriver(tmp_path, page_size=16))


@pytest.mark.parametrize("length", [1, 3, 4, 127, 128, 129, 255, 256, 511, 1024, nightly(4097)])
def test_logits_around_groups_equal_transformers(
    model: tuple[Path, PreTrainedModel], length: int
) -> None:
    """The whole prompt at once, in chunks that begin within groups, and words after it."""
    path, hf = model
    cuts = (1, 2, 127, 128, 130, 300, 513, 4095)
    driver = StepDriver(path, page_size=128, pool_tokens=8704, max_requests=2)
    assert_logits_around(hf, driver, length, cuts)


@pytest.mark.parametrize("chunk", [1, 3, 5, 15, 16, 17, 37, 100])
def test_any_chunks_of_a_prompt_give_the_same_logits(tmp_path: Path, chunk: int) -> None:
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4")
    assert_logits_in_chunks(hf, StepDriver(tmp_path, page_size=16), prompt(100, 5), chunk)


def test_chunks_of_127_equal_transformers(model: tuple[Path, PreTrainedModel]) -> None:
    path, hf = model
    assert_logits_in_chunks(hf, StepDriver(path, page_size=256), prompt(640, 6), 127)


def test_words_over_edges_equal_transformers(model: tuple[Path, PreTrainedModel]) -> None:
    path, hf = model
    assert_greedy_words(hf, StepDriver(path, page_size=128), prompt(70, 4), count=200, chunk=33)


WINDOW = "sliding_attention"
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"layer_types": [SPARSE] * 4}, id="sparse-alone"),
        pytest.param({"layer_types": [HEAVY] * 4}, id="heavy-alone"),
        pytest.param(
            {"layer_types": [HEAVY, HEAVY, SPARSE, "sliding_attention"]}, id="window-last"
        ),
        pytest.param({"mlp_layer_types": ["moe"] * 4}, id="no-table"),
        pytest.param({"mlp_layer_types": ["hash_moe"] * 4}, id="tables-alone"),
        pytest.param({"rope_parameters": None}, id="no-yarn"),
        pytest.param({"hc_mult": 2, "hc_sinkhorn_iters": 1}, id="two-streams"),
        pytest.param({"compress_rates": {SPARSE: 2, HEAVY: 8}}, id="short-groups"),
        pytest.param({"compress_rates": {SPARSE: 2, HEAVY: 2}}, id="equal-groups"),
        pytest.param({"index_topk": 1}, id="one-row"),
        pytest.param({"sliding_window": 1}, id="window-1"),
        pytest.param({"sliding_window": 300}, id="window-beyond-prompts"),
        pytest.param({"max_shard_size": "60KB"}, id="shards"),
    ],
)
def test_variants_equal_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4", **overrides)
    assert_logits_of_batches(hf, StepDriver(tmp_path, page_size=16))


@pytest.mark.parametrize("at", [16, 32, 48])
def test_requests_continue_from_a_snapshot_of_a_prefill(tmp_path: Path, at: int) -> None:
    """A snapshot lies at the end of a page, so no group is open there."""
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4")
    driver = StepDriver(tmp_path, page_size=16, num_states=20)
    assert_continued(hf, driver, at, whole=60, ends=(61, 70))


@pytest.mark.parametrize("new", [1, 7])
def test_a_step_reads_a_snapshot_and_leaves_it_as_it_is(tmp_path: Path, new: int) -> None:
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4")
    driver = StepDriver(tmp_path, page_size=16, num_states=20)
    tokens = prompt(60, 7)
    want = reference(hf, tokens)
    driver.extend([(0, tokens[:32])], {0: (18, 32)})
    pools = [driver.runner.pools[name] for name in (PoolName.SWA, PoolName.COMPRESSOR)]
    before = [part[:, 18].clone() for pool in pools for part in buffers_of(pool)]
    table = driver.runner.req_to_token_pool.req_to_token
    table[1, :32], driver.lens[1] = table[0, :32], 32

    def from_snapshot(batch: Any) -> None:
        batch.states.first_slots = torch.tensor([18])

    step = driver.extend([(1, tokens[32 : 32 + new])], before=from_snapshot)
    end = driver.lens[1]
    assert_close(step.next_token_logits, want[end - 1 : end])
    after = [part[:, 18] for pool in pools for part in buffers_of(pool)]
    assert all(map(torch.equal, before, after))
    for place in range(end, 50):
        got = driver.decode([(1, tokens[place])]).next_token_logits
        assert_close(got, want[place : place + 1])


def buffers_of(pool: object) -> tuple[torch.Tensor, ...]:
    assert isinstance(pool, StatePool)
    return pool.buffers


def test_requests_continue_from_a_snapshot_of_decoding(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4")
    driver = StepDriver(tmp_path, page_size=16, num_states=20)
    tokens = prompt(70, 8)
    want = reference(hf, tokens)
    driver.extend([(0, tokens[:31])])
    driver.decode([(0, tokens[31])], {0: (18, 1)})
    driver.decode([(0, tokens[32])])
    driver.continue_from(18, 0, [1], 32)
    for place in range(32, 54):
        got = driver.decode([(1, tokens[place])]).next_token_logits
        assert_close(got, want[place : place + 1])


def test_a_row_that_another_request_used_starts_anew(tmp_path: Path) -> None:
    """A request reads no tokens of the open group that the last request of its row left."""
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4")
    driver = StepDriver(tmp_path, page_size=16)
    driver.extend([(0, prompt(31, 9))])
    tokens = prompt(40, 10)
    want = reference(hf, tokens)
    driver.lens[0] = 0
    assert_close(driver.extend([(0, tokens[:9])]).next_token_logits, want[8:9])
    assert_close(driver.extend([(0, tokens[9:])]).next_token_logits, want[39:])


def test_a_short_request_beside_a_long_one_reads_its_own_rows_alone(tmp_path: Path) -> None:
    """The end of its row of the table still names slots of an earlier request. They hold NaN."""
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4")
    driver = StepDriver(tmp_path, page_size=16)
    runner, short, long = driver.runner, prompt(8, 9), prompt(70, 10)
    allocator, rows = runner.token_to_kv_pool_allocator, runner.req_to_token_pool
    (free,) = (pages[-5:] for pages in allocator.free_page_ids())
    rows.req_to_token[0, :80] = (free[:, None] * 16 + torch.arange(16)).flatten()
    driver.extend([(0, short[:-2]), (1, long[:-2])])
    poison_free(runner.pools.values(), runner)
    want = torch.stack([reference(hf, tokens)[-2:] for tokens in (short, long)], dim=1)
    for place in (-2, -1):
        got = driver.decode([(0, short[place]), (1, long[place])]).next_token_logits
        assert_close(got, want[place])


def test_bf16_errs_like_transformers(tmp_path: Path) -> None:
    hf = save_tiny_checkpoint(tmp_path, "deepseek_v4", dtype=torch.bfloat16)
    assert_errs_like_bf16(hf, StepDriver(tmp_path, page_size=16), prompt(120, 3), 40)


def test_items_of_each_pool(tmp_path: Path) -> None:
    """A row and a key for 4 tokens in two layers, a row for 16 in one; one ring in all layers."""
    save_tiny_checkpoint(tmp_path, "deepseek_v4")
    driver = StepDriver(tmp_path, page_size=16, pool_tokens=64, max_requests=3, num_states=5)
    found = {
        str(name): (pool.spec.layers, [tuple(part[0].shape) for part in pool.parts])
        for name, pool in driver.runner.pools.items()
    }
    assert found == {
        "kv": ((1, 3), [(20, 24)]),
        "indexer": ((1, 3), [(20, 16)]),
        "c128": ((2,), [(5, 24)]),
        "swa": ((0, 1, 2, 3), [(6, 1, 12, 24)]),
        "compressor": ((1, 3), [(6, 4, 48), (6, 4, 32)]),
        "open_group": ((1, 3), [(4, 3, 96), (4, 3, 64)]),
        "open_c128": ((2,), [(4, 15, 48)]),
    }


@pytest.mark.parametrize(("page_size", "words"), [(64, "multiple of 128"), (192, "of 128")])
def test_a_page_that_cuts_a_group_is_refused_with_a_size_that_works(
    model: tuple[Path, PreTrainedModel], page_size: int, words: str
) -> None:
    with pytest.raises(ValueError, match=f"--page-size {page_size}: .*'c128'.* 128 .*{words}"):
        StepDriver(model[0], page_size=page_size)


def test_a_start_line_says_what_a_token_takes(tmp_path: Path) -> None:
    """Two layers of rows of 24 and keys of 16 for 4 tokens, one of rows for 16, in fp32."""
    save_tiny_checkpoint(tmp_path, "deepseek_v4")
    specs = StepDriver(tmp_path, page_size=16).runner.state_specs
    # All but tokens in a million times the layers, because the line shows a thousandth of a GB.
    (line,) = lines_of_kinds([
        replace(one, layers=tuple(range(10**6 * len(one.layers))))
        if one.item is not ItemKind.TOKEN else one
        for one in specs
    ])  # fmt: skip
    assert "A token takes 86 bytes on a rank: kv 48, indexer 32, c128 6; a prefix of 131072" in line
    # Four rings of 12 rows of 24, and 4 tokens' values and gates of 24 and 16 in two layers.
    state = (4 * 12 * 24 + 2 * 4 * 2 * (24 + 16)) * 4
    assert f"{131072 * 86 / 1e9:.3f} GB of pages and {state / 1e3:.3f} GB of state" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": [WINDOW] * 4}, "layer_types=.* names no layer with compressed rows"),
        ({"sliding_window": 0}, "sliding_window=0 must be a positive integer"),
        # Four rings of keys of 24 in fp32.
        ({"sliding_window": 30000}, "in 4 layers takes 11520000 bytes .* give --dtype bfloat16"),
        ({"sliding_window": 60000}, "more than the 8388608 .*: give a checkpoint with a smaller"),
        ({"o_groups": 3}, "o_groups=3 must divide num_attention_heads=4"),
        ({"index_head_dim": 6}, "partial_rotary_factor=.* and at most index_head_dim=6"),
        ({"qk_rope_head_dim": 4}, "qk_rope_head_dim=4 contradicts partial_rotary_factor=0.3"),
        ({"num_experts_per_tok": 9}, "a token cannot use 9 of 8 experts"),
        ({"swiglu_limit": 0.0}, "swiglu_limit=0.0 must be a positive number"),
        ({"hc_mult": 0}, "hc_mult=0 must be a positive integer"),
        ({"index_topk": 0}, "index_topk=0 must be a positive integer"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    tiny_config("deepseek_v4", architectures=["DeepseekV4ForCausalLM"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ValueError, match=words):
        build_model(ModelConfig.from_path(str(tmp_path)), LoadConfig())


def test_rows_in_fp8_are_refused(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v4")
    with pytest.raises(ValueError, match="--kv-cache-dtype"):
        StepDriver(tmp_path, page_size=16, kv_cache_dtype="fp8_e4m3")
