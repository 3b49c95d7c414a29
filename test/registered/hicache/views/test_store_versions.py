"""Servers of two formats of pages on one store: neither reads the other's, and both can be told."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from rigs.servers.engine_server import ADMIN_KEY, EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer, InRank
from rigs.views import planted_faults
from rigs.views.alert_rules import differing_labels, firing, scrape
from sglang import hicache_top
from sglang.srt.environ import envs
from sglang.srt.mem_cache.storage.types import FORMAT_VERSION
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-b-test-cpu")

PAGE: Final = 64
PROMPT: Final = [300 + i * 7 % 1000 for i in range(6 * PAGE + 5)]
WHOLE: Final = 6 * PAGE


def server_of(version: int, folder: Path, in_rank: InRank | None = None) -> ForkedServer:
    return ForkedServer(
        "--enable-metrics", "--hicache-storage-backend", "file", "--page-size", str(PAGE), *EXACT,
        "--hicache-storage-prefetch-policy", "wait_complete", "--max-total-tokens", "4096",
        env={envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: str(folder)},
        in_rank=in_rank or partial(planted_faults.has_format, version),
    )  # fmt: skip


def sees(server: EngineServer, others: int) -> bool:
    """True if `/hicache` counts `others` namespaces in the store that the server cannot read."""
    usage = hicache_top.ask(server.url, ADMIN_KEY)["store"]["usage"]
    return usage is not None and usage["num_other_namespaces"] == others


def shares_with(server: EngineServer, servers: int) -> bool:
    """True if `/hicache` says how many servers share the namespace."""
    seen: int | None = hicache_top.ask(server.url, ADMIN_KEY)["store"]["servers"]
    return seen == servers


def test_formats_do_not_share_pages_and_the_alert_names_them(tmp_path: Path) -> None:
    with server_of(FORMAT_VERSION, tmp_path) as old, server_of(FORMAT_VERSION + 1, tmp_path) as new:
        words = old.generate(PROMPT).output_ids
        old.flush()
        assert wait_until(partial(sees, old, 0), 30)
        cold = new.generate(PROMPT)
        assert (cold.output_ids, cold.meta_info["cached_tokens"]) == (words, 0)
        new.flush()
        for server in (old, new):
            warm = server.generate(PROMPT)
            assert (warm.output_ids, warm.cached["storage"]) == (words, WHOLE)
            assert wait_until(partial(sees, server, 1), 30)
        both = scrape(old, new)
        assert "NamespacesDiffer" in firing(both, both)
        found = differing_labels(both, "sglang:hicache_storage_info")
        assert found == {"namespace", "format_version"}

        # The old one takes its objects with it; the new one keeps its own.
        for server in (old, new):
            server.flush()
        path = "/hicache/storage-backend/clear"
        assert old.request("POST", path, admin=True).status == 200
        assert wait_until(partial(sees, new, 0), 30)
        assert old.generate(PROMPT).cached["storage"] == 0
        assert new.generate(PROMPT).cached["storage"] == WHOLE


def test_a_server_that_shares_its_store_with_nobody_is_named(tmp_path: Path) -> None:
    """Its namespace is that of the others, so that labels do not tell."""
    folders = tmp_path / "shared", tmp_path / "shared", tmp_path / "another"
    with ExitStack() as stack:
        first, second, apart = (
            stack.enter_context(server_of(FORMAT_VERSION, folder, planted_faults.looks_often))
            for folder in folders
        )

        def sharers(*servers: EngineServer) -> list[float]:
            return [server.metrics()["sglang:hicache_storage_servers"] for server in servers]

        assert wait_until(lambda: sharers(first, second, apart) == [2, 2, 1], 30)
        now = scrape(first, second, apart)
        assert [one["instance"] for one in firing(now, now)["NamespaceAlone"]] == [apart.url]
        assert "NamespacesDiffer" not in firing(now, now)
        # A view is a second old at most.
        assert wait_until(partial(shares_with, first, 2), 30)
        assert wait_until(partial(shares_with, apart, 1), 30)
        second.process.kill()
        assert wait_until(lambda: sharers(first) == [1], 30)
