"""KV events of a server: whoever asks for all of them knows the blocks of L1 and L2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, KVEventBatch
from sglang.srt.utils.network import get_free_ports, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-b-test-cpu")

PAGE = 16
IDS = prompt(1, 70)


def batches(endpoint: str) -> list[KVEventBatch]:
    """All batches so far, by a replay."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    asker = context.socket(zmq.DEALER)
    asker.setsockopt(zmq.RCVTIMEO, 30_000)
    asker.connect(endpoint)
    try:
        asker.send_multipart((b"", bytes(8)))
        found: list[KVEventBatch] = []
        while (parts := asker.recv_multipart())[2]:
            assert int.from_bytes(parts[1], "big") == len(found)
            found.append(msgspec.msgpack.decode(parts[2], type=KVEventBatch))
        return found
    finally:
        context.destroy(linger=0)


def blocks(endpoint: str, medium: str) -> dict[int, list[int]]:
    """Tokens of the blocks that a tier has now, by hash."""
    have: dict[int, list[int]] = {}
    for batch in batches(endpoint):
        for event in batch.events:
            if isinstance(event, BlockStored) and event.medium == medium:
                assert event.block_size == PAGE
                for nth, block in enumerate(event.block_hashes):
                    have[block] = event.token_ids[nth * PAGE : (nth + 1) * PAGE]
            elif isinstance(event, BlockRemoved) and event.medium == medium:
                for block in event.block_hashes:
                    del have[block]
    return have


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama", 1),
        ("llama", 2),
        ("kimi_linear", 1),
        ("gpt_oss", 1),
        ("deepseek_v4", 1),
        ("glm5_next", 1),
    ],
)
def test_events_tell_what_each_tier_has(tmp_path: Path, family: str, ranks: int) -> None:
    """The first of several ranks tells. Blocks are pages of tokens, whatever states lie beside
    them."""
    save_tiny_checkpoint(tmp_path, family)
    published, replayed = (f"tcp://127.0.0.1:{port}" for port in get_free_ports(2))
    config = json.dumps({"endpoint": published, "replay_endpoint": replayed, "topic": "kv"})
    flags: dict[str, Any] = {
        "tokenizer-path": BUILTIN_MODEL_DIR, "device": "cpu", "page-size": PAGE,
        "max-total-tokens": 256, "hicache-ratio": 4, "kv-events-config": config, "tp-size": ranks,
        "max-running-requests": 2, "max-mamba-cache-size": 8,
    }  # fmt: skip
    pairs = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    server = ForkedServer("--enable-hierarchical-cache", *pairs, model=str(tmp_path))
    try:
        server.start()
        server.generate(IDS, max_new_tokens=1)
        own = [IDS[begin : begin + PAGE] for begin in range(0, 64, PAGE)]
        assert list(blocks(replayed, "GPU").values()) == own
        assert wait_until(lambda: len(blocks(replayed, "CPU_PINNED")) >= 4, 30)
        assert list(blocks(replayed, "CPU_PINNED").values()) == own
        for seed in range(2, 6):
            server.generate(prompt(seed, 200), max_new_tokens=1)
        assert not any(tokens in own for tokens in blocks(replayed, "GPU").values())
        assert all(tokens in blocks(replayed, "CPU_PINNED").values() for tokens in own)
        server.flush()
        (last,) = batches(replayed)[-1].events
        assert type(last).__name__ == "AllBlocksCleared"
        assert server.stop() == 0
    finally:
        server.kill()
