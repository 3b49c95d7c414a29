"""Weights of a running server over TCP, beside the same weights from a file.

One seed and one start at a time, TCP over loopback, a llama of 45 million parameters a layer in
bfloat16. `--tp` has the ranks of the seed and of the started server. Figures of a start: the
seconds until the server is healthy, and the seconds of loading the weights on the slowest rank. The
file is read cold (its pages are dropped first) and from the page cache. The peer of the same run is
the transport alone: reads of as many bytes as the ranks read together, in blocks of 16 MB, between
two processes.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmark.command import Command
from benchmark.report import Report
from benchmark.timing import gb_per_second
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.servers.engine_server import EngineServer
from rigs.servers.seed_servers import remote_flags
from rigs.stores.transfer_peer import TransferPeer
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.remote_weights import START_SEED
from sglang.srt.constants import BUILTIN_MODEL_DIR, MIB
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import Block, TransferOp
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
BLOCK = 16 * MIB
_LOADED = re.compile(r"Loaded .* ([\d.]+) MiB, .* ([\d.]+) s\b")
_READ = re.compile(r"read ([\d.]+) MiB from the seed, .* in ([\d.]+) s,")


def transport_rates(num_bytes: int, repeats: int) -> list[float]:
    """GB/s of reads of `num_bytes`. The first one connects and touches memory: not counted."""
    memory = np.zeros(num_bytes, np.uint8)
    address = memory.ctypes.data
    engine = MooncakeTransferEngine(LOOPBACK)
    engine.register(address, num_bytes)
    rates = []
    with TransferPeer(num_bytes) as peer:
        blocks = [
            Block(address + at, peer.address + at, min(BLOCK, num_bytes - at))
            for at in range(0, num_bytes, BLOCK)
        ]

        def read() -> None:
            assert engine.transfer(peer.session_id, TransferOp.READ, blocks, timeout=None).is_done

        for turn in range(repeats + 1):
            rate = gb_per_second(num_bytes, read)
            if turn:
                rates.append(rate)
    engine.close()
    return rates


def drop_pages(folder: Path) -> None:
    """Let the next reader of the weights read the disk."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(model: Path, *flags: str) -> dict[str, float]:
    """Seconds of one start, and of loading its weights as its log says."""
    server = EngineServer("--tokenizer-path", str(BUILTIN_MODEL_DIR), *flags, model=str(model))
    started = time.perf_counter()
    with server:
        seconds = {"start": round(time.perf_counter() - started, 2)}
        log = server.process.log_path.read_text()
        loaded, read = _LOADED.findall(log), _READ.findall(log)
        assert loaded, log
        seconds["load"] = max(float(took) for _, took in loaded)
        if read:
            seconds["read"] = max(float(took) for _, took in read)
            seconds["mib"] = round(sum(float(mib) for mib, _ in read), 1)
        server.stop()
    return seconds


def measure(model: Path, seed_ranks: int, ranks: int, repeats: int, report: Report) -> None:
    """All starts, the kinds in turn."""
    size = ("--tp-size", str(ranks))
    tokenizer = ("--tokenizer-path", str(BUILTIN_MODEL_DIR))
    raw: dict[str, list[dict[str, float]]] = {}
    with EngineServer(
        START_SEED, *tokenizer, "--tp-size", str(seed_ranks), model=str(model)
    ) as seed:
        kinds: dict[str, Callable[[], dict[str, float]]] = {
            "file, cold": lambda: start(model, *size),
            "file, cached": lambda: start(model, *size),
            "server": lambda: start(model, *size, *remote_flags(seed)),
        }
        for _ in range(repeats):
            for kind, begin in kinds.items():
                if kind == "file, cold":
                    drop_pages(model)
                raw.setdefault(kind, []).append(begin())
    median = {
        kind: {what: statistics.median(one[what] for one in starts) for what in starts[0]}
        for kind, starts in raw.items()
    }
    for kind, of_kind in median.items():
        seconds: dict[str, Any] = {what: s for what, s in of_kind.items() if what != "mib"}
        report.add_all("s", seconds, {"weights_from": kind}, raw=raw[kind])
    num_bytes = int(median["server"]["mib"] * MIB)
    rates = transport_rates(num_bytes, repeats)
    rate, transport = num_bytes / median["server"]["read"] / 1e9, statistics.median(rates)
    report.add("read", num_bytes, "bytes")
    report.add("weights", rate, "GB/s")
    report.add("transport", transport, "GB/s", raw=rates)
    report.add("weights_to_transport", rate / transport, "ratio")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tp", type=int, nargs=2, default=(1, 1), metavar=("SEED", "READER"), help="ranks"
    )
    parser.add_argument("--layers", type=int, default=6, help="of the model")


def run(args: argparse.Namespace, report: Report) -> None:
    mark_device_set("cpu")
    envs.MOONCAKE_PROTOCOL.set("tcp")
    with tempfile.TemporaryDirectory(prefix="remote-weights-") as folder:
        model = Path(folder)
        save_tiny_checkpoint(
            model, "llama", dtype=torch.bfloat16, num_hidden_layers=args.layers, **SHAPE
        )
        seed_ranks, ranks = args.tp
        measure(model, seed_ranks, ranks, args.repeats, report)


COMMAND: Final = Command(
    run=run, add_options=add_options, repeats=3, quick={"layers": 1, "repeats": 1}
)
