"""Requests a second through HTTP, tokenizer, scheduler and back, beside a bare FastAPI echo.

    python benchmark/micro/bench_http_path.py [--concurrency 32] [--seconds 3] [--repeat 3]

The server is the real one with a dummy model of one layer of 16, so that nothing is computed to
speak of; each request is a prompt of about `--words` tokens and one token of answer. The echo
parses the same body and gives it back. Both get the same client, in turn, in every round. One JSON
line: medians and the ratio, whose target is 0.25. The client's own share of a core is in it: it
competes with the servers for the machine in both cases.
"""

from __future__ import annotations

import argparse
import asyncio
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
from pathlib import Path
from typing import Any

import aiohttp
import orjson

import sglang
from sglang.benchmark.load_generator import open_session
from sglang.benchmark.report import emit, provenance
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.engine_server import EngineServer

_BUILTIN = Path(sglang.__file__).parent / "builtin_model"
_START_S = 30.0


def write_dummy_model(folder: Path) -> None:
    """A checkpoint without weights: the built-in model's tokenizer, one layer of 16."""
    for path in _BUILTIN.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    config = json.loads((_BUILTIN / "config.json").read_text())
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
def echo_server() -> Iterator[str]:
    """The bare application in a process of its own; its URL."""
    port = get_free_port()
    script = str(Path(__file__).with_name("echo_server.py"))
    process = subprocess.Popen([sys.executable, script, str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        if not wait_until(lambda: _accepts(port), _START_S):
            raise RuntimeError("the echo server did not start")
        yield url
    finally:
        process.kill()
        process.wait()


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


async def requests_per_second(url: str, body: bytes, concurrency: int, seconds: float) -> float:
    """Of `concurrency` clients that ask again as soon as they have an answer."""
    begin = time.perf_counter()
    end = begin + seconds

    async def client(session: aiohttp.ClientSession) -> int:
        count = 0
        while time.perf_counter() < end:
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/generate", data=body, headers=headers) as response:
                raw = await response.read()
                assert response.status == 200, raw[:300]
            count += 1
        return count

    async with open_session() as session:
        counts = await asyncio.gather(*(client(session) for _ in range(concurrency)))
    return sum(counts) / (time.perf_counter() - begin)


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Requests a second of every round, after one that is not kept; the client's CPU share."""
    body = orjson.dumps(
        {
            "text": "the code of heron is " * (args.words // 5),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        }
    )
    raw: dict[str, list[float]] = {"echo": [], "engine": [], "client_cpu_share": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_dummy_model(folder)
        flags = ["--load-format", "dummy", "--log-level", "warning", *args.server_flag]
        engine = stack.enter_context(EngineServer(*flags, model=str(folder)))
        urls = {"echo": stack.enter_context(echo_server()), "engine": engine.url}
        for turn in range(args.repeat + 1):
            for name, url in urls.items():
                cpu, begin = time.process_time(), time.perf_counter()
                speed = asyncio.run(requests_per_second(url, body, args.concurrency, args.seconds))
                share = (time.process_time() - cpu) / (time.perf_counter() - begin)
                if turn:
                    raw[name].append(round(speed, 1))
                    raw["client_cpu_share"].append(round(share, 3))
    return raw


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--server-flag", action="append", default=[], help="one more flag")
    parser.add_argument("--output-file", help="append the JSON line here too")
    args = parser.parse_args(argv)
    raw = measure(args)
    ratios = [ours / echo for ours, echo in zip(raw["engine"], raw["echo"], strict=True)]
    record: dict[str, Any] = {
        "benchmark": "http_path",
        **provenance(),
        "concurrency": args.concurrency,
        "echo_req_s": statistics.median(raw["echo"]),
        "engine_req_s": statistics.median(raw["engine"]),
        "ratio": round(statistics.median(ratios), 3),
        "target_ratio": 0.25,
        "raw": raw,
    }
    emit(record, args.output_file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
