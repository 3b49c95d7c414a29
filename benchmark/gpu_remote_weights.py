"""Weights of a running server over NVLink: the seed on one GPU, servers that start on another.

    python benchmark/gpu_remote_weights.py [--repeat 3] [--json FILE]

Qwen3-8B's shape in bf16 (16 GB) with dummy weights. Each start reads them from the seed. `read_s`
are the seconds of reading, as the server's log has them; the target is 0.2. `hashed_s` are those
until all that was read is hashed, `start_s` until the server is healthy. Digests of the weights
must be equal. `--tiny` tries it without GPUs: the built-in model, over TCP.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import time
from pathlib import Path
from typing import Any, Final

from rigs.models.qwen3_8b import DUMMY_FLAGS, dummy_model
from rigs.servers.engine_server import EngineServer
from rigs.servers.seed_servers import remote_flags, weight_digest
from sglang.benchmark.report import emit, provenance
from sglang.srt.arg_groups.remote_weights import START_SEED
from sglang.srt.constants import BUILTIN_MODEL_DIR, MIB

EXPECTED_S: Final = 0.06
"""16.4 GB at 280 GB/s, which copies of 16 MB reach."""
TARGET_S: Final = 0.2
_READ: Final = re.compile(r"read ([\d.]+) MiB from the seed, .* in ([\d.]+) s, .* after ([\d.]+) s")
_HASHED_S: Final = 240.0


def measure(model: str, repeat: int, *, tiny: bool) -> list[dict[str, Any]]:
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
        for _ in range(repeat):
            begun = time.monotonic()
            with EngineServer(*flags, model=model, env=env) as reader:
                start_s = round(time.monotonic() - begun, 2)
                ((mib, read_s, hashed_s),) = _READ.findall(reader.process.log_path.read_text())
                assert weight_digest(reader, timeout_s=_HASHED_S) == digest, "the weights differ"
            found = {"mib": mib, "read_s": read_s, "hashed_s": hashed_s}
            starts.append({name: float(one) for name, one in found.items()} | {"start_s": start_s})
    return starts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        model = str(BUILTIN_MODEL_DIR) if args.tiny else stack.enter_context(dummy_model())
        starts = measure(model, args.repeat, tiny=args.tiny)
    median = statistics.median(start["read_s"] for start in starts)
    record = {
        "benchmark": "gpu_remote_weights",
        "read_s": median,
        "gb_s": round(starts[0]["mib"] * MIB / median / 1e9, 1),
        "expected_s": None if args.tiny else EXPECTED_S,
        "target_s": None if args.tiny else TARGET_S,
        "starts": starts,
    }
    emit(record | provenance(), args.json)


if __name__ == "__main__":
    main()
