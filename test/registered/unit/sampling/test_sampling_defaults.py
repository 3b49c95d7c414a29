"""The checkpoint's sampling values are the defaults of all endpoints that generate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from rigs.servers.fake_engine import FrontServer, front_server
from sglang.srt.configs.generation_config import SamplingDefaults
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

VALUES: Final = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.05,
}
MESSAGES: Final = [{"role": "user", "content": "hi"}]
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}
ENDPOINTS: Final = pytest.mark.parametrize("path", list(BODIES))


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with front_server() as running:
        running.context.sampling_defaults = SamplingDefaults(values=VALUES, source="a test")
        yield running


def sampling_of(server: FrontServer, path: str, **more: Any) -> tuple[SamplingParams, Any]:
    """The parameters that the engine got, and the answer."""
    body = {**BODIES[path]}
    if path == "/generate":
        body["sampling_params"] = {**body["sampling_params"], **more}
    else:
        body |= more
    reply = httpx.post(server.url + path, json=body)
    assert reply.status_code == 200, reply.text
    [*_, last] = server.requests
    return last.sampling_params, reply.json()


def values_of(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in VALUES}


@ENDPOINTS
def test_a_request_without_values_gets_those_of_the_model(server: FrontServer, path: str) -> None:
    params, answer = sampling_of(server, path)
    assert values_of(params) == VALUES
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.9)


@ENDPOINTS
def test_a_value_of_the_request_counts(server: FrontServer, path: str) -> None:
    params, _ = sampling_of(server, path, temperature=1.0, top_p=1.0)
    assert values_of(params) == {**VALUES, "temperature": 1.0, "top_p": 1.0}
    params, _ = sampling_of(server, path, temperature=0)
    assert params.is_greedy
    params, _ = sampling_of(server, path, temperature=None)
    assert values_of(params) == VALUES


@ENDPOINTS
def test_without_defaults_the_engine_samples_from_all(path: str) -> None:
    with front_server() as plain:
        assert values_of(sampling_of(plain, path)[0]) == values_of(SamplingParams())


def test_server_info_says_which_hold(server: FrontServer) -> None:
    info = httpx.get(f"{server.url}/server_info").json()
    assert (info["sampling_defaults"], info["default_sampling_params"]) == ("model", VALUES)


def test_a_batchs_parameters_win(server: FrontServer) -> None:
    body = {"text": ["a", "b"], "sampling_params": [{"top_k": 3}, {"min_p": 0}]}
    assert httpx.post(f"{server.url}/generate", json=body).status_code == 200
    first, second = (values_of(one.sampling_params) for one in server.requests[-2:])
    assert (first, second) == ({**VALUES, "top_k": 3}, {**VALUES, "min_p": 0.0})


def test_a_probe_is_greedy_without_penalties(server: FrontServer) -> None:
    assert httpx.get(f"{server.url}/health_generate").status_code == 200
    [*_, last] = server.requests
    assert last.sampling_params.is_greedy and not last.sampling_params.has_penalties
