"""Splitters of outputs into reasoning, content and calls, in chat's form."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from sglang.srt.constrained.constraint import THINK_END
from sglang.srt.function_call.format_detector import (
    FormatDetector,
    StreamingParseResult,
    ToolCallItem,
)
from sglang.srt.function_call.gpt_oss_detector import GptOssDetector, Part, PartKind
from sglang.srt.parser.reasoning_parser import ReasoningParser, ReasoningParseResult


class ChatOutput:
    """Splitter of one output. Call `message` for a whole output, or `feed` and `finish` for a
    stream. `is_cut`: the output ended at a limit (see `FormatDetector.finish`).

    Without a parser, reasoning or calls are content. `parallel`: more calls than the first are
    passed on. Unless `stream_reasoning`, reasoning is held back until it is complete.
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
        """True if a call was found."""

    def message(self, text: str, *, is_cut: bool = False) -> dict[str, Any]:
        """The assistant's message for a whole output."""
        reasoning, calls = "", list[ToolCallItem]()
        if self._reasoning is not None:
            reasoning, text = self._reasoning.parse_non_stream(text, is_cut=is_cut)
            self._note_end_of_reasoning(self._reasoning)
        if self._calls is not None:
            text, calls = self._calls.parse_non_stream(text, is_cut=is_cut)
        return self._message(reasoning, text, calls)

    def _message(self, reasoning: str, text: str, calls: Sequence[ToolCallItem]) -> dict[str, Any]:
        calls = calls if self._parallel else calls[:1]
        self.has_calls = bool(calls)
        text = text.strip() if calls else text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
            "reasoning_content": reasoning or None,
        }
        if calls:
            message["tool_calls"] = [_call(call, first=True) for call in calls]
        return message

    def whole(self, text: str, *, is_cut: bool = False) -> list[dict[str, Any]]:
        """Deltas of a whole output, each block in one."""
        message = self.message(text, is_cut=is_cut)
        calls = [{"tool_calls": [call]} for call in message.get("tool_calls") or ()]
        reasoning, content = message["reasoning_content"], message["content"]
        return [{"reasoning_content": reasoning}, {"content": content}, *calls]

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Deltas for the next piece of text."""
        if self._reasoning is None:
            return [*self._content(text)] if text else []
        return [*self._split(self._reasoning.parse_stream_increment(text), ended=False)]

    def finish(self, *, is_cut: bool = False) -> list[dict[str, Any]]:
        """Deltas for the text held back. Call it once, last."""
        deltas: list[dict[str, Any]] = []
        if self._reasoning is not None:
            deltas += self._split(self._reasoning.finish(is_cut=is_cut), ended=True)
        if self._calls is not None:
            deltas += self._with_calls(self._calls.finish(is_cut=is_cut))
        return deltas

    def _split(self, parts: ReasoningParseResult, *, ended: bool) -> Iterator[dict[str, Any]]:
        assert self._reasoning is not None, "it has made the parts"
        self._note_end_of_reasoning(self._reasoning)
        yield from self._thought(parts.reasoning_text, ended=ended or bool(parts.normal_text))
        if parts.normal_text:
            yield from self._content(parts.normal_text)

    def _thought(self, text: str, *, ended: bool) -> Iterator[dict[str, Any]]:
        """The reasoning so far and `text`, unless it is held back because it has not `ended`."""
        self._held_reasoning += text
        if self._held_reasoning and (self._stream_reasoning or ended):
            yield {"reasoning_content": self._held_reasoning}
            self._held_reasoning = ""

    def _note_end_of_reasoning(self, reasoning: ReasoningParser) -> None:
        if self._calls is not None and reasoning.ended_by_call and not self.has_calls:
            self._calls.end_of_reasoning = THINK_END

    def _content(self, text: str) -> Iterator[dict[str, Any]]:
        if self._calls is None:
            yield {"content": text}
        else:
            yield from self._with_calls(self._calls.parse_stream_increment(text))

    def _with_calls(self, result: StreamingParseResult) -> Iterator[dict[str, Any]]:
        if result.normal_text:
            yield {"content": result.normal_text}
        for call in result.calls:
            yield from self._called(call)

    def _called(self, call: ToolCallItem) -> Iterator[dict[str, Any]]:
        if self._parallel or not call.tool_index:
            self.has_calls = True
            yield {"tool_calls": [_call(call, first=call.name is not None)]}


class MessagesOutput(ChatOutput):
    """Splitter of one output of gpt-oss, whose `messages` have reasoning, texts and calls.

    `calls` finds the calls in texts, if a grammar enforces one there. A whole output is read once.
    """

    def __init__(
        self,
        messages: GptOssDetector,
        calls: FormatDetector | None,
        *,
        parallel: bool = True,
        stream_reasoning: bool = True,
    ) -> None:
        super().__init__(None, calls, parallel=parallel, stream_reasoning=stream_reasoning)
        self._messages = messages
        self._num_calls = 0

    def message(self, text: str, *, is_cut: bool = False) -> dict[str, Any]:
        parts = [*self._messages.take_parts(text), *self._messages.last_parts(is_cut=is_cut)]
        texts = {
            kind: "".join(part.text for part in parts if part.kind is kind) for kind in PartKind
        }
        calls = [self._item(part) for part in parts if part.kind is PartKind.CALL]
        content = texts[PartKind.TEXT]
        if self._calls is not None:
            content, calls = self._calls.parse_non_stream(content, is_cut=is_cut)
        return self._message(texts[PartKind.REASONING], content, calls)

    def whole(self, text: str, *, is_cut: bool = False) -> list[dict[str, Any]]:
        return self.feed(text) + self.finish(is_cut=is_cut)

    def feed(self, text: str) -> list[dict[str, Any]]:
        return [*self._of_parts(self._messages.take_parts(text))]

    def finish(self, *, is_cut: bool = False) -> list[dict[str, Any]]:
        return [
            *self._of_parts(self._messages.last_parts(is_cut=is_cut)),
            *self._thought("", ended=True),
            *super().finish(is_cut=is_cut),
        ]

    def _of_parts(self, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
            is_reasoning = part.kind is PartKind.REASONING
            yield from self._thought(part.text if is_reasoning else "", ended=not is_reasoning)
            if part.kind is PartKind.CALL:
                yield from self._called(self._item(part))
            elif not is_reasoning:
                yield from self._content(part.text)

    def _item(self, call: Part) -> ToolCallItem:
        self._num_calls += 1
        return ToolCallItem(self._num_calls - 1, call.name, call.text)


def _call(call: ToolCallItem, *, first: bool) -> dict[str, Any]:
    """A call in OpenAI's form, or in a stream the next piece of a call."""
    if not first:
        return {"index": call.tool_index, "function": {"arguments": call.parameters}}
    return {
        "index": call.tool_index,
        "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.parameters},
    }
