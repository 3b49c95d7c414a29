"""Two GPUs with a DP group each, which share experts: the words of one GPU, with CUDA graphs and
without, with drafts and without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer
from sglang.serve_pd import count_gpus
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=400, suite="base-b-test-2-gpu-large")

HAS_TWO: Final = detect_device() == "cuda" and count_gpus() > 1
pytestmark = pytest.mark.skipif(not HAS_TWO, reason="needs two GPUs")

SIZES: Final[dict[str, Any]] = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2176, "eos_token_id": None,
}  # fmt: skip
LENGTHS: Final = (20, 200, 45, 7, 130, 64)
"""Tokens of prompts: alternately those of one group and of the other."""


def words(model: Path, dp_size: int, *more: str) -> list[list[int]]:
    """Answers to one request alone, and to several at once, which meet in all kinds of steps."""
    with EngineServer(
        "--device", "cuda", "--tokenizer-path", str(BUILTIN_MODEL_DIR), "--dtype", "float32",
        "--page-size", "16", "--max-total-tokens", "4096", "--chunked-prefill-size", "64",
        "--tp-size", str(dp_size), "--attn-dp-size", str(dp_size), *more, model=str(model),
        env={"SGLANG_SPECULATE_ALWAYS": "1"},
    ) as server:  # fmt: skip
        alone = server.generate(prompt(100, 30), 24, {"ignore_eos": True}).output_ids

        def ask(number: int) -> list[int]:
            return server.generate(
                prompt(number, LENGTHS[number]), 24 + 16 * number, {"ignore_eos": True},
                routed_dp_rank=number % dp_size,
            ).output_ids  # fmt: skip

        with ThreadPoolExecutor(len(LENGTHS)) as pool:
            together = list(pool.map(ask, range(len(LENGTHS))))
        if dp_size > 1:
            log, captures = server.process.log_tail(4000), "--disable-cuda-graph" not in more
            assert ("Captured decoding" in log) == captures
            drafts = "--speculative-algorithm" in more
            assert ("Captured verifications" in log) == (captures and drafts)
        return [alone, *together]


def sizes_of(family: str) -> dict[str, Any]:
    more = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    return SIZES | more if family == "qwen3_next" else SIZES


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v32", "qwen3_next", "gpt_oss"])
def test_groups_say_what_one_gpu_says(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family, **sizes_of(family))
    expected = words(tmp_path, 1)
    for more in ((), ("--ep-size", "2"), ("--ep-size", "2", "--disable-cuda-graph")):
        assert words(tmp_path, 2, *more) == expected, more


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["deepseek_v32", "qwen3_next"])
def test_groups_draft_tokens(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family, mtp=True, **sizes_of(family))
    expected = words(tmp_path, 1)
    drafts = ("--speculative-algorithm", "NEXTN")
    for more in ((), ("--ep-size", "2"), ("--ep-size", "2", "--disable-cuda-graph")):
        assert words(tmp_path, 2, *drafts, *more) == expected, more
