"""Sends one request to a server, reads its event stream, and records the times of its tokens. Asks
the server for what a load test needs before it starts: model name and tokenizer.

A backend defines the body of a request and the fields of an event; `send` does the rest. Errors
become part of the result and are never raised, so that a load test continues.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import aiohttp
import msgspec
import numpy as np

from sglang.benchmark.workload import BenchRequest, Vocabulary
from sglang.srt.utils.hf_tokenizer import get_tokenizer, special_token_ids

TIERS = ("device", "host", "storage")


@dataclass(slots=True)
class RequestResult:
    """Times in seconds of the client's clock; lengths in tokens, as counted by the server."""

    error: str = ""
    """Empty if the request succeeded."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft: float = 0.0
    """Seconds from sending the request to the first token."""
    latency: float = 0.0
    """Seconds from sending the request to the end of the stream."""
    itl: list[float] = field(default_factory=list)
    """Times between tokens. Tokens that arrive together share the time equally."""
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    """Empty if the endpoint does not report them."""
    cached_tokens: int = 0
    cached_details: dict[str, int] = field(default_factory=dict)
    """Cached tokens by tier; empty if the server does not report them."""

    @property
    def success(self) -> bool:
        return not self.error

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        if self.completion_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.completion_tokens - 1)

    def note_cached(self, total: Any, details: Any) -> None:
        """Record the cached tokens that the server reported, unless they are malformed."""
        if isinstance(total, int):
            self.cached_tokens = total
        if isinstance(details, dict):
            self.cached_details = {
                tier: details[tier] for tier in TIERS if isinstance(details.get(tier), int)
            }


_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options that all requests of a run have in common."""

    base_url: str
    model: str = "default"
    ignore_eos: bool = True
    temperature: float = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Added to the body of each request."""


class _Progress:
    """Computes TTFT and inter-token latencies from the arrival times of tokens."""

    def __init__(self, result: RequestResult) -> None:
        self.result = result
        self._begin = time.perf_counter()
        self._last = 0.0
        self._tokens = 0

    def tokens(self, total: int) -> None:
        """Note that `total` tokens of the answer have arrived so far."""
        now = time.perf_counter()
        new = total - self._tokens
        if new <= 0:
            return
        if self._tokens == 0:
            self.result.ttft = now - self._begin
        else:
            self.result.itl += [(now - self._last) / new] * new
        self._last, self._tokens = now, total

    def one_more(self) -> None:
        """Note that text has arrived, which is at least one token."""
        self.tokens(self._tokens + 1)

    def end(self) -> None:
        result = self.result
        result.latency = time.perf_counter() - self._begin
        result.completion_tokens = result.completion_tokens or self._tokens
        if not self._tokens:
            result.ttft = result.latency


class ApiBackend(ABC):
    """An endpoint and its protocol for generating text."""

    path: ClassVar[str]
    wants_text: ClassVar[bool] = False

    @abstractmethod
    def body(
        self, request: BenchRequest, text: str | None, options: RequestOptions
    ) -> dict[str, Any]:
        """The JSON body. `text` is the prompt's text if `wants_text`."""

    @abstractmethod
    def read(self, event: Mapping[str, Any], progress: _Progress) -> None:
        """Process one event of the stream."""

    async def send(
        self,
        session: aiohttp.ClientSession,
        request: BenchRequest,
        options: RequestOptions,
        text: str | None = None,
    ) -> RequestResult:
        """Send a request and read the answer to its end."""
        body = msgspec.json.encode({**self.body(request, text, options), **options.extra_body})
        result = RequestResult(prompt_tokens=len(request.prompt_ids))
        progress = _Progress(result)
        try:
            async with session.post(
                options.base_url + self.path,
                data=body,
                headers={"Content-Type": "application/json"},
            ) as response:
                if response.status != 200:
                    said = (await response.text())[:_ERROR_CHARS]
                    result.error = f"HTTP {response.status}: {said}"
                else:
                    await self._read_stream(response.content, progress)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            result.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
        progress.end()
        if result.success and not result.completion_tokens:
            result.error = "the answer has no tokens"
        return result

    async def _read_stream(self, content: aiohttp.StreamReader, progress: _Progress) -> None:
        async for data in _events(content):
            if data == b"[DONE]":
                return
            event = msgspec.json.decode(data)
            if "error" in event:
                progress.result.error = str(event["error"])[:_ERROR_CHARS]
                return
            self.read(event, progress)
        if progress.result.success:
            progress.result.error = "the stream ended before [DONE]"


class SglangBackend(ApiBackend):
    """`POST /generate` with token ids; text and counts in the events are cumulative."""

    path = "/generate"

    def body(
        self, request: BenchRequest, text: str | None, options: RequestOptions
    ) -> dict[str, Any]:
        return {
            "input_ids": request.prompt_ids,
            "sampling_params": {
                "temperature": options.temperature,
                "max_new_tokens": request.output_len,
                "ignore_eos": options.ignore_eos,
            },
            "stream": True,
        }

    def read(self, event: Mapping[str, Any], progress: _Progress) -> None:
        result, meta = progress.result, event["meta_info"]
        result.text = event.get("text") or result.text
        result.output_ids = event.get("output_ids") or result.output_ids
        result.completion_tokens = meta["completion_tokens"]
        result.prompt_tokens = meta.get("prompt_tokens", result.prompt_tokens)
        result.note_cached(meta.get("cached_tokens"), meta.get("cached_tokens_details"))
        progress.tokens(result.completion_tokens)
        finish = meta.get("finish_reason") or {}
        if finish.get("type") == "abort":
            result.error = f"aborted: {finish.get('message', '')}"[:_ERROR_CHARS]


class OpenAICompletionsBackend(ApiBackend):
    """`POST /v1/completions` with token ids."""

    path = "/v1/completions"

    def body(
        self, request: BenchRequest, text: str | None, options: RequestOptions
    ) -> dict[str, Any]:
        return {"prompt": request.prompt_ids, **self._common(request, options)}

    def _common(self, request: BenchRequest, options: RequestOptions) -> dict[str, Any]:
        return {
            "model": options.model,
            "temperature": options.temperature,
            "max_tokens": request.output_len,
            "ignore_eos": options.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_cached_tokens_details": True,
        }

    def read(self, event: Mapping[str, Any], progress: _Progress) -> None:
        result = progress.result
        for choice in event.get("choices") or ():
            piece = self._piece(choice)
            if piece:
                result.text += piece
                progress.one_more()
        usage = event.get("usage") or {}
        result.prompt_tokens = usage.get("prompt_tokens", result.prompt_tokens)
        result.completion_tokens = usage.get("completion_tokens", result.completion_tokens)
        details = usage.get("prompt_tokens_details") or {}
        by_tier = (event.get("sglext") or {}).get("cached_tokens_details")
        result.note_cached(details.get("cached_tokens"), by_tier)
        if by_tier and not result.cached_tokens:
            result.cached_tokens = sum(result.cached_details.values())

    def _piece(self, choice: Mapping[str, Any]) -> str:
        return choice.get("text") or ""


class OpenAIChatBackend(OpenAICompletionsBackend):
    """`POST /v1/chat/completions` with the prompt's text as the user's message."""

    path = "/v1/chat/completions"
    wants_text = True

    def body(
        self, request: BenchRequest, text: str | None, options: RequestOptions
    ) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"messages": messages, **self._common(request, options)}

    def _piece(self, choice: Mapping[str, Any]) -> str:
        delta = choice.get("delta") or {}
        return (delta.get("content") or "") + (delta.get("reasoning_content") or "")


BACKENDS: Final[Mapping[str, type[ApiBackend]]] = {
    "sglang": SglangBackend,
    "sglang-native": SglangBackend,
    "sglang-oai": OpenAICompletionsBackend,
    "sglang-oai-chat": OpenAIChatBackend,
    "vllm": OpenAICompletionsBackend,
    "vllm-chat": OpenAIChatBackend,
}
"""The keys are those of SGLang's load test."""


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenizer, and the tokens that prompts are made of."""

    vocabulary: Vocabulary
    tokenizer: Any

    def printable(self) -> Vocabulary:
        """The tokens that are printable text on their own.

        Parts of characters would become other, and more, tokens when a prompt is sent as text.
        """
        kept = [index for index in self.vocabulary.tolist() if _is_text(self.decode([index]))]
        return np.asarray(kept, dtype=np.uint32)

    def as_text(self, ids: list[int]) -> str:
        """The text of `ids`, cut so that tokenizing it again gives about as many tokens.

        The tokenizer seldom splits the text of random tokens into the same tokens. Equal prefixes
        stay equal.
        """
        again = self.tokenizer.encode(self.decode(ids), add_special_tokens=False)
        return self.decode(again[: len(ids)])

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`."""
        text: str = self.tokenizer.decode(ids)
        return text


def _is_text(piece: str) -> bool:
    return bool(piece) and "\ufffd" not in piece and piece.isprintable()


def load_tokens(path: str) -> Tokens:
    """The tokens of the tokenizer at `path`, without special tokens. Raises ValueError if there is
    none."""
    tokenizer = get_tokenizer(path)
    kept_out = special_token_ids(tokenizer)
    ids = [index for index in range(len(tokenizer)) if index not in kept_out]
    return Tokens(np.asarray(ids, dtype=np.uint32), tokenizer)


async def fetch_model_info(session: aiohttp.ClientSession, base_url: str) -> dict[str, Any]:
    """`GET /model_info`, or the older `/get_model_info`, which is all that `sglang_router` has.
    Raises ValueError if the server does not answer."""
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with session.get(f"{base_url}/model_info", timeout=timeout) as response:
            if response.status != 404:
                return await _facts_in(response)
        async with session.get(f"{base_url}/get_model_info", timeout=timeout) as response:
            return await _facts_in(response)
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        raise ValueError(
            f"no usable server at {base_url} ({type(error).__name__}: {error}); start one, or give "
            "--base-url, --host and --port, and --model and --tokenizer if it has no /model_info"
        ) from error


async def _facts_in(response: aiohttp.ClientResponse) -> dict[str, Any]:
    response.raise_for_status()
    facts: dict[str, Any] = await response.json(content_type=None)
    return facts


async def flush_cache(session: aiohttp.ClientSession, base_url: str, admin_key: str | None) -> None:
    """Empty L1 and L2 of the server as soon as it is idle. Raises ValueError if it refuses."""
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    async with session.post(f"{base_url}/flush_cache?timeout=30", headers=headers) as response:
        if response.status != 200:
            said = (await response.text())[:200]
            raise ValueError(f"--flush-cache: the server answered {response.status}: {said}")
