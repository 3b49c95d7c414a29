"""Row F1 for minutes: ten thousand nearly valid bodies, different ones in each run."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from rigs.servers.engine_server import EngineServer
from rigs.servers.http_fuzz import FuzzedRequest, fuzzed_requests, judge
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=180, suite="nightly-test-cpu", nightly=True)


@pytest.mark.timeout(900)
def test_f1_ten_thousand_nearly_valid_bodies_are_answered() -> None:
    with EngineServer() as server, httpx.Client(timeout=30) as client:

        @settings(
            max_examples=10_000,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(fuzzed_requests())
        def ask(request: FuzzedRequest) -> None:
            judge(client, server.url, request)

        ask()
        server.flush()
        assert len(server.generate("name", 2, {"ignore_eos": True}).output_ids) == 2
