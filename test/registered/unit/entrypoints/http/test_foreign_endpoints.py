"""Endpoints that SGLang has and this engine lacks are refused by name, with a remedy."""

from __future__ import annotations

import httpx
import pytest

from sglang.srt.entrypoints.http.foreign_endpoints import FOREIGN_ENDPOINTS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("POST", "/update_weights_from_disk", "start a server with the other checkpoint"),
        ("POST", "/parse_function_call", "/v1/chat/completions, with --tool-call-parser"),
        ("GET", "/weight_version", "GET /model_info has it"),
        ("POST", "/set_internal_state", "start the server with the flags"),
        ("POST", "/freeze_gc", "leave it out"),
        ("POST", "/generate_from_file", "send the text to /generate"),
        ("POST", "/vertex_generate", "use /generate"),
        ("GET", "/health_scheduler", "probe /health, or /health_generate"),
        ("POST", "/v1/score", "use a server of a model that"),
        ("GET", "/v1/responses/resp_1", "send the whole conversation"),
        ("DELETE", "/v1/conversations", "send them whole"),
    ],
)
def test_endpoints_of_sglang_are_refused_by_name(
    client: httpx.Client, method: str, path: str, remedy: str
) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 501
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{method} {path}: SGLang has it, this engine does not: ")
    assert remedy in message


def test_no_endpoint_of_this_engine_is_among_those_of_sglang_alone(client: httpx.Client) -> None:
    assert not client.get("/openapi.json").json()["paths"].keys() & FOREIGN_ENDPOINTS.keys()
