"""The same words from every tier and after a restart: a random model of each family that needs it.

The reference is transformers' model, which has no prefix cache. A cold server, L1, L2 and L3 must
give its greedy words, and so must a second server that has only the store that the first left.
Other files test the other pairs of a family and a backend: `ranks/test_same_words_of_ranks.py`,
`entrypoints/test_engine_latent.py`, `entrypoints/test_engine_hybrid.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest
import torch
from transformers import PreTrainedModel

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.nightly_cases import nightly
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=17, suite="base-b-test-cpu")

PAGE: Final = 16
IDS: Final = prompt(1, 200)
WHOLE: Final = 192
"""Tokens of the whole pages of `IDS`."""
OTHER_PAGES: Final = [*prompt(2, WHOLE), *IDS[WHOLE:]]
"""`IDS` with other tokens where a cache can have them."""
WORDS: Final = 12
L1_TOKENS: Final = 512
NAMES: Final = {"file": "HiCacheFile", "mooncake": "MooncakeStore"}
"""Backends as answers name them."""
STATES: Final = ("--max-running-requests", "2", "--max-mamba-cache-size", "12")
HALF_STATES: Final = (*STATES, "--mamba-ssm-dtype", "bfloat16")
SMALL_STATES: Final = (*STATES, "--mamba-ssm-dtype", "float16")
"""Snapshots and running states are rounded alike, so a state from a tier changes no word."""


@dataclass(frozen=True)
class Asked:
    """The words of an answer, and the number of its prompt's tokens that came from each tier."""

    words: list[int]
    store: str
    """The name of L3's backend."""
    device: int = 0
    host: int = 0
    storage: int = 0


def ask(server: EngineServer) -> Asked:
    answer = server.generate(IDS, max_new_tokens=WORDS, sampling={"ignore_eos": True})
    found = answer.cached
    return Asked(
        answer.output_ids,
        found["storage_backend"],
        found["device"],
        found["host"],
        found.get("storage", 0),
    )


def words_of(model: PreTrainedModel, ids: list[int]) -> list[int]:
    """Greedy words of transformers' model, which computes the whole text for each of them."""
    text = list(ids)
    with torch.no_grad():
        for _ in range(WORDS):
            logits = model(torch.tensor([text]), use_cache=False).logits
            text.append(int(logits[0, -1].argmax()))
    return text[len(ids) :]


def push_out(server: EngineServer) -> None:
    """Fill L1 with other prompts, whose pages also take the first slots of an empty L2."""
    for seed in range(10, 13):
        server.generate(prompt(seed, 220), max_new_tokens=1)


def flags(backend: str) -> list[str]:
    words = {
        "tokenizer-path": BUILTIN_MODEL_DIR,
        "device": "cpu",
        "page-size": PAGE,
        "chunked-prefill-size": 64,
        "max-total-tokens": L1_TOKENS,
        "hicache-ratio": 4,
        "hicache-storage-backend": backend,
        "hicache-storage-prefetch-policy": "wait_complete",
        "hicache-storage-backend-extra-config": json.dumps({"prefetch_threshold": PAGE}),
    }
    pairs = (text for name, value in words.items() for text in (f"--{name}", str(value)))
    return ["--enable-hierarchical-cache", *pairs]


def check_every_tier(server: ForkedServer, cold: Asked) -> None:
    """Assert that a server, whose store is empty, and its successor answer alike from each tier.

    Args:
        server: It runs; its successor does in the end.
        cold: The answer without a cache.
    """
    from_l3 = replace(cold, storage=WHOLE)
    assert ask(server) == cold
    assert ask(server) == replace(cold, device=WHOLE)
    push_out(server)
    assert ask(server) == replace(cold, host=WHOLE)
    server.flush()
    push_out(server)  # Or the slots of both tiers would still have the right bytes.
    assert ask(server) == from_l3
    assert server.stop() == 0
    server.start()
    assert ask(server) == from_l3, "from the store of a server that ended"


@pytest.mark.parametrize(
    ("family", "backend", "states"),
    [
        ("llama", "file", ()),
        nightly("qwen2", "file", ()),
        nightly("deepseek_v2", "file", ()),
        ("deepseek_v3", "file", ()),
        ("deepseek_v32", "mooncake", ()),
        ("glm_moe_dsa_shared", "file", ()),
        nightly("kimi_k25_vision", "file", ()),
        ("minimax_m2", "file", ()),
        ("qwen3_5_moe_vision", "file", HALF_STATES),
        ("kimi_linear", "mooncake", STATES),
        nightly("qwen3_next", "mooncake", STATES),
        ("qwen3_next", "file", SMALL_STATES),
        nightly("nemotron_h", "mooncake", STATES),
        ("nemotron_h", "file", SMALL_STATES),
        ("ministral", "mooncake", STATES),
        ("gpt_oss", "file", STATES),
        ("deepseek_v4", "file", STATES),
        nightly("deepseek_v4", "mooncake", STATES),
        ("glm5_next", "file", STATES),
        nightly("glm5_next", "mooncake", STATES),
    ],
)
def test_every_tier_of_any_server_gives_the_words_of_no_cache(
    tmp_path: Path, cluster: MooncakeCluster, family: str, backend: str, states: tuple[str, ...]
) -> None:
    model = save_tiny_checkpoint(tmp_path / "model", family, vocab_size=2176, eos_token_id=2)
    words = words_of(model, IDS)
    assert words != words_of(model, OTHER_PAGES), "words that would hide wrong pages"
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "store")}
    if backend == "mooncake":
        env = cluster.engine_env()
    path = str(tmp_path / "model")
    with ForkedServer(*flags(backend), *states, env=env, model=path) as server:
        check_every_tier(server, Asked(words, NAMES[backend]))


def test_state_in_fp8_gives_the_words_of_a_cold_server(
    tmp_path: Path, cluster: MooncakeCluster
) -> None:
    model = tmp_path / "model"
    save_tiny_checkpoint(model, "deepseek_v32", vocab_size=2176, eos_token_id=2)
    args, fp8 = flags("mooncake"), ("--kv-cache-dtype", "fp8_e4m3")
    alike = ("--tokenizer-path", str(BUILTIN_MODEL_DIR), "--chunked-prefill-size", "64")
    with ForkedServer("--disable-radix-cache", *alike, *fp8, model=str(model)) as cold:
        sampling = {"ignore_eos": True}
        words = cold.generate(IDS, max_new_tokens=WORDS, sampling=sampling).output_ids
        other = cold.generate(OTHER_PAGES, max_new_tokens=WORDS, sampling=sampling).output_ids
    assert words != other, "words that would hide wrong pages"
    with ForkedServer(*args, *fp8, env=cluster.engine_env(), model=str(model)) as server:
        check_every_tier(server, Asked(words, NAMES["mooncake"]))
