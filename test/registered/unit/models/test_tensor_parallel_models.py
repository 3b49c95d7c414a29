"""Every model split over ranks: logits and words as transformers', the same bits on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.caches.memory_ranks import MemoryTensorGroup
from rigs.models.model_oracle import prompt, reference
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.rank_threads import on_rank_threads
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-a-test-cpu")

SPLIT: dict[str, Any] = {"num_attention_heads": 8, "vocab_size": 162}
"""Four ranks divide the heads and not the vocabulary; two KV heads, so that they share those."""
LATENT: dict[str, Any] = {**SPLIT, "num_key_value_heads": 8}
LINEAR: dict[str, Any] = {**SPLIT, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
CASES = [
    pytest.param("llama", {**SPLIT, "attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param("llama", {**SPLIT, "tie_word_embeddings": True}, id="llama-tied"),
    pytest.param("qwen2", SPLIT, id="qwen2"),
    pytest.param("qwen3", SPLIT, id="qwen3"),
    pytest.param("minimax_m2", SPLIT, id="minimax_m2"),
    pytest.param("ministral", SPLIT, id="ministral"),
    pytest.param("gpt_oss", SPLIT, id="gpt_oss"),
    pytest.param("qwen3_moe", SPLIT, id="qwen3_moe"),
    pytest.param("deepseek_v2", LATENT, id="deepseek_v2"),
    pytest.param("deepseek_v3", {**LATENT, "attention_bias": True}, id="deepseek_v3-biases"),
    pytest.param("deepseek_v32", LATENT, id="deepseek_v32"),
    pytest.param("glm_moe_dsa", LATENT, id="glm_moe_dsa"),
    pytest.param("glm_moe_dsa_shared", LATENT, id="glm_moe_dsa_shared"),
    pytest.param("deepseek_v4", {**SPLIT, "o_groups": 4}, id="deepseek_v4"),
    pytest.param("glm5_next", LATENT, id="glm5_next"),
    pytest.param("glm4_moe", SPLIT, id="glm4_moe"),
    pytest.param("kimi_k25_vision", LATENT, id="kimi_k25"),
    pytest.param("nemotron_h", {**SPLIT, "n_groups": 4}, id="nemotron_h"),
    pytest.param(
        "nemotron_h", {**SPLIT, "n_groups": 8, "moe_latent_size": None}, id="nemotron_h-x"
    ),
    pytest.param("kimi_linear", LATENT, id="kimi_linear"),
    pytest.param("qwen3_next", LINEAR, id="qwen3_next"),
    pytest.param("qwen3_5", {**LINEAR, "linear_num_value_heads": 4}, id="qwen3_5-equal-heads"),
    pytest.param("qwen3_5_moe", LINEAR, id="qwen3_5_moe"),
    pytest.param("qwen3_5_vision", {**LINEAR, "tie_word_embeddings": True}, id="qwen3_5_vision"),
    pytest.param("qwen3_5_moe_vision", LINEAR, id="qwen3_5_moe_vision"),
]


@pytest.mark.half
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logits_equal_transformers(
    tmp_path: Path, family: str, overrides: dict[str, Any], size: int
) -> None:
    hf = save_tiny_checkpoint(tmp_path, family, **overrides)
    long, short = prompt(90, 1), prompt(21, 2)
    want_long, want_short = reference(hf, long), reference(hf, short)

    def work(driver: StepDriver, group: MemoryTensorGroup) -> torch.Tensor:
        """A chunked prefill beside a whole one, then both decode."""
        steps = [
            driver.extend([(0, short[:17]), (1, long[:37])]),
            driver.extend([(1, long[37:86])]),
        ]
        logits = [step.next_token_logits for step in steps]
        for step in range(4):
            pairs = [(1, long[86 + step]), (0, short[17 + step])]
            logits.append(driver.decode(pairs).next_token_logits)
        return torch.cat(logits)

    found = on_rank_threads(size, tmp_path, work, page_size=16)
    rows = [want_short[16], want_long[36], want_long[85]]
    for step in range(4):
        rows += [want_long[86 + step], want_short[17 + step]]
    torch.testing.assert_close(found[0], torch.stack(rows), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("family", "overrides", "each"),
    [
        ("llama", SPLIT, 2),
        ("qwen3_moe", SPLIT, 2),
        ("deepseek_v3", LATENT, 2),
        ("minimax_m2", SPLIT, 3),
        ("gpt_oss", SPLIT, 2),
        ("deepseek_v4", {**SPLIT, "o_groups": 4}, 2),
        ("glm5_next", LATENT, 2),
        ("qwen3_5", LINEAR, 2),
    ],
)
def test_few_collectives_suffice(
    tmp_path: Path, family: str, overrides: dict[str, Any], each: int
) -> None:
    """One for the embedding, attention and feed-forward of each layer, and a norm over all heads;
    one for what is read of the logits, whole or the greatest, however often."""
    config = save_tiny_checkpoint(tmp_path, family, **overrides).config
    layers = config.get_text_config().num_hidden_layers

    def work(driver: StepDriver, group: MemoryTensorGroup) -> list[int]:
        counts = [group.num_calls]
        output = driver.extend([(0, prompt(40, 1)), (1, prompt(9, 2))])
        counts.append(group.num_calls)
        assert len(output.next_token_logits) == len(output.next_token_logits) == 2
        counts.append(group.num_calls)
        output = driver.decode([(0, 5), (1, 6)])
        counts.append(group.num_calls)
        assert len(output.logits.argmax()) == 2
        return [*counts, group.num_calls]

    step = 1 + each * layers
    expected = [0, step, step + 1, 2 * step + 1, 2 * step + 2]
    assert on_rank_threads(2, tmp_path, work, page_size=16) == [expected] * 2


def test_log_probabilities_of_prompts_are_those_of_one_rank(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3", **SPLIT)
    tokens = prompt(30, 4)

    def work(driver: StepDriver, group: object = None) -> list[Any]:
        def asks(batch: ForwardBatch) -> None:
            batch.extend_logprob_start_lens_cpu = [3]
            batch.extend_input_logprob_token_ids_cpu = [tokens[4:20]]
            batch.top_logprobs_nums = [5]

        inputs = driver.extend([(0, tokens)], before=asks).input_logprobs
        assert inputs is not None
        return [torch.tensor(inputs.values), torch.tensor([*inputs.tops[0]])]

    alone = work(StepDriver(tmp_path))
    for found in on_rank_threads(4, tmp_path, work):
        for got, want in zip(found, alone, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("qwen3", {}, "6 attention heads cannot be split over 4 ranks: use a --tp-size that"),
        (
            "qwen3_5",
            {**LINEAR, "linear_num_key_heads": 2},
            "2 key heads of linear",
        ),
        (
            "nemotron_h",
            SPLIT,
            r"2 groups of Mamba-2 heads \(n_groups\) cannot be split over 4 ranks",
        ),
        ("qwen3", {**SPLIT, "intermediate_size": 130}, "130 features of the feed-forward layers"),
    ],
)
def test_sizes_that_the_ranks_do_not_divide_are_refused(
    tmp_path: Path, family: str, overrides: dict[str, Any], message: str
) -> None:
    save_tiny_checkpoint(tmp_path, family, **overrides)
    with pytest.raises(ValueError, match=message):
        on_rank_threads(4, tmp_path, lambda driver, group: None)
