"""Prefills split over ranks: logits and pools as those of one rank, for all that can be split."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rigs.caches.memory_ranks import MemoryTensorGroup
from rigs.models.model_oracle import prompt
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.rank_threads import on_rank_threads
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.speculative.eagle_worker import EAGLEWorker
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

SPLIT: dict[str, Any] = {"num_attention_heads": 8}
LATENT: dict[str, Any] = {**SPLIT, "num_key_value_heads": 8}
CASES = [
    pytest.param("qwen3", SPLIT, id="qwen3"),
    pytest.param("qwen3_moe", SPLIT, id="qwen3_moe"),
    pytest.param("deepseek_v3", LATENT, id="deepseek_v3"),
    pytest.param("deepseek_v32", LATENT, id="deepseek_v32"),
    pytest.param("glm_moe_dsa", LATENT, id="glm_moe_dsa"),
    pytest.param("glm_moe_dsa_shared", LATENT, id="glm_moe_dsa_shared"),
    pytest.param("glm4_moe", SPLIT, id="glm4_moe"),
    pytest.param("minimax_m2", SPLIT, id="minimax_m2"),
    pytest.param("gpt_oss", {**SPLIT, "layer_types": ["full_attention"] * 4}, id="gpt_oss"),
]
SIZES = [(2, 2), (4, 2), (4, 4)]
"""Ranks, and over how many of them prefills are split."""


def pools_of(driver: StepDriver, lengths: list[int]) -> list[torch.Tensor]:
    """Content of the pools for each row's context, in order, without padding."""
    table = driver.runner.req_to_token_pool.req_to_token
    slots = torch.cat([table[row, :length].long() for row, length in enumerate(lengths)])
    return [
        buffer[slots].clone()
        for pool in driver.runner.pools.values()
        if isinstance(pool, PagedDevicePool)
        for part in pool.parts
        for buffer in part
    ]


def run_steps(driver: StepDriver, group: object = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Long prompts in chunks beside short ones, then decoding; the logits, then the pools."""
    long, middle, short = prompt(330, 1), prompt(150, 2), prompt(9, 3)
    chunks = [
        [(0, long[:201]), (1, middle[:77]), (2, short[:1])],
        [(2, short[1:8]), (1, middle[77:149]), (0, long[201:329])],
        [(1, middle[149:])],
    ]
    logits = [driver.extend(chunk).next_token_logits for chunk in chunks]
    for tokens in ((long[329], 7, short[8]), (8, 9, 10)):
        logits.append(driver.decode(list(enumerate(tokens))).next_token_logits)
    return torch.cat(logits), pools_of(driver, driver.lens[:3])


@pytest.mark.half
@pytest.mark.parametrize(("size", "cp_size"), SIZES)
@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_logits_and_pools_are_those_of_one_rank(
    tmp_path: Path, family: str, overrides: dict[str, Any], size: int, cp_size: int
) -> None:
    save_tiny_checkpoint(tmp_path, family, **overrides)
    want, pools = run_steps(StepDriver(tmp_path, page_size=16))
    found = on_rank_threads(size, tmp_path, run_steps, cp_size=cp_size, page_size=16)
    torch.testing.assert_close(found[0][0], want, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(logits, found[0][0]) for logits, _ in found)
    # Ranks with the same heads hold the same bytes, which are those of one rank up to rounding.
    tp_size = size // cp_size
    for rank, (_, held) in enumerate(found):
        first = found[rank % tp_size][1]
        assert all(torch.equal(part, other) for part, other in zip(held, first, strict=True))
    if tp_size == 1:
        for part, whole in zip(found[0][1], pools, strict=True):
            torch.testing.assert_close(part, whole, rtol=1e-3, atol=1e-4)


def run_with_drafts(driver: StepDriver, group: object = None) -> tuple[torch.Tensor, Any]:
    """`run_steps` of a model whose draft layer follows: the hidden state kept of each request, and
    the pools. The second chunk wants log probabilities of its prompts."""
    for pool in driver.runner.pools.values():
        for buffer in (buffer for part in cast("PagedDevicePool", pool).parts for buffer in part):
            buffer.fill_(7)
    worker, steps = EAGLEWorker(driver.runner, num_draft_tokens=4), list[ForwardBatch]()
    forward, num_layers = driver.runner.forward, len([*driver.runner.model.attention_layers()])
    split_over = driver.runner.cp_group

    def follows(batch: ForwardBatch) -> LogitsProcessorOutput:
        batch.capture_hidden = True
        if len(steps) == 1:
            batch.extend_logprob_start_lens_cpu = [1, 0, 3]
            batch.extend_input_logprob_token_ids_cpu = [[5, 6], [7], [8]]
        begun = split_over.num_calls if isinstance(split_over, MemoryTensorGroup) else 0
        output = forward(batch)
        steps.append(batch)
        if output.split_hidden is not None:
            assert output.hidden_states is None
            worker.follow_split(batch, output.split_hidden)
            assert isinstance(split_over, MemoryTensorGroup)
            assert split_over.num_calls == begun + num_layers + 1, "a gathering a layer, one sum"
        elif batch.forward_mode is ForwardMode.EXTEND:
            assert output.hidden_states is not None
            worker.follow(batch, output.hidden_states)
        return output

    driver.runner.forward = follows  # type: ignore[method-assign, assignment]
    pools = run_steps(driver)[1]
    kept = driver.runner.req_to_token_pool.last_hidden
    assert kept is not None
    return kept.table[:3].clone(), pools


DRAFTING = [case for case in CASES if not str(case.id).startswith(("gpt", "minimax", "qwen3"))]


@pytest.mark.half
@pytest.mark.parametrize(("size", "cp_size"), SIZES)
@pytest.mark.parametrize(("family", "overrides"), DRAFTING)
def test_a_draft_layer_stores_and_keeps_what_it_does_on_one_rank(
    tmp_path: Path, family: str, overrides: dict[str, Any], size: int, cp_size: int
) -> None:
    """Runs begin and end within pages. The layer stores nothing for a prompt of one token, which is
    beside the first."""
    save_tiny_checkpoint(tmp_path, family, mtp=True, **overrides)
    fields: dict[str, Any] = {"page_size": 16, "has_draft_layer": True, "num_draft_tokens": 4}
    kept, pools = run_with_drafts(StepDriver(tmp_path, **fields))
    found = on_rank_threads(size, tmp_path, run_with_drafts, cp_size=cp_size, **fields)
    tp_size = size // cp_size
    for rank, (own, held) in enumerate(found):
        torch.testing.assert_close(own, kept, rtol=1e-4, atol=1e-4)
        assert torch.equal(own, found[0][0])
        first = found[rank % tp_size][1]
        assert all(torch.equal(part, other) for part, other in zip(held, first, strict=True))
    if tp_size == 1:
        for part, whole in zip(found[0][1], pools, strict=True):
            torch.testing.assert_close(part, whole, rtol=1e-3, atol=1e-4)


def test_log_probabilities_of_prompts_are_those_of_one_rank(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3", **SPLIT)
    long, short = prompt(140, 4), prompt(9, 5)

    def work(driver: StepDriver, group: object = None) -> list[Any]:
        def asks(batch: ForwardBatch) -> None:
            batch.extend_logprob_start_lens_cpu = [3, 9]
            batch.extend_input_logprob_token_ids_cpu = [long[4:120], []]
            batch.top_logprobs_nums = [5, 0]

        step = driver.extend([(0, long), (1, short)], before=asks)
        inputs = step.input_logprobs
        assert inputs is not None
        values = [torch.tensor(inputs.values[0]), torch.tensor([*inputs.tops[0]])]
        return [*values, step.next_token_logits]

    alone = work(StepDriver(tmp_path))
    for found in on_rank_threads(2, tmp_path, work, cp_size=2):
        for got, want in zip(found, alone, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_ranks_compute_their_share_alone(tmp_path: Path) -> None:
    """A rank's part of a prefill is half of the tokens; of decoding and short prompts it is all."""
    save_tiny_checkpoint(tmp_path, "qwen3", **SPLIT)

    def work(driver: StepDriver, group: MemoryTensorGroup) -> list[int]:
        counts: list[int] = []
        model = driver.runner.model
        forward = model.forward

        def counting(ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> Any:
            counts.append(len(ids))
            return forward(ids, positions, batch)

        model.forward = counting  # type: ignore[method-assign, assignment]
        driver.extend([(0, prompt(200, 1))])
        driver.extend([(1, prompt(63, 2)), (2, prompt(5, 2))])
        driver.extend([(1, prompt(64, 2)), (2, prompt(5, 2))])
        driver.decode([(0, 1)])
        return counts

    found = on_rank_threads(2, tmp_path, work, cp_size=2)
    assert [one[0] for one in found] == [100, 100]
    assert [one[1] for one in found] == [68, 68]
    assert sorted(one[2] for one in found) == [32, 37]
    assert [one[3] for one in found] == [1, 1]


@pytest.mark.parametrize(
    ("model", "has_draft_layer", "words"),
    [
        pytest.param("qwen3_5", False, "recurrent states of Qwen3_5ForC", id="recurrent"),
        pytest.param("kimi_linear", False, "recurrent states of KimiLinearForC", id="kimi"),
        pytest.param("qwen3_5", True, "recurrent states of Qwen3_5ForC", id="drafts"),
        pytest.param("nemotron_h", False, "recurrent states of NemotronHForC", id="one-block"),
        pytest.param("ministral", False, "windows of MinistralForC", id="windows"),
        pytest.param("gpt_oss", False, "windows of GptOssForC", id="sinks"),
        pytest.param("deepseek_v4", False, "windows of DeepseekV4ForC", id="compressed"),
        pytest.param("glm5_next", False, "recurrent states of Glm5NextForC", id="pooled"),
    ],
)
def test_models_with_states_of_whole_prefixes_are_refused(
    tmp_path: Path, model: str, has_draft_layer: bool, words: str
) -> None:
    overrides: dict[str, Any] = {"mtp": True} if has_draft_layer else {}
    save_tiny_checkpoint(tmp_path, model, **overrides)
    with pytest.raises(ValueError, match=f"--attn-cp-size 2: {words}"):
        on_rank_threads(
            2,
            tmp_path,
            lambda driver, group: None,
            cp_size=2,
            has_draft_layer=has_draft_layer,
            page_size=16,
        )


def test_tokens_that_the_pool_has_already_are_read_from_there(tmp_path: Path) -> None:
    """For example, log probabilities of a cached prompt: computed again, not stored."""
    save_tiny_checkpoint(tmp_path, "qwen3", **SPLIT)
    ids, known = prompt(170, 6), 100

    def work(driver: StepDriver, group: object = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        driver.extend([(0, ids)])
        table = driver.runner.req_to_token_pool.req_to_token

        def has(batch: ForwardBatch) -> None:
            table[1, :known] = table[0, :known]
            batch.out_cache_loc[:known] = 0

        logits = driver.extend([(1, ids), (2, ids[:5])], before=has).next_token_logits
        return torch.cat([logits, driver.decode([(1, 3), (0, 3)]).next_token_logits]), pools_of(
            driver, driver.lens[:3]
        )

    logits, pools = work(StepDriver(tmp_path, page_size=16))
    torch.testing.assert_close(logits[2], logits[3], rtol=1e-4, atol=1e-4)
    for got, held in on_rank_threads(2, tmp_path, work, cp_size=2, page_size=16):
        torch.testing.assert_close(got, logits, rtol=1e-4, atol=1e-4)
        for part, whole in zip(held, pools, strict=True):
            torch.testing.assert_close(part, whole, rtol=1e-3, atol=1e-4)


def test_a_captured_prefill_is_computed_whole(tmp_path: Path) -> None:
    """Graphs are made of steps that give nothing to other ranks."""
    save_tiny_checkpoint(tmp_path, "qwen3", **SPLIT)
    captured = 100

    def work(driver: StepDriver, group: MemoryTensorGroup) -> tuple[list[int], torch.Tensor]:
        runner, counts = driver.runner, list[int]()

        class Graphs:
            def can_run(self, batch: ForwardBatch) -> bool:
                return batch.forward_mode.is_extend() and len(batch.input_ids) <= captured

            def replay(self, batch: ForwardBatch) -> Any:
                assert batch.context_share is None
                counts.append(len(batch.input_ids))
                batch.attn_backends, batch.pools = runner.attn_backends, runner.pools
                for backend in runner.attn_backends.values():
                    backend.init_forward_metadata(batch)
                return runner.model.forward(batch.input_ids, batch.positions, batch)

        runner._graphs = [Graphs()]  # type: ignore[list-item]
        # Half of the first is short enough for a graph.
        logits = [driver.extend([(0, prompt(2 * captured, 1))]).next_token_logits]
        logits.append(driver.extend([(0, prompt(captured, 2))]).next_token_logits)
        return counts, torch.cat(logits)

    alone = StepDriver(tmp_path)
    want = [alone.extend([(0, ids)]) for ids in (prompt(2 * captured, 1), prompt(captured, 2))]
    for counts, logits in on_rank_threads(2, tmp_path, work, cp_size=2):
        assert counts == [captured]
        found = torch.cat([one.next_token_logits for one in want])
        torch.testing.assert_close(logits, found, rtol=1e-4, atol=1e-4)
