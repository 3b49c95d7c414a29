"""The scheduler as a process: ready message, sockets, hostile bytes, and how it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from rigs.servers.forked_servers import forking_engines
from sglang.srt.hardware_backend.cuda.runtime import CudaRuntime
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import (
    DETOKENIZER_DECODER,
    SERVER_DECODER,
    BatchTokenIDOutput,
    ControlReqOutput,
    GetInternalStateReq,
    ShutdownReq,
    TokenizedGenerateReqInput,
    ToScheduler,
    encode,
    frame_of,
)
from sglang.srt.messages.ipc import IpcAddresses, make_ipc_directory, receive_ready
from sglang.srt.process.build import on_this_machine
from sglang.srt.process.run import run_scheduler_process
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-b-test-cpu")

_DEADLINE_MS = 60_000


class Peer:
    """The server's and the detokenizer's side of the sockets."""

    def __init__(self, ipc: IpcAddresses) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sink = self._context.socket(zmq.PUSH)
        self.sink.connect(ipc.scheduler_input())
        self._tokens = self._context.socket(zmq.PULL)
        self._tokens.bind(ipc.detokenizer_input)
        self._answers = self._context.socket(zmq.PULL)
        self._answers.bind(ipc.server_input)

    def send(self, message: ToScheduler) -> None:
        self.sink.send(frame_of([encode(message)]))

    def tokens(self) -> BatchTokenIDOutput:
        assert self._tokens.poll(_DEADLINE_MS), "no tokens"
        return DETOKENIZER_DECODER.decode(self._tokens.recv())

    def answer(self) -> ControlReqOutput:
        assert self._answers.poll(_DEADLINE_MS), "no answer"
        message = SERVER_DECODER.decode(self._answers.recv())
        assert isinstance(message, ControlReqOutput)
        return message

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def scheduler(**args: Any) -> Iterator[tuple[Peer, Any, dict[str, Any]]]:
    """A scheduler process: our side of its sockets, its handle, its ready message."""
    spawn = multiprocessing.get_context("spawn")
    directory = make_ipc_directory()
    ipc = IpcAddresses(directory.path)
    with ExitStack() as stack:
        stack.callback(directory.remove)
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(
            target=run_scheduler_process,
            args=(ServerArgs(**args).resolve(), ipc, None, theirs),
            name="scheduler",
        )
        process.start()
        stack.callback(process.join, 10)
        stack.callback(process.kill)
        theirs.close()
        peer = Peer(ipc)
        stack.callback(peer.close)
        yield peer, process, receive_ready(ours)


def generate(rid: str, max_new_tokens: int) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=token_array(range(1, 200)),
        sampling_params=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        seed=1,
        stream=True,
        created_time=time.monotonic(),
    )


def test_a_scheduler_drops_hostile_messages_and_ends_when_told(tmp_path: Path) -> None:
    with scheduler(max_total_tokens=4096, page_size=16) as (peer, process, ready):
        assert ready["status"] == "ready"
        assert ready["max_total_num_tokens"] == 4096
        assert ready["max_req_input_len"] == 4095
        assert ready["device"] == detect_device()
        assert "--max-total-tokens 4096" in ready["tiers"][0]
        # Not a message, a message of another kind, a message with a wrong type.
        peer.sink.send(b"\x80\x04.hostile")
        peer.sink.send(frame_of([encode(ControlReqOutput(req_id="x", success=True))]))
        peer.sink.send(msgspec.msgpack.encode([{"type": "ShutdownReq", "timeout": "soon"}]))
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
        peer.send(generate("a", 5))
        got: list[int] = []
        while True:
            for output in peer.tokens().outputs:
                got += output.output_ids
            if output.finish_reason is not None:
                break
        assert len(got) == 5
        assert output.finish_reason.type == "length"
        assert 0 <= output.queue_time < 30
        peer.send(GetInternalStateReq(req_id="s"))
        assert peer.answer().data["counters"]["finished"] == 1
        peer.send(generate("b", 3))
        peer.send(ShutdownReq(timeout=30.0))
        while peer.tokens().outputs[-1].finish_reason is None:
            pass
        process.join(30)
        assert process.exitcode == 0


def test_auto_means_the_best_device_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ServerArgs(model_path="dummy").resolve()
    for detected, backend in (("cpu", "torch_native"), ("cuda", "triton")):
        settled = on_this_machine(args, detected)
        assert (settled.device, settled.attention_backend) == (detected, backend)
    on_cpu = ServerArgs(model_path="dummy", device="cpu").resolve()
    assert on_this_machine(on_cpu, "cuda").device == "cpu"
    on_npu = ServerArgs(model_path="dummy", device="npu").resolve()
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ValueError, match="--device npu: torch_npu "):
        on_this_machine(on_npu, "cpu")
    on_gpu = ServerArgs(model_path="dummy", device="cuda").resolve()
    monkeypatch.setattr(CudaRuntime, "why_absent", lambda _: "torch sees no CUDA device here")
    with pytest.raises(ValueError, match="torch sees no CUDA device here; use --device cpu"):
        on_this_machine(on_gpu, "cpu")
    split = ServerArgs(
        model_path="dummy", enable_hierarchical_cache=True, hicache_mem_layout="page_first_kv_split"
    ).resolve()
    assert on_this_machine(split, "cpu").device == "cpu"
    with pytest.raises(ValueError, match="page_first_kv_split does not work on cuda"):
        on_this_machine(split, "cuda")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"model_path": "/nonexistent"}, "is not a directory"),
        ({"mem_fraction_static": 1e-9}, "--mem-fraction-static"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(args: dict[str, Any], message: str) -> None:
    with forking_engines(), scheduler(**args) as (_, process, ready):
        assert ready["status"] == "error"
        assert message in ready["message"]
        assert "\n" not in ready["message"]
        process.join(30)
        assert process.exitcode == 1
