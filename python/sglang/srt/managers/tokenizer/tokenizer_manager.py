"""The server process's side of the engine: requests in, growing outputs out.

A request is checked (`request_limits`), encoded (`prompt_encoder`) and sent
(`server_channel`) in `TokenizerManager.submit`; its outputs collect in a `RequestState`. Everything
runs on the event loop that called `start`; only `PromptEncoder` has a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.tokenizer.dp_groups import DPGroups, joined
from sglang.srt.managers.tokenizer.generate_request import (
    EngineUnavailable,
    GenerateRequest,
    InvalidRequest,
)
from sglang.srt.managers.tokenizer.prompt_encoder import PromptEncoder
from sglang.srt.managers.tokenizer.request_limits import (
    RequestLimits,
    check_prompt,
    check_request,
    tokenized,
)
from sglang.srt.managers.tokenizer.request_state import RequestState
from sglang.srt.managers.tokenizer.request_trace import record_request
from sglang.srt.managers.tokenizer.server_channel import (
    QUICK_TIMEOUT,
    STORAGE_TIMEOUT,
    ControlClient,
    ServerChannel,
)
from sglang.srt.mem_cache.tree.radix_key import TokenArray, token_array
from sglang.srt.messages.io_struct import (
    AbortReq,
    AttachHiCacheStorageReqInput,
    ContinueGenerationReqInput,
    ControlReq,
    ControlReqOutput,
    DeclineRoomReq,
    FlushCacheReqInput,
    HeldPagesReport,
    PauseGenerationReqInput,
    RequestOutput,
    SettleHiCacheStorageReqInput,
    ShutdownReq,
    ToServer,
)
from sglang.srt.observability.engine_metrics import ServerMetrics
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sglang.srt.mem_cache.tree.radix_key import TokenArray
    from sglang.srt.messages.ipc import IpcAddresses
    from sglang.srt.observability.trace_recorder import TraceRecorder
    from sglang.srt.observability.tracing import Tracer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TokenizerManager:
    """Checks, encodes and sends requests; gives out their outputs as they grow."""

    def __init__(
        self,
        *,
        ipc: IpcAddresses,
        tokenizer: PreTrainedTokenizerBase,
        limits: RequestLimits,
        metrics: ServerMetrics | None = None,
        log_requests: bool = False,
        tracer: Tracer | None = None,
        groups: DPGroups | None = None,
        recorder: TraceRecorder | None = None,
    ) -> None:
        """`groups` are the server's DP groups, of which `limits` has the number; None: one."""
        self.tokenizer = tokenizer
        self.limits = limits
        self.metrics = metrics
        self._groups = groups or DPGroups()
        num_groups = self._groups.size
        self._channel = ServerChannel(ipc, self._handle, self.fail_all, num_groups)
        self.control = ControlClient(self._channel.send, num_groups)
        self._log_requests = log_requests
        self.tracer = tracer
        self._recorder = recorder
        self.encoder = PromptEncoder(tokenizer)
        self._states: dict[str, RequestState] = {}
        self._turn = asyncio.Lock()
        """Flushes and changes of L3 with several DP groups take turns."""
        self._leaving: set[str] = set()
        """Ids of requests that have lost their client, until their last output comes. The ids are
        still in use."""
        self.refusal: str | None = None
        """Reason why no request is accepted, or None."""
        self.ending: str | None = None
        """Reason why probes fail although requests are accepted, or None: the server ends."""
        self.switching: str | None = None
        """Reason why requests are refused while the server's role changes, or None."""
        self.is_paused = False
        """True if the scheduler launches no steps, or was told so."""
        self._log = RateLimitedLogger(logger)

    async def start(self) -> None:
        await self._channel.start()

    async def close(self) -> None:
        """Fail pending requests and close the sockets. Idempotent."""
        self.fail_all("the engine has been shut down")
        self.encoder.close()
        if self._recorder is not None:
            self._recorder.close()
        await self._channel.close()

    def fail_all(self, reason: str) -> None:
        """End all requests and control requests with `reason`: the engine has died or ends."""
        self.refusal = self.refusal or reason
        error = EngineUnavailable(reason)
        for state in self._states.values():
            state.fail(error)
        self.control.fail_all(error)

    def fail_all_threadsafe(self, reason: str) -> None:
        """Call `fail_all` from another thread; without effect if the loop has ended."""
        self.refusal = self.refusal or reason
        self._channel.call_soon_threadsafe(self.fail_all, reason)

    async def shut_down_scheduler(self, timeout: float) -> None:
        """Ask the scheduler to finish within `timeout` seconds and to exit."""
        self._channel.send(ShutdownReq(timeout=timeout))

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._states)

    @contextmanager
    def submit(self, requests: Sequence[GenerateRequest]) -> Iterator[list[RequestState]]:
        """Check, encode and send the requests of one body; give their states, which grow.

        No request is sent unless all pass. A long text is encoded by the encoder's thread, and its
        request is sent after that; `RequestState.wait_for_output` raises the errors of its prompt.
        Leaving the context aborts requests that have not ended.

        Raises:
            InvalidRequest: Names the field.
            EngineUnavailable: The engine shuts down or has died.
        """
        if (refusal := self.refusal or self.switching) is not None:
            self._decline(requests, refusal)
            raise EngineUnavailable(refusal)
        now = time.monotonic()
        try:
            for request in requests:
                check_request(request, self.limits)
            prompts = self.encoder.encode_now(requests)
            for request, tokens in zip(requests, prompts, strict=True):
                if tokens is not None:
                    check_prompt(request, tokens, self.limits)
        except InvalidRequest as error:
            if error.field == "bootstrap_host":
                # The prefill server waits in vain for this request, and a router's client too.
                self._log.warning("bootstrap_host", "refused a request: %s", error)
            self._decline(requests, str(error))
            raise
        states: list[RequestState] = []
        of_body: dict[str, int] = {}
        try:
            for request in requests:
                rid = request.rid
                if rid in self._states or rid in self._leaving:
                    is_twice = any(state.rid == rid for state in states)
                    where = "another prompt of the body" if is_twice else "a running request"
                    why = f"rid {rid!r} is in use by {where}: choose another"
                    self._decline(requests, why)
                    raise InvalidRequest(why, field="rid")
                self._states[rid] = state = RequestState(request, now)
                states.append(state)
                if self.tracer is not None and not rid.startswith(HEALTH_CHECK_RID_PREFIX):
                    room = None if request.bootstrap is None else request.bootstrap.room
                    state.trace_context = self.tracer.parent(room)
            for request, state, tokens in zip(requests, states, prompts, strict=True):
                if tokens is None:
                    self._encode_later(request, state, of_body)
                else:
                    self._send(state, tokens, of_body)
            yield states
        finally:
            for state in states:
                if state.place is not None:
                    self._groups.leave(state.place)
                self._leave(state)

    async def generate_whole(self, request: GenerateRequest) -> RequestState:
        """Run one request to its end; raises as `submit` and `RequestState.wait_for_output` do."""
        with self.submit([request]) as (state,):
            return await state.wait_for_end()

    async def abort(self, rid: str) -> None:
        """Abort the request `rid` and all its samples."""
        meant = [
            state for state in self._states.values() if rid in (state.rid, state.request.sample_of)
        ]
        _abort_unsent(meant)
        sent = {state.rid: state.dp_rank for state in meant if state.is_sent}
        # A scheduler may still have `rid` after its client has left.
        for one in {rid, *sent}:
            self._channel.send(AbortReq(rid=one), sent.get(one))

    async def abort_all(self) -> None:
        _abort_unsent(self._states.values())
        self._channel.send(AbortReq(abort_all=True))

    async def flush_cache(self, timeout: float) -> ControlReqOutput:
        """Empty L1 and L2 of all DP groups at a time when all are idle, after waiting at most
        `timeout` seconds for that; else of none. Raises as `ControlClient.ask`."""
        if self._groups.size == 1:
            return await self.control.ask(
                FlushCacheReqInput(timeout=timeout), timeout + QUICK_TIMEOUT
            )
        return await self._while_idle(timeout, lambda: self.control.ask(FlushCacheReqInput()))

    async def change_storage(self, message: ControlReq) -> ControlReqOutput:
        """Let `message` change L3 in all DP groups or in none. Raises as `ControlClient.ask`."""
        if self._groups.size == 1:
            return await self.control.ask(message, STORAGE_TIMEOUT)
        if attaches := isinstance(message, AttachHiCacheStorageReqInput):
            message.only_prepares = True

        async def send() -> list[Coroutine[Any, Any, ControlReqOutput]]:
            return self.control.send_each(message, STORAGE_TIMEOUT)

        begun = await self._while_idle(0.0, send)
        if isinstance(begun, ControlReqOutput):
            return begun
        is_prepared = False
        try:
            answer = joined(await asyncio.gather(*begun), is_question=attaches)
            is_prepared = answer.success
        finally:
            if attaches and not is_prepared and self._channel.is_open:
                self._channel.send(SettleHiCacheStorageReqInput(keeps=False))
        if not (attaches and is_prepared):
            return answer
        return await self.control.ask(SettleHiCacheStorageReqInput(keeps=True))

    async def _while_idle(
        self, timeout: float, act: Callable[[], Awaitable[T]]
    ) -> T | ControlReqOutput:
        """Call `act` when all DP groups are idle, and hold new requests back meanwhile. Returns its
        result; or the refusal of a group that is not idle within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            answer = await self._all_idle(max(0.0, deadline - time.monotonic()))
            if not answer.success:
                return answer
            # One group may have got a request while another one still ran.
            async with self._turn:
                with self._channel.requests_held():
                    answer = await self._all_idle(0.0)
                    if answer.success:
                        return await act()
            if time.monotonic() >= deadline:
                return answer

    async def _all_idle(self, timeout: float) -> ControlReqOutput:
        message = FlushCacheReqInput(timeout=timeout, only_asks=True)
        answers = await self.control.ask_each(message, timeout + QUICK_TIMEOUT)
        return joined(answers, is_question=True)

    async def pause(self) -> ControlReqOutput:
        """Let the scheduler launch no further step. Raises as `ControlClient.ask`: then it may
        still come to that, so the server counts as paused."""
        self.is_paused = True
        answer = await self.control.ask(PauseGenerationReqInput())
        self.is_paused = self.is_paused and answer.success
        return answer

    async def resume(self) -> ControlReqOutput:
        """End a pause. Raises as `ControlClient.ask`."""
        self.is_paused = False
        return await self.control.ask(ContinueGenerationReqInput())

    def resume_at_end(self) -> None:
        """End a pause, without waiting: the server drains, and requests under way may end well."""
        if self.is_paused and self._channel.is_open:
            self.is_paused = False
            self._channel.send(ContinueGenerationReqInput())

    def _send(self, state: RequestState, tokens: TokenArray, of_body: dict[str, int]) -> None:
        """Choose the group of a request and send it there; `of_body`: see `DPGroups.enter`."""
        request, is_traced = state.request, state.trace_context is not None
        message = tokenized(request, tokens, self.limits, state.created_time, is_traced=is_traced)
        state.place = self._groups.enter(request, tokens, of_body)
        self._channel.send(message, state.dp_rank)
        state.note_sent(tokens, message.logprob_start_len)
        # Samples of one prompt compute it once.
        if self._recorder is not None and request.sample_of is None:
            state.trace_blocks = self._recorder.blocks(tokens, message.extra_key)

    def _encode_later(
        self, request: GenerateRequest, state: RequestState, of_body: dict[str, int]
    ) -> None:
        """Start the task that encodes a long text and sends its request."""

        async def run() -> None:
            tokens = token_array(
                await self.encoder.encode(
                    request.text or "", add_special_tokens=request.add_special_tokens
                )
            )
            if not state.ended:
                check_prompt(request, tokens, self.limits)
                self._send(state, tokens, of_body)

        def on_done(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception) and self._states.get(state.rid) is state:
                self._decline([request], str(error))
                # Refused requests count in no metric, and their id is free at once.
                del self._states[state.rid]
                state.fail(error)

        state.encoding = asyncio.create_task(run(), name="encode-prompt")
        state.encoding.add_done_callback(on_done)

    def _decline(self, requests: Sequence[GenerateRequest], reason: str) -> None:
        """Tell the other servers of `requests` that these never begin."""
        if self.limits.disaggregation_mode == DisaggregationMode.NULL or not self._channel.is_open:
            return
        for request in requests:
            if request.bootstrap is not None and self.limits.may_contact(request.bootstrap):
                message = DeclineRoomReq(bootstrap=request.bootstrap, reason=reason)
                self._channel.send(message, self._groups.of_room(request.bootstrap.room))

    def _leave(self, state: RequestState) -> None:
        """Drop the state of a request that has no reader any more; abort it if it still runs."""
        if self._states.get(state.rid) is not state:
            return
        del self._states[state.rid]
        state.stop_encoding()
        if not state.is_sent:
            self._decline([state.request], "it ended before its prompt was tokenized")
        if not state.ended:
            if not state.is_sent:
                return
            self._leaving.add(state.rid)
            if self._channel.is_open:
                self._channel.send(AbortReq(rid=state.rid), state.dp_rank)
        if state.rid.startswith(HEALTH_CHECK_RID_PREFIX):
            return
        if self._recorder is not None and state.trace_blocks is not None:
            self._recorder.record(
                state.created_time, state.prompt_tokens, len(state.output_ids), state.trace_blocks
            )
        if self.metrics is not None:
            self.metrics.observe_end(state.outcome, state.seconds)
        if self._log_requests:
            log_request(state)
        if self.tracer is not None:
            record_request(self.tracer, state)

    def _handle(self, message: ToServer) -> None:
        if isinstance(message, ControlReqOutput):
            self.control.deliver(message)
            return
        if isinstance(message, HeldPagesReport):
            self._groups.note_pages(message)
            return
        now = time.monotonic()
        for update in message.outputs:
            state = self._states.get(update.output.rid)
            # Outputs of a request whose client has left may still come for a while.
            if state is None or state.ended:
                if update.output.finish_reason is not None:
                    self._leaving.discard(update.output.rid)
                continue
            fresh = state.apply(update, self._stop_text(state, update.output))
            if fresh:
                if state.place is not None and state.place.uncomputed:
                    self._groups.computed(state.place)
                self._observe_tokens(state, fresh, now)

    def _stop_text(self, state: RequestState, output: RequestOutput) -> str:
        """Text of the stop token, which the detokenizer leaves out; empty unless the client wants
        it."""
        reason = output.finish_reason
        if not state.request.no_stop_trim or reason is None or not isinstance(reason.matched, int):
            return ""
        text = self.tokenizer.decode(
            [reason.matched], skip_special_tokens=output.skip_special_tokens
        )
        return text if isinstance(text, str) else ""

    def _observe_tokens(self, state: RequestState, fresh: int, now: float) -> None:
        last = state.last_token_time
        state.last_token_time = now
        is_probe = state.rid.startswith(HEALTH_CHECK_RID_PREFIX)
        if self.metrics is None or not state.request.stream or is_probe:
            return
        if last is None:
            self.metrics.observe_first_token(now - state.created_time)
        else:
            self.metrics.observe_next_tokens(now - last, fresh)


def log_request(state: RequestState) -> None:
    """The line of `--log-requests` for a request that has no reader any more."""
    cached, first_token = state.cached_tokens_details, state.first_token_seconds
    seconds = time.monotonic() - state.created_time
    reason = state.finish_reason.type if state.finish_reason else "left by its client"
    stages = state.shown_stages() or {}
    told = (
        f"{name.replace('_', ' ')} {value:.3f} s"
        for name, value in stages.items()
        if value is not None and name != "queue"
    )
    fields = {
        "rid": state.rid,
        "prompt_tokens": state.prompt_tokens,
        "cached_tokens": {
            "device": cached.device,
            "host": cached.host,
            "storage": cached.storage,
        },
        "output_tokens": len(state.output_ids),
        "queue_seconds": state.queue_time,
        "stages": stages,
        "first_token_seconds": first_token,
        "seconds": seconds,
        "finish_reason": reason,
    }
    logger.info(
        "request %s: %d prompt tokens (%d cached: device %d, host %d, storage %d), %d output "
        "tokens, queue %.3f s, first token %s, %.3f s (%s), %s",
        state.rid,
        state.prompt_tokens,
        cached.total,
        cached.device,
        cached.host,
        cached.storage,
        len(state.output_ids),
        state.queue_time,
        "never" if first_token is None else f"{first_token:.3f} s",
        seconds,
        ", ".join(told) or "not scheduled",
        reason,
        extra={"fields": fields},
    )


def _abort_unsent(states: Iterable[RequestState]) -> None:
    """End the requests whose prompt is still being tokenized; they are never sent."""
    for state in list(states):
        if not state.is_sent:
            state.abort_unsent()
