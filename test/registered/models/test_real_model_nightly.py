"""A real model and its tokenizer: transformers' words, and the perplexity of each weight format."""

from __future__ import annotations

import argparse
import json
import math
import pydoc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rigs.models.quantized_checkpoints import (
    Format,
    awq,
    fp8_blocks,
    fp8_per_tensor,
    gptq,
    save_compressed,
    write_quantized,
)
from rigs.models.smollm2 import save_smollm2
from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=600, suite="nightly-test-cpu", nightly=True)

pytestmark = pytest.mark.timeout(1800)

CONVERSATIONS: Final = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers.",
)
WORDS: Final = 32
CHUNK: Final = 512
"""Tokens of a text whose perplexity is measured, each chunk by itself."""
FORMATS: Final[dict[str, tuple[Callable[[], Format], float]]] = {
    "fp8-blocks": (fp8_blocks, 1.01),
    "fp8-per-tensor": (fp8_per_tensor, 1.01),
    "awq": (awq, 1.05),
    "gptq": (gptq, 1.05),
    "gptq-8": (lambda: gptq(8, 128), 1.01),
}
"""Writer of a format, and the greatest ratio of its perplexity to that of bf16."""


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def text_ids(smollm2: Path) -> list[list[int]]:
    """Real English: pages of the standard library's documentation."""
    text = "\n".join(pydoc.plain(pydoc.render_doc(module)) for module in (argparse, json))
    ids = AutoTokenizer.from_pretrained(smollm2)(text)["input_ids"]
    return [ids[begin : begin + CHUNK] for begin in range(0, 4 * CHUNK, CHUNK)]


def serve(path: Path, *flags: str, dtype: str = "bfloat16") -> ForkedServer:
    words = ("--device", "cpu", "--dtype", dtype, "--max-total-tokens", "8192", *flags)
    return ForkedServer(*words, model=str(path))


def perplexity(server: EngineServer, chunks: list[list[int]]) -> float:
    """Of each token given those before it in its chunk."""
    total = count = 0.0
    for ids in chunks:
        fields: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
        answer = server.generate(ids, max_new_tokens=1, **fields)
        found = [entry[0] for entry in answer.meta_info["input_token_logprobs"]][1:]
        total, count = total + sum(found), count + len(found)
    return math.exp(-total / count)


def test_words_equal_those_of_transformers(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    with serve(smollm2, dtype="float32") as server:
        for question in CONVERSATIONS:
            messages = [{"role": "user", "content": question}]
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )["input_ids"]
            with torch.no_grad():
                want = model.generate(ids, max_new_tokens=WORDS, do_sample=False)
            said = tokenizer.decode(want[0, ids.shape[1] :], skip_special_tokens=True)
            body = {"model": "smollm2", "messages": messages, "max_tokens": WORDS, "temperature": 0}
            reply = server.request("POST", "/v1/chat/completions", body)
            assert reply.body["choices"][0]["message"]["content"] == said
    assert "Paris" in said or question != CONVERSATIONS[0]


@pytest.fixture(scope="module")
def plain_perplexity(smollm2: Path, text_ids: list[list[int]]) -> float:
    with serve(smollm2) as server:
        return perplexity(server, text_ids)


def test_the_text_is_understood(plain_perplexity: float) -> None:
    assert 2 < plain_perplexity < 40


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_costs_little(
    smollm2: Path, text_ids: list[list[int]], plain_perplexity: float, tmp_path: Path, name: str
) -> None:
    make, most = FORMATS[name]
    with serve(write_quantized(smollm2, tmp_path, make())) as server:
        ratio = perplexity(server, text_ids) / plain_perplexity
    print(f"{name}: perplexity {plain_perplexity:.3f} x {ratio:.4f}")
    assert ratio < most


@pytest.mark.parametrize(
    ("weights", "most"),
    [
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, 1.05),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, 1.01),
    ],
    ids=["int4", "fp8"],
)
def test_compressed_tensors_cost_little(
    smollm2: Path,
    text_ids: list[list[int]],
    plain_perplexity: float,
    tmp_path: Path,
    weights: dict[str, Any],
    most: float,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    save_compressed(model, tmp_path / "compressed", **weights)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(tmp_path / "compressed")
    with serve(tmp_path / "compressed") as server:
        ratio = perplexity(server, text_ids) / plain_perplexity
    print(f"{weights}: perplexity {plain_perplexity:.3f} x {ratio:.4f}")
    assert ratio < most


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
