"""A real server and the real `openai` client: what is constrained always parses, however random
the sampling; samples, prompt logprobs and limits beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer, spawn_compile_processes
from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-b-test-cpu")

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "home": {"$ref": "#/$defs/home"},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "boolean"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
STOP: Any = {"type": "function", "function": {"name": "stop"}}
ASK: Any = [{"role": "user", "content": "The code of heron is 7391. Who is it?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    template: Path = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    with ForkedServer(
        "--chat-template", str(template), "--enable-cache-report", "--page-size", "8",
        "--chunked-prefill-size", "64", "--max-queued-requests", "64",
        "--tool-call-parser", "auto", *EXACT,
        in_rank=spawn_compile_processes,
    ) as running:  # fmt: skip
        yield running
        before = compile_processes(running)
        assert running.stop() == 0
        assert wait_until(lambda: not any(map(is_alive, before)), 30)


@pytest.fixture(scope="module")
def client(server: EngineServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def compile_processes(server: EngineServer) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "compile_process" in " ".join(child.cmdline())]


def test_constraints_are_compiled_in_a_process_of_their_own(server: EngineServer) -> None:
    """One that ends with the server: the fixture sees to that."""
    sampling = {"regex": "[0-9]{4}", "max_new_tokens": 8}
    reply = server.request("POST", "/generate", {"text": "x", "sampling_params": sampling})
    assert re.fullmatch("[0-9]{4}", reply.body["text"])
    assert compile_processes(server)


def assert_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags", "home"]
    assert 1 <= len(value["name"]) <= 8
    assert 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"a", "b"}
    assert isinstance(value["home"]["zip"], bool)


def test_a_schema_holds_under_random_sampling(client: openai.OpenAI) -> None:
    response_format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": PERSON},
    }
    texts = set()
    reply = client.chat.completions.create(
        model="any", messages=ASK, temperature=1.0, seed=0, n=8,
        response_format=response_format, max_tokens=1500,
    )  # fmt: skip
    assert len(reply.choices) == 8
    for choice in reply.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.content is not None
        assert_person(choice.message.content)
        texts.add(choice.message.content)
    assert len(texts) >= 6, "samples differ"


def test_streamed_and_whole_are_the_same(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "any", "prompt": "x", "temperature": 1.0, "seed": 4, "max_tokens": 40,
        "extra_body": {"regex": "([a-z]{3}-){2}[0-9]{4}"},
    }  # fmt: skip
    whole = client.completions.create(**fields).choices[0].text
    assert re.fullmatch("([a-z]{3}-){2}[0-9]{4}", whole)
    chunks = client.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_a_call_that_must_be_made_always_parses(client: openai.OpenAI) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": "look_up", "parameters": {
            "type": "object", "properties": {"bird": {"enum": ["heron", "owl"]}},
            "required": ["bird"], "additionalProperties": False}}},
        STOP,
    ]  # fmt: skip
    names: set[str] = set()
    # Which tool a seed draws depends on the CPU's rounding.
    for seed in range(25):
        if len(names) == 2:
            break
        reply = client.chat.completions.create(
            model="any", messages=ASK, tools=tools, tool_choice="required", temperature=1.0,
            seed=seed, n=8, max_tokens=1000,
        )  # fmt: skip
        for choice in reply.choices:
            assert choice.finish_reason == "tool_calls"
            [call] = choice.message.tool_calls or []
            assert call.type == "function"
            arguments = json.loads(call.function.arguments)
            if call.function.name == "look_up":
                assert arguments["bird"] in ("heron", "owl")
            else:
                assert (call.function.name, arguments) == ("stop", {})
            names.add(call.function.name)
    assert names == {"look_up", "stop"}


def test_the_parser_of_calls_is_the_templates(server: EngineServer, client: openai.OpenAI) -> None:
    assert server.request("GET", "/server_info").body["tool_call_parser"] == "qwen25"
    free = client.chat.completions.create(model="any", messages=ASK, tools=[STOP], max_tokens=1)
    assert free.choices[0].finish_reason in ("length", "stop")


def test_whitespace_in_json_is_forbidden_by_a_flag(server: EngineServer) -> None:
    """The same request, to a model that likes line breaks, with the flag and without."""
    blanks = server.request("POST", "/v1/tokenize", {"prompt": ["a\nb", "a  b"]}).body["tokens"]
    likes = {str(token): 20.0 for tokens in blanks for token in tokens[1:-1]}
    body = {
        "text": "x",
        "sampling_params": {
            "temperature": 1.0, "sampling_seed": 3, "max_new_tokens": 900, "logit_bias": likes,
            "json_schema": json.dumps({"type": "array", "items": {"enum": [1, 2]}, "minItems": 2,
                                       "maxItems": 5}),
        },
    }  # fmt: skip
    free = server.request("POST", "/generate", body).body["text"]
    with ForkedServer("--constrained-json-disable-any-whitespace") as strict:
        plain = strict.request("POST", "/generate", body).body["text"]
    assert plain == json.dumps(json.loads(plain))
    assert len(free) > len(json.dumps(json.loads(free)))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"regex": "("}, "regex"),
        ({"ebnf": "root ::= nowhere"}, "ebnf"),
        ({"json_schema": '{"not": {}}'}, "json_schema"),
        ({"json_schema": "{}", "regex": "a"}, "regex"),
    ],
)
def test_a_bad_constraint_is_the_clients(
    server: EngineServer, params: dict[str, str], field: str
) -> None:
    reply = server.request("POST", "/generate", {"text": "x", "sampling_params": params})
    assert reply.status == 400
    assert field in reply.body["error"]["message"]
    assert reply.body["error"]["param"] is not None


def test_prompt_logprobs_are_what_generating_said(server: EngineServer) -> None:
    ids = server.generate("The code of heron is 7391. The code of owl is 1200. " * 8, 1)
    text = "The code of heron is 7391. The code of owl is 1200. " * 8
    tokens = server.request("POST", "/v1/tokenize", {"prompt": text}).body["tokens"]
    assert ids.meta_info["prompt_tokens"] == len(tokens)
    first = server.generate(
        tokens, 12, {"ignore_eos": True}, return_logprob=True, top_logprobs_num=2
    )
    said = [value for value, _, _ in first.meta_info["output_token_logprobs"]]
    start = len(tokens) - 1
    again = server.generate(
        tokens + first.output_ids, 1, return_logprob=True, logprob_start_len=start,
        top_logprobs_num=2,
    )  # fmt: skip
    inputs = again.meta_info["input_token_logprobs"]
    assert inputs[0] == [None, tokens[-1], None]
    assert [entry[1] for entry in inputs[1:]] == first.output_ids
    assert [entry[0] for entry in inputs[1:]] == pytest.approx(said, abs=1e-4)
    assert again.meta_info["cached_tokens"] == start // 8 * 8
    tops = again.meta_info["input_top_logprobs"]
    assert tops[0] is None
    assert [row[0][1] for row in tops[1:]] == first.output_ids, "greedy"


def test_samples_share_their_prompt(server: EngineServer) -> None:
    body = {
        "text": "one prompt for all of its samples, and long enough for some pages " * 4,
        "sampling_params": {"n": 3, "max_new_tokens": 4, "temperature": 1, "sampling_seed": 1},
    }
    answers = server.request("POST", "/generate", body).body
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    prompt_tokens = answers[0]["meta_info"]["prompt_tokens"]
    assert cached[0] == 0
    assert cached[1:] == [(prompt_tokens - 1) // 8 * 8] * 2
    again = server.request("POST", "/generate", body).body
    assert [one["output_ids"] for one in again] == [one["output_ids"] for one in answers]


def test_more_outputs_than_ever_may_wait_are_refused_by_name(server: EngineServer) -> None:
    reply = server.request(
        "POST",
        "/generate",
        {"text": ["x"] * 1000, "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}},
    )
    assert reply.status == 400, "another try would not help"
    assert "at most 64 may wait (--max-queued-requests)" in reply.body["error"]["message"]
    server.flush()
    assert server.generate("x", 1).output_ids, "and the server goes on"


TAG: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<age>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer", "maximum": 99}},
        "end": "</age>",
    },
}


def test_structural_tags_in_every_place_they_may_be_in(
    server: EngineServer, client: openai.OpenAI
) -> None:
    wanted = re.compile(r"<age>\s*-?\d+\s*</age>")
    chat = client.chat.completions.create(
        model="x",
        messages=ASK,
        max_tokens=80,
        seed=1,
        response_format=TAG,
    )
    assert wanted.fullmatch(chat.choices[0].message.content)
    reply = server.request(
        "POST",
        "/generate",
        {"text": "a", "sampling_params": {"structural_tag": json.dumps(TAG), "max_new_tokens": 80}},
    )
    assert wanted.fullmatch(reply.body["text"]), reply
    with pytest.raises(openai.BadRequestError, match="response_format: give format"):
        client.chat.completions.create(
            model="x",
            messages=ASK,
            response_format={"type": "structural_tag"},
        )
