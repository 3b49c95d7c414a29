"""`/openapi.json` names every endpoint, and requests made from it get the promised answers."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from rigs.servers.fake_engine import FrontServer, front_server
from rigs.servers.openapi_fuzz import judge_api
from sglang.srt.entrypoints.http.application import Application
from sglang.srt.entrypoints.http.body import Refused, marks_of
from sglang.srt.entrypoints.openai.protocol import ChatBody
from sglang.srt.entrypoints.openapi import BODIES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-b-test-cpu")

EXAMPLES = 2


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with front_server(api_key="secret", enable_metrics=True) as running:
        yield running


def test_every_endpoint_is_described(server: FrontServer) -> None:
    reply = httpx.get(f"{server.url}/openapi.json", headers={"x-api-key": "secret"})
    document = reply.json()
    app = server.server.app
    assert isinstance(app, Application)
    routes = app.routes
    for route in routes:
        operations = document["paths"][route.path]
        for method in route.methods - {"HEAD"}:
            operation = operations[method.lower()]
            assert operation["summary"].endswith("."), route.path
            assert ("requestBody" in operation) == (route.endpoint in BODIES), route.path
    described = sum(len(operations) for operations in document["paths"].values())
    assert described == sum(len(route.methods - {"HEAD"}) for route in routes)
    assert "security" not in document["paths"]["/health"]["get"]
    assert document["paths"]["/generate"]["post"]["security"] == [{"bearer": []}, {"apiKey": []}]
    # Endpoints that read a body are in the table of bodies.
    readers = [route for route in routes if "read_json" in route.endpoint.__code__.co_names]
    assert len(readers) >= 10
    assert {route.endpoint for route in readers} == BODIES.keys()


def test_schemas_have_what_is_acted_on_or_accepted(server: FrontServer) -> None:
    headers = {"authorization": "Bearer secret"}
    schemas = httpx.get(f"{server.url}/openapi.json", headers=headers).json()["components"]
    chat = schemas["schemas"]["ChatBody"]
    marks = marks_of(ChatBody)
    refused = {name for name, mark in marks.items() if isinstance(mark, Refused)}
    assert refused and not refused & chat["properties"].keys()
    assert chat["additionalProperties"] is False
    assert chat["properties"]["prediction"]["description"].startswith("No effect")
    assert "description" not in chat["properties"]["messages"]


def test_answers_to_generated_requests(server: FrontServer) -> None:
    seen = judge_api(server.url, "secret", EXAMPLES, derandomize=True)
    assert len(seen) >= 30
    assert 200 in seen["GET /v1/models"]
    assert 400 in seen["POST /v1/chat/completions"]
