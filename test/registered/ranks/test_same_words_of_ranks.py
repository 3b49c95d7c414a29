"""The same words from one to four ranks, and with context parallelism: tiny models, real
servers, every tier. `deepseek_v32` also drafts tokens under context parallelism.

`test_same_words_of_ranks_nightly.py` has eight ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.nightly_cases import nightly
from rigs.servers.engine_server import EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from rigs.words_of_ranks import FAMILIES, PAGE, SOURCES, ask, assert_same_words, flags
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=66, suite="base-b-test-cpu")

TWO: Final = ((1, 1), (2, 1))
SIZES: Final = {
    "qwen3": ((1, 1), (4, 1), (4, 2)),
    "qwen3_moe": ((1, 1), (4, 1), (2, 2)),
    "deepseek_v32": ((1, 1), (4, 1), (4, 2)),
    "minimax_m2": TWO,
    "kimi_linear": TWO,
    "qwen3_next": ((1, 1), (4, 1)),
    "qwen3_5": TWO,
    "nemotron_h": TWO,
    "gpt_oss": TWO,
    "deepseek_v4": TWO,
    "glm5_next": TWO,
}
"""Numbers of ranks, and how many of them divide a prompt; the first is the reference."""
WITH_LIKE_LAYERS: Final = ("minimax_m2", "kimi_linear", "qwen3_5")
"""Ranks split the layers of these families as those of another family here."""
ONE_HEAD_EACH: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v32": {"num_attention_heads": 4, "num_key_value_heads": 4}
}


@pytest.mark.parametrize(
    "family", [nightly(one) if one in WITH_LIKE_LAYERS else one for one in FAMILIES]
)
def test_ranks_say_what_one_rank_says(tmp_path: Path, family: str) -> None:
    assert_same_words(tmp_path, family, SIZES[family], **ONE_HEAD_EACH.get(family, {}))


def test_ranks_write_to_mooncake_and_read_from_it(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3", **FAMILIES["qwen3"])
    with MooncakeCluster() as cluster:
        env = cluster.engine_env()
        with ForkedServer(*flags("qwen3", 2, "mooncake"), env=env, model=str(tmp_path)) as server:
            cold, _ = ask(server)
            server.flush()
            assert ask(server) == (cold, SOURCES["L3"])
            assert server.stop() == 0
            server.start()
            assert ask(server) == (cold, SOURCES["L3"])


def attach_for_sizes(server: EngineServer) -> None:
    """Empty L1 and L2, and attach L3 anew: with objects that one, two and four ranks can read."""
    server.flush()
    extra = json.dumps({"prefetch_threshold": PAGE, "tp_lcm_size": 4})
    attach = {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": extra,
    }
    for method, body in (("DELETE", None), ("PUT", attach)):
        answer = server.request(method, "/hicache/storage-backend", body, admin=True)
        assert answer.status == 200, answer.body


@pytest.mark.parametrize(("family", "readers"), [("qwen3", (1, 4)), ("qwen3_next", (1,))])
def test_servers_of_other_sizes_read_what_two_ranks_wrote(
    tmp_path: Path, family: str, readers: tuple[int, ...]
) -> None:
    model = tmp_path / "model"
    save_tiny_checkpoint(model, family, **FAMILIES[family] | {"num_key_value_heads": 4})
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "store")}
    with ForkedServer(*flags(family, 2), env=env, model=str(model)) as server:
        words, found = ask(server)
        assert found == (0, 0, 0)
        attach_for_sizes(server)
        assert ask(server) == (words, (0, 0, 0)), "written with tp_lcm_size too"
        assert server.stop() == 0
    for size in readers:
        with ForkedServer(*flags(family, size), env=env, model=str(model)) as server:
            # Four ranks have the heads of one object each, so they need no setting.
            alone = SOURCES["L3"] if size == 4 else (0, 0, 0)
            assert ask(server) == (words, alone), f"TP {size} without tp_lcm_size"
            attach_for_sizes(server)
            assert ask(server) == (words, SOURCES["L3"]), f"TP {size}"
            assert server.stop() == 0
