"""Real servers with and without speculation, on one rank and on two: the same words, log
probabilities, samples, stops and grammars; what streams, figures and `/server_info` show."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from rigs.drafts.guesses import guess_in_rank
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.request_battery import GREEDY, Results, battery, differences
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=13, suite="base-b-test-cpu")

SIZES: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3_next": {
        "num_attention_heads": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4
    },
}  # fmt: skip
IDS: Final = prompt(1, 200)
LONG: Final = {**GREEDY, "max_new_tokens": 40}
WHOLE: Final = 192
"""Tokens of the whole pages of IDS."""
TOLERANCE: Final = 1e-4


def server_of(model: Path, *more: str, **settings: Any) -> ForkedServer:
    return ForkedServer(
        "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR), "--page-size", "16",
        "--max-total-tokens", "2048", "--max-running-requests", "8", "--enable-metrics",
        # Where states are none, without effect; sized by what is free, they are half a gigabyte.
        "--max-mamba-cache-size", "24",
        "--chunked-prefill-size", "96", "--constrained-json-disable-any-whitespace",
        *EXACT, *more, model=str(model), **settings,
    )  # fmt: skip


@pytest.fixture(scope="module", params=list(SIZES))
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Path:
    sizes = SIZES[request.param]
    return tiny_model(request.param, mtp=True, vocab_size=2176, eos_token_id=2, **sizes)


@pytest.fixture(scope="module")
def plain(model: Path) -> tuple[dict[str, Any], Results]:
    """An answer to IDS, and to the battery, without speculation."""
    with server_of(model) as server:
        answer = ask(server)
        results = battery(server)
        assert server.stop() == 0
    assert "spec_verify_ct" not in answer["meta_info"]
    return answer, results


def ask(server: EngineServer, **fields: Any) -> dict[str, Any]:
    body = {"input_ids": IDS, "sampling_params": LONG, "return_logprob": True, **fields}
    reply = server.request("POST", "/generate", body)
    assert reply.status == 200, reply
    answer: dict[str, Any] = reply.body
    return answer


def speculating(
    model: Path, plain: tuple[dict[str, Any], Results], *more: str, **settings: Any
) -> ForkedServer:
    """A server whose drafts are often what `plain` says."""
    texts = [[*IDS, *plain[0]["output_ids"]]]
    return server_of(
        model, "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3", *more,
        in_rank=functools.partial(guess_in_rank, texts, 0.9), **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def server(model: Path, plain: tuple[dict[str, Any], Results]) -> Iterator[ForkedServer]:
    with speculating(model, plain) as running:
        yield running
        assert running.stop() == 0


def test_answers_are_those_without_speculation(
    server: ForkedServer, plain: tuple[dict[str, Any], Results]
) -> None:
    said = ask(server)
    expected = plain[0]
    assert said["output_ids"] == expected["output_ids"]
    pairs = zip(
        said["meta_info"]["output_token_logprobs"],
        expected["meta_info"]["output_token_logprobs"],
        strict=True,
    )
    assert all(abs(a[0] - b[0]) < TOLERANCE and a[1] == b[1] for a, b in pairs)
    assert differences(battery(server), plain[1], TOLERANCE) == []


def test_figures_of_speculation_are_told(server: ForkedServer) -> None:
    meta = ask(server)["meta_info"]
    count, length = meta["spec_verify_ct"], meta["spec_accept_length"]
    assert 39 / 4 <= count <= 39 / 2
    assert count * length == pytest.approx(39), "the prefill gave the first token"
    assert meta["cached_tokens_details"]["device"] == WHOLE
    metrics = server.metrics()
    assert metrics['sglang:spec_verifications_total{tier="device"}'] >= count
    assert metrics['sglang:spec_drafts_total{tier="device"}'] >= 3 * count
    assert 0 < metrics["sglang:spec_accept_rate"] < 1
    assert 1 < metrics["sglang:spec_accept_length"] < 4
    info = server.request("GET", "/get_server_info").body
    assert info["speculative_algorithm"] == "NEXTN"
    assert info["speculative_num_steps"] == 3


def test_a_stream_has_several_tokens_a_chunk(
    server: ForkedServer, plain: tuple[dict[str, Any], Results]
) -> None:
    body = {"input_ids": IDS, "sampling_params": LONG, "stream": True}
    lengths, meta = [], {}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                answer = json.loads(line.removeprefix("data: "))
                lengths.append(len(answer["output_ids"]))
                meta = answer["meta_info"]
    assert answer["output_ids"] == plain[0]["output_ids"]
    assert answer["text"] == plain[0]["text"]
    assert len(lengths) <= meta["spec_verify_ct"] + 1, "one chunk for a verification at most"


def test_a_stop_string_among_drafts(
    server: ForkedServer, plain: tuple[dict[str, Any], Results]
) -> None:
    text = plain[0]["text"]
    for begin in range(10, 14):
        stop = text[begin : begin + 3]
        got = ask(server, sampling_params={**LONG, "stop": [stop]})
        assert got["text"] == text[: text.index(stop)]
        assert got["meta_info"]["finish_reason"]["matched"] == stop


def test_an_abort_between_verifications_frees_everything(server: ForkedServer) -> None:
    body = {"rid": "goes", "input_ids": IDS, "stream": True}
    body["sampling_params"] = {**GREEDY, "max_new_tokens": 300}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        assert server.request("POST", "/abort_request", {"rid": "goes"}, admin=True).status == 200
        events = [line for line in lines if line.startswith("data: {")]
    last = json.loads(events[-1].removeprefix("data: "))
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] < 300
    assert wait_until(lambda: server.metrics()["sglang:num_running_reqs"] == 0, 20)
    assert server.metrics()["sglang:num_used_tokens"] == 0


def test_two_ranks_say_the_same_from_every_tier(
    model: Path, plain: tuple[dict[str, Any], Results], tmp_path: Path
) -> None:
    """The ranks split prompts if the model allows it, else heads."""
    divides = "1" if "qwen3_next" in str(model) else "2"
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    extra = json.dumps({"prefetch_threshold": 16})
    ranks = speculating(
        model, plain, "--tp-size", "2", "--attn-cp-size", divides, "--enable-hierarchical-cache",
        "--hicache-storage-backend", "file", "--hicache-ratio", "2",
        "--hicache-storage-prefetch-policy", "wait_complete",
        "--hicache-storage-backend-extra-config", extra, env=env,
    )  # fmt: skip
    with ranks as server:
        for tier in ("none", "device", "storage"):
            said = ask(server)
            assert said["output_ids"] == plain[0]["output_ids"], tier
            assert said["meta_info"]["spec_verify_ct"] <= 39 / 2, tier
            found = said["meta_info"]["cached_tokens_details"]
            assert tier == "none" or found[tier] == WHOLE
            if tier == "device":
                server.flush()
        assert differences(battery(server), plain[1], TOLERANCE) == []
        metrics = server.metrics()
        assert metrics['sglang:spec_verifications_total{tier="storage"}'] > 0
        assert server.stop() == 0
