"""Blocks of one output, in order: reasoning, text, calls; whole or as a stream. APIs other than
chat completions make their items and events from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sglang.srt.entrypoints.http.errors import ApiError, as_api_error, client_names
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import context_of
from sglang.srt.entrypoints.openai.answers import is_cut, respond, shown_reports
from sglang.srt.entrypoints.openai.protocol import NO_FORMAT, ChatBody, naming_format
from sglang.srt.entrypoints.openai.serving_chat import OutputSplitting, rendered
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_state import OutputCursor, RequestState


class BlockKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass
class Block:
    """A part of an output."""

    kind: BlockKind
    index: int
    """Position among the output's blocks, from 0."""
    text: str = ""
    """Text of the block so far; a call's arguments, in JSON."""
    name: str = ""
    """A call's function."""
    call_id: str = ""


class Step(Enum):
    """Event of a block in a stream."""

    OPEN = "open"
    GROW = "grow"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Change:
    step: Step
    block: Block
    """The block after the change."""
    added: str = ""
    """The new text, if it grows."""
    is_last: bool = False
    """True if the block is closed because the output has ended."""


def blocks_of(deltas: Iterable[dict[str, Any]]) -> list[Block]:
    """The blocks of a whole output, given as chat's deltas; one at least."""
    blocks = BlockStream()
    for _ in (*blocks.advance(deltas), *blocks.end()):
        pass
    return blocks.made


class BlockStream:
    """Turns chat's deltas into changes of blocks. At most one block is open, the last.

    Blank text around blocks of other kinds is dropped: it separates them.
    """

    def __init__(self) -> None:
        self.made: list[Block] = []
        self._open: Block | None = None
        self._blanks = ""

    def advance(self, deltas: Iterable[dict[str, Any]]) -> Iterator[Change]:
        """The changes by `deltas`, the next ones of `ChatOutput`."""
        for delta in deltas:
            if reasoning := delta.get("reasoning_content"):
                yield from self._grow(BlockKind.REASONING, reasoning)
            if content := delta.get("content"):
                yield from self._text(content)
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)

    def end(self) -> Iterator[Change]:
        """The last changes. An output without any block gets an empty text."""
        if not self.made:
            yield from self._start(BlockKind.TEXT)
            yield from self._add(self._blanks)
        yield from self._close(is_last=True)

    def _text(self, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not BlockKind.TEXT:
            text = self._blanks + text
            self._blanks = "" if text.strip() else text
            if self._blanks:
                return
        yield from self._grow(BlockKind.TEXT, text)

    def _call(self, call: dict[str, Any]) -> Iterator[Change]:
        function = call["function"]
        if "id" in call:
            yield from self._start(BlockKind.CALL, name=function["name"], call_id=call["id"])
        yield from self._add(function["arguments"])

    def _grow(self, kind: BlockKind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not kind:
            text = text.lstrip() if self.made else text
            if not text:
                return
            yield from self._start(kind)
        yield from self._add(text)

    def _start(self, kind: BlockKind, *, name: str = "", call_id: str = "") -> Iterator[Change]:
        yield from self._close()
        self._blanks = "" if kind is not BlockKind.TEXT else self._blanks
        self._open = Block(kind, len(self.made), name=name, call_id=call_id)
        self.made.append(self._open)
        yield Change(Step.OPEN, self._open)

    def _add(self, text: str) -> Iterator[Change]:
        assert self._open is not None, "pieces follow the start of their block"
        if text:
            self._open.text += text
            yield Change(Step.GROW, self._open, text)

    def _close(self, *, is_last: bool = False) -> Iterator[Change]:
        if self._open is not None:
            block, self._open = self._open, None
            yield Change(Step.CLOSE, block, is_last=is_last)


class BlockAnswers(ABC):
    """Writes the answers to a body that has one output (see `Answerer`)."""

    def __init__(self, splitting: OutputSplitting) -> None:
        self._splitting = splitting

    async def whole(self, states: Sequence[RequestState]) -> dict[str, Any]:
        """The only answer of a request that does not stream."""
        [state] = states
        deltas = self._splitting.new_output().whole(state.text, is_cut=is_cut(state))
        return await self._answer(state, blocks_of(deltas))

    async def stream(self, states: Sequence[RequestState]) -> AsyncGenerator[dict[str, Any], None]:
        """The events, each with its `type`. An error after the first is an event too."""
        [state] = states
        cursor, output, blocks = OutputCursor(state), self._splitting.new_output(), BlockStream()
        has_begun = has_ended = False
        try:
            while not has_ended:
                has_ended = await state.wait_for_output()
                if not has_begun:
                    for event in self._first_events(state):
                        has_begun = True
                        yield event
                deltas = output.feed(cursor.advance())
                if has_ended:
                    deltas += output.finish(is_cut=is_cut(state))
                for change in blocks.advance(deltas):
                    for event in self._events_of(change, state):
                        yield event
            for change in blocks.end():
                for event in self._events_of(change, state):
                    yield event
            for event in await self._last_events(state, blocks.made):
                yield event
        except Exception as error:
            known = as_api_error(error)
            if known is None or not has_begun:
                raise
            yield self._failure(known)

    @staticmethod
    def _extra(state: RequestState) -> dict[str, Any]:
        """The further fields of an answer whose output has ended."""
        return {"sglext": shown_reports([state])} if state.request.return_cache_report else {}

    @abstractmethod
    async def _answer(self, state: RequestState, blocks: Sequence[Block]) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def _first_events(self, state: RequestState) -> Iterable[dict[str, Any]]:
        """The events before the blocks; the first output is there."""

    @abstractmethod
    def _events_of(self, change: Change, state: RequestState) -> Iterable[dict[str, Any]]:
        """The events of one change."""

    @abstractmethod
    async def _last_events(
        self, state: RequestState, blocks: Sequence[Block]
    ) -> Iterable[dict[str, Any]]:
        """The events after the blocks."""

    @abstractmethod
    def _failure(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that fails."""


async def respond_in_blocks(
    request: Request,
    chat: ChatBody,
    names: Sequence[tuple[str, str]],
    answers: Callable[[GenerateRequest, OutputSplitting], BlockAnswers],
    check: Callable[[GenerateRequest], Awaitable[None]] | None = None,
) -> Response:
    """Answer `chat`, which another API's body says, in that API's form.

    Args:
        names: Replacements for names of chat's fields in errors, as `client_names` takes them.
        answers: Makes the answers to the request, whose output is split so.
        check: Refuses a request for its prompt, by an error.
    """
    context = context_of(request)
    with client_names(*names), NO_FORMAT if chat.response_format is None else naming_format():
        samples, tools = await rendered(chat, context)
        if check is not None:
            await check(samples[0])
        splitting = OutputSplitting(chat, context, samples[0], tools)
        return await respond(
            request,
            context.manager,
            samples,
            lambda: answers(samples[0], splitting),
            named_events=True,
        )
