"""The same words from every tier of a server on a GPU: built-in model, real pools, real stores.

The server answers one prompt of about 1,500 tokens cold and from L1. L2 serves it with each I/O
backend and layout. L3 serves it to the server that wrote it and to one that never saw it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from rigs.models.heldout_question import HeldoutQuestion
from rigs.servers.engine_server import Answer, EngineServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=60, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

CONTEXT = 1500
PAGE = 64
PAIRS = (
    ("kernel", "layer_first"),
    ("kernel", "page_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
)
L3 = {"file": "HiCacheFile", "mooncake": "MooncakeStore"}

Servers = dict[str, EngineServer]


def whole_pages(ids: list[int]) -> int:
    """Tokens of the prompt, which ends within a page, that a page-wise cache can give back."""
    assert len(ids) % PAGE, "or all tokens but the last come from the cache"
    return len(ids) // PAGE * PAGE


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """All servers of the tests below, started side by side."""
    with ExitStack() as stack:
        store = stack.enter_context(MooncakeCluster(segment_size="256mb"))
        folder = tmp_path_factory.mktemp("l3")
        envs = {
            "file": {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)},
            "mooncake": store.engine_env(),
        }
        made: Servers = {"cold": EngineServer("--device", "cuda", "--disable-radix-cache")}
        for io, layout in PAIRS:
            made[f"{io} {layout}"] = EngineServer(
                "--device", "cuda", "--enable-hierarchical-cache", "--hicache-io-backend", io,
                "--hicache-mem-layout", layout, "--max-total-tokens", "4096",
                "--hicache-ratio", "4",
            )  # fmt: skip
        for backend, env in envs.items():
            for role in ("writer", "reader"):
                made[f"{backend} {role}"] = EngineServer(
                    "--device", "cuda", "--hicache-storage-backend", backend,
                    "--hicache-storage-prefetch-policy", "wait_complete", env=env,
                )  # fmt: skip
        for server in made.values():
            stack.callback(server.kill)
        with ThreadPoolExecutor(len(made)) as pool:
            list(pool.map(EngineServer.start, made.values()))
        yield made


@pytest.fixture(scope="module")
def cold(servers: Servers) -> tuple[list[int], Answer]:
    """Prompt, and the answer without any cache."""
    question = HeldoutQuestion.of(1, CONTEXT)
    ids = question.ids
    first = servers["cold"].generate(ids)
    second = servers["cold"].generate(ids)
    assert first.cached["device"] == second.cached["device"] == 0
    assert first.output_ids == second.output_ids
    assert first.text.strip() == question.answer
    return ids, first


def test_the_server_says_where_it_runs(servers: Servers) -> None:
    info = servers["cold"].request("GET", "/server_info").body
    assert (info["device"], info["attention_backend"]) == ("cuda", "triton")
    assert "on cuda" in info["tiers"][0]


@pytest.mark.parametrize(("io", "layout"), PAIRS)
def test_l1_and_l2_give_the_cold_words(
    servers: Servers, cold: tuple[list[int], Answer], io: str, layout: str
) -> None:
    ids, expected = cold
    server = servers[f"{io} {layout}"]
    assert server.generate(ids).output_ids == expected.output_ids
    hit = server.generate(ids)
    assert hit.output_ids == expected.output_ids
    assert hit.cached["device"] == whole_pages(ids)
    for seed in range(100, 104):  # push it out of L1
        server.generate(HeldoutQuestion.of(seed, CONTEXT).ids, max_new_tokens=1)
    loaded = server.generate(ids)
    assert loaded.output_ids == expected.output_ids
    assert (loaded.cached["device"], loaded.cached["host"]) == (0, whole_pages(ids))
    server.flush()  # checks page ownership, too


@pytest.mark.parametrize("backend", L3)
def test_l3_of_either_server_gives_the_words_of_no_cache(
    servers: Servers, cold: tuple[list[int], Answer], backend: str, tmp_path: Path
) -> None:
    ids, expected = cold
    writer, reader = servers[f"{backend} writer"], servers[f"{backend} reader"]
    assert writer.generate(ids).output_ids == expected.output_ids
    writer.flush()
    for server in (writer, reader):
        got = server.generate(ids)
        assert got.output_ids == expected.output_ids
        assert got.cached["storage_backend"] == L3[backend]
        assert got.cached["storage"] == whole_pages(ids), got.cached
