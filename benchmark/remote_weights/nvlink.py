"""Weights of a running server over NVLink: the seed on one GPU, servers that start on another.

Qwen3-8B's shape in bf16 (16 GB) with dummy weights. Each start reads them from the seed. `read` are
the seconds of reading, as the server's log has them; the target is 0.2. `hashed` are those until
all that was read is hashed, `start` until the server is healthy. Digests of the weights must be
equal. `--device cpu` tries it without GPUs: the built-in model, over TCP.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import time
from typing import Final

from benchmark.command import Command
from benchmark.report import Report
from rigs.models.qwen3_8b import DUMMY_FLAGS, dummy_model
from rigs.servers.engine_server import EngineServer
from rigs.servers.seed_servers import remote_flags, weight_digest
from sglang.srt.arg_groups.remote_weights import START_SEED
from sglang.srt.constants import BUILTIN_MODEL_DIR, MIB

EXPECTED_S: Final = 0.06
"""16.4 GB at 280 GB/s, which copies of 16 MB reach."""
TARGET_S: Final = 0.2
_READ: Final = re.compile(r"read ([\d.]+) MiB from the seed, .* in ([\d.]+) s, .* after ([\d.]+) s")
_HASHED_S: Final = 240.0


def measure(model: str, repeats: int, *, tiny: bool) -> list[dict[str, float]]:
    """Starts from one running seed."""
    env = {"MOONCAKE_PROTOCOL": "tcp" if tiny else "nvlink_intra"}
    tokenizer = ("--tokenizer-path", str(BUILTIN_MODEL_DIR))
    seed_flags: tuple[str, ...] = () if tiny else ("--device", "cuda", "--base-gpu-id", "0")
    own_flags: tuple[str, ...] = () if tiny else ("--device", "cuda", "--base-gpu-id", "1")
    source = tokenizer if tiny else DUMMY_FLAGS
    starts = []
    with EngineServer(START_SEED, *source, *seed_flags, model=model, env=env) as seed:
        digest = weight_digest(seed, timeout_s=_HASHED_S)
        # A reader is a seed itself, so that it tells the digest of its weights.
        flags = (START_SEED, *tokenizer, *remote_flags(seed), *own_flags)
        for _ in range(repeats):
            begun = time.monotonic()
            with EngineServer(*flags, model=model, env=env) as reader:
                start_s = time.monotonic() - begun
                ((mib, read_s, hashed_s),) = _READ.findall(reader.process.log_path.read_text())
                assert weight_digest(reader, timeout_s=_HASHED_S) == digest, "the weights differ"
            found = {"mib": mib, "read": read_s, "hashed": hashed_s}
            starts.append({name: float(one) for name, one in found.items()} | {"start": start_s})
    return starts


def run(args: argparse.Namespace, report: Report) -> None:
    tiny = args.device == "cpu"
    with contextlib.ExitStack() as stack:
        model = str(BUILTIN_MODEL_DIR) if tiny else stack.enter_context(dummy_model())
        starts = measure(model, args.repeats, tiny=tiny)
    median = {name: statistics.median(one[name] for one in starts) for name in starts[0]}
    expected, target = (None, None) if tiny else (EXPECTED_S, TARGET_S)
    report.add("read", median["read"], "s", expected=expected, target=target, starts=starts)
    report.add("rate", starts[0]["mib"] * MIB / median["read"] / 1e9, "GB/s")
    report.add_all("s", {name: median[name] for name in ("hashed", "start")})


COMMAND: Final = Command(
    run=run, repeats=3, devices=("cuda", "cpu"), gpus=2, quick={"device": "cpu", "repeats": 1}
)
