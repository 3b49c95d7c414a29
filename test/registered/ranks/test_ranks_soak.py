"""Ranks that are stopped for moments, again and again, say the same and keep equal states."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.request_battery import battery, differences
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=400, suite="nightly-test-cpu", nightly=True)

ROUNDS: Final = 25
MOST_STOPPED_S: Final = 1.0
"""The watch of ranks takes eight seconds for the end of a rank."""
HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8, "vocab_size": 2176, "eos_token_id": 2}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": HEADS,
    "qwen3_next": {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}


def flags(family: str, size: int) -> list[str]:
    extra = ["--max-mamba-cache-size", "20"] if family == "qwen3_next" else []
    return [
        "--tp-size", str(size), "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR),
        "--page-size", "16", "--max-total-tokens", "640", "--max-running-requests", "6",
        "--chunked-prefill-size", "64", "--enable-hierarchical-cache", "--hicache-ratio", "1.5",
        "--hicache-storage-backend", "file", "--constrained-json-disable-any-whitespace",
        "--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": 16}), *extra,
    ]  # fmt: skip


@contextmanager
def stumbling(server: ForkedServer, seed: int) -> Iterator[None]:
    """Inside the block ranks are stopped for moments, one at a time."""
    ranks = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "scheduler_TP" in child.cmdline()[0]
    ]
    assert len(ranks) > 1
    rng, done = random.Random(seed), threading.Event()

    def stumble() -> None:
        while not done.wait(rng.random()):
            victim = rng.choice(ranks)
            victim.send_signal(signal.SIGSTOP)
            done.wait(rng.random() * MOST_STOPPED_S)
            victim.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=stumble)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "size"), [("qwen3_moe", 2), ("qwen3_next", 4)])
def test_c16_ranks_may_stop_for_moments(tmp_path: Path, family: str, size: int) -> None:
    model = tmp_path / "model"
    save_tiny_checkpoint(model, family, **MODELS[family])
    with ForkedServer(*flags(family, 1), env=store(tmp_path / "1"), model=str(model)) as alone:
        expected = battery(alone)
    server = ForkedServer(*flags(family, size), env=store(tmp_path / "2"), model=str(model))
    with server, stumbling(server, size):
        for number in range(ROUNDS):
            assert differences(battery(server), expected, 1e-4) == [], f"round {number}"
            if number % 5 == 4:
                server.flush()
        assert server.stop() == 0


def store(path: Path) -> dict[str, str]:
    return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(path)}
