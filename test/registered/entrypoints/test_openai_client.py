"""The real `openai` client against a real server, with an echo behind."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from rigs.servers.fake_engine import CONTEXT_LEN, FrontServer, front_server
from sglang.srt.entrypoints.http.body import Refused, marks_of
from sglang.srt.entrypoints.openai.protocol import ChatBody
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-b-test-cpu")

HELLO: Any = [{"role": "user", "content": "hi"}]
PROMPT = "user:hi|assistant:"
"""HELLO as the test's template renders it; the echo answers with it."""


@pytest.fixture(scope="module")
def server() -> Iterator[FrontServer]:
    with front_server(enable_cache_report=True, api_key="secret") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: FrontServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").id == "echo"


def test_other_work_of_openais_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="use a server of a model that") as refusal:
        client.embeddings.create(model="echo", input="hi")
    assert refusal.value.status_code == 501
    with pytest.raises(openai.APIStatusError, match="stores no responses") as refusal:
        client.responses.retrieve("resp_1")
    assert refusal.value.status_code == 501


def test_a_chat_has_a_message_and_usage(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="echo", messages=HELLO, max_completion_tokens=7)
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", PROMPT[:7])
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(PROMPT), 7)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


def test_reasoning_content_is_there_to_be_read(client: openai.OpenAI) -> None:
    """Clients of reasoning models read it without asking whether it is there."""
    reply: Any = client.chat.completions.create(model="echo", messages=HELLO, max_tokens=2)
    assert reply.choices[0].message.reasoning_content is None
    chunks: Any = client.chat.completions.create(
        model="echo", messages=HELLO, max_tokens=2, stream=True
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert len(deltas) >= 3, "role, text, end"
    assert [delta.reasoning_content for delta in deltas] == [None] * len(deltas)


def test_messages_are_tokenized_as_chat_does(client: openai.OpenAI) -> None:
    def tokenize(**body: Any) -> Any:
        return client.post("/tokenize", body=body, cast_to=object)

    got = tokenize(messages=HELLO)
    reply = client.chat.completions.create(model="echo", messages=HELLO, max_tokens=1)
    assert reply.usage is not None
    assert got["count"] == len(got["tokens"]) == reply.usage.prompt_tokens
    assert got["tokens"] == tokenize(prompt=PROMPT, add_special_tokens=False)["tokens"]
    without = tokenize(messages=HELLO, add_generation_prompt=False)
    assert got["tokens"][: without["count"]] == without["tokens"] != got["tokens"]
    wrong: list[dict[str, Any]] = [
        {}, {"messages": HELLO, "prompt": "x"}, {"messages": []},
        {"messages": [{"role": "king", "content": "x"}]}, {"messages": HELLO * (CONTEXT_LEN + 1)},
    ]  # fmt: skip
    for body in wrong:
        with pytest.raises(openai.BadRequestError, match=r"messages|role"):
            tokenize(**body)


def test_idle_loads_count_no_request(client: openai.OpenAI) -> None:
    body: Any = client.get("/loads", cast_to=object)
    assert body["dp_rank_count"] == len(body["loads"]) == 1
    [load] = body["loads"]
    assert (load["dp_rank"], load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0, 0)
    assert load["num_total_tokens"] == body["aggregate"]["total_tokens"]
    assert body["aggregate"]["total_reqs"] == 0


def test_chat_fills_the_context_by_default(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="echo", messages=HELLO)
    assert reply.usage is not None
    assert reply.usage.total_tokens == CONTEXT_LEN


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="echo",
        messages=HELLO,
        max_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    # The client's own `stream` helper glues roles together, if several chunks have one.
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == PROMPT[:7]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_stop_in_a_stream_shows_nothing_of_it(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="echo", messages=HELLO, stop=["hi|as"], stream=True
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "user:"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_logprobs_and_bytes_of_each_token(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    reply: Any = client.chat.completions.create(
        model="echo", messages=HELLO, stream=stream, **options
    )
    choices = [c.choices[0] for c in reply] if stream else [reply.choices[0]]
    content = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
    assert [entry.token for entry in content] == list("use")
    assert [entry.bytes for entry in content] == [[ord(c)] for c in "use"]
    assert len(content[0].top_logprobs) == 2
    assert content[0].top_logprobs[0].logprob == content[0].logprob < 0


def test_chat_messages_reach_the_template(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    reply = client.chat.completions.create(model="echo", messages=messages, max_tokens=46)
    expected = "system:be brief|user:a\nb|assistant:c|user:d|assistant:"
    assert reply.choices[0].message.content == expected[:46]


def test_a_final_message_is_continued(client: openai.OpenAI) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "sure"}]
    reply = client.chat.completions.create(
        model="echo",
        messages=messages,
        max_tokens=22,
        extra_body={"continue_final_message": True},
    )
    assert reply.choices[0].message.content == "user:hi|assistant:sure"


def test_seed_and_sampling_reach_the_scheduler(server: FrontServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="echo",
        messages=HELLO,
        max_tokens=1,
        seed=-5,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"65": 1},
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1},
    )
    message = server.requests[-1]
    params = message.sampling_params
    assert message.seed == -5 & (2**63 - 1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.repetition_penalty, params.min_new_tokens) == (1.1, 1)
    assert params.logit_bias == {"65": 1.0}


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_told_by_tier(client: openai.OpenAI, stream: bool) -> None:
    reply: Any = client.chat.completions.create(
        model="echo",
        messages=HELLO,
        max_tokens=1,
        stream=stream,
        extra_body={"return_cached_tokens_details": True},
    )
    answers = [c for c in reply if getattr(c, "sglext", None)] if stream else [reply]
    details = {"device": 1, "host": 0, "storage": 2, "storage_backend": "HiCacheFile"}
    assert [a.sglext["cached_tokens_details"] for a in answers] == [details]


def test_completions_take_texts_and_ids_alone_and_in_batches(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="echo", prompt="hello")
    assert reply.choices[0].text == ("hello" * 4)[:16]
    assert reply.choices[0].finish_reason == "length"
    many = client.completions.create(model="echo", prompt=["ab", "cd"], max_tokens=2)
    assert [choice.text for choice in many.choices] == ["ab", "cd"]
    assert many.usage is not None
    assert many.usage.total_tokens == 8
    ids = client.completions.create(model="echo", prompt=[[66], [67]], max_tokens=1)
    assert [choice.index for choice in ids.choices] == [0, 1]


def test_streamed_completions_add_up(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="echo",
        prompt=["ab", "cé"],
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = {0: "", 1: ""}
    ends = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason
    assert texts == {0: "aba", 1: "cé"}
    assert ends == {0: "length", 1: "length"}
    assert usage is not None
    assert usage.completion_tokens == 6


def test_a_completion_has_logprobs_and_offsets(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="echo", prompt="abc", max_tokens=3, logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 3
    assert logprobs.top_logprobs is not None
    assert set(logprobs.top_logprobs[0]) >= {"a"}


@pytest.mark.parametrize("name", ["default", "gpt-4o", "meta-llama/Llama-3.1-8B"])
def test_any_model_name_is_served_and_repeated(client: openai.OpenAI, name: str) -> None:
    chat = client.chat.completions.create(model=name, messages=HELLO, max_tokens=2)
    text = client.completions.create(model=name, prompt="hello", max_tokens=2)
    assert chat.model == text.model == name
    assert [model.id for model in client.models.list()] == ["echo"]


def test_errors_are_the_clients_own(server: FrontServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        client.chat.completions.create(model="echo", messages=HELLO, max_tokens=10_000)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError), stranger:
        stranger.models.list()


REFUSED = sorted(name for name, mark in marks_of(ChatBody).items() if isinstance(mark, Refused))


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        client.chat.completions.create(
            model="echo", messages=HELLO, extra_body={field: {"some": "thing"}}
        )


def test_a_response_format_becomes_a_constraint(server: FrontServer, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats: list[tuple[Any, str | None]] = [
        ({"type": "json_object"}, '{"type":"object"}'),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            json.dumps(schema, separators=(",", ":")),
        ),
        ({"type": "text"}, None),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 10**30}}},
            f'{{"const":{10**30}}}',
        ),
    ]
    for response_format, want in formats:
        client.chat.completions.create(
            model="echo", messages=HELLO, max_tokens=1, response_format=response_format
        )
        assert server.requests[-1].sampling_params.json_schema == want
    for wrong in ({"type": "xml"}, {"type": "json_schema"}):
        with pytest.raises(openai.BadRequestError, match="response_format"):
            client.chat.completions.create(
                model="echo",
                messages=HELLO,
                response_format=wrong,
            )


def test_samples_are_choices_in_order(server: FrontServer, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="echo", messages=HELLO, max_tokens=4, n=3, seed=5)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(PROMPT), 12)
    samples = server.requests[-3:]
    assert len({one.seed for one in samples}) == 3
    assert samples[0].seed == 5
    texts: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        model="echo", messages=HELLO, max_tokens=4, n=2, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == {0: PROMPT[:4], 1: PROMPT[:4]}
    many = client.completions.create(model="echo", prompt=["ab", "cd"], max_tokens=2, n=2)
    assert [(c.index, c.text) for c in many.choices] == [(0, "ab"), (1, "ab"), (2, "cd"), (3, "cd")]
    assert many.usage is not None
    assert many.usage.prompt_tokens == 4


def test_echo_says_the_prompt_with_its_logprobs(client: openai.OpenAI) -> None:
    """The byte tokenizer makes the token ids. The logprob of an echoed token is minus its id."""
    plain = client.completions.create(model="echo", prompt="abc", max_tokens=2, echo=True)
    assert plain.choices[0].text == "abcab"
    reply = client.completions.create(
        model="echo", prompt="abc", max_tokens=2, echo=True, logprobs=1, n=2
    )
    for choice in reply.choices:
        assert choice.text == "abcab"
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["a", "b", "c", "a", "b"]
        assert logprobs.text_offset == [0, 1, 2, 3, 4]
        values: Any = logprobs.token_logprobs
        assert values[0] is None
        assert values[1:] == [-65.0, -66.0, -64.0, -65.0]
        tops: Any = logprobs.top_logprobs
        assert tops[:2] == [None, {"b": -65.0}]
    chunks = [
        *client.completions.create(
            model="echo", prompt=[64, 65], max_tokens=2, echo=True, logprobs=0, stream=True
        )
    ]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abab"
    told = [chunk.choices[0].logprobs for chunk in chunks]
    tokens = [token for part in told if part is not None for token in part.tokens or []]
    offsets = [at for part in told if part is not None for at in part.text_offset or []]
    assert (tokens, offsets) == (["a", "b", "a", "b"], [0, 1, 2, 3])


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_where_tokens_are_bytes(
    client: openai.OpenAI, stream: bool
) -> None:
    """The echo of `aé€` takes six tokens, and the answer begins with it again."""
    reply: Any = client.completions.create(
        model="echo", prompt="aé€", max_tokens=8, echo=True, logprobs=0, stream=stream
    )
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
    assert "".join(choice.text for choice in choices) == "aé€aé€a\N{REPLACEMENT CHARACTER}"
    offsets = [at for choice in choices for at in choice.logprobs.text_offset]
    assert offsets == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 6, 7]


# A call that fills in every argument of the client's method.
BOTH_CALLS: dict[str, Any] = {
    "model": "echo", "frequency_penalty": 0.0, "logit_bias": {}, "max_tokens": 4, "n": 1,
    "presence_penalty": 0.0, "seed": 1, "stop": [], "temperature": 1.0, "top_p": 1.0, "user": "u",
    "stream_options": {"include_usage": True},
}  # fmt: skip
COMPLETION_CALL: dict[str, Any] = {
    **BOTH_CALLS, "prompt": "abcd", "best_of": 1, "echo": False, "logprobs": 1, "suffix": "",
}  # fmt: skip
CHAT_CALL: dict[str, Any] = {
    **BOTH_CALLS, "messages": HELLO, "audio": None, "function_call": "none", "functions": [],
    "logprobs": True, "max_completion_tokens": 4, "metadata": {"a": "b"}, "modalities": ["text"],
    "moderation": None, "parallel_tool_calls": True, "prompt_cache_key": "k",
    "prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {"ttl": "30m"},
    "prompt_cache_retention": "in_memory", "reasoning_effort": "low", "safety_identifier": "s",
    "response_format": {"type": "text"}, "service_tier": "auto", "store": False, "tools": [],
    "tool_choice": "auto", "top_logprobs": 1, "verbosity": "medium", "web_search_options": None,
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_every_argument_of_the_clients_calls_may_be_given(
    client: openai.OpenAI, stream: bool
) -> None:
    beside = {"extra_headers", "extra_query", "extra_body", "timeout"}
    calls: list[tuple[Any, dict[str, Any]]] = [
        (client.completions.create, COMPLETION_CALL),
        (client.chat.completions.create, CHAT_CALL),
    ]
    for create, given in calls:
        assert inspect.signature(create).parameters.keys() - beside == {*given, "stream"}
        reply = create(**given, stream=stream)
        usage = [chunk.usage for chunk in reply][-1] if stream else reply.usage
        assert usage.completion_tokens == 4


def test_requests_of_a_benchmark_over_conversations_are_answered(server: FrontServer) -> None:
    """The test sends requests and reads answers like SGLang's own script for conversations."""
    history = "ab"
    for turn in range(3):
        body = {
            "text": history,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True},
            "stream": True,
            "stream_options": {"include_usage": True},
            "lora_path": "",
            "return_logprob": False,
            "logprob_start_len": -1,
        }
        headers = {"Authorization": "Bearer secret"}
        text, last = "", {}
        with httpx.stream("POST", f"{server.url}/generate", json=body, headers=headers) as answer:
            assert answer.status_code == 200
            lines = [line for line in answer.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            event = json.loads(line.removeprefix("data: "))
            assert event["text"].startswith(text)
            text, last = event["text"], event["meta_info"]
        assert (last["prompt_tokens"], last["completion_tokens"]) == (len(history), 3)
        assert last["cached_tokens"] == 3
        history += text + str(turn)


def test_harmless_fields_of_the_router_are_accepted(server: FrontServer) -> None:
    body = {
        "model": "echo",
        "messages": HELLO,
        "max_completion_tokens": 2,
        "no_stop_trim": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "continue_final_message": False,
        "skip_special_tokens": True,
        "ignore_eos": False,
        "return_hidden_states": False,
        "logprobs": False,
        "n": 1,
        "tools": None,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {"a": "b"},
        "stop": None,
    }
    headers = {"Authorization": "Bearer secret"}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == "us"
