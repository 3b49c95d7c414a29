"""Fields of bodies: acted on, accepted without effect, or refused."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from anthropic.resources.messages import Messages
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.responses import Responses
from openai.types import chat
from openai.types.chat import completion_create_params

from rigs.servers.fake_engine import byte_tokenizer
from sglang.srt.entrypoints.anthropic.protocol import CountTokensBody, MessagesBody
from sglang.srt.entrypoints.anthropic.protocol import chat_body as chat_of_messages
from sglang.srt.entrypoints.http.body import (
    NOTHING,
    Ignored,
    Refused,
    decode_body,
    is_neutral,
    marks_of,
)
from sglang.srt.entrypoints.http.errors import ApiError
from sglang.srt.entrypoints.native_protocol import SAMPLING_MARKS, GenerateBody
from sglang.srt.entrypoints.native_protocol import to_requests as generate_requests
from sglang.srt.entrypoints.openai.chat_prompt import chat_prompt
from sglang.srt.entrypoints.openai.protocol import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    StreamOptions,
    check_common,
)
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesBody
from sglang.srt.entrypoints.openai.responses_protocol import chat_body as chat_of_responses
from sglang.srt.entrypoints.openai.serving_completions import to_requests as completion_requests
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

REPO: Final = Path(__file__).resolve().parents[4]
HELLO: Final = {"role": "user", "content": "hi"}

GENERATE_FIELDS: Final = """
    text input_ids input_embeds image_data video_data audio_data sampling_params rid
    return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs
    stream log_metrics modalities session_params lora_path lora_id custom_logit_processor
    return_hidden_states return_routed_experts background bootstrap_host bootstrap_port
    bootstrap_room bootstrap_pair_key require_reasoning data_parallel_rank routed_dp_rank
    disagg_prefill_dp_rank conversation_id priority extra_key cache_salt routing_key no_logs
    custom_labels return_bytes return_entropy max_dynamic_patch min_dynamic_patch
    image_max_dynamic_patch video_max_dynamic_patch use_audio_in_video external_trace_header
    return_prompt_token_ids model stream_options storage_checkpoint storage_checkpoint_dependency
    routed_experts_start_len
"""
"""Fields that SGLang's clients, benchmarks and router send to `/generate`."""
SAMPLING_FIELDS: Final = """
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag
    ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params
    stream_interval logit_bias sampling_seed
"""
BOTH_FIELDS: Final = """
    top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim
    ignore_eos skip_special_tokens lora_path session_params response_format custom_params
    custom_logit_processor return_hidden_states return_routed_experts return_cached_tokens_details
    return_token_ids bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank
    disagg_prefill_dp_rank rid extra_key cache_salt priority custom_labels log_metrics no_logs
    sampling_seed routing_key
"""
"""SGLang's fields beside OpenAI's, in completions and chats; its router forwards them."""
CHAT_FIELDS: Final = """
    continue_final_message separate_reasoning stream_reasoning chat_template_kwargs reasoning_effort
    return_prompt_token_ids return_meta_info use_audio_in_video input_ids
"""
MESSAGE_TYPES: Final = (
    chat.ChatCompletionAssistantMessageParam,
    chat.ChatCompletionDeveloperMessageParam,
    chat.ChatCompletionSystemMessageParam,
    chat.ChatCompletionToolMessageParam,
    chat.ChatCompletionUserMessageParam,
)


def parameters(create: Callable[..., Any]) -> set[str]:
    """Body fields in the signature of a call of the `openai` client."""
    beside = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    return set(inspect.signature(create).parameters) - beside


def known(kind: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


def test_the_page_has_the_fields_of_the_bodies() -> None:
    updated = runpy.run_path(str(REPO / "scripts" / "update_api.py"))["updated"]
    page = (REPO / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == updated(page), "run scripts/update_api.py"


def test_every_field_that_clients_send_is_known() -> None:
    assert set(GENERATE_FIELDS.split()) <= known(GenerateBody)
    sampling = known(SamplingParams) | SAMPLING_MARKS.keys() | {"no_stop_trim"}
    assert set(SAMPLING_FIELDS.split()) <= sampling
    both = set(BOTH_FIELDS.split())
    assert both | parameters(Completions.create) <= known(CompletionBody)
    wanted = both | set(CHAT_FIELDS.split()) | parameters(ChatCompletions.create)
    assert wanted <= known(ChatBody)
    assert parameters(Responses.create) <= known(ResponsesBody)
    assert parameters(Messages.create) <= known(MessagesBody)
    # The client sends `output_format` as a part of `output_config`.
    assert parameters(Messages.count_tokens) - {"output_format"} <= known(CountTokensBody)
    streaming = completion_create_params.CompletionCreateParamsStreaming
    assert set(streaming.__annotations__) <= known(ChatBody)
    assert set(chat.ChatCompletionStreamOptionsParam.__annotations__) <= known(StreamOptions)
    for kind in MESSAGE_TYPES:
        assert set(kind.__annotations__) <= known(ChatMessage)


def generate(**more: Any) -> list[GenerateRequest]:
    body = {"text": "a", "rid": "r", **more}
    return generate_requests(decode_body(msgspec.json.encode(body), GenerateBody))[0]


def sampling(**more: Any) -> list[GenerateRequest]:
    return generate(sampling_params=more)


def complete(**more: Any) -> list[GenerateRequest]:
    body = {"prompt": "a", "rid": "r", **more}
    return completion_requests(decode_body(msgspec.json.encode(body), CompletionBody))


def prompt_of(message: Mapping[str, Any], **more: Any) -> str:
    body = {"messages": [message], **more}
    decoded = decode_body(msgspec.json.encode(body), ChatBody)
    check_common(decoded)
    return chat_prompt(decoded, plain_template(), None, 100)


@cache
def plain_template() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(), None)


def ask(**more: Any) -> str:
    return prompt_of(HELLO, **more)


def say(**more: Any) -> str:
    return prompt_of({**HELLO, **more})


def respond(**more: Any) -> ChatBody:
    return chat_of_responses(
        decode_body(msgspec.json.encode({"input": "a", **more}), ResponsesBody)
    )


def message(**more: Any) -> ChatBody:
    body = {"messages": [HELLO], "max_tokens": 1, **more}
    return chat_of_messages(decode_body(msgspec.json.encode(body), MessagesBody))


Ask = Callable[..., Any]
PLACES: Final[list[tuple[Ask, Mapping[str, Ignored | Refused]]]] = [
    (generate, marks_of(GenerateBody)),
    (sampling, SAMPLING_MARKS),
    (complete, marks_of(CompletionBody)),
    (ask, marks_of(ChatBody)),
    (say, marks_of(ChatMessage)),
    (respond, marks_of(ResponsesBody)),
    (message, marks_of(MessagesBody)),
]
REFUSED: Final = [
    pytest.param(call, name, mark, id=f"{call.__name__}-{name}")
    for call, marks in PLACES
    for name, mark in marks.items()
    if isinstance(mark, Refused)
]
IGNORED: Final = [
    pytest.param(call, name, id=f"{call.__name__}-{name}")
    for call, marks in PLACES
    for name, mark in marks.items()
    if isinstance(mark, Ignored)
]
VALUES: Final = ("x", 3, True, {"a": "b"}, [3])
"""At least one of these fits each field's type, and asks for something."""


@pytest.mark.parametrize(("call", "name", "mark"), REFUSED)
def test_a_refused_field_is_named_with_its_remedy(call: Ask, name: str, mark: Refused) -> None:
    for value in VALUES:
        if value in mark.neutral:
            continue
        with pytest.raises(ApiError) as caught:
            call(**{name: value})
        assert caught.value.status == 400
        assert f"{name} is not supported: {mark.remedy}" in caught.value.message
        assert str(caught.value.param).endswith(name)


@pytest.mark.parametrize(("call", "name", "mark"), REFUSED)
def test_a_value_that_asks_for_nothing_is_accepted(call: Ask, name: str, mark: Refused) -> None:
    plain = call()
    for value in (*mark.neutral, None, [mark.neutral[0]] if mark.neutral else None):
        assert call(**{name: value}) == plain


@pytest.mark.parametrize(("call", "name"), IGNORED)
def test_a_field_without_effect_changes_no_request(call: Ask, name: str) -> None:
    plain = call()
    fitting = 0
    for value in VALUES:
        try:
            answer = call(**{name: value})
        except ApiError as error:
            if "expected" not in error.message:  # the value is of another type
                raise
            continue
        assert answer == plain
        fitting += 1
    assert fitting


def test_only_lists_of_values_that_ask_for_nothing_are_accepted() -> None:
    assert generate(text=["a", "b"], rid=None, lora_path=[None, ""])
    for value in ([None, "x"], [[None]], [False] * 2000):
        with pytest.raises(ApiError, match="lora_path"):
            generate(lora_path=value)


def test_values_of_other_types_are_no_neutral_ones() -> None:
    assert is_neutral(0, (*NOTHING, 0))
    for value in (0.0, 1, "0"):
        assert not is_neutral(value, (*NOTHING, 0))
    with pytest.raises(ApiError, match="lora_path"):
        generate(lora_path=0)
    assert NOTHING[0] is None


@pytest.mark.parametrize("field", ["routed_dp_rank", "data_parallel_rank"])
def test_a_body_names_one_group_for_all_its_prompts(field: str) -> None:
    wrongs: tuple[Any, ...] = (True, 1.5, "1", [1], {})
    for call in (generate, complete):
        assert call()[0].dp_rank is None
        assert call(**{field: None})[0].dp_rank is None
        assert call(**{field: 0})[0].dp_rank == 0
        assert call(**{field: -(10**30)})[0].dp_rank == -(10**30), "`check_request` knows the range"
        for wrong in wrongs:
            with pytest.raises(ApiError, match=f"^{field}"):
                call(**{field: wrong})
    for wrong in wrongs:
        body = GenerateBody(text="a")
        setattr(body, field, wrong)
        with pytest.raises(ApiError, match=f"^{field} must be a number"):
            generate_requests(body)
    several = generate(text=["a", "b"], sampling_params={"n": 2}, **{field: 3})
    assert [one.dp_rank for one in several] == [3] * 4
    with pytest.raises(ApiError, match="differ"):
        generate(routed_dp_rank=0, data_parallel_rank=1)
    assert generate(routed_dp_rank=1, data_parallel_rank=1)[0].dp_rank == 1


@pytest.mark.parametrize(
    ("call", "name", "words"),
    [
        (generate, "temperature", "put it into sampling_params"),
        (generate, "max_tokens", "put max_new_tokens into sampling_params"),
        (generate, "messages", "/v1/chat/completions"),
        (generate, "lora_paths", "did you mean lora_path"),
        (ask, "max_new_tokens", "send max_tokens"),
        (complete, "sampling_params", "beside the others"),
        (complete, "zzz", "leave it out"),
        (respond, "messages", "send them as input"),
        (message, "stop", "send stop_sequences"),
    ],
)
def test_an_unknown_field_is_told_where_it_belongs(call: Ask, name: str, words: str) -> None:
    with pytest.raises(ApiError, match=f"{name}: unknown field; .*{words}"):
        call(**{name: 1})


def test_the_thinking_of_an_earlier_answer_has_two_names() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template

    def shown(**thinking: Any) -> str:
        body = ChatBody(messages=[ChatMessage(role="assistant", content="b", **thinking)])
        return chat_prompt(body, ChatTemplate(tokenizer, None), None, 100)

    assert shown(reasoning_content="a") == shown(reasoning="a") == "ab"
    assert shown(reasoning="x", reasoning_content="a") == "ab"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "--"),
        ({"reasoning_effort": "low"}, "low--"),
        ({"reasoning_effort": "none"}, "none-False-False"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "none-True-False",
        ),
    ],
)
def test_no_effort_switches_thinking_off(fields: dict[str, Any], words: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ reasoning_effort }}-{{ enable_thinking }}-{{ thinking }}"
    body = ChatBody(messages=[ChatMessage(role="user", content="a")], **fields)
    assert chat_prompt(body, ChatTemplate(tokenizer, None), None, 100) == words
