"""The same words from every tier: real servers, the built-in model, a real Mooncake store.

A server answers one prompt of about 1,500 tokens cold, then from L1, L2 and L3. A second server
answers it from L3, and so does the first after a restart. Greedy outputs must be equal, token for
token, and `cached_tokens_details` must show the prefix in the expected tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rigs.models.heldout_question import HeldoutQuestion
from rigs.servers.engine_server import EXACT, Answer, EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-b-test-cpu")

CONTEXT = 1500
PAGE = 64


@pytest.fixture(scope="module")
def cold() -> Iterator[tuple[list[int], Answer]]:
    """A prompt, and the answer of an engine without a cache."""
    question = HeldoutQuestion.of(1, CONTEXT)
    ids = question.ids
    with ForkedServer("--disable-radix-cache", *EXACT) as server:
        first = server.generate(ids)
        second = server.generate(ids)
        assert first.cached["device"] == second.cached["device"] == 0
        assert first.output_ids == second.output_ids
        assert first.text.strip() == question.answer
        yield ids, first


def whole_pages(ids: list[int]) -> int:
    """Tokens of the prompt, which ends within a page, that a cache of whole pages can reuse."""
    assert len(ids) % PAGE, "or all tokens but the last come from the cache"
    return len(ids) // PAGE * PAGE


def push_out(server: EngineServer) -> None:
    """Fill L1 with other prompts."""
    for seed in range(100, 104):
        server.generate(HeldoutQuestion.of(seed, CONTEXT).ids, max_new_tokens=1)


def check_l1_and_l2(server: EngineServer, ids: list[int], expected: Answer) -> None:
    assert server.generate(ids).output_ids == expected.output_ids
    hit = server.generate(ids)
    assert hit.output_ids == expected.output_ids
    assert hit.cached["device"] == whole_pages(ids)
    push_out(server)
    loaded = server.generate(ids)
    assert loaded.output_ids == expected.output_ids
    assert (loaded.cached["device"], loaded.cached["host"]) == (0, whole_pages(ids))


SMALL_L1 = ("--max-total-tokens", "4096", "--hicache-ratio", "4", *EXACT)
L3_LAYOUTS = {HostLayout.PAGE_FIRST_DIRECT, HostLayout.PAGE_FIRST_KV_SPLIT}
"""Layouts that the tests with an L3 cover: `auto` picks the first of them there."""


@pytest.mark.parametrize("layout", sorted(set(HostLayout) - L3_LAYOUTS))
def test_l1_and_l2_give_the_cold_words(cold: tuple[list[int], Answer], layout: str) -> None:
    with ForkedServer(
        "--enable-hierarchical-cache", "--hicache-mem-layout", layout, *SMALL_L1
    ) as server:
        check_l1_and_l2(server, *cold)


@pytest.mark.parametrize(
    ("backend", "layout"),
    [("file", "auto"), ("mooncake", "auto"), ("mooncake", "page_first_kv_split")],
)
def test_every_tier_of_any_server_gives_the_words_of_no_cache(
    cold: tuple[list[int], Answer], backend: str, layout: str, tmp_path: Path
) -> None:
    ids, expected = cold
    flags = ("--hicache-storage-backend", backend, "--hicache-storage-prefetch-policy",
             "wait_complete", "--hicache-mem-layout", layout, *SMALL_L1)  # fmt: skip
    name = {"file": "HiCacheFile", "mooncake": "MooncakeStore"}[backend]
    with ExitStack() as stack:
        env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
        if backend == "mooncake":
            env = stack.enter_context(MooncakeCluster(segment_size="256mb")).engine_env()
        writer = stack.enter_context(ForkedServer(*flags, env=env))
        check_l1_and_l2(writer, ids, expected)
        writer.flush()
        again = writer.generate(ids)
        check_from_storage(again, expected, ids, name)
        reader = stack.enter_context(ForkedServer(*flags, env=env))
        check_from_storage(reader.generate(ids), expected, ids, name)
        if layout != "auto":
            return  # The layout does not affect a restart.
        assert writer.stop() == 0
        writer.start()
        check_from_storage(writer.generate(ids), expected, ids, name)


def check_from_storage(got: Answer, expected: Answer, ids: list[int], backend: str) -> None:
    assert got.output_ids == expected.output_ids
    assert got.cached["storage_backend"] == backend
    assert got.cached["storage"] == whole_pages(ids), got.cached
