"""`auto`: the parser that reads the calls of a chat template, and the parser of its reasoning."""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import Any, Final

import pytest

from rigs.harmony_text import TEMPLATE
from rigs.servers.fake_engine import byte_tokenizer
from rigs.written_calls import ALL_WRITERS
from sglang.srt.entrypoints.openai.parser_choice import with_parsers
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.parser.reasoning_parser import AUTO, REASONING_PARSERS
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

CHAT: Final = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>BEGIN{% endif %}"
)
"""A template that shows tools, messages and calls."""
NAME, VALUES = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"


def template(call: str = "", begin: str = "", text: str = CHAT) -> ChatTemplate:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = text.replace("CALL", call).replace("BEGIN", begin)
    return ChatTemplate(tokenizer)


def resolved(made: ChatTemplate, architecture: str, **flags: Any) -> ServerArgs:
    return with_parsers(ServerArgs(**flags).resolve(), made, architecture)


def calls(made: ChatTemplate, architecture: str = "LlamaForCausalLM") -> str | None:
    return resolved(made, architecture, tool_call_parser=AUTO).tool_call_parser


def reasoning(made: ChatTemplate, architecture: str) -> str | None:
    return resolved(made, architecture, reasoning_parser=AUTO).reasoning_parser


@cache
def written(form: str) -> str:
    """A template's text that writes the call of the probe in this form."""
    arguments = {"place": "PLACE", "days": 333}
    text: str = ALL_WRITERS[form](("NAME", arguments))
    text = text.replace("functions.NAME:0", "{{ c.id }}").replace("NAME", NAME)
    text = text.replace(json.dumps(arguments), VALUES).replace("333", VALUE.format("days"))
    return text.replace("PLACE", VALUE.format("place"))


VALUE: Final = "{{{{ c.function.arguments['{}'] }}}}"


@pytest.mark.parametrize("form", ALL_WRITERS)
def test_the_parser_reads_what_the_template_shows(form: str) -> None:
    parser = form.split()[0]
    found = calls(template(written(form), "<think>\n" if parser != "llama3" else ""))
    assert found is not None
    assert TOOL_CALL_PARSERS[found] is TOOL_CALL_PARSERS[parser]


def test_a_bare_call_is_one_only_where_the_answer_begins() -> None:
    bare = '{"name": "' + NAME + '", "parameters": ' + VALUES + "}"
    assert calls(template(bare)) == "llama3"
    with pytest.raises(ValueError, match="--tool-call-parser auto: no parser reads the calls"):
        calls(template("<|tool_call|>" + bare))


def test_joined_arguments_choose_a_parser() -> None:
    call = '{{ \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' + '
    assert calls(template(call + "c.function.arguments + '}</tool_call>' }}")) == "qwen25"


@pytest.mark.parametrize(
    ("architecture", "parser"),
    [
        ("Qwen2ForCausalLM", "qwen25"),
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_coder"),
        ("Glm4MoeForCausalLM", "glm45"),
        ("GlmMoeDsaForCausalLM", "glm47"),
        ("Glm5NextForConditionalGeneration", "glm47"),
        ("DeepseekV4ForCausalLM", "deepseekv4"),
        ("KimiK25ForConditionalGeneration", "kimi_k2"),
        ("MiniMaxM2ForCausalLM", "minimax-m2"),
        ("MistralForCausalLM", "mistral"),
    ],
)
@pytest.mark.parametrize("call", ["", "{{ raise_exception('no calls') }}"])
def test_without_calls_in_the_template_the_architecture_decides(
    architecture: str, parser: str, call: str
) -> None:
    assert calls(template(call), architecture) == parser


@pytest.mark.parametrize(
    ("made", "architecture", "words"),
    [
        (template(text="{{ messages[0].content }}"), "Qwen2ForCausalLM", "the model no tools"),
        (template(), "LlamaForCausalLM", "name one of qwen25, "),
        (template(f"<call>{NAME}</call>"), "Qwen2ForCausalLM", "no parser reads the calls"),
    ],
)
def test_calls_that_nothing_fits_are_refused(
    made: ChatTemplate, architecture: str, words: str
) -> None:
    with pytest.raises(ValueError, match=r"^--tool-call-parser auto: .*leave") as error:
        calls(made, architecture)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("begin", "architecture", "parser"),
    [
        ("{# </think> #}", "Qwen3ForCausalLM", "qwen3"),
        ("<think>\n\n</think>", "Qwen3ForCausalLM", "qwen3"),
        ("<think>\n", "Qwen3NextForCausalLM", "qwen3-thinking"),
        ("</think>", "DeepseekV3ForCausalLM", "deepseek-v3"),
        ("<think>\n", "DeepseekV2ForCausalLM", "deepseek-r1"),
        ("</think>", "DeepseekV4ForCausalLM", "deepseek-v4"),
        ("<think>", "DeepseekV4ForCausalLM", "deepseek-v4"),
        ("{# </think> #}", "Glm4MoeForCausalLM", "glm45"),
        ("<think>", "Glm5NextForConditionalGeneration", "glm45"),
        ("<think>", "KimiK25ForConditionalGeneration", "kimi_k2"),
        ("<think>\n", "MiniMaxM2ForCausalLM", "minimax"),
        ("<think>", "LlamaForCausalLM", "qwen3-thinking"),
    ],
)
def test_a_parser_of_reasoning_is_chosen(begin: str, architecture: str, parser: str) -> None:
    assert reasoning(template(begin=begin), architecture) == parser
    assert parser in REASONING_PARSERS


@pytest.mark.parametrize(
    ("made", "architecture"),
    [
        (template(text=TEMPLATE), "GptOssForCausalLM"),
        (template(text=TEMPLATE), "LlamaForCausalLM"),
        (template(text="{{ tools }}<|channel|>{{ NAME }}"), "LlamaForCausalLM"),
        (template(), "GptOssForCausalLM"),
    ],
)
def test_channels_choose_the_parser_of_both(made: ChatTemplate, architecture: str) -> None:
    assert calls(made, architecture) == reasoning(made, architecture) == "gpt-oss"


def test_a_template_without_reasoning_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--reasoning-parser auto: .*no </think>: leave the flag"):
        reasoning(template(), "Qwen3ForCausalLM")


def test_the_log_says_which(caplog: pytest.LogCaptureFixture) -> None:
    made = template(written("qwen25"), "<think>")
    with caplog.at_level(logging.INFO):
        args = resolved(
            made, "Qwen3ForCausalLM", tool_call_parser=AUTO, reasoning_parser=AUTO, port=30123
        )
    assert (args.tool_call_parser, args.reasoning_parser) == ("qwen25", "qwen3-thinking")
    assert args.port == 30123
    assert caplog.messages == [
        "--tool-call-parser auto: qwen25, which reads the calls that the chat template shows",
        "--reasoning-parser auto: qwen3-thinking, for Qwen3ForCausalLM, whose chat template opens "
        "the reasoning",
    ]


def test_the_parser_of_both_takes_no_other_beside_it() -> None:
    made = template(text=TEMPLATE)
    for flags in (
        {"tool_call_parser": "gpt-oss", "reasoning_parser": "qwen3"},
        {"tool_call_parser": "qwen25", "reasoning_parser": "gpt-oss"},
        {"tool_call_parser": AUTO, "reasoning_parser": "qwen3"},
        {"tool_call_parser": "qwen25", "reasoning_parser": AUTO},
    ):
        with pytest.raises(ValueError, match=r"-parser qwen\d* contradicts --.*gpt-oss.*leave it"):
            resolved(made, "GptOssForCausalLM", **flags)
    both = {"tool_call_parser": AUTO, "reasoning_parser": "gpt-oss"}
    assert resolved(made, "GptOssForCausalLM", **both).tool_call_parser == "gpt-oss"


def test_names_stay_as_they_are() -> None:
    args = ServerArgs(tool_call_parser="glm", reasoning_parser="qwen3").resolve()
    assert with_parsers(args, template(), "LlamaForCausalLM") is args
