"""Earlier tool calls in templates that differ in what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.entrypoints.openai.chat_prompt import chat_prompt
from sglang.srt.entrypoints.openai.protocol import ChatBody, ChatMessage, FunctionCall, ToolCall
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.managers.tokenizer.generate_request import InvalidRequest
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

CALLS = "{% for c in m.tool_calls or [] %}<call>NAME{% endfor %}"
OBJECTS = CALLS.replace("NAME", "{{ c.function.name }} {{ c.function.arguments | tojson }}")
"""A template like Qwen's, which renders arguments as objects."""
TEXTS = CALLS.replace("NAME", "{{ c.function.name + ' ' + c.function.arguments }}")
"""A template like DeepSeek's, which joins strings."""


def render(tmp_path: Path, template: str) -> str:
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}" + template + "{% endfor %}")
    made = ChatTemplate(get_tokenizer(str(BUILTIN_MODEL_DIR)), str(path))
    call = ToolCall(id="c", function=FunctionCall(name="f", arguments='{"x": "é"}'))
    turn = ChatMessage(role="assistant", content=None, tool_calls=[call])
    return chat_prompt(ChatBody(messages=[turn]), made, None, 100)


@pytest.mark.parametrize("template", [OBJECTS, TEXTS])
def test_arguments_are_objects_or_texts_as_the_template_takes_them(
    tmp_path: Path, template: str
) -> None:
    assert render(tmp_path, template) == '<call>f {"x": "é"}'


@pytest.mark.parametrize("template", ["{{ 1 + m.role }}", "{{ 1 + m.role }}" + TEXTS])
def test_other_mistakes_of_a_template_are_told(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template refuses them: unsupported operand"):
        render(tmp_path, template)


def test_the_conversation_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}" + TEXTS + "{% endfor %}")
    made = ChatTemplate(get_tokenizer(str(BUILTIN_MODEL_DIR)), str(path))
    arguments = {"x": 1}
    call: dict[str, Any] = {"function": {"name": "f", "arguments": arguments}}
    made.render([{"role": "assistant", "tool_calls": [call]}], add_generation_prompt=False)
    assert call["function"]["arguments"] is arguments
