"""DeepSeek models: logits and words equal transformers' on the same random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rigs.models.model_oracle import (
    assert_close,
    assert_errs_like_bf16,
    assert_greedy_words,
    assert_logits_of_batches,
    prompt,
    reference,
)
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.layers.attention import (
    dsa_backend,
    mla_backend,
    torch_native_backend,
)
from sglang.srt.layers.attention.partial_attention import Partial, _attend_plainly
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 64,
}
FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
DENSE: dict[str, Any] = {"first_k_dense_replace": 2}
CASES = [
    *(pytest.param(family, DENSE, id=f"{family}-dense") for family in FAMILIES),
    *(pytest.param(family, {}, id=family) for family in (*FAMILIES, "glm_moe_dsa_shared")),
    *(
        pytest.param(family, {"rope_parameters": YARN, **DENSE}, id=f"{family}-yarn")
        for family in FAMILIES
    ),
    pytest.param("deepseek_v2", {"q_lora_rank": None}, id="deepseek_v2-no-q-lora"),
    pytest.param(
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        id="deepseek_v2-groups",
    ),
    pytest.param("deepseek_v2", {"routed_scaling_factor": 2.5}, id="deepseek_v2-scaled"),
    pytest.param("deepseek_v2", {"v_head_dim": 40, **DENSE}, id="deepseek_v2-wide-values"),
    pytest.param("deepseek_v3", {"q_lora_rank": None, **DENSE}, id="deepseek_v3-no-q-lora"),
    pytest.param("deepseek_v3", {"rope_interleave": False, **DENSE}, id="deepseek_v3-halves"),
    pytest.param("deepseek_v3", {"attention_bias": True, **DENSE}, id="deepseek_v3-biases"),
    pytest.param("deepseek_v3", {"norm_topk_prob": False}, id="deepseek_v3-not-normalized"),
    pytest.param("deepseek_v3", {"n_group": 1, "topk_group": 1}, id="deepseek_v3-one-group"),
    pytest.param("deepseek_v3", {"tie_word_embeddings": True, **DENSE}, id="deepseek_v3-tied"),
    pytest.param("glm4_moe_lite", {}, id="glm4_moe_lite"),
    pytest.param(
        "glm4_moe_lite",
        {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        id="glm4_moe_lite-dense-among-sparse",
    ),
    pytest.param("kimi_k25_vision", {}, id="kimi_k25"),
    pytest.param("kimi_k25_vision", {"tie_word_embeddings": True, **DENSE}, id="kimi_k25-tied"),
    pytest.param("deepseek_v32", {"max_shard_size": "40KB"}, id="deepseek_v32-sharded"),
    pytest.param(
        "deepseek_v32",
        {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        id="deepseek_v32-dense-among-sparse",
    ),
    pytest.param("deepseek_v32", {"index_topk": 1, **DENSE}, id="deepseek_v32-one-token"),
    pytest.param("deepseek_v32", {"index_topk": 500, **DENSE}, id="deepseek_v32-all-tokens"),
]


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, **overrides)
    driver = StepDriver(tmp_path, page_size=16)
    assert_logits_of_batches(hf, driver)


@pytest.mark.parametrize("family", FAMILIES)
def test_128_greedy_tokens_equal_transformers(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, eos_token_id=None)
    driver = StepDriver(tmp_path, page_size=16)
    assert_greedy_words(hf, driver, prompt(20, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_errs_like_transformers(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    driver = StepDriver(tmp_path, page_size=16)
    assert_errs_like_bf16(hf, driver, prompt(120, 3), 40)


@pytest.mark.half
@pytest.mark.parametrize("chunk", [1, 7, 33, 90])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_chunks_of_a_prompt_give_the_same_logits(
    tmp_path: Path, family: str, chunk: int
) -> None:
    hf = save_tiny_checkpoint(tmp_path, family)
    driver = StepDriver(tmp_path, page_size=4)
    tokens = prompt(90, 4)
    want = reference(hf, tokens)
    for begin in range(0, 90, chunk):
        got = driver.extend([(0, tokens[begin : begin + chunk])]).next_token_logits
    assert_close(got, want[89:90])


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_are_read_in_pieces_within_bounds(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few tokens, of prefixes that lie in one piece and of scattered ones."""
    monkeypatch.setattr(mla_backend, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(dsa_backend, "GATHER_BYTES", 20_000)
    monkeypatch.setattr(dsa_backend, "SCORE_BYTES", 4096)
    hf = save_tiny_checkpoint(tmp_path, family, **DENSE)
    tokens = prompt(150, 5)
    want = reference(hf, tokens)
    for page_size, scattered in ((16, False), (1, True)):
        driver = StepDriver(tmp_path, page_size=page_size, pool_tokens=640)
        allocator = driver.runner.token_to_kv_pool_allocator
        order = torch.arange(640)
        if scattered:
            held = allocator.alloc(640)
            assert held is not None
            order = held[torch.randperm(640, generator=torch.Generator().manual_seed(5))]
        for begin, end in ((0, 60), (60, 63), (63, 149)):
            if scattered:
                allocator.free(order[begin:end])
            got = driver.extend([(0, tokens[begin:end])]).next_token_logits
            assert_close(got, want[end - 1 : end])
        if scattered:
            allocator.free(order[149:150])
        assert_close(driver.decode([(0, tokens[149])]).next_token_logits, want[149:150])


@pytest.mark.parametrize("family", FAMILIES)
def test_devices_without_an_attention_kernel_equal_transformers(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of devices other than CPUs, run on a CPU."""
    for module in (torch_native_backend, mla_backend, dsa_backend):
        monkeypatch.setattr(module, "attend", attend_plainly)
    hf = save_tiny_checkpoint(tmp_path, family, **DENSE)
    driver = StepDriver(tmp_path, page_size=4)
    tokens = prompt(90, 7)
    want = reference(hf, tokens)
    for begin, end in ((0, 45), (45, 48), (48, 89)):
        got = driver.extend([(0, tokens[begin:end])]).next_token_logits
        assert_close(got, want[end - 1 : end])
    assert_close(driver.decode([(0, tokens[89])]).next_token_logits, want[89:90])


def attend_plainly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> Partial:
    return _attend_plainly(q, k, v, scale=scale, causal=causal, mask=mask)


def test_the_chosen_tokens_are_the_same_however_a_prompt_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v32", **DENSE)
    chosen: list[torch.Tensor] = []
    choose_tokens = dsa_backend.choose_tokens

    def recording(scores: torch.Tensor, topk: int) -> torch.Tensor:
        chosen.append(choose_tokens(scores, topk))
        return chosen[-1]

    monkeypatch.setattr(dsa_backend, "choose_tokens", recording)
    tokens = prompt(80, 6)
    seen = []
    for page_size, cuts in ((1, [79]), (16, [16, 79]), (4, [50, 78, 79]), (4, [5, 33, 40, 79])):
        driver = StepDriver(tmp_path, page_size=page_size)
        begin = 0
        for end in cuts:
            driver.extend([(0, tokens[begin:end])])
            begin = end
        chosen.clear()
        driver.decode([(0, tokens[79])])
        assert [tuple(places.shape) for places in chosen] == [(1, 32), (1, 32)]
        seen.append(torch.cat(chosen))
    assert all(torch.equal(places, seen[0]) for places in seen)
    assert not torch.equal(seen[0][0], seen[0][1]), "each layer chooses for itself"
    driver = StepDriver(tmp_path)
    driver.extend([(0, tokens[:31])])
    chosen.clear()
    driver.decode([(0, tokens[31])])
    assert not chosen, "all 32 tokens are attended to"
    driver.decode([(0, tokens[32])])
    assert len(chosen) == 2


def test_only_layers_with_an_indexer_have_keys(tmp_path: Path) -> None:
    """GLM-5.2 says in its config how often there is one: here in layers 0, 1, 4."""
    save_tiny_checkpoint(tmp_path, "glm_moe_dsa", num_hidden_layers=6)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text()) | {"index_topk_freq": 3, "index_skip_topk_offset": 2}
    del fields["indexer_types"]
    file.write_text(json.dumps(fields))
    names = [f"model.layers.{layer}.self_attn.indexer." for layer in (2, 3, 5)]
    weights = load_file(tmp_path / "model.safetensors")
    left = {name: weights[name] for name in weights if not name.startswith(tuple(names))}
    assert len(left) < len(weights)
    save_file(left, tmp_path / "model.safetensors")
    runner = StepDriver(tmp_path, kv_cache_dtype="bfloat16").runner
    assert runner.pools[PoolName.INDEXER].spec.layers == (0, 1, 4)
    assert runner.kv_bytes_per_token() == 6 * (32 + 8) * 2 + 3 * 24 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_state_is_a_row_for_each_token(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family)
    runner = StepDriver(tmp_path, kv_cache_dtype="bfloat16").runner
    row, key = 2 * (32 + 8) * 2, 2 * 24 * 4
    is_sparse = family in ("deepseek_v32", "glm_moe_dsa")
    assert set(runner.pools) == {PoolName.KV} | ({PoolName.INDEXER} if is_sparse else set())
    assert runner.kv_bytes_per_token() == row + (key if is_sparse else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_as_much_memory_as_in_the_checkpoint(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family)
    tensors = load_file(tmp_path / "model.safetensors")
    runner = StepDriver(tmp_path).runner
    assert runner.weight_bytes() == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_need_no_files(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    driver = StepDriver(tmp_path, load_format="dummy")
    logits = driver.extend([(0, prompt(60, 1)), (1, prompt(60, 2))]).next_token_logits
    assert logits.isfinite().all() and not torch.equal(logits[0], logits[1])


def test_dummy_weights_of_61_layers_keep_activations_in_range(tmp_path: Path) -> None:
    """In fp8, computed in bf16: words depend on the prompt after as many layers as DeepSeek's."""
    save_tiny_checkpoint(tmp_path, "deepseek_v32", num_hidden_layers=61, first_k_dense_replace=3)
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "config.json"
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": fp8}))
    driver = StepDriver(tmp_path, load_format="dummy", dtype="bfloat16")
    logits = driver.extend([(0, prompt(60, 1)), (1, prompt(60, 2))]).next_token_logits.float()
    assert logits.isfinite().all()
    assert 0.3 < logits.std() < 3.0
    assert (logits[0] - logits[1]).std() > 0.3


def test_layers_that_draft_tokens_are_left_out(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "deepseek_v3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"model.layers.2.eh_proj.weight": torch.ones(3)}
    save_file(tensors, file)
    StepDriver(tmp_path)
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(3)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"layers.3.eh_proj.weight' has no place"):
        StepDriver(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank=0"),
        ("deepseek_v3", {"head_dim": 16}, "head_dim=16 .* qk_rope_head_dim=8"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "'noaux_tc' is not supported: greedy"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'.*: sigmoid"),
        ("deepseek_v3", {"n_group": 3}, "config.json: 8 experts cannot be divided into 3"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim=4 .* qk_rope_head_dim=8"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk=0"),
        ("deepseek_v32", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "indexer_types=.* each of 2 layers"),
        ("glm_moe_dsa", {"indexer_types": ["full", "none"]}, "indexer_types=.*'none'"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full"]}, "the first one 'full'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    save_tiny_checkpoint(tmp_path, family)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message) as caught:
        StepDriver(tmp_path)
    assert "\n" not in str(caught.value)
