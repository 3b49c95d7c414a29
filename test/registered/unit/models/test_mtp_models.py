"""The layer that drafts tokens (MTP): hidden states and logits equal transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.caches.memory_ranks import MemoryTensorGroup
from rigs.drafts.draft_driver import (
    DraftDriver,
    Drafted,
    draft_reference,
    drafted_in_steps,
    rows_in_steps,
)
from rigs.models.model_oracle import assert_close, prompt, reference
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.rank_threads import on_rank_threads
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.models.llama import LlamaDecoderLayer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

FAMILIES = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "glm_moe_dsa_shared",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
)
CASES: list[Any] = [
    *(pytest.param(family, {}, id=family) for family in FAMILIES),
    pytest.param("deepseek_v3", {"first_k_dense_replace": 2}, id="deepseek_v3-dense"),
    pytest.param("deepseek_v3", {"tie_word_embeddings": True}, id="deepseek_v3-tied"),
    pytest.param("qwen3_next", {"num_experts": 0, "max_shard_size": "60KB"}, id="qwen3_next-dense"),
    pytest.param("qwen3_5", {"tie_word_embeddings": True}, id="qwen3_5-tied"),
]


def assert_equal(got: Drafted, want: Drafted) -> None:
    assert_close(got.hidden, want.hidden)
    assert_close(got.logits, want.logits)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_drafts_equal_transformers_in_chunks_and_decode_steps(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, mtp=True, **overrides)
    long, short = prompt(82, 1), prompt(21, 2)
    got = drafted_in_steps(DraftDriver(tmp_path, page_size=16), long, short)
    assert_equal(got, rows_in_steps(draft_reference(hf, long), draft_reference(hf, short)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_of_three_drafts_equals_transformers(tmp_path: Path, family: str) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, mtp=True)
    tokens = prompt(47, 3)
    driver = DraftDriver(tmp_path, page_size=16)
    got = driver.chain(0, driver.run([(0, tokens)]), 3)
    want = draft_reference(hf, tokens, steps=3)
    assert len(got.hidden) == 46 + 2
    assert_equal(got, want)
    # The model's own words are those without a draft layer.
    assert_close(driver.decode([(0, 7)]).next_token_logits, reference(hf, [*tokens, 7])[-1:])


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa_shared", "qwen3_5_moe"])
def test_any_pass_gives_the_same_drafts(tmp_path: Path, family: str) -> None:
    """One by one or several at once."""
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    driver = DraftDriver(tmp_path, page_size=4)
    tokens, other = prompt(60, 4), prompt(9, 5)
    driver.run([(0, tokens[:50]), (1, other[:5])])
    steps = [driver.run([(0, [token])], decodes=True) for token in tokens[50:54]]
    want = Drafted(*(torch.cat(parts) for parts in zip(*steps, strict=True)))
    work = [(1, 1, other[1:5]), (0, 50, tokens[50:54])]
    for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
        got = driver.draft(work, mode=mode)
        assert_equal(Drafted(got.hidden[4:], got.logits[4:]), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_entries_are_stored_without_running_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    driver = DraftDriver(tmp_path, page_size=4)
    tokens, other = prompt(60, 4), prompt(9, 5)
    driver.run([(0, tokens), (1, other)])
    want = [part.clone() for part in driver.entries()]
    assert all(part.count_nonzero() for part in want)
    layer = driver.runner.model.draft_layer
    assert layer is not None
    decoder = layer.layer
    assert isinstance(decoder, LlamaDecoderLayer)
    for module in (decoder.mlp, *driver._backends.values()):
        monkeypatch.setattr(module, "forward", not_called)
    indexer = getattr(decoder.self_attn, "indexer", None)
    assert (indexer is not None) == ("v32" in family or "dsa" in family)
    if indexer is not None:
        monkeypatch.setattr(indexer, "queries", not_called)
    pool, waited = driver.runner.token_to_kv_pool, []
    wait = pool.wait_for_layer

    def noting(layer_id: int) -> int:
        waited.append(layer_id)
        return wait(layer_id)

    monkeypatch.setattr(pool, "wait_for_layer", noting)
    for part in driver.entries():
        part.zero_()
    driver.store([(1, 1, other[1:]), (0, 1, tokens[1:56])], ForwardMode.EXTEND)
    driver.store([(0, 56, tokens[56:])], ForwardMode.TARGET_VERIFY)
    for got, right in zip(driver.entries(), want, strict=True):
        # Slot 0 pads.
        torch.testing.assert_close(got[1:], right[1:], rtol=0, atol=1e-5)
    # The next step, which waits for no load, reads the layer.
    assert waited == [driver.runner.model_config.num_hidden_layers] * 2


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_angles_are_ready_before_the_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Kernels that start early read angles at once: they may only if a kernel that waits follows
    the angles."""
    order: list[str] = []

    def note(module: Any, name: str) -> None:
        forward = module.forward

        def noting(*arguments: Any) -> Any:
            order.append(name)
            return forward(*arguments)

        monkeypatch.setattr(module, "forward", noting)

    note(RotaryEmbedding, "angles")
    note(VocabParallelEmbedding, "lookup")
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    DraftDriver(tmp_path, page_size=4).run([(0, prompt(9, 1))])
    assert order == ["angles", "lookup"] * 2


def not_called(*args: object, **kwargs: object) -> None:
    raise AssertionError("only entries are stored")


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v3", {"num_key_value_heads": 8}),
        ("deepseek_v32", {"num_key_value_heads": 8}),
        ("glm4_moe", {}),
        ("qwen3_next", {"linear_num_key_heads": 4}),
        ("qwen3_5", {"linear_num_key_heads": 4, "tie_word_embeddings": True}),
        ("qwen3_5_moe_vision", {"linear_num_key_heads": 4}),
    ],
)
def test_ranks_that_split_the_layer_draft_what_one_does(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    overrides = {"num_attention_heads": 8, "vocab_size": 162, **overrides}
    hf = save_tiny_checkpoint(tmp_path, family, mtp=True, **overrides)
    long, short = prompt(82, 1), prompt(21, 2)

    def work(driver: StepDriver, group: MemoryTensorGroup) -> Drafted:
        assert isinstance(driver, DraftDriver)
        return drafted_in_steps(driver, long, short)

    found = on_rank_threads(2, tmp_path, work, make_driver=DraftDriver, page_size=16)
    assert_equal(found[0], rows_in_steps(draft_reference(hf, long), draft_reference(hf, short)))
    assert torch.equal(found[0].hidden, found[1].hidden)
    assert torch.equal(found[0].logits, found[1].logits)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_steps_of_the_model_pass_three_quarters_of_its_own_layers(
    tmp_path: Path, family: str
) -> None:
    """Even if the pool has one layer of the model, and that of drafts."""
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    driver = DraftDriver(tmp_path)
    recorded: list[int] = []

    class Counting:
        def record(self) -> None:
            recorded.append(1)

    def counts(batch: ForwardBatch) -> None:
        batch.mostly_done = Counting()  # type: ignore[assignment]

    driver.extend([(0, prompt(9, 6))], before=counts)
    driver.decode([(0, 5)], before=counts)
    assert len(recorded) == 2
