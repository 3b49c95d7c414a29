"""The same words where L2 is a buffer (`--hicache-host-memory-mode buffer_only`): real servers.

The prompt passes through L2 in parts. A server answers cold, from L1, from L3 and after a restart;
two ranks, families of other states and a pair of servers do it in nightly runs.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from rigs.disaggregation.pd_servers import TCP, ask_both, decode_server, prefill_server
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.nightly_cases import nightly
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import ADMIN_KEY, EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-b-test-cpu")

PAGE: Final = 16
IDS: Final = prompt(1, 200)
WHOLE: Final = 192
"""Tokens of the whole pages of `IDS`."""
L2_TOKENS: Final = 128
WORDS: Final = 12
BUFFER: Final = (
    "--hicache-host-memory-mode", "buffer_only", "--hicache-ratio", "0.25",
    "--hicache-storage-prefetch-policy", "wait_complete",
    "--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}',
    "--enable-hierarchical-cache", "--enable-metrics",
)  # fmt: skip
FLAGS: Final = (
    "--page-size", "16", "--max-total-tokens", "512", "--max-running-requests", "2", *BUFFER
)  # fmt: skip
HYBRID: Final = (
    "--max-mamba-cache-size", "24", "--hicache-ratio", "0.5", "--chunked-prefill-size", "64"
)  # fmt: skip
"""A part ends with a state: there is one after each chunk, and a quarter of this buffer has 64
tokens."""
SAMPLING: Final = {"temperature": 0, "max_new_tokens": WORDS, "ignore_eos": True}


def ask(server: EngineServer) -> tuple[list[int], dict[str, Any]]:
    """Words of `IDS`, and the number of its tokens that came from each tier."""
    answer = server.generate(IDS, sampling=SAMPLING)
    return answer.output_ids, answer.cached


def tiers_of(server: EngineServer) -> list[dict[str, Any]]:
    headers = {"Accept": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    answer = httpx.get(f"{server.url}/hicache", headers=headers, timeout=60)
    tiers: list[dict[str, Any]] = answer.raise_for_status().json()["tiers"]
    return tiers


def await_empty_buffer(server: EngineServer) -> None:
    """Wait until all has passed through L2: nothing stays there."""

    def is_empty() -> bool:
        samples = server.metrics()
        queues = [n for name, n in samples.items() if "hicache_queue_length" in name]
        return not any([*queues, samples["sglang:hicache_host_used_tokens"]])

    assert wait_until(is_empty, 60), server.metrics()
    tiers = {one["name"]: one for one in tiers_of(server)}
    assert tiers["L2"]["total"] in (L2_TOKENS, 2 * L2_TOKENS)
    for one in (tier for name, tier in tiers.items() if name.startswith("L2")):
        assert sum(one["parts"].values()) == one["parts"]["free"] == one["total"], one


@pytest.mark.parametrize(
    ("family", "backend", "flags"),
    [
        ("qwen3", "file", ()),
        nightly("qwen3", "mooncake", ("--tp-size", "2")),
        nightly("qwen3_next", "file", HYBRID),
        nightly("deepseek_v4", "file", HYBRID),
        nightly("glm5_next", "mooncake", HYBRID),
    ],
)
def test_pages_that_pass_through_a_buffer_give_the_same_words(
    family: str, backend: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    save_tiny_checkpoint(model, family, eos_token_id=None)
    with ExitStack() as stack:
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "store")}
        if backend == "mooncake":
            env = stack.enter_context(MooncakeCluster(segment_size="64mb")).engine_env()
        storage = ("--hicache-storage-backend", backend)
        tokenizer = ("--tokenizer-path", str(BUILTIN_MODEL_DIR))
        server = stack.enter_context(
            ForkedServer(*FLAGS, *storage, *tokenizer, *flags, model=str(model), env=env)
        )
        words, _ = ask(server)
        again, found = ask(server)
        assert again == words and found["device"] > 0
        await_empty_buffer(server)
        server.flush()
        again, found = ask(server)
        assert again == words
        assert found["storage"] > L2_TOKENS, found
        top = [sys.executable, "-m", "sglang.hicache_top", "--once", server.url]
        key = tmp_path / "key"
        key.write_text(ADMIN_KEY)
        key.chmod(0o600)
        shown = subprocess.run(
            [*top, "--admin-api-key-file", str(key)], capture_output=True, text=True, timeout=60
        )
        assert shown.returncode == 0 and "L2" in shown.stdout, shown
        await_empty_buffer(server)
        assert server.stop() == 0
        server.start()
        again, found = ask(server)
        assert again == words
        assert found["storage"] > L2_TOKENS, found


@pytest.mark.nightly
def test_a_pair_with_a_buffer_on_decode_gives_the_same_words(tmp_path: Path) -> None:
    storage = ("--hicache-storage-backend", "file", *FLAGS[2:])
    env = {**TCP, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "store")}
    prefill, port = prefill_server(env=env)
    decode = decode_server(
        *storage, "--disaggregation-decode-retraction-backup", "host_pool", env=env
    )
    with prefill, decode:
        body = {"input_ids": IDS, "sampling_params": SAMPLING}
        words = []
        for _ in range(2):
            answers = ask_both(prefill, ("127.0.0.1", port), decode, body)
            assert [one.status_code for one in answers] == [200, 200], answers[1].text
            words.append(answers[1].json()["output_ids"])
            await_empty_buffer(decode)
            decode.flush()
            prefill.flush()
        assert words[0] == words[1] and len(words[0]) == WORDS
        assert decode.metrics()["sglang:prefetched_tokens_total"] > L2_TOKENS
