"""Requests per second through HTTP, tokenizer, scheduler and back, against a bare FastAPI echo.

The server is the real one with a dummy model of one layer of 16, so that almost nothing is
computed; each request is a prompt of about `--words` tokens and one token of answer. The echo
parses the same body and returns it. The same client loads the server and the echo in turn, in every
round. Prints the medians, their ratio (target: 0.25) and the CPU time of each process per request,
which other load on the machine disturbs less than the speed. The client competes with the server
and the echo for the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from benchmark.command import Command
from benchmark.posting import post_all
from benchmark.report import Report
from benchmark.timing import median_ratio
from rigs.bench.cpu_clocks import process_seconds
from rigs.servers.engine_server import EngineServer
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import get_free_port, wait_until

_START_S = 30.0


def write_dummy_model(folder: Path) -> None:
    """A checkpoint without weights: the built-in model's tokenizer, one layer of 16."""
    for path in BUILTIN_MODEL_DIR.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    config = json.loads((BUILTIN_MODEL_DIR / "config.json").read_text())
    config |= {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "max_window_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    (folder / "config.json").write_text(json.dumps(config))


@contextmanager
def echo_server() -> Iterator[tuple[str, int]]:
    """The bare application in a process of its own; its URL and process id."""
    port = get_free_port()
    script = str(Path(__file__).with_name("echo_server.py"))
    process = subprocess.Popen([sys.executable, script, str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        if not wait_until(lambda: _accepts(port), _START_S):
            raise RuntimeError("the echo server did not start")
        yield url, process.pid
    finally:
        process.kill()
        process.wait()


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def engine_processes(server_pid: int) -> dict[str, psutil.Process]:
    """The processes of an engine. The server starts the scheduler first, then the detokenizer."""
    server = psutil.Process(server_pid)
    spawned = [one for one in server.children() if "resource_tracker" not in str(one.cmdline())]
    scheduler, detokenizer = sorted(spawned, key=psutil.Process.create_time)
    return {"server": server, "scheduler": scheduler, "detokenizer": detokenizer}


def cpu_seconds(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """User and system time of each process so far, all its threads."""
    return {name: process_seconds(process.pid) for name, process in processes.items()}


def repeated(body: bytes, seconds: float) -> Iterator[bytes]:
    """The same body until the time is over."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield body


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of the engine or of the echo."""

    speed: float
    """Requests per second."""
    cpu_us: dict[str, float]
    """Microseconds that each process spent on a request."""


def measure_round(
    url: str, body: bytes, processes: dict[str, psutil.Process], args: argparse.Namespace
) -> Round:
    """Send requests for `args.seconds`."""
    processes = {**processes, "client": psutil.Process()}
    before, begin = cpu_seconds(processes), time.perf_counter()
    count = post_all(url, repeated(body, args.seconds), args.concurrency)
    seconds, after = time.perf_counter() - begin, cpu_seconds(processes)
    cpu_us = {name: round((after[name] - before[name]) / count * 1e6, 1) for name in processes}
    return Round(round(count / seconds, 1), cpu_us)


def measure(args: argparse.Namespace) -> dict[str, list[Round]]:
    """Every round of echo and engine, after one that is not kept."""
    body = msgspec.json.encode(
        {
            "text": "the code of heron is " * (args.words // 5),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_dummy_model(folder)
        flags = ["--load-format", "dummy", "--log-level", "warning", *args.server_flag]
        engine = stack.enter_context(EngineServer(*flags, model=str(folder)))
        echo_url, echo_pid = stack.enter_context(echo_server())
        sides = {
            "echo": (echo_url, {"echo": psutil.Process(echo_pid)}),
            "engine": (engine.url, engine_processes(engine.process.pid)),
        }
        rounds: dict[str, list[Round]] = {name: [] for name in sides}
        for _ in range(args.repeats + 1):
            for name, (url, processes) in sides.items():
                rounds[name].append(measure_round(url, body, processes, args))
    return {name: kept for name, (_, *kept) in rounds.items()}


def medians(rounds: list[Round]) -> dict[str, float]:
    """Median CPU time of each process per request, in microseconds."""
    return {
        name: statistics.median(one.cpu_us[name] for one in rounds) for name in rounds[0].cpu_us
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--server-flag", action="append", default=[], help="one more flag")


def run(args: argparse.Namespace, report: Report) -> None:
    rounds = measure(args)
    raw = {name: [one.speed for one in kept] for name, kept in rounds.items()}
    for name, speeds in raw.items():
        report.add(name, statistics.median(speeds), "request/s", raw=speeds)
    ratio = median_ratio(raw["engine"], raw["echo"])
    report.add("engine_to_echo", ratio, "ratio", target="at least 0.25")
    for name, kept in rounds.items():
        report.add_all("us/request", medians(kept), {"cpu_time_with": name})


_QUICK: Final = {"seconds": 0.5, "repeats": 1}
COMMAND: Final = Command(run=run, add_options=add_options, repeats=3, quick=_QUICK)
