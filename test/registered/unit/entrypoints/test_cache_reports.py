"""`return_cache_report` on each endpoint: whole and streamed, of one output and of several."""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
import pytest

from rigs.servers.fake_engine import FrontServer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

SHOWN: Final[dict[str, Any]] = {
    "prompt_tokens": 5,
    "on_arrival": 1,
    "found": {"device": 1, "host": 0, "storage": 2},
    "used": {"device": 1, "host": 0, "storage": 2},
    "cuts": [{"tier": "storage", "at": 3, "reason": "damaged"}],
}
OPENAI: Final = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
}


def answers(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer, or the events of a stream."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        answer = response.json()
        return answer if isinstance(answer, list) else [answer]
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [json.loads(line) for line in lines[:-1]]


TIMES: Final = {
    "queue": 0.5, "l3_wait": 0.25, "prefill": 0.125, "transfer": None, "decode": 1.0,
}  # fmt: skip
AGENTS: Final = {
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
}


def reports_of(got: list[dict[str, Any]]) -> list[Any]:
    """Reports of OpenAI's answers or chunks, without the prompt's length: templates change it."""
    found = [one["sglext"]["cache_report"] for one in got if "sglext" in one]
    flat = [report for one in found for report in (one if isinstance(one, list) else [one])]
    return [{key: report[key] for key in report if key != "prompt_tokens"} for report in flat]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_generate_reports_when_asked(client: httpx.Client, stream: bool, n: int) -> None:
    sampling = {"max_new_tokens": 3, "n": n}
    body = {"text": "hello", "sampling_params": sampling, "stream": stream}
    for one in answers(client, "/generate", body):
        assert "cache_report" not in one["meta_info"]
    got = answers(client, "/generate", {**body, "return_cache_report": True})
    metas = [one["meta_info"] for one in got]
    assert all(("cache_report" in meta) == (meta["finish_reason"] is not None) for meta in metas), (
        "only the last event has it"
    )
    assert [meta["cache_report"] for meta in metas if "cache_report" in meta] == [SHOWN] * n
    assert [meta["stages"] for meta in metas if "stages" in meta] == [TIMES] * n


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_openai_reports_when_asked(client: httpx.Client, path: str, stream: bool, n: int) -> None:
    body = {**OPENAI[path], "stream": stream, "n": n}
    assert not any("sglext" in one for one in answers(client, path, body))
    got = answers(client, path, {**body, "return_cache_report": True})
    expected = {key: SHOWN[key] for key in SHOWN if key != "prompt_tokens"}
    assert reports_of(got) == [expected] * n
    times = [one["sglext"]["stages"] for one in got if "sglext" in one]
    assert times in ([TIMES] * n, [[TIMES] * n])
    if n > 1 and not stream:
        assert isinstance(got[0]["sglext"]["cache_report"], list)


@pytest.mark.parametrize("path", AGENTS)
@pytest.mark.parametrize("stream", [False, True])
def test_agents_get_report_and_times_when_asked(
    client: httpx.Client, path: str, stream: bool
) -> None:
    body = {**AGENTS[path], "stream": stream}
    assert "sglext" not in client.post(path, json=body).text
    response = client.post(path, json={**body, "return_cache_report": True})
    if stream:
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        assert [("sglext" in event) for event in events].count(True) == 1, "the last that has text"
        (last,) = (json.loads(event) for event in events if "sglext" in event)
        found = last.get("response", last)["sglext"]
    else:
        found = response.json()["sglext"]
    assert found["stages"] == TIMES
    assert {**found["cache_report"], "prompt_tokens": 5} == SHOWN


def test_both_extensions_are_answered_at_once(client: httpx.Client) -> None:
    asked = {"return_cache_report": True, "return_cached_tokens_details": True}
    (got,) = answers(client, "/v1/completions", {**OPENAI["/v1/completions"], **asked})
    assert got["sglext"]["cache_report"] == SHOWN
    assert got["sglext"]["cached_tokens_details"]["storage"] == 2


def test_the_field_is_checked_and_passed_on(client: httpx.Client, server: FrontServer) -> None:
    response = client.post("/generate", json={"text": "a", "return_cache_report": "yes"})
    assert response.status_code == 400
    assert "return_cache_report" in response.json()["error"]["message"]
    answers(client, "/generate", {"text": "a", "return_cache_report": True})
    assert server.requests[-1].return_cache_report
