"""`POST /v1/chat/completions`: requests, and answers split into reasoning, content and calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, Final

from sglang.srt.constrained.constraint import ConstraintKind, Reasoning
from sglang.srt.entrypoints.http.body import dp_rank_of, read_json, rooms_of
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import ServerContext, context_of
from sglang.srt.entrypoints.openai.answers import (
    Answers,
    TokenFormatter,
    chat_logprobs,
    finish_reason,
    is_cut,
    matched_stop,
    respond,
)
from sglang.srt.entrypoints.openai.chat_output import ChatOutput, MessagesOutput
from sglang.srt.entrypoints.openai.chat_prompt import ToolUse, chat_prompt, tool_use
from sglang.srt.entrypoints.openai.protocol import (
    NO_FORMAT,
    ChatBody,
    check_common,
    naming_format,
    sampling_params,
)
from sglang.srt.function_call.function_call_parser import (
    TOOL_CALL_PARSERS,
    make_call_parser,
    make_message_parser,
)
from sglang.srt.function_call.gpt_oss_detector import (
    FINAL,
    GPT_OSS,
    GptOssDetector,
    begun_message,
)
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest, expand_samples, new_rid
from sglang.srt.managers.tokenizer.request_state import OutputCursor, RequestState
from sglang.srt.parser.reasoning_parser import (
    ReasoningParser,
    opened_reasoning,
    reasoning_before,
)
from sglang.srt.server_args import ServerArgs

MAX_TOP_LOGPROBS: Final = 20
MESSAGES_AT_ONCE: Final = 256
"""Most messages that are rendered on the event loop's thread, which takes a millisecond or two; the
thread `render` renders longer conversations."""


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streaming or not."""
    context = context_of(request)
    body = await read_json(request, ChatBody)
    # The same steps as in `rendered`, inlined to save calls on each chat's way to the socket.
    if len(body.messages) > MESSAGES_AT_ONCE:
        samples, tools = await rendered(body, context)
    else:
        samples, tools = to_requests(body, context)
    with NO_FORMAT if body.response_format is None else naming_format():
        return await respond(
            request, context.manager, samples, lambda: ChatAnswers(body, context, samples[0], tools)
        )


async def rendered(
    body: ChatBody, context: ServerContext
) -> tuple[list[GenerateRequest], ToolUse | None]:
    """`to_requests`, which renders long conversations in the thread `render`."""
    if len(body.messages) <= MESSAGES_AT_ONCE:
        return to_requests(body, context)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(context.renderer, to_requests, body, context)


def to_requests(
    body: ChatBody, context: ServerContext
) -> tuple[list[GenerateRequest], ToolUse | None]:
    """The engine's requests for `body`, one for each choice, and their use of tools."""
    check_common(body)
    tools = tool_use(body, context.args.tool_call_parser, context.chat_template)
    top_logprobs = body.top_logprobs or 0
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise bad_request(
            f"top_logprobs={top_logprobs} must be from 0 to {MAX_TOP_LOGPROBS}", "top_logprobs"
        )
    if top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    field = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    max_tokens = getattr(body, field)
    if body.max_tokens not in (None, max_tokens):
        raise bad_request(
            f"max_tokens={body.max_tokens} and {field}={max_tokens} differ: send one of them", field
        )
    params = sampling_params(body, max_tokens, field, context.sampling_defaults.values)
    # A router that sends lists has a room for each sample.
    given = body.bootstrap_room
    num_rooms = len(given) or 1 if isinstance(given, list) else 1
    rooms = rooms_of(body, num_rooms, is_batch=isinstance(given, list))
    if tools is not None:
        # Tools are refused beside other constraints.
        params.json_schema, params.structural_tag = tools.json_schema, tools.structural_tag
    reads_messages = _reads_messages(context.args)
    if reads_messages or (tools and TOOL_CALL_PARSERS[tools.parser].has_special_markers):
        # Also against the body: sglang_router adds skip_special_tokens: true to every chat.
        params.skip_special_tokens = False
    prompt = chat_prompt(body, context.chat_template, tools, context.manager.limits.context_len)
    if context.args.reasoning_parser is not None and body.separate_reasoning is not False:
        params.reasoning = reasoning_before(context.args.reasoning_parser, prompt)
    if reads_messages and params.has_constraint:
        if params.structural_tag is not None:
            params.reasoning = Reasoning.NONE
        if params.reasoning is Reasoning.NONE and not begun_message(prompt):
            # A grammar that holds from the first token on cannot write a header.
            prompt += FINAL
    request = GenerateRequest(
        rid=new_rid() if body.rid is None else body.rid,
        text=prompt,
        add_special_tokens=False,
        sampling_params=params,
        default_max_new_tokens=0 if max_tokens is None else None,
        max_tokens_field=field,
        prompt_field="messages",
        stream=bool(body.stream),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=top_logprobs,
        no_stop_trim=bool(body.no_stop_trim),
        return_cache_report=bool(body.return_cache_report),
        bootstrap=rooms[0],
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        session_id=body.session_id,
        dp_rank=dp_rank_of(body),
        priority=body.priority or 0,
    )
    return expand_samples([request], rooms), tools


def _reads_messages(args: ServerArgs) -> bool:
    """True if outputs are messages of gpt-oss; one parser reads their reasoning and calls."""
    return GPT_OSS in (args.reasoning_parser, args.tool_call_parser)


class OutputSplitting:
    """Makes a `ChatOutput` for each output of one request."""

    def __init__(
        self,
        body: ChatBody,
        context: ServerContext,
        request: GenerateRequest,
        tools: ToolUse | None,
    ) -> None:
        self._tools = tools
        constraint = request.sampling_params.constraint
        # A constraint that holds from the first token on leaves no room for reasoning.
        has_room = (
            constraint is None
            or constraint.kind is ConstraintKind.STRUCTURAL_TAG
            or constraint.reasoning is not Reasoning.NONE
        )
        splits = body.separate_reasoning is not False and has_room
        self._reasoning_parser = context.args.reasoning_parser if splits else None
        self._begins_inside = opened_reasoning(request.text or "")
        self._begun = begun_message(request.text or "")
        self._reads_messages = _reads_messages(context.args)
        self._streams_reasoning = body.stream_reasoning is not False

    def new_output(self) -> ChatOutput:
        tools = self._tools
        if self._reads_messages:
            is_enforced = tools is not None and tools.parser != GPT_OSS
            return MessagesOutput(
                self._new_message_parser(),
                make_call_parser(tools.shown, tools.parser) if tools and is_enforced else None,
                parallel=tools is None or tools.parallel,
                stream_reasoning=self._streams_reasoning,
            )
        return ChatOutput(
            self._new_reasoning_parser(),
            None if tools is None else make_call_parser(tools.shown, tools.parser),
            parallel=tools is None or tools.parallel,
            stream_reasoning=self._streams_reasoning,
        )

    def reasoning_end(self, output: str) -> int:
        """Characters of a whole output up to the end of its reasoning; 0: it is not split."""
        if self._reads_messages:
            messages = self._new_message_parser()
            messages.take_parts(output)
            messages.last_parts()
            return messages.reasoning_end
        parser = self._new_reasoning_parser()
        if parser is None:
            return 0
        parser.parse_non_stream(output)
        return len(output) if parser.reasoning_end is None else parser.reasoning_end

    def _new_message_parser(self) -> GptOssDetector:
        tools = self._tools
        shown = tools.shown if tools is not None and tools.parser == GPT_OSS else ()
        return make_message_parser(
            shown, self._begun, separates_reasoning=self._reasoning_parser is not None
        )

    def _new_reasoning_parser(self) -> ReasoningParser | None:
        name, tools = self._reasoning_parser, self._tools
        if name is None:
            return None
        return ReasoningParser(
            name,
            begins_inside=self._begins_inside,
            find_calls=None
            if tools is None
            else partial(make_call_parser, tools.shown, tools.parser),
        )


class ChatAnswers(Answers):
    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        body: ChatBody,
        context: ServerContext,
        request: GenerateRequest,
        tools: ToolUse | None,
    ) -> None:
        super().__init__(body, context)
        self._formatter = TokenFormatter(context.manager.tokenizer) if body.logprobs else None
        self._new_output = OutputSplitting(body, context, request, tools).new_output

    async def _choice(self, index: int, state: RequestState) -> dict[str, Any]:
        output = self._new_output()
        return {
            "index": index,
            "message": output.message(state.text, is_cut=is_cut(state)),
            "logprobs": await self._logprobs(state, 0),
            **_end_of(state, output),
        }

    async def _chunks(
        self, index: int, state: RequestState
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The role, the text as it grows, the end."""
        cursor = OutputCursor(state)
        output = self._new_output()
        has_begun = has_ended = False

        def choice(delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
            delta = {"reasoning_content": None, **delta}
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

        while not has_ended:
            has_ended = await state.wait_for_output()
            if not has_begun:
                has_begun = True
                role = {"role": "assistant", "content": ""}
                yield self._chunk(state, choice(role, None), ended=False)
            deltas = output.feed(cursor.advance())
            if has_ended:
                deltas += output.finish(is_cut=is_cut(state))
            logprobs = await self._logprobs(state, cursor.first_new_token)
            if not deltas and logprobs is not None and logprobs["content"]:
                deltas = [{"content": ""}]
            for delta in deltas:
                yield self._chunk(state, choice(delta, logprobs), ended=False)
                logprobs = None
        yield self._chunk(state, choice({}, None) | _end_of(state, output), ended=True)

    async def _logprobs(self, state: RequestState, first: int) -> dict[str, Any] | None:
        return (
            None if self._formatter is None else await chat_logprobs(state, first, self._formatter)
        )


def _end_of(state: RequestState, output: ChatOutput) -> dict[str, Any]:
    reason = finish_reason(state)
    if reason == "stop" and output.has_calls:
        reason = "tool_calls"
    return {"finish_reason": reason, "matched_stop": matched_stop(state)}
