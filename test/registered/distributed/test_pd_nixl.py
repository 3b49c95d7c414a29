"""NIXL over UCX between real processes: the words of one scheduler, and peers that die."""

from __future__ import annotations

import itertools
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import numpy as np
import psutil
import pytest
import torch

from rigs.disaggregation.nixl_package import needs_nixl
from rigs.disaggregation.pd_pair import NEVER_ASKED
from rigs.disaggregation.pd_processes import RoleProcess
from rigs.disaggregation.pd_ranks import PdRanks
from rigs.disaggregation.pd_rig import PdRig
from rigs.disaggregation.pd_servers import decode_server, prefill_server, router
from rigs.models.letters import Letters
from rigs.schedulers import checkable_model
from rigs.schedulers.scheduler_rig import RIG_DEVICE, SchedulerRig, greedy, prompt
from rigs.servers.engine_server import EXACT
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.transfer_peer import TransferPeer
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.disaggregation import DisaggregationMode, TransferBackend
from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators import nixl_transfer_engine
from sglang.srt.distributed.device_communicators.nixl_transfer_engine import NixlTransferEngine
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    PeerStalled,
    PeerUnreachable,
    Transfer,
    TransferOp,
)
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import Bootstrap, TokenizedGenerateReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=70, suite="nightly-test-cpu", nightly=True)
pytestmark = needs_nixl

PAGE: Final = 16
LENGTHS: Final = (1, 5, 16, 17, 64, 100, 200)
PROMPTS: Final = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
FAMILIES: Final = ("qwen3", "deepseek_v32", "qwen3_next")
ARGS: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "chunked_prefill_size": 64,
    "pool_tokens": 2048,
    "max_requests": 16,
    "tokenizer": Letters(),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[NixlTransferEngine]:
    torch.set_num_threads(1)
    mark_device_set(RIG_DEVICE)
    engine = NixlTransferEngine("127.0.0.1")
    yield engine
    engine.close()


def assert_same_words(pair: PdRig | PdRanks, alone: SchedulerRig) -> None:
    """Two servers say what one says, of prompts that are cold, and then cached on both sides."""
    for turn in ("cold", "cached"):
        asked = [
            pair.request(f"{turn} {number}", ids, greedy(12)) for number, ids in enumerate(PROMPTS)
        ]
        pair.run(*asked)
        for one in asked:
            alone.run(msgspec.structs.replace(one, bootstrap=None))
            assert pair.result(one.rid).output_ids == alone.results[one.rid].output_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_model_says_the_same_cold_and_cached(
    engine: NixlTransferEngine, tiny_model: Callable[..., Path], family: str
) -> None:
    model = tiny_model(family, eos_token_id=None)
    alone = SchedulerRig(model, **ARGS)
    with PdRig(model, engine, **ARGS) as pair:
        assert_same_words(pair, alone)
        assert pair.decode.scheduler.state.counters.prefill_tokens == 0, "nothing is computed twice"


HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8, "eos_token_id": None}
DELTA: Final[dict[str, Any]] = {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8}


@pytest.mark.parametrize(
    ("family", "model_args", "prefill", "decode"),
    [
        ("qwen3", HEADS, 1, 4),
        ("qwen3", HEADS, 4, 2),
        ("qwen3_next", DELTA, 1, 2),
        ("qwen3_next", DELTA, 2, 1),
        ("ministral", HEADS, 4, 2),
        ("gpt_oss", HEADS, 2, 1),
    ],
)
def test_servers_of_unlike_ranks_say_the_same(
    tiny_model: Callable[..., Path],
    family: str,
    model_args: dict[str, Any],
    prefill: int,
    decode: int,
) -> None:
    model = tiny_model(family, **model_args)
    args = ARGS | {"max_requests": 8, "pool_tokens": 1024}
    alone = SchedulerRig(model, **args)
    with (
        closing(NixlTransferEngine(LOOPBACK)) as engine,
        PdRanks(model, prefill, decode, engine=engine, **args) as pair,
    ):
        assert_same_words(pair, alone)


# -- processes that die ----------------------------------------------------------------------------

SILENT_S: Final = 6
"""A busy machine may pause for seconds."""
ENV: Final = {
    "SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT": "10",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "1",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": str(SILENT_S),
}
SMALL: Final[dict[str, Any]] = {
    "page_size": 4,
    "pool_tokens": 2048,
    "max_requests": 16,
    "chunked_prefill_size": 16,
}
numbers = itertools.count(1)


def start(mode: DisaggregationMode) -> RoleProcess:
    return RoleProcess(mode, ENV, over=TransferBackend.NIXL, **SMALL)


def make(rid: str) -> TokenizedGenerateReqInput:
    number = next(numbers)
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=token_array(prompt(number, 40, 1000)),
        sampling_params=greedy(8),
        seed=number,
        bootstrap=Bootstrap(LOOPBACK, NEVER_ASKED, number),
    )


def send(message: TokenizedGenerateReqInput, *processes: RoleProcess) -> None:
    for process in processes:
        process.send(message)


def assert_right(decode: RoleProcess, message: TokenizedGenerateReqInput) -> None:
    ended = decode.end_of(message.rid)
    want = checkable_model.words(message.input_ids.tolist(), message.seed, 8)
    assert ended.output_ids == want, ended.why


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_prefill_process_fails_its_requests_alone(how: signal.Signals) -> None:
    with start(DisaggregationMode.PREFILL) as lost, start(DisaggregationMode.DECODE) as decode:
        decode.set(endpoint=lost.endpoint)
        send(first := make("first"), lost, decode)
        assert_right(decode, first)
        lost.set(pause=True)
        send(hopeless := make("hopeless"), lost, decode)
        lost.signal(how)
        assert decode.end_of(hopeless.rid).why
        with start(DisaggregationMode.PREFILL) as other:
            decode.set(endpoint=other.endpoint)
            send(second := make("second"), other, decode)
            assert_right(decode, second)
            decode.until(lambda facts: facts.is_idle)
            decode.check()


def test_a_prefill_process_outlives_decode_processes_that_die_while_they_read() -> None:
    with start(DisaggregationMode.PREFILL) as prefill:
        for turn in range(2):
            with start(DisaggregationMode.DECODE) as dying:
                dying.set(endpoint=prefill.endpoint)
                messages = [make(f"{turn} {number}") for number in range(6)]
                for message in messages:
                    send(message, prefill, dying)
                if turn % 2:
                    dying.signal(signal.SIGSTOP)
                dying.kill()
            for message in messages:
                prefill.end_of(message.rid)
        with start(DisaggregationMode.DECODE) as decode:
            decode.set(endpoint=prefill.endpoint)
            send(last := make("last"), prefill, decode)
            assert_right(decode, last)
        prefill.until(lambda facts: facts.is_idle)
        prefill.check()


# -- the engine alone ------------------------------------------------------------------------------

SIZE: Final = 16 * MIB


def listening() -> list[str]:
    """Addresses at which this process listens."""
    connections = psutil.Process().net_connections(kind="tcp")
    return [str(one.laddr[0]) for one in connections if one.status == psutil.CONN_LISTEN]


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros(SIZE, dtype=np.uint8)


def begin(engine: NixlTransferEngine, peer: TransferPeer, memory: np.ndarray) -> Transfer:
    block = Block(memory.ctypes.data, peer.address, SIZE)
    return engine.begin(peer.session_id, TransferOp.READ, [block], timeout=60)


def test_a_dead_peer_ends_its_agent(engine: NixlTransferEngine, memory: np.ndarray) -> None:
    before = listening()
    assert set(before) == {LOOPBACK}
    engine.batch_register([memory.ctypes.data], [SIZE])
    with TransferPeer(SIZE, TransferBackend.NIXL) as peer:
        memory[:] = 1
        transfer = begin(engine, peer, memory)
        assert transfer.wait(60) and transfer.is_done and not memory.any()
        assert len(listening()) == len(before) + 1
        peer.kill()
        failed = begin(engine, peer, memory)
        assert failed.wait(60) and isinstance(failed.error, PeerUnreachable)
    assert listening() == before, "no reference to the agent is left, also not of the error"
    engine.batch_deregister([memory.ctypes.data])


@pytest.mark.parametrize("emulation", ["n", "y"])
def test_tcp_is_refused_unless_it_is_asked_for(
    memory: np.ndarray, emulation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"UCX_TLS": "tcp", "UCX_PROTO_EMULATION_ENABLE": emulation}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(nixl_transfer_engine, "STALLED_AFTER_S", 1.0)
    monkeypatch.setattr(nixl_transfer_engine, "LEAST_RATE", 1e9)
    before, threads = listening(), psutil.Process().num_threads()
    engine = NixlTransferEngine(LOOPBACK)
    assert psutil.Process().num_threads() <= threads + 2, "a thread of NIXL's own takes a core"
    engine.batch_register([memory.ctypes.data], [SIZE])
    with TransferPeer(SIZE, TransferBackend.NIXL, env) as peer:
        memory[:] = 1
        if emulation == "n":
            refused = begin(engine, peer, memory)
            assert refused.wait(60)
            assert "UCX cannot read its memory" in str(refused.error)
        else:
            peer.suspend()
            hanging = begin(engine, peer, memory)
            assert hanging.wait(60) and isinstance(hanging.error, PeerStalled)
        engine.batch_deregister([memory.ctypes.data])
    engine.close()
    assert listening() == before


# -- servers ---------------------------------------------------------------------------------------


def test_servers_behind_the_router_say_what_one_server_says() -> None:
    flags = ("--disaggregation-transfer-backend", "nixl")
    env = {"SGLANG_DISAGGREGATION_SECRET": secrets.token_hex(32)}
    text = "The code of heron is 7391. The code of otter is 0042. The code of badger is 5127. "
    bodies = [
        {"text": text * repeats, "sampling_params": {"temperature": 0, "max_new_tokens": 12}}
        for repeats in (1, 3)
    ]
    with ExitStack() as stack:
        prefill, port = prefill_server(*flags, env=env)
        decode, alone = decode_server(*flags, env=env), ForkedServer("--page-size", "16", *EXACT)
        for server in (prefill, decode, alone):
            stack.enter_context(server)
        url = stack.enter_context(router([(prefill, port)], [decode]))
        for body in bodies:
            said, want = (
                httpx.post(f"{at}/generate", json=body, timeout=60).json()["output_ids"]
                for at in (url, alone.url)
            )
            assert said == want and len(said) > 1
        for server in (prefill, decode):
            info = httpx.get(f"{server.url}/server_info", timeout=60).json()["transfer_engine"]
            assert info["protocol"] == "nixl" and info["registered_ranges"] > 0
