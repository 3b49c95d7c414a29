"""A chat model's output split into reasoning, content and tool calls, whole or streamed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from sglang.srt.function_call.core_types import StreamingParseResult, ToolCallItem
from sglang.srt.function_call.format_detector import FormatDetector
from sglang.srt.parser.reasoning_parser import ReasoningParser, ReasoningParseResult


class ChatOutput:
    """Splitter of one output. Call `message` for a whole output, or `feed` and `finish` for a
    stream.

    Args:
        reasoning: Parser that splits off reasoning; None: reasoning is content.
        calls: Parser that splits off calls; None: calls are content.
        parallel: Whether to pass on more calls than the first.
        stream_reasoning: Whether to stream reasoning; False: it is held back until it is complete.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        calls: FormatDetector | None,
        *,
        parallel: bool = True,
        stream_reasoning: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._parallel = parallel
        self._stream_reasoning = stream_reasoning
        self._held_reasoning = ""
        self.has_calls = False
        """Whether a call was found."""

    def message(self, text: str) -> dict[str, Any]:
        """The assistant's message for a whole output."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        message["reasoning_content"] = None
        if self._reasoning is not None:
            reasoning, text = self._reasoning.parse_non_stream(text)
            message["reasoning_content"] = reasoning or None
        if self._calls is not None:
            text, calls = self._calls.parse_non_stream(text)
            calls = calls if self._parallel else calls[:1]
            self.has_calls = bool(calls)
            if calls:
                message["tool_calls"] = [_call(call, first=True) for call in calls]
                text = text.strip()
        message["content"] = text or (None if self.has_calls else "")
        return message

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Deltas for the next piece of text."""
        if self._reasoning is None:
            return [*self._content(text)] if text else []
        return [*self._split(self._reasoning.parse_stream_increment(text), ended=False)]

    def finish(self) -> list[dict[str, Any]]:
        """Deltas for the text held back. Call it once, last."""
        deltas: list[dict[str, Any]] = []
        if self._reasoning is not None:
            deltas += self._split(self._reasoning.finish(), ended=True)
        if self._calls is not None:
            deltas += self._with_calls(self._calls.finish())
        return deltas

    def _split(self, parts: ReasoningParseResult, *, ended: bool) -> Iterator[dict[str, Any]]:
        reasoning = self._held_reasoning + parts.reasoning_text
        self._held_reasoning = ""
        if reasoning and (self._stream_reasoning or ended or parts.normal_text):
            yield {"reasoning_content": reasoning}
        else:
            self._held_reasoning = reasoning
        if parts.normal_text:
            yield from self._content(parts.normal_text)

    def _content(self, text: str) -> Iterator[dict[str, Any]]:
        if self._calls is None:
            yield {"content": text}
        else:
            yield from self._with_calls(self._calls.parse_stream_increment(text))

    def _with_calls(self, result: StreamingParseResult) -> Iterator[dict[str, Any]]:
        if result.normal_text:
            yield {"content": result.normal_text}
        for call in result.calls:
            if call.tool_index > 0 and not self._parallel:
                continue
            self.has_calls = True
            yield {"tool_calls": [_call(call, first=call.name is not None)]}


def _call(call: ToolCallItem, *, first: bool) -> dict[str, Any]:
    """A call in OpenAI's form, or in a stream the next piece of a call."""
    if not first:
        return {"index": call.tool_index, "function": {"arguments": call.parameters}}
    return {
        "index": call.tool_index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.parameters},
    }
