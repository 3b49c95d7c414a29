"""The layer that drafts tokens (MTP) on a GPU: hidden states and logits equal those on a CPU, and
captured verifications draft and say what launched ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.drafts.draft_driver import DraftDriver, Drafted, drafted_in_steps
from rigs.drafts.guesses import Drafts, recorded
from rigs.models.heldout_question import HeldoutQuestion
from rigs.models.model_oracle import logits_of_batches, prompt
from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import SchedulerRig
from rigs.servers.engine_server import EngineServer
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.verify_graphs import VerifyGraphs
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=40, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa_shared", "qwen3_next", "qwen3_5")


def assert_near(got: Drafted, want: Drafted) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_equal_those_of_a_cpu(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    long, short = prompt(82, 1), prompt(21, 2)
    want = drafted_in_steps(DraftDriver(tmp_path, page_size=16), long, short)
    driver = DraftDriver(tmp_path, page_size=16, device="cuda", disable_cuda_graph=True)
    assert_near(drafted_in_steps(driver, long, short), want)


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_and_passes_of_several_tokens(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    tokens = prompt(60, 3)
    found = []
    for device in ("cpu", "cuda"):
        driver = DraftDriver(tmp_path, page_size=16, device=device, disable_cuda_graph=True)
        chain = driver.chain(0, driver.run([(0, tokens)]), 3)
        last = [(0, 56, tokens[56:])]
        again = driver.draft(last, mode=ForwardMode.TARGET_VERIFY)
        assert_near(again, Drafted(chain.hidden[55:59], chain.logits[55:59]))
        found.append(chain)
    assert_near(found[1], found[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_of_the_model_leave_the_layer_out(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family, mtp=True)
    want = logits_of_batches(StepDriver(tmp_path, page_size=16))
    driver = StepDriver(tmp_path, page_size=16, device="cuda", has_draft_layer=True)
    torch.testing.assert_close(logits_of_batches(driver), want, rtol=1e-3, atol=1e-3)


APART = [prompt(1 + 17 * seed, seed) for seed in range(6)]
"""Prompts of which no two have the same position among 16 answered tokens, as `recorded` wants."""
SPECULATES: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_verifications_draft_what_launched_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    save_tiny_checkpoint(tmp_path, family, eos_token_id=None, mtp=True)
    plain = SchedulerRig(tmp_path, disable_radix_cache=True)
    alone = [plain.generate([ids], 16)[0] for ids in APART]
    launched = SchedulerRig(tmp_path, page_size=16, **SPECULATES)
    with recorded() as want:
        assert [launched.generate([ids], 16)[0] for ids in APART] == alone
    got: Drafts = {}
    real = VerifyGraphs.verify

    def verify(self: VerifyGraphs, batch: ForwardBatch) -> Any:
        drafts, output = real(self, batch)
        for row, token in enumerate(batch.input_ids.tolist()):
            got[token, batch.seq_lens_cpu[row] - 4] = drafts[row].tolist()
        return drafts, output

    monkeypatch.setattr(VerifyGraphs, "verify", verify)
    monkeypatch.setattr(SchedulerRig, "captures_graphs", True)
    captured = SchedulerRig(tmp_path, page_size=16, **SPECULATES)
    assert [captured.generate([ids], 16)[0] for ids in APART] == alone
    assert got == want
    assert captured.generate(APART, 16) == alone, "together, with the prompts cached"
    captured.close()


def test_a_trained_layer_is_as_often_right_in_graphs() -> None:
    questions = [HeldoutQuestion.of(seed, 1000) for seed in range(4)]
    counts = []
    for more in ((), ("--disable-cuda-graph",)):
        server = EngineServer(
            *("--device", "cuda", "--speculative-algorithm", "NEXTN", *more),
            model=str(BUILTIN_HYBRID_MODEL_DIR),
        )
        server.start()
        try:
            answers = [server.generate(question.ids) for question in questions]
        finally:
            server.kill()
        assert [answer.text for answer in answers] == [one.answer for one in questions]
        counts.append([answer.meta_info["spec_verify_ct"] for answer in answers])
    assert counts[0] == counts[1]
    assert sum(counts[0]) < 4 * 3, "four tokens follow the first digit, its end is one"
