"""Routes of OpenAI's endpoints, and the endpoints for models and tokens."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from sglang.srt.entrypoints.http.application import Route
from sglang.srt.entrypoints.http.body import MAX_BATCH, NOTHING, is_neutral, read_json
from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import ServerContext, context_of
from sglang.srt.entrypoints.http.sse import json_response, unless_client_leaves
from sglang.srt.entrypoints.openai.chat_prompt import chat_prompt, tool_use
from sglang.srt.entrypoints.openai.protocol import ChatBody, DetokenizeBody, TokenizeBody
from sglang.srt.entrypoints.openai.serving_chat import MESSAGES_AT_ONCE, chat_completions
from sglang.srt.entrypoints.openai.serving_completions import completions
from sglang.srt.entrypoints.openai.serving_responses import responses
from sglang.srt.managers.tokenizer.request_limits import RequestLimits
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager

MAX_DETOKENIZED_IDS: Final = 1 << 18
"""Most ids in one request: decoding more would block the event loop."""
_FIELDS_OF_A_CONVERSATION: Final = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
    "tools",
    "tool_choice",
)
"""Fields of a chat request that shape its prompt, besides the messages."""


async def models(request: Request) -> Response:
    """The list of models, which has one."""
    return json_response({"object": "list", "data": [_model_card(context_of(request))]})


async def model(request: Request) -> Response:
    """The model that the path names, if it is the served one."""
    context = context_of(request)
    name = request.path.removeprefix("/v1/models/")
    if name != context.model_name:
        raise ApiError(
            404,
            f"model {name[:128]!r} is not served here; {context.model_name!r} is",
            param="model",
            code="model_not_found",
        )
    return json_response(_model_card(context))


async def tokenize(request: Request) -> Response:
    """Token ids of a text, of several, or of a conversation."""
    context = context_of(request)
    body = await read_json(request, TokenizeBody)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt, messages: give exactly one of them", "prompt")
    prompt: str | list[str]
    if body.prompt is not None:
        for field in _FIELDS_OF_A_CONVERSATION:
            if not is_neutral(getattr(body, field), (*NOTHING, "none", "auto")):
                raise bad_request(f"{field} shapes messages: leave it out with prompt", field)
        prompt = body.prompt
    elif len(body.messages or ()) > MESSAGES_AT_ONCE:
        prompt = await asyncio.get_running_loop().run_in_executor(
            context.renderer, _text_of_messages, body, context
        )
    else:
        prompt = _text_of_messages(body, context)
    # A chat template writes the special tokens itself.
    adds = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    texts = [prompt] if isinstance(prompt, str) else prompt
    check_texts(texts, context.manager.limits, "prompt")
    rows = await unless_client_leaves(request.gone, _encode_all(context.manager, texts, adds))
    single = isinstance(prompt, str)
    return json_response(
        {
            "tokens": rows[0] if single else rows,
            "count": len(rows[0]) if single else [len(row) for row in rows],
            "max_model_len": context.manager.limits.context_len,
        }
    )


async def _encode_all(manager: TokenizerManager, texts: list[str], adds: bool) -> list[list[int]]:
    rows = []
    for text in texts:
        rows.append(await manager.encoder.encode(text, add_special_tokens=adds))
        # Short texts are encoded on this thread; other requests may run in between.
        await asyncio.sleep(0)
    return rows


def _text_of_messages(body: TokenizeBody, context: ServerContext) -> str:
    """The text that the chat template makes of `messages`, with the refusals of a chat request."""
    chat = ChatBody(
        messages=body.messages or [],
        **{field: getattr(body, field) for field in _FIELDS_OF_A_CONVERSATION},
    )
    template = context.chat_template
    tools = tool_use(chat, context.args.tool_call_parser, template)
    return chat_prompt(chat, template, tools, context.manager.limits.context_len)


async def detokenize(request: Request) -> Response:
    """Text of token ids, of one list or of several."""
    context = context_of(request)
    body = await read_json(request, DetokenizeBody)
    _check_id_count(len(body.tokens))
    numbers = [item for item in body.tokens if isinstance(item, int)]
    rows = [item for item in body.tokens if not isinstance(item, int)]
    if numbers and rows:
        raise bad_request("tokens: expected a list of ids or a list of such lists", "tokens")
    _check_id_count(len(numbers) + len(rows) + sum(map(len, rows)))
    vocab_size = context.manager.limits.vocab_size
    for token_id in (*numbers, *(token for row in rows for token in row)):
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"tokens has id {token_id}, the vocabulary has ids 0 to {vocab_size - 1}", "tokens"
            )
    skips = True if body.skip_special_tokens is None else body.skip_special_tokens
    texts = [
        context.manager.tokenizer.decode(row, skip_special_tokens=skips)
        for row in (rows if rows else [numbers])
    ]
    return json_response({"text": texts if rows else texts[0]})


def check_texts(texts: list[str], limits: RequestLimits, field: str) -> None:
    """Refuse texts that are too many or too long to tokenize in one request; errors name `field`,
    which has them."""
    if len(texts) > MAX_BATCH:
        raise bad_request(f"{field} has {len(texts)} texts, at most {MAX_BATCH} fit", field)
    total = sum(map(len, texts))
    if total > limits.max_text_chars:
        raise bad_request(
            f"{field} has {total} characters, at most {limits.max_text_chars} are tokenized in one "
            "request: split it",
            field,
        )


def _check_id_count(count: int) -> None:
    if count > MAX_DETOKENIZED_IDS:
        raise bad_request(
            f"tokens has {count} ids, at most {MAX_DETOKENIZED_IDS} are decoded in one request: "
            "split it",
            "tokens",
        )


def _model_card(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": int(context.started),
        "owned_by": "sglang",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.manager.limits.context_len,
    }


ROUTES: Final = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{name}", model, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/v1/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/detokenize", detokenize, methods=["POST"]),
)
