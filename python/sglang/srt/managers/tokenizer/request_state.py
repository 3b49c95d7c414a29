"""One request's output as it grows in the server process. Event loop thread only."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from sglang.srt.managers.tokenizer.dp_groups import Place
from sglang.srt.managers.tokenizer.generate_request import (
    EngineUnavailable,
    GenerateRequest,
    RequestFailed,
)
from sglang.srt.mem_cache.tree.radix_key import TokenArray
from sglang.srt.messages.cache_report import CacheReport
from sglang.srt.messages.io_struct import (
    ABORTED_BY_CLIENT,
    CLIENT_ABORT_STATUS,
    CachedTokensDetails,
    FinishReason,
    Stages,
    TextOutput,
    TopLogprobs,
    Verifications,
)

if TYPE_CHECKING:
    from opentelemetry.context import Context

TOKEN_BYTES: Final = 140
"""Memory of a token's id, text and logprob in Python, measured."""
TOP_LOGPROB_BYTES: Final = 132
"""The same of one of its alternatives."""


@dataclass(slots=True)
class RequestState:
    """State and output of one request. Lists only grow; readers keep their own positions."""

    request: GenerateRequest
    created_time: float
    """`time.monotonic()` on arrival."""
    place: Place | None = None
    """The DP group that has the request; None until it is sent."""
    encoding: asyncio.Task[None] | None = None
    """Task that tokenizes a long prompt and then sends the request."""
    is_sent: bool = False
    """True if the scheduler has it. It is sent once its prompt is tokenized."""
    prompt_tokens: int = 0
    """Tokens of the prompt; 0 until the request is sent."""
    logprob_ids: list[int] = field(default_factory=list)
    """Prompt tokens from `logprob_start_len` on; empty if their logprobs are not wanted."""
    input_logprobs: list[float] = field(default_factory=list)
    """Logprobs of all `logprob_ids` but the first; they come with the first output."""
    input_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    text_parts: list[str] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens_details: CachedTokensDetails = field(default_factory=CachedTokensDetails)
    queue_time: float = 0.0
    stages: Stages | None = None
    verifications: Verifications | None = None
    cache_report: CacheReport | None = None
    trace_context: Context | None = None
    """Parent of its spans; None: it is not traced."""
    trace_blocks: list[int] | None = None
    """Ids of its prompt's blocks; None: it is not recorded."""
    last_token_time: float | None = None
    finished_time: float | None = None
    failure: Exception | None = None
    _held: str = ""
    """Text that a stop may be part of."""
    _num_shown: int = 0
    """Characters of bounded outputs that were shown."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _joined: str = ""
    _joined_parts: int = 0

    @property
    def rid(self) -> str:
        return self.request.rid

    @property
    def dp_rank(self) -> int:
        """The DP group that has the request, which is sent."""
        return 0 if self.place is None else self.place.dp_rank

    @property
    def first_token_seconds(self) -> float | None:
        """Time from its arrival to its first token; None: it has none, or has not ended."""
        if self.seconds is None or self.stages is None or self.stages.decode is None:
            return None
        return self.seconds - self.stages.decode

    def note_sent(self, input_ids: TokenArray, logprob_start_len: int) -> None:
        """Note that the scheduler got the request; `logprob_start_len` -1: no prompt logprobs."""
        self.is_sent = True
        self.prompt_tokens = len(input_ids)
        if logprob_start_len >= 0:
            self.logprob_ids = input_ids[logprob_start_len:].tolist()

    @property
    def num_bytes(self) -> int:
        """About the memory of the output so far, in bytes."""
        tokens = len(self.output_ids) + len(self.input_logprobs)
        rows = len(self.output_top_logprobs) + len(self.input_top_logprobs)
        alternatives = rows * self.request.top_logprobs_num
        return tokens * TOKEN_BYTES + alternatives * TOP_LOGPROB_BYTES

    @property
    def ended(self) -> bool:
        """True if the request has ended: its output does not grow any more."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def outcome(self) -> str:
        """How the request ended: the type of its `finish_reason`, `error`, or `disconnect` if its
        client left first."""
        if self.finish_reason is not None:
            return self.finish_reason.type
        return "disconnect" if self.failure is None else "error"

    @property
    def seconds(self) -> float | None:
        """Time from its arrival to its end; None: it has not ended."""
        return None if self.finished_time is None else self.finished_time - self.created_time

    @property
    def text(self) -> str:
        if self._joined_parts < len(self.text_parts):
            self._joined += "".join(self.text_parts[self._joined_parts :])
            self._joined_parts = len(self.text_parts)
        return self._joined

    def shown_cache_report(self) -> dict[str, Any] | None:
        """The cache report as answers have it; None: the request has not been scheduled."""
        report, used = self.cache_report, self.cached_tokens_details
        if report is None:
            return None
        tiers = ("device", "host", "storage")
        return {
            "prompt_tokens": self.prompt_tokens,
            "on_arrival": report.on_arrival,
            "found": {tier: getattr(report, tier) for tier in tiers},
            "used": {tier: getattr(used, tier) for tier in tiers},
            "cuts": msgspec.to_builtins(report.cuts),
        }

    def shown_stages(self) -> dict[str, float | None] | None:
        """The times of its stages as answers have them, in seconds; None: it has not ended."""
        shown: dict[str, float | None] | None = msgspec.to_builtins(self.stages)
        return shown

    def apply(self, update: TextOutput, stop_text: str = "") -> int:
        """Add the new output of one message, and return the number of new tokens. `stop_text` is
        the text of the token that stopped the request, if it is to be shown."""
        output = update.output
        reason = output.finish_reason
        text = update.text + stop_text
        is_bounded = output.shown_chars is not None or self._held
        if is_bounded and not self.request.no_stop_trim:
            text = self._trim(text, output.shown_chars)
        if text:
            self.text_parts.append(text)
        self.output_ids.extend(output.output_ids)
        self.output_logprobs.extend(output.output_logprobs or ())
        self.output_top_logprobs.extend(output.output_top_logprobs or ())
        self.input_logprobs.extend(output.input_logprobs or ())
        self.input_top_logprobs.extend(output.input_top_logprobs or ())
        self.prompt_tokens = output.prompt_tokens or self.prompt_tokens
        self.cached_tokens_details = output.cached_tokens_details
        self.queue_time = output.queue_time
        self.stages = output.stages
        self.verifications = output.verifications
        self.cache_report = output.cache_report
        if reason is not None:
            self._finish(reason)
        self._changed.set()
        return len(output.output_ids)

    def _trim(self, text: str, shown_chars: int | None) -> str:
        """The part of the held text and `text` that may be shown; the rest is held. For
        `shown_chars` see `RequestOutput`: all outputs of a request but its last have it, or none.
        """
        text = self._held + text
        count = len(text) if shown_chars is None else max(shown_chars - self._num_shown, 0)
        self._held = text[count:]
        shown = text[:count]
        self._num_shown += len(shown)
        return shown

    def abort_unsent(self) -> None:
        """Abort the request for its client before it is sent to the scheduler."""
        assert not self.is_sent, "the scheduler ends what it knows of"
        if not self.ended:
            self._finish(ABORTED_BY_CLIENT)
            self._changed.set()
        self.stop_encoding()

    def stop_encoding(self) -> None:
        if self.encoding is not None:
            self.encoding.cancel()

    def _finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        self.finished_time = time.monotonic()

    def fail(self, error: Exception) -> None:
        """End the request with `error`, unless it has ended."""
        if not self.ended:
            self.failure = error
            self.finished_time = time.monotonic()
            self._changed.set()

    async def wait_for_output(self) -> bool:
        """Wait for new output or the request's end. True: it has ended without an error.

        For one reader only.

        Raises:
            InvalidRequest: Its prompt, a long text, has too many tokens.
            EngineUnavailable: The engine died.
            RequestFailed: The scheduler refused the request or failed on it.
        """
        await self._changed.wait()
        self._changed.clear()
        if isinstance(self.failure, EngineUnavailable):
            # One failure ends all requests; each raises an error with its own traceback.
            raise EngineUnavailable(str(self.failure)) from self.failure
        if self.failure is not None:
            raise self.failure
        reason = self.finish_reason
        if reason is None:
            return False
        if reason.status_code not in (None, CLIENT_ABORT_STATUS):
            raise RequestFailed(reason.message or "the engine aborted it", reason.status_code)
        return True

    async def wait_for_end(self) -> RequestState:
        """Wait until the request has ended; raises as `wait_for_output` does."""
        while not await self.wait_for_output():
            pass
        return self


class OutputCursor:
    """One reader's position in a `RequestState`; gives the output that is new to that reader."""

    def __init__(self, state: RequestState) -> None:
        self.state = state
        self.first_new_token = 0
        """Index of the first new token of the last `advance`."""
        self._seen_tokens = 0
        self._seen_parts = 0

    def advance(self) -> str:
        """The text since the last call; sets `first_new_token`."""
        state = self.state
        fresh = "".join(state.text_parts[self._seen_parts :])
        self._seen_parts = len(state.text_parts)
        self.first_new_token = self._seen_tokens
        self._seen_tokens = len(state.output_ids)
        return fresh
