"""The server process of an engine with a scheduler that echoes: real sockets, no model.

`FrontServer` runs the HTTP application on a free loopback port, with the real detokenizer in a
thread and `FakeScheduler` in another, all in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import zmq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang.srt.arg_groups.disaggregation import DisaggregationMode, PrefillHosts, prefill_hosts
from sglang.srt.entrypoints.engine import EngineFront, make_recorder, make_tracer
from sglang.srt.entrypoints.engine_processes import EngineProcesses
from sglang.srt.entrypoints.http.pd_role import PDRole
from sglang.srt.entrypoints.http.server_context import ServerContext
from sglang.srt.entrypoints.http_server import HttpServer
from sglang.srt.managers.detokenizer.detokenizer_manager import (
    DecoderFactory,
    Detokenizer,
    make_decoder_factory,
    open_sockets,
    serve,
)
from sglang.srt.managers.scheduler.requests.stop_finder import StopFinder
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.managers.tokenizer.dp_groups import DPGroups
from sglang.srt.managers.tokenizer.group_prefixes import GroupPrefixes
from sglang.srt.managers.tokenizer.request_limits import RequestLimits
from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
from sglang.srt.messages.cache_report import CacheCut, CacheReport, Tier
from sglang.srt.messages.io_struct import (
    ABORTED_BY_CLIENT,
    SCHEDULER_DECODER,
    AbortReq,
    BatchTokenIDOutput,
    CachedTokensDetails,
    ContinueGenerationReqInput,
    ControlReqOutput,
    DeclineRoomReq,
    FinishReason,
    FlushCacheReqInput,
    GetMetricsReq,
    Message,
    PauseGenerationReqInput,
    PDRoleSwitchReqInput,
    RequestOutput,
    ShutdownReq,
    Stages,
    TokenizedGenerateReqInput,
    encode,
)
from sglang.srt.messages.ipc import IpcAddresses, make_ipc_directory
from sglang.srt.observability.engine_metrics import ServerMetrics
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import base_url, get_free_port, wait_until

if TYPE_CHECKING:
    from sglang.srt.observability.trace_recorder import TraceRecorder
    from sglang.srt.observability.tracing import Tracer

EOS_ID: Final = 256
CONTEXT_LEN: Final = 200
VOCAB_SIZE: Final = 260
PAGE_SIZE: Final = 4
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with one token for each byte, `<eos>` and `<sys>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.add_special_tokens([AddedToken("<sys>", special=True)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


REPORT: Final = CacheReport(
    on_arrival=1,
    device=1,
    storage=2,
    cuts=[CacheCut(tier=Tier.STORAGE, at=3, reason="damaged")],
)
"""The report of every request that asks for one."""
STAGES: Final = Stages(queue=0.5, l3_wait=0.25, prefill=0.125, decode=1.0)
"""The times of every request that asks for a report."""


@dataclass(slots=True)
class _Running:
    request: TokenizedGenerateReqInput
    finder: StopFinder
    sent: int = 0


@dataclass
class FakeScheduler:
    """Answers every request with its own prompt, repeated, one token a step.

    Thread `fake-scheduler`. Outputs end by `<eos>`, `stop_token_ids`, `max_new_tokens`, aborts,
    and stops that the real finder finds in the text. Logprobs are `-token_id`.
    """

    ipc: IpcAddresses
    new_decoder: DecoderFactory
    dp_rank: int = 0
    hold: threading.Event = field(default_factory=threading.Event)
    """While set, running requests get no further tokens: by a test, or a pause."""
    hold_after: int | None = None
    """Tokens after which a streaming request gets no further tokens."""
    refuse_with: FinishReason | None = None
    """If set, every new request ends with it, and so do aborted ones."""
    control_success: bool = True
    refused: dict[type, str] = field(default_factory=dict)
    """Kinds of control requests that are refused, and why."""
    busy: str | None = None
    """Refusal of a change of the role; None: the role changes."""
    silent_about: type | None = None
    """Kind of control requests that get no answer."""
    eos_ids: frozenset[int] = frozenset({EOS_ID})
    received: list[Message] = field(default_factory=list)
    frame_sizes: list[int] = field(default_factory=list)
    """Number of messages in each frame."""
    running: dict[str, _Running] = field(default_factory=dict)

    def run(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Serve until the context is terminated."""
        source = context.socket(zmq.PULL)
        source.bind(self.ipc.scheduler_input(self.dp_rank))
        tokens = context.socket(zmq.PUSH)
        tokens.connect(self.ipc.detokenizer_input)
        control = context.socket(zmq.PUSH)
        control.connect(self.ipc.server_input)
        try:
            while True:
                idle = not self._steppable()
                while source.poll(5 if idle else 0):
                    messages = SCHEDULER_DECODER.decode(source.recv())
                    self.frame_sizes.append(len(messages))
                    for message in messages:
                        self.received.append(message)
                        self._handle(message, tokens, control)
                if ready := self._steppable():
                    outputs = [self._step(one) for one in ready]
                    self._send(tokens, [one for one in outputs if one is not None])
        except zmq.ContextTerminated:
            pass
        finally:
            for socket in (source, tokens, control):
                socket.close(linger=0)

    def _steppable(self) -> list[_Running]:
        if self.hold.is_set():
            return []
        limit = self.hold_after
        return [one for one in self.running.values() if limit is None or one.sent < limit]

    def _handle(self, message: Any, tokens: zmq.Socket[bytes], control: zmq.Socket[bytes]) -> None:
        if isinstance(message, TokenizedGenerateReqInput):
            if self.refuse_with is None:
                params = message.sampling_params
                finder = StopFinder(params, self.new_decoder(params.skip_special_tokens))
                self.running[message.rid] = _Running(message, finder)
            else:
                self._send(
                    tokens,
                    [RequestOutput(rid=message.rid, output_ids=[], finish_reason=self.refuse_with)],
                )
        elif isinstance(message, AbortReq):
            rids = list(self.running) if message.abort_all else [message.rid]
            ended = [rid for rid in rids if self.running.pop(rid, None) is not None]
            reason = self.refuse_with or ABORTED_BY_CLIENT
            self._send(
                tokens,
                [RequestOutput(rid=r, output_ids=[], finish_reason=reason) for r in ended],
            )
        elif not isinstance(message, ShutdownReq | DeclineRoomReq):
            if isinstance(message, PauseGenerationReqInput) and self.control_success:
                self.hold.set()
            if isinstance(message, ContinueGenerationReqInput):
                self.hold.clear()
            data: dict[str, Any] = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0}
            if isinstance(message, GetMetricsReq):
                data = {"text": "sglang:num_running_reqs 0.0\n"}
            if isinstance(message, PDRoleSwitchReqInput):
                data = {"role": message.new_role, "routes": []}
                if self.busy is not None:
                    data = {"role": "old", "busy": self.busy}
            if type(message) is self.silent_about:
                return
            is_busy = isinstance(message, FlushCacheReqInput) and bool(self.running)
            refusal = self.refused.get(type(message))
            success = self.control_success and not is_busy and refusal is None
            answer = ControlReqOutput(
                req_id=message.req_id,
                success=success,
                message="done" if success else refusal or "busy: running 1; try again when idle",
                data=data,
            )
            control.send(encode(answer))

    def _step(self, one: _Running) -> RequestOutput | None:
        request, params = one.request, one.request.sampling_params
        ids = request.input_ids.tolist()
        reason: FinishReason | None = None
        first = one.sent
        while reason is None:
            token = ids[one.sent % len(ids)]
            one.sent += 1
            output = [ids[i % len(ids)] for i in range(one.sent)]
            match = one.finder.advance(output, may_stop=True) if params.has_text_stops else None
            ends = token in self.eos_ids and not params.ignore_eos
            if ends or token in (params.stop_token_ids or ()):
                reason = FinishReason(type="stop", matched=token)
            elif match is not None:
                reason = FinishReason(type="stop", matched=match.stop)
            elif one.sent >= params.max_new_tokens:
                reason = FinishReason(type="length", length=params.max_new_tokens)
            if request.stream:
                break
        if reason is not None:
            del self.running[request.rid]
        start = request.logprob_start_len
        told = ids[start + 1 :] if start >= 0 and first == 0 else None
        fresh = [ids[i % len(ids)] for i in range(first, one.sent)]
        return RequestOutput(
            rid=request.rid,
            output_ids=fresh,
            finish_reason=reason,
            prompt_tokens=len(ids),
            completion_tokens=one.sent,
            cached_tokens_details=CachedTokensDetails(
                device=1, storage=2, storage_backend="HiCacheFile"
            ),
            output_logprobs=[-float(t) for t in fresh] if request.return_logprob else None,
            output_top_logprobs=[[(-float(t), t), (-999.0, 0)] for t in fresh]
            if request.top_logprobs_num
            else None,
            input_logprobs=None if told is None else [-float(t) for t in told],
            input_top_logprobs=[[(-float(t), t)] for t in told]
            if told is not None and request.top_logprobs_num
            else None,
            stages=STAGES if reason and request.return_cache_report else None,
            cache_report=REPORT if reason and request.return_cache_report else None,
            skip_special_tokens=params.skip_special_tokens,
            shown_chars=one.finder.shown_chars(ended=reason is not None)
            if params.has_text_stops
            else None,
        )

    @staticmethod
    def _send(socket: zmq.Socket[bytes], outputs: list[RequestOutput]) -> None:
        if outputs:
            socket.send(encode(BatchTokenIDOutput(outputs=outputs)))


@dataclass(frozen=True)
class FakeEngine:
    """The threads behind a `TokenizerManager`, and the addresses to reach them."""

    ipc: IpcAddresses
    schedulers: list[FakeScheduler]
    tokenizer: PreTrainedTokenizerFast

    @property
    def scheduler(self) -> FakeScheduler:
        """That of the first DP group."""
        return self.schedulers[0]

    def groups(self, method: str = "auto") -> DPGroups:
        """The DP groups, whose pages have `PAGE_SIZE` tokens."""
        size = len(self.schedulers)
        by_prefix = size > 1 and method == "auto"
        return DPGroups(size, method, GroupPrefixes(size, PAGE_SIZE) if by_prefix else None)

    def manager(
        self,
        metrics: ServerMetrics | None = None,
        disaggregation_mode: str = DisaggregationMode.NULL,
        max_queued_requests: int = 4096,
        hosts: PrefillHosts | None = None,
        tracer: Tracer | None = None,
        load_balance_method: str = "auto",
        recorder: TraceRecorder | None = None,
    ) -> TokenizerManager:
        """A manager that uses this engine. At most one at a time."""
        limits = RequestLimits(
            vocab_size=max(VOCAB_SIZE, len(self.tokenizer)),
            context_len=CONTEXT_LEN,
            max_input_len=CONTEXT_LEN - 1,
            max_queued_requests=max_queued_requests,
            disaggregation_mode=disaggregation_mode,
            prefill_hosts=hosts,
            num_dp_groups=len(self.schedulers),
        )
        return TokenizerManager(
            ipc=self.ipc,
            tokenizer=self.tokenizer,
            limits=limits,
            metrics=metrics,
            tracer=tracer,
            groups=self.groups(load_balance_method),
            recorder=recorder,
        )


@contextlib.contextmanager
def fake_engine(
    make_tokenizer: Callable[[], PreTrainedTokenizerFast] = byte_tokenizer,
    eos_ids: frozenset[int] = frozenset({EOS_ID}),
    num_groups: int = 1,
) -> Iterator[FakeEngine]:
    """Run a fake scheduler for each DP group and the real detokenizer, in threads."""
    directory = make_ipc_directory()
    ipc = IpcAddresses(directory.path)
    tokenizer = make_tokenizer()
    schedulers = [
        FakeScheduler(ipc, make_decoder_factory(make_tokenizer()), dp_rank, eos_ids=eos_ids)
        for dp_rank in range(num_groups)
    ]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    source, sink = open_sockets(context, ipc)

    def detokenize() -> None:
        try:
            serve(Detokenizer(make_decoder_factory(make_tokenizer())), source, sink)
        finally:
            source.close(linger=0)
            sink.close(linger=0)

    threads = [
        *(
            threading.Thread(target=one.run, args=(context,), name="fake-scheduler")
            for one in schedulers
        ),
        threading.Thread(target=detokenize, name="fake-detokenizer"),
    ]
    for thread in threads:
        thread.start()
    try:
        yield FakeEngine(ipc, schedulers, tokenizer)
    finally:
        context.term()
        for thread in threads:
            thread.join()
        directory.remove()


def with_groups(
    work: Callable[[FakeEngine, TokenizerManager], Awaitable[None]], num_groups: int = 2
) -> None:
    """Run `work` on an engine of so many DP groups, and a manager that has been started."""

    async def run() -> None:
        with fake_engine(num_groups=num_groups) as engine:
            manager = engine.manager()
            await manager.start()
            try:
                await work(engine, manager)
            finally:
                await manager.close()

    asyncio.run(run())


@dataclass(frozen=True)
class _Front:
    """The part of `EngineFront` that a server of threads needs."""

    context: ServerContext
    processes: EngineProcesses

    @property
    def manager(self) -> TokenizerManager:
        return self.context.manager

    async def drain(self, timeout: float) -> bool:
        await self.manager.shut_down_scheduler(timeout)
        await self.manager.close()
        return True


@dataclass(frozen=True)
class FrontServer:
    """A running HTTP server and its engine."""

    url: str
    engine: FakeEngine
    context: ServerContext
    server: HttpServer
    thread: threading.Thread

    @property
    def scheduler(self) -> FakeScheduler:
        return self.engine.scheduler

    @property
    def requests(self) -> list[TokenizedGenerateReqInput]:
        """Requests that the scheduler got, in order."""
        return [m for m in self.scheduler.received if isinstance(m, TokenizedGenerateReqInput)]

    def signal(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """Do what the server does at a signal."""
        self.server.handle_exit(sig, None)


@contextlib.contextmanager
def front_server(
    *, make_engine: Callable[[], AbstractContextManager[FakeEngine]] = fake_engine, **args: Any
) -> Iterator[FrontServer]:
    """Serve on a free loopback port; `args` are fields of `ServerArgs`."""
    server_args = ServerArgs(
        model_path="dummy", served_model_name="echo", port=get_free_port(), **args
    ).resolve()
    with make_engine() as engine:
        metrics = ServerMetrics() if server_args.enable_metrics else None
        context = ServerContext(
            args=server_args,
            manager=engine.manager(
                metrics,
                server_args.disaggregation_mode,
                server_args.max_queued_requests,
                prefill_hosts(server_args, server_args.host),
                make_tracer(server_args, None if metrics is None else metrics.registry),
                recorder=make_recorder(server_args),
            ),
            chat_template=ChatTemplate(engine.tokenizer, server_args.chat_template),
            ready_details={"max_req_input_len": CONTEXT_LEN - 1},
            model_info={"model_path": "dummy", "is_generation": True},
            pd_role=PDRole(server_args),
        )
        front = _Front(context, EngineProcesses())
        front.processes.expect_end()  # There are none to watch.
        server = HttpServer(cast(EngineFront, front))
        thread = threading.Thread(target=server.run, name="front-server")
        thread.start()
        try:
            assert wait_until(lambda: server.started, 20.0), "the server did not start"
            url = base_url(server_args.host, server_args.port)
            yield FrontServer(url, engine, context, server, thread)
        finally:
            server.should_exit = True
            thread.join()
            if context.manager.tracer is not None:
                context.manager.tracer.close()
            if context.pd_role is not None:
                context.pd_role.close()
            front.processes.kill()


LAST_MESSAGE: Final = "{{ messages[-1]['content'] }}<eos>{# it knows of tools #}"
"""A template that lets the echo say what the last message says."""
WHOLE: Final = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ reasoning_effort or '' }}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}:{% if m.reasoning_content %}<{{ m.reasoning_content }}>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.id }}={{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id or '' }}{% if not loop.last or add_generation_prompt %}]{% endif %}"
    "{% endfor %}"
)
"""A template that shows all that a conversation has."""
CALLS: Final = '{"name":"f","parameters":{}};{"name":"g","parameters":{"x":7}}'
FULL: Final = f"<think>h</think>So. <|python_tag|>{CALLS}"
"""Reasoning, a text and two calls, as Qwen and Llama write them."""


def write_template(folder: Path, text: str) -> str:
    """The path of a chat template with this text."""
    path = folder / "template.jinja"
    path.write_text(text)
    return str(path)
