"""Agents behind the real router, which adds fields to their requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import httpx
import openai
import pytest

from rigs.disaggregation.pd_servers import ROUTER
from rigs.servers.fake_engine import LAST_MESSAGE, FrontServer, front_server, write_template
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.srt.utils.process import kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-b-test-cpu")

KIMI_CALL: Final = (
    "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|>"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontServer]:
    template = write_template(tmp_path_factory.mktemp("last"), LAST_MESSAGE)
    with front_server(chat_template=template, tool_call_parser="kimi_k2") as running:
        yield running


def accepts(url: str) -> bool:
    try:
        answer = httpx.get(f"{url}/readiness", timeout=5)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


@pytest.fixture(scope="module")
def client(
    server: FrontServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """A client of the router."""
    port = get_free_port()
    command = [sys.executable, "-m", f"{ROUTER}.launch_router", "--port", str(port)]
    command += ["--worker-urls", server.url, "--prometheus-port", str(get_free_port())]
    folder = tmp_path_factory.mktemp("router")
    with (folder / "log").open("w+") as log:
        router = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            assert wait_until(lambda: accepts(url), 60), (folder / "log").read_text()
            with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as made:
                yield made
        finally:
            kill_process_tree(router.pid)
            router.wait()


def tool(name: str) -> Any:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("fields", [{}, {"store": True}, {"store": False}])
def test_responses_pass(server: FrontServer, client: openai.OpenAI, fields: dict[str, Any]) -> None:
    reply = client.responses.create(model="echo", input="abc", **fields)
    assert (reply.output_text, reply.status, reply.store) == ("abc", "completed", False)
    params = server.requests[-1].sampling_params
    assert (params.top_k, params.min_p, params.repetition_penalty) == (-1, 0.0, 1.0)


def test_a_stream_and_fields_of_sglang(server: FrontServer, client: openai.OpenAI) -> None:
    more = {"request_id": "mine", "stop": ["c"], "top_k": 7, "frequency_penalty": 0.5}
    events = [
        *client.responses.create(
            model="echo", input="abc", stream=True, text={"verbosity": "low"}, extra_body=more
        )
    ]
    done = events[-1]
    assert done.type == "response.completed"
    assert (done.response.id, done.response.output_text) == ("mine", "ab")
    request = server.requests[-1]
    assert (request.rid, request.sampling_params.top_k) == ("mine", 7)
    assert request.sampling_params.frequency_penalty == 0.5


def test_an_earlier_response_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        client.responses.create(model="echo", input="abc", previous_response_id="resp_1")


def test_calls_between_special_tokens_are_found(client: openai.OpenAI) -> None:
    """The router adds `skip_special_tokens: true` to chats, which would remove the markers."""
    [call] = client.responses.create(model="echo", input=KIMI_CALL, tools=[tool("f")]).output
    assert call.type == "function_call"
    function = {name: value for name, value in tool("f").items() if name != "type"}
    reply = client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": KIMI_CALL}],
        tools=[{"type": "function", "function": function}],
    )
    assert reply.choices[0].finish_reason == "tool_calls"
