"""The prompt of a chat request, made from its messages and tools by the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.http.field_marks import TEXT_ALONE, refuse_fields
from sglang.srt.entrypoints.openai.protocol import ChatBody, ChatMessage, ToolCall
from sglang.srt.entrypoints.openai.tools import ToolUse
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate

_RENDER_ARGUMENTS: Final = frozenset(
    {
        "conversation", "messages", "chat_template", "tokenize", "tools", "documents", "padding",
        "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
        "return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message",
    }
)  # fmt: skip
"""Arguments of the renderer, which a client must not set as template variables."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def chat_prompt(
    body: ChatBody, template: ChatTemplate, tools: ToolUse | None, context_len: int
) -> str:
    """The text that the model continues.

    Args:
        context_len: Tokens of the longest context, which limits the number of messages and parts.

    Raises:
        ApiError: 400 that names the field.
        InvalidRequest: The template refuses the messages.
    """
    if not body.messages:
        raise bad_request("messages is empty: send at least one message", "messages")
    _check_count(body.messages, context_len)
    continues = bool(body.continue_final_message)
    if continues and body.messages[-1].role != "assistant":
        raise bad_request(
            "continue_final_message needs a last message of role assistant",
            "continue_final_message",
        )
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and adds:
        raise bad_request(
            "add_generation_prompt contradicts continue_final_message: give one of them",
            "add_generation_prompt",
        )
    if tools is not None and not template.takes_tools:
        raise bad_request(
            "tools: this model's chat template shows the model no tools: leave them out, or start "
            "the server with a --chat-template that does",
            "tools",
        )
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    if body.reasoning_effort == "none":
        # Templates have different names for it, and ignore names that they do not know.
        for name in ("enable_thinking", "thinking"):
            variables.setdefault(name, False)
    for name in variables.keys() & _RENDER_ARGUMENTS:
        raise bad_request(
            f"chat_template_kwargs.{name}: not a template's variable; leave it out",
            "chat_template_kwargs",
        )
    return template.render(
        [_turn(f"messages[{i}]", message) for i, message in enumerate(body.messages)],
        add_generation_prompt=adds,
        continue_final_message=continues,
        tools=None if tools is None else tools.shown,
        variables=variables,
    )


def _check_count(messages: Sequence[ChatMessage], context_len: int) -> None:
    """Refuse a conversation that surely does not fit, before it is rendered: each message and each
    part takes at least one token."""
    parts = sum(len(one.content) for one in messages if isinstance(one.content, list))
    for count, what in ((len(messages), "messages"), (parts, "parts of content")):
        if count > context_len:
            raise ApiError(
                400,
                f"messages has {count} {what}, more than fit into a context of {context_len} "
                "tokens: shorten the conversation",
                param="messages",
                code="context_length_exceeded",
            )


def _turn(field: str, message: ChatMessage) -> dict[str, Any]:
    """The message in the form that templates read."""
    if message.role not in _ROLES:
        raise bad_request(
            f"{field}.role={message.role[:32]!r} must be one of {', '.join(_ROLES)}", "messages"
        )
    refuse_fields(message)
    # `developer` is OpenAI's newer name for `system`; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role}
    if message.tool_calls:
        turn["content"] = "" if message.content is None else _content(field, message.content)
        turn["tool_calls"] = [
            _call(f"{field}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)
        ]
    else:
        turn["content"] = _content(field, message.content)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        turn["name"] = message.name
    reasoning = (
        message.reasoning if message.reasoning_content is None else message.reasoning_content
    )
    if reasoning is not None:
        turn["reasoning_content"] = reasoning
    return turn


def _call(field: str, call: ToolCall) -> dict[str, Any]:
    """An earlier call in the form that templates read, with the arguments as an object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise bad_request(
                f"{field}.function.arguments: expected a JSON object", "messages"
            ) from None
    function = {"name": call.function.name, "arguments": arguments or {}}
    return {"id": call.id, "type": "function", "function": function}


def _content(field: str, content: str | list[dict[str, Any]] | None) -> str:
    if content is None:
        raise bad_request(f"{field}.content: expected text, got null", "messages")
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.get("type") != "text":
            raise bad_request(
                f"{field}.content[{index}].type={str(part.get('type'))[:32]!r} is not supported: "
                f"{TEXT_ALONE}, send parts of type text",
                "messages",
            )
        if not isinstance(part.get("text"), str):
            raise bad_request(f"{field}.content[{index}].text: expected text", "messages")
        texts.append(part["text"])
    return "\n".join(texts)
