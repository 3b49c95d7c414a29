"""Servers on a GPU: what they answer with graphs and without, under load, and a large shape."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import pytest

from benchmark.gpu_hybrid.families import VOCABULARY, model_of
from rigs.models.qwen3_8b import DUMMY_FLAGS, VOCAB_SIZE, dummy_model
from rigs.recall.run_eval import EvalArgs, run_eval
from rigs.servers.engine_server import Answer, EngineServer
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

QUESTION = "The code of heron is 7391. The code of otter is 2846. What is the code of heron?"

AT_ONCE: Final = 4
"""Starts at once. One of ten took longer than a start may, beside other work."""


class Servers:
    """Servers by name. Each starts in the background, in their order; a test waits for its own."""

    def __init__(self, made: Mapping[str, EngineServer], pool: ThreadPoolExecutor) -> None:
        self._made = made
        self._starts = {name: pool.submit(server.start) for name, server in made.items()}

    def __getitem__(self, name: str) -> EngineServer:
        self._starts[name].result()
        return self._made[name]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """All servers of the tests below. The last three need kernels that the first compiles."""
    with ExitStack() as stack:
        large = stack.enter_context(dummy_model())
        with_states = {
            "rows": stack.enter_context(model_of("deepseek_v4", layers=4)),
            "mamba": stack.enter_context(model_of("nemotron_h", layers=7)),
            "kda": stack.enter_context(model_of("kimi_linear", layers=5)),
        }
        made = {
            "graphs": EngineServer("--device", "cuda"),
            "large": EngineServer(
                "--device", "cuda", *DUMMY_FLAGS,
                "--enable-hierarchical-cache", "--max-total-tokens", "8192", "--hicache-ratio", "2",
                model=large,
            ),
        }  # fmt: skip
        for name, model in with_states.items():
            made[name] = EngineServer(
                "--device", "cuda", *DUMMY_FLAGS, "--page-size", "256" if name == "rows" else "64",
                "--max-total-tokens", "8192", "--enable-hierarchical-cache", "--hicache-ratio", "8",
                "--max-running-requests", "4", "--max-mamba-cache-size", "24", model=model,
            )  # fmt: skip
        made |= {
            "plain": EngineServer(
                "--device", "cuda", "--disable-cuda-graph", "--disable-overlap-schedule"
            ),
            "torch": EngineServer("--device", "cuda", "--attention-backend", "torch_native"),
            "tiers": EngineServer(
                "--device", "cuda", "--kv-cache-dtype", "fp8_e4m3", "--enable-hierarchical-cache",
                "--max-total-tokens", "8192", "--hicache-ratio", "16", "--enable-cache-report",
            ),
        }  # fmt: skip
        for server in made.values():
            stack.callback(server.kill)
        pool = ThreadPoolExecutor(AT_ONCE)
        # A server can be killed once its start has returned.
        stack.callback(pool.shutdown, cancel_futures=True)
        yield Servers(made, pool)


@pytest.mark.parametrize("other", ["plain", "torch"])
def test_greedy_words_and_logprobs_are_those_of_other_ways_to_run(
    servers: Servers, other: str
) -> None:
    answers = [
        servers[name].generate(QUESTION, max_new_tokens=12, return_logprob=True)
        for name in ("graphs", other)
    ]
    assert answers[0].output_ids == answers[1].output_ids
    logprobs = [[entry[0] for entry in a.meta_info["output_token_logprobs"]] for a in answers]
    assert len(logprobs[0]) == len(answers[0].output_ids)
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.1)


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0}, {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.01}],
)
def test_sampled_words_are_those_without_graphs_or_overlap(
    servers: Servers, sampling: dict[str, float]
) -> None:
    sampling = {**sampling, "sampling_seed": 11, "ignore_eos": True, "frequency_penalty": 0.5}
    answers = []
    for name in ("graphs", "plain", "graphs"):
        servers[name].flush()  # a cached prompt rounds otherwise, and luck may hang on a bit
        answers.append(servers[name].generate(QUESTION, max_new_tokens=24, sampling=sampling))
    assert len({tuple(answer.output_ids) for answer in answers}) == 1
    assert len(set(answers[0].output_ids)) > 4


def test_a_grammar_holds(servers: Servers) -> None:
    answer = servers["graphs"].generate(
        QUESTION, max_new_tokens=30, sampling={"regex": "code: [0-9]{4}"}
    )
    assert re.fullmatch("code: [0-9]{4}", answer.text), answer.text


@pytest.mark.parametrize("name", ["graphs", "tiers"])
def test_facts_are_recalled_under_load(servers: Servers, name: str) -> None:
    """In bf16, and from L2 in fp8."""
    result = run_eval(
        EvalArgs(
            base_url=servers[name].url,
            num_examples=16,
            num_threads=16,
            num_questions=3,
            order="round",
            cached_tokens_details=True,
        )
    )
    assert result["score"] >= 0.95, result["wrong"]
    if name == "tiers":
        assert result["cached_tokens_details"]["host"] > 1000, result


def test_long_prompts_of_a_large_shape_load_from_l2(servers: Servers) -> None:
    server = servers["large"]
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(5000)] for _ in range(3)]
    for ids in (*prompts, prompts[0]):
        answer = server.generate(ids, max_new_tokens=16, sampling={"ignore_eos": True})
        assert len(answer.output_ids) == 16
        assert all(0 <= token < VOCAB_SIZE for token in answer.output_ids)
    assert answer.cached["host"] == 5000 // 64 * 64, answer.cached
    server.flush()


@pytest.mark.parametrize("kind", ["mamba", "kda", "rows"])
def test_states_from_l2_are_those_of_l1(servers: Servers, kind: str) -> None:
    """Both answers begin at the same snapshot, so the words and their logprobs are the same."""
    server = servers[kind]
    rng = random.Random(5)
    asked, *others = [[rng.randrange(VOCABULARY) for _ in range(2100)] for _ in range(6)]
    sampling = {"ignore_eos": True, "temperature": 0.0}

    def ask(ids: list[int]) -> Answer:
        return server.generate(ids, 24, sampling, return_logprob=True)

    ask(asked)
    from_l1 = ask(asked)
    for ids in others:
        ask(ids)
    from_l2 = ask(asked)
    assert (from_l1.cached["device"], from_l2.cached["host"]) == (2048, 2048)
    assert from_l2.output_ids == from_l1.output_ids
    assert from_l2.meta_info["output_token_logprobs"] == from_l1.meta_info["output_token_logprobs"]
    server.flush()
