"""A prefill and a decode server of two machines each, on two loopback addresses: they say what one
rank says, and each rank is found at its own machine's address. `test_pd_networks_nightly.py` has
machines with networks of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from rigs.disaggregation.pd_servers import ask_both
from rigs.machines.two_nodes import Machine, Nodes, state_of
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EXACT
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import canonical_host, get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-b-test-cpu")

HOSTS: Final = ("127.0.0.1", "127.0.0.2")
FLAGS: Final = (
    "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR), "--served-model-name", "tiny",
    "--max-total-tokens", "2048", "--page-size", "16", "--chunked-prefill-size", "64", *EXACT,
)  # fmt: skip
MACHINES: Final = (
    Machine(HOSTS[0], {"MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_LOCAL_HOSTNAME": HOSTS[0]}),
    Machine(HOSTS[1], {"MOONCAKE_PROTOCOL": "tcp", "MOONCAKE_LOCAL_HOSTNAME": HOSTS[1]}),
)


@dataclass(frozen=True)
class Pair:
    prefill: Nodes
    decode: Nodes
    port: int
    """Of the bootstrap server."""


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", num_attention_heads=8, vocab_size=2176, eos_token_id=2)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    port = get_free_port()
    mode = (*FLAGS, "--tp-size", "2", "--disaggregation-mode")
    with ExitStack() as stack:
        prefill, decode = (
            Nodes(model, [*mode, *more], machines=MACHINES)
            for more in (["prefill", "--disaggregation-bootstrap-port", str(port)], ["decode"])
        )
        for nodes in (prefill, decode):
            stack.callback(nodes.kill)
        for nodes in (prefill, decode):
            nodes.await_ready()
        yield Pair(prefill, decode, port)


def body_of(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 16}}


def test_they_say_what_one_rank_says(pair: Pair, model: Path) -> None:
    prompts = [prompt(seed, length) for seed, length in enumerate((1, 40, 200))]
    with ForkedServer(*FLAGS, model=str(model)) as server:
        expected = [server.generate(ids).output_ids for ids in prompts]
    for ids, words in zip(prompts, expected, strict=True):
        answers = ask_both(
            pair.prefill.server, ("127.0.0.1", pair.port), pair.decode.server, body_of(ids)
        )
        assert [one.status_code for one in answers] == [200, 200], [one.text for one in answers]
        assert answers[1].json()["output_ids"] == words
    for server in (pair.prefill.server, pair.decode.server):
        assert wait_until(lambda server=server: not state_of(server)["busy"], 30)  # type: ignore[misc]
        state = state_of(server)
        assert state["free_tokens"] + state["evictable_tokens"] == state["max_total_num_tokens"]


def test_each_rank_is_found_on_its_own_machine(pair: Pair) -> None:
    log = pair.prefill.first.log_path.read_text()
    for rank, host in enumerate(HOSTS):
        assert f"rank {rank} answers decode servers at tcp://{host}:" in log


def test_other_machines_reach_only_what_the_flags_open(pair: Pair) -> None:
    """Ranks meet where `--dist-init-addr` says, and listen for decode servers and Mooncake at their
    own machine's `--host`; the bootstrap server is on the first machine alone."""
    for nodes in (pair.prefill, pair.decode):
        is_prefill = nodes is pair.prefill
        first, second = (listeners_of(node.pid) for node in (nodes.first, nodes.second))
        assert {host for host, _ in first} == {HOSTS[0]}
        assert {host for host, _ in second} == set(HOSTS), "gloo is where the ranks meet"
        # A decode rank has two for each peer that it has read from, too.
        assert not is_prefill or [host for host, _ in second].count(HOSTS[1]) == 3
        assert ((HOSTS[0], pair.port) in first) is is_prefill


def listeners_of(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which a process and its children listen."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        (canonical_host(connection.laddr.ip), connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
