"""Starts of a server: weights from a running server beside the same weights from a file.

    python benchmark/remote_weights.py [--tp 1 1] [--layers 6] [--repeat 3] [--out FILE]

One seed and one start at a time, TCP over loopback, a llama of 45 million parameters a layer in
bfloat16. `--tp` has the ranks of the seed and of the started server. Figures of a start: the
seconds until it is healthy, and those of loading the weights on the slowest rank. The file is read
cold (its pages are dropped first) and from the page cache. The peer of the same run is the
transport alone: reads of as many bytes as the ranks read together, in blocks of 16 MB, between two
processes.
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

import numpy as np
import torch

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.servers.engine_server import EngineServer
from rigs.servers.seed_servers import remote_flags
from rigs.stores.transfer_peer import TransferPeer
from sglang.benchmark.report import emit, provenance, writable_file
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.remote_weights import START_SEED
from sglang.srt.constants import BUILTIN_MODEL_DIR, MIB
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import Block, TransferOp
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs

SHAPE = {
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


def transport_rates(num_bytes: int, repeat: int) -> list[float]:
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
        for turn in range(repeat + 1):
            started = time.perf_counter()
            assert engine.transfer(peer.session_id, TransferOp.READ, blocks, timeout=None).is_done
            if turn:
                rates.append(round(num_bytes / (time.perf_counter() - started) / 1e9, 3))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tp", type=int, nargs=2, default=(1, 1), metavar=("SEED", "READER"), help="Ranks."
    )
    parser.add_argument("--layers", type=int, default=6, help="Of the model.")
    parser.add_argument("--repeat", type=int, default=3, help="Starts of each kind.")
    parser.add_argument("--out", type=writable_file, help="Append the line to this file.")
    args = parser.parse_args()
    mark_device_set("cpu")
    envs.MOONCAKE_PROTOCOL.set("tcp")
    with tempfile.TemporaryDirectory(prefix="remote-weights-") as folder:
        model = Path(folder)
        save_tiny_checkpoint(
            model, "llama", dtype=torch.bfloat16, num_hidden_layers=args.layers, **SHAPE
        )
        seed_ranks, ranks = args.tp
        emit({**provenance(), **measure(model, seed_ranks, ranks, args.repeat)}, args.out)


def measure(model: Path, seed_ranks: int, ranks: int, repeat: int) -> dict[str, object]:
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
        for _ in range(repeat):
            for kind, begin in kinds.items():
                if kind == "file, cold":
                    drop_pages(model)
                raw.setdefault(kind, []).append(begin())
    median = {
        kind: {what: statistics.median(one[what] for one in starts) for what in starts[0]}
        for kind, starts in raw.items()
    }
    num_bytes = int(median["server"]["mib"] * MIB)
    rates = transport_rates(num_bytes, repeat)
    rate = num_bytes / median["server"]["read"] / 1e9
    return {
        "benchmark": "remote_weights",
        "tp": {"seed": seed_ranks, "reader": ranks},
        "bytes": num_bytes,
        "seconds": median,
        "gb_per_second": {"weights": round(rate, 3), "transport": statistics.median(rates)},
        "ratio": round(rate / statistics.median(rates), 3),
        "raw": {"starts": raw, "transport": rates},
    }


if __name__ == "__main__":
    main()
