"""A rank that dies, stops, fails or differs ends its server, which says which rank it was."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from rigs.schedulers import rank_faults
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.forked_servers import ForkedServer, InRank
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=9, suite="base-b-test-cpu")

END_S: Final = 40.0
"""Seconds in which a server ends at the latest; it needs ten on a machine that does nothing else.
The watch of ranks gives up after eight, whatever the transport's own limits are."""
LONG: Final[dict[str, Any]] = {
    "input_ids": prompt(1, 40),
    "stream": True,
    "sampling_params": {"max_new_tokens": 7000, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(
        "qwen3",
        num_attention_heads=8,
        vocab_size=2176,
        eos_token_id=2,
        max_position_embeddings=8192,
    )


def server_of(
    model: Path, *flags: str, size: int = 2, in_rank: InRank | None = None
) -> ForkedServer:
    return ForkedServer(
        "--tp-size", str(size), "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR),
        *flags, model=str(model), in_rank=in_rank,
    )  # fmt: skip


def ranks_of(server: ForkedServer) -> dict[int, psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    titles = {" ".join(child.cmdline()).strip(): child for child in children}
    ranks = [title for title in titles if title.startswith("sglang::scheduler_TP")]
    return {int(title.rpartition("TP")[2]): titles[title] for title in ranks}


@contextmanager
def generating(server: ForkedServer) -> Iterator[list[str]]:
    """A long answer is under way inside the block; its lines, of which the last say how it ended,
    are there behind it."""
    lines: list[str] = []
    has_begun = threading.Event()

    def read() -> None:
        try:
            with httpx.stream("POST", f"{server.url}/generate", json=LONG, timeout=60) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    if len(lines) > 4:
                        has_begun.set()
        except httpx.TransportError as error:
            lines.append(repr(error))

    thread = threading.Thread(target=read)
    thread.start()
    assert has_begun.wait(60), "the answer has not begun"
    yield lines
    thread.join(60)


def end_of(server: ForkedServer, family: list[psutil.Process]) -> tuple[int, list[str], float]:
    """Exit status, the last lines of the log, and the seconds until the end. All processes of
    `family` must end too."""
    begin = time.monotonic()
    status = server.process.wait(END_S)
    seconds = time.monotonic() - begin
    assert wait_until(lambda: not any(map(is_alive, family)), 60), "processes are left"
    return status, server.process.log_tail(8).splitlines(), seconds


CASES: Final = {
    (signal.SIGKILL, 0): "scheduler_TP0 (pid {pid}, killed by SIGKILL)",
    (signal.SIGKILL, 1): "scheduler_TP1 (pid {pid}, killed by SIGKILL)",
    (signal.SIGSTOP, 0): "rank 0 is stuck or out of reach: no answer from it for 7 s",
    (signal.SIGSTOP, 1): "rank 1 has given no sign of life for 8 s",
}
"""Last words of the log, by signal and rank."""


def provoke(model: Path, sig: signal.Signals, rank: int, is_busy: bool) -> tuple[str, bool, float]:
    """The end of the log, whether the client was told, and how long it took."""
    with server_of(model) as server:
        ranks = ranks_of(server)
        assert sorted(ranks) == [0, 1]
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) == 3, "two ranks and a detokenizer"
        if not is_busy:
            ranks[rank].send_signal(sig)
            status, lines, seconds = end_of(server, family)
            was_told = True
        else:
            with generating(server) as said:
                ranks[rank].send_signal(sig)
                status, lines, seconds = end_of(server, family)
            was_told = any('"error"' in line for line in said[-4:])
        assert status == 1
        assert lines[-1].endswith("; the server ends")
        expected = CASES[sig, rank].format(pid=ranks[rank].pid)
        assert any(expected in line for line in lines), lines
        return lines[-1], was_told, seconds


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_ends_the_server(model: Path, sig: signal.Signals) -> None:
    cases = [(rank, is_busy) for rank in (0, 1) for is_busy in (False, True)]
    with ThreadPoolExecutor(len(cases)) as pool:
        ends = [pool.submit(provoke, model, sig, *case) for case in cases]
    for (rank, is_busy), end in zip(cases, ends, strict=True):
        line, was_told, seconds = end.result()
        print(f"{sig.name} to rank {rank}, generating {is_busy}: {seconds:.1f} s, {line}")
        assert was_told, (rank, is_busy)


def test_a_rank_whose_scheduler_hangs_ends_the_server(model: Path) -> None:
    """No forward runs there, and the process shows signs of life."""
    server = server_of(
        model, "--enable-hierarchical-cache", "--watchdog-timeout", "4",
        in_rank=rank_faults.hangs_in_a_tick,
    )  # fmt: skip
    with server, generating(server) as said:
        family = psutil.Process(server.process.pid).children(recursive=True)
        status, lines, _ = end_of(server, family)
        log = server.process.log_tail(400)
    assert status == 1
    assert any('"error"' in line for line in said[-4:])
    assert "a tick of the scheduler has taken more than --watchdog-timeout 4 s" in log
    assert "in hang" in log, "the stacks name the place"
    assert lines[-1].endswith("; the server ends")


FAILURES: Final[dict[str, tuple[InRank, str]]] = {
    "weights": (rank_faults.cannot_read_weights, f"error: rank 1: {rank_faults.DAMAGE}"),
    "memory": (rank_faults.has_no_memory, f"error: rank 1: {rank_faults.NO_MEMORY}"),
    "killed": (
        rank_faults.dies_while_it_starts,
        "error: the scheduler_TP1 process ended while it started (pid",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_that_cannot_start_ends_the_start(model: Path, failure: str) -> None:
    in_rank, message = FAILURES[failure]
    server = server_of(model, "--enable-hierarchical-cache", in_rank=in_rank)
    process = server.launch()
    try:
        assert process.wait(END_S) == 1
        assert message in process.log_tail(1), process.log_tail()
    finally:
        process.kill()


def test_heads_that_the_ranks_do_not_divide_end_the_start() -> None:
    process = ForkedServer("--tp-size", "4", "--device", "cpu").launch()
    try:
        assert process.wait(END_S) == 1
        assert "6 attention heads cannot be split over 4 ranks" in process.log_tail(1)
    finally:
        process.kill()


def test_an_address_where_the_ranks_cannot_meet(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, why in (
            (f"127.0.0.1:{port}", "Address already in use"),
            ("192.0.2.1:5000", "Cannot assign requested address"),
        ):
            process = server_of(model, "--dist-init-addr", address).launch()
            try:
                assert process.wait(END_S) == 1
                last = process.log_tail(1)
            finally:
                process.kill()
            assert last == (
                f"error: the ranks cannot meet at {address} ({why}): give an address of this "
                "machine and a free port with --dist-init-addr"
            )


def test_a_rank_that_differs_is_named(model: Path) -> None:
    flags = ("--enable-hierarchical-cache", "--page-size", "16", "--max-total-tokens", "1024")
    with server_of(model, *flags, in_rank=rank_faults.evicts_by_itself) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        for seed in range(3):
            reply = server.request(
                "POST", "/generate", {"input_ids": prompt(seed, 100), "sampling_params": {}}
            )
            if reply.status != 200:
                break
        status, _, _ = end_of(server, family)
        log = server.process.log_path.read_text()
    assert status == 1
    assert "RanksDiverged: the ranks' states differ: rank 1 has" in log
