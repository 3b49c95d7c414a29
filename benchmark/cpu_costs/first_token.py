"""CPU time of a first token whose prompt is all in L1: in the scheduler and in the server process.

Scheduler: a whole tick up to the launch of its step, of a prompt that the tree has, over a tiny
model whose forward is left out. Server: from the first bytes of a request to the frame for the
scheduler (`in`), and from waking up with the text to the first bytes of the answer (`out`). The
server is the real application with real sockets; client and engine each run in a process of their
own. The benchmark writes 64 MB between two requests, because an idle server finds nothing in its
caches; `--warm` leaves this out. Prints the median and the least microseconds. `--calls` counts
calls of Python and C functions instead, which are the same on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import selectors
import socket
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np
import zmq

from benchmark.command import Command
from benchmark.prompts import random_prompt
from benchmark.report import Report
from sglang.srt.messages.io_struct import (
    SCHEDULER_DECODER,
    BatchStrOutput,
    FinishReason,
    RequestOutput,
    TextOutput,
    encode,
)
from sglang.srt.messages.ipc import IpcAddresses, make_ipc_directory
from sglang.srt.utils.network import get_free_port

_COLD_WORDS: Final = 8 << 20
_WARM_UP: Final = 5
_VOCAB_SIZE: Final = 150_000
"""Vocabulary of the server, which reads token ids as JSON. The scheduler's model has a small
one."""
_TINY_VOCAB_SIZE: Final = 150
_PAUSE_S: Final = 0.03
_STEP_S: Final = 0.005


@dataclass
class Span:
    """A part of the way of a request: microseconds each time, or calls."""

    counts_calls: bool
    values: list[float] = field(default_factory=list)
    _began: float | None = None
    _calls: int = 0

    def begin(self) -> None:
        """It begins, anew if it has begun."""
        self._began, self._calls = time.perf_counter(), 0
        if self.counts_calls:
            sys.setprofile(self._on_event)

    def end(self) -> None:
        """It is over; nothing where it has not begun."""
        if self._began is None:
            return
        sys.setprofile(None)
        micros = (time.perf_counter() - self._began) * 1e6
        self.values.append(self._calls if self.counts_calls else micros)
        self._began = None

    def _on_event(self, frame: object, event: str, argument: object) -> None:
        self._calls += event in ("call", "c_call")

    def summary(self) -> dict[str, float]:
        kept = self.values[_WARM_UP:]
        return {"median": statistics.median(kept), "least": min(kept)}


def cool(memory: Any) -> None:
    """Fill the caches with other things."""
    if memory is not None:
        memory += 1


# ---- scheduler ---------------------------------------------------------------------------------


def measure_scheduler(args: argparse.Namespace) -> dict[str, float]:
    """A tick with one request, up to the launch of its step."""
    import torch

    from rigs.models.tiny_models import save_tiny_checkpoint
    from rigs.schedulers.scheduler_rig import SchedulerRig, greedy
    from sglang.srt.managers.scheduler.launched_step import TpModelWorker
    from sglang.srt.utils.process import freeze_heap

    torch.set_num_threads(1)
    ids, span = random_prompt(0, args.tokens, 0, _TINY_VOCAB_SIZE), Span(args.calls)
    memory = None if args.warm else np.zeros(_COLD_WORDS, dtype=np.int64)
    results: list[Any] = []
    forward = TpModelWorker.forward_batch_generation

    def launch(worker: TpModelWorker, batch: Any) -> Any:
        span.end()
        if not results or batch.forward.forward_mode.is_extend():
            results[:] = [forward(worker, batch)]
        elif batch.forward.mostly_done is not None:
            batch.forward.mostly_done.record()
        return results[0]

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = Path(name)
        save_tiny_checkpoint(
            model, "qwen3", eos_token_id=None, max_position_embeddings=args.tokens + 64
        )
        rig = SchedulerRig(
            model,
            pool_tokens=-(-args.tokens // 64) * 128,
            max_requests=4,
            page_size=64,
            chunked_prefill_size=8192,
            enable_hierarchical_cache=True,
            overlap=True,
        )
        stack.callback(rig.close)
        rig.run(rig.request("first", ids, greedy(1)))
        rig.run(rig.request("second", ids, greedy(1)))
        freeze_heap()
        patch = mock.patch.object(TpModelWorker, "forward_batch_generation", launch)
        stack.enter_context(patch)
        scheduler = rig.scheduler
        for number in range(args.repeats + _WARM_UP):
            message = rig.request(f"r{number}", ids, greedy(1))
            cool(memory)
            time.sleep(_PAUSE_S)
            span.begin()
            scheduler.step(scheduler.make_tick(2000.0 + number, [message]))
            while not scheduler.is_idle():
                rig.step()
        return span.summary()


# ---- server ------------------------------------------------------------------------------------


def run_engine(ipc: IpcAddresses) -> None:
    """Process: answers every request with one token."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    source, sink = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    source.set_hwm(0)
    source.bind(ipc.scheduler_input())
    sink.connect(ipc.server_input)
    while True:
        for message in SCHEDULER_DECODER.decode(source.recv()):
            time.sleep(_STEP_S)
            rid = getattr(message, "rid", "")
            output = RequestOutput(
                rid=rid, output_ids=[5], finish_reason=FinishReason(type="length", length=1)
            )
            sink.send(encode(BatchStrOutput(outputs=[TextOutput(output=output, text="x")])))


def run_client(port: int, tokens: int, count: int) -> None:
    """Process: asks `count` times on one connection."""
    params = {"max_new_tokens": 1, "temperature": 0}
    ids = random_prompt(0, tokens, 0, _VOCAB_SIZE)
    body = msgspec.json.encode({"input_ids": ids, "sampling_params": params, "stream": True})
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as peer:
        for _ in range(count):
            time.sleep(_PAUSE_S)
            peer.sendall(head.encode() + body)
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += peer.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200"), answer[:300]


class WakingSelector(selectors.DefaultSelector):
    """Tells when the event loop wakes up."""

    def __init__(self, on_wake: Any) -> None:
        super().__init__()
        self._on_wake = on_wake

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(timeout)
        if ready:
            self._on_wake()
        return ready


def measure_server(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure the server process before and after the engine's part."""
    from rigs.servers.fake_engine import byte_tokenizer
    from sglang.srt.entrypoints.http.protocol import BoundedProtocol
    from sglang.srt.entrypoints.http.request import Request
    from sglang.srt.entrypoints.http.server_context import ServerContext
    from sglang.srt.entrypoints.http_server import BoundedServer, create_app
    from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
    from sglang.srt.managers.tokenizer.request_limits import RequestLimits
    from sglang.srt.managers.tokenizer.server_channel import ServerChannel
    from sglang.srt.managers.tokenizer.tokenizer_manager import TokenizerManager
    from sglang.srt.observability.engine_metrics import ServerMetrics
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.process import freeze_heap

    way_in, way_out = Span(args.calls), Span(args.calls)
    memory = None if args.warm else np.zeros(_COLD_WORDS, dtype=np.int64)
    is_with_engine = False
    received, flush = BoundedProtocol.data_received, ServerChannel._flush
    write = Request.write

    def on_data(self: BoundedProtocol, data: bytes) -> None:
        if way_in._began is None:
            cool(memory)
            way_in.begin()
        received(self, data)

    def on_flush(self: ServerChannel) -> None:
        nonlocal is_with_engine
        flush(self)
        is_with_engine = way_in._began is not None
        way_in.end()
        cool(memory)

    def on_wake() -> None:
        if is_with_engine:
            way_out.begin()

    def on_write(self: Request, part: bytes) -> None:
        nonlocal is_with_engine
        write(self, part)
        is_with_engine = False
        way_out.end()

    directory = make_ipc_directory()
    ipc = IpcAddresses(directory.path)
    tokenizer = byte_tokenizer()
    limits = RequestLimits(
        vocab_size=_VOCAB_SIZE,
        context_len=args.tokens + 64,
        max_input_len=args.tokens,
        max_queued_requests=100,
    )
    context = ServerContext(
        args=ServerArgs(model_path="dummy", served_model_name="dummy").resolve(),
        manager=TokenizerManager(
            ipc=ipc, tokenizer=tokenizer, limits=limits, metrics=ServerMetrics()
        ),
        chat_template=ChatTemplate(tokenizer, None),
        ready_details={},
        model_info={},
    )
    port = get_free_port()

    class Server(BoundedServer):
        async def on_startup(self) -> None:
            await context.manager.start()

        async def on_shutdown(self) -> None:
            await context.manager.close()

    server = Server(create_app(context), port=port)
    spawn = multiprocessing.get_context("spawn")
    engine = spawn.Process(target=run_engine, args=(ipc,))
    count = args.repeats + _WARM_UP
    client = spawn.Process(target=run_client, args=(port, args.tokens, count))

    def ask() -> None:
        while not server.started:
            time.sleep(0.05)
        client.start()
        client.join()
        server.should_exit = True

    engine.start()
    asker = threading.Thread(target=ask, name="ask")
    asker.start()
    freeze_heap()
    with (
        mock.patch.object(BoundedProtocol, "data_received", on_data),
        mock.patch.object(ServerChannel, "_flush", on_flush),
        mock.patch.object(Request, "write", on_write),
        asyncio.Runner(
            loop_factory=lambda: asyncio.SelectorEventLoop(WakingSelector(on_wake))
        ) as runner,
    ):
        runner.run(server.serve())
    asker.join()
    engine.kill()
    engine.join()
    directory.remove()
    return {"in": way_in.summary(), "out": way_out.summary()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--warm", action="store_true", help="leave the caches as they are")
    parser.add_argument("--calls", action="store_true", help="count calls, not time")


def run(args: argparse.Namespace, report: Report) -> None:
    unit = "calls" if args.calls else "us"
    ways = {f"server, {way}": found for way, found in measure_server(args).items()}
    for place, found in (ways | {"scheduler": measure_scheduler(args)}).items():
        report.add_all(unit, found, {"place": place})


_QUICK: Final = {"tokens": 1024, "repeats": 3, "warm": True}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=40, quick=_QUICK)
