"""Requests made from `/openapi.json` by schemathesis, to a real server with the built-in model."""

from __future__ import annotations

import pytest

from rigs.servers.engine_server import ADMIN_KEY, EngineServer
from rigs.servers.openapi_fuzz import judge_api
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=600, suite="nightly-test-cpu", nightly=True)

EXAMPLES = 25


@pytest.mark.timeout(1200)
def test_no_generated_request_makes_the_server_fail() -> None:
    # Few tokens of context: a chat may fill it.
    with EngineServer(
        "--context-length", "128", "--enable-metrics", "--tool-call-parser", "hermes"
    ) as server:
        seen = judge_api(server.url, ADMIN_KEY, EXAMPLES, derandomize=False)
        assert 200 in seen["POST /generate"] | seen["POST /v1/completions"]
        server.flush()
        assert len(server.generate("name", 2, {"ignore_eos": True}).output_ids) == 2
