"""Retracted requests of a decode server: with `--disaggregation-decode-retraction-backup` their
pages go to L2, and come back by a load."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.disaggregation.decode_rig import PAGE, DecodeRig
from rigs.schedulers.random_checks import assert_unpinned
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.environ import envs
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.srt.utils.metrics import counts_by_label
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

IDS: Final = [prompt(seed, 26) for seed in (1, 2, 3)]
NEW: Final = 30
POOL: Final = 112
"""Room for two of the three requests at their ends."""
POLICIES: Final = ("write_through", "write_through_selective", "write_back")
GROUPS: Final = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v3": {},
    "deepseek_v32": {"index_topk": 12},
    "qwen3_next": {"mlp_only_layers": [1]},
    "ministral": {"sliding_window": 12},
    "deepseek_v4": {"compress_rates": GROUPS},
    "glm5_next": {"index_kpool": 4, "index_topk": 12},
}
HYBRIDS: Final = ("qwen3_next", "ministral", "deepseek_v4", "glm5_next")
FLAG: Final = "disaggregation_decode_retraction_backup"


@contextlib.contextmanager
def rig_of(model: Path, **args: Any) -> Iterator[tuple[DecodeRig, HiRadixCache]]:
    settings = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "hicache_write_policy": "write_through_selective",
        "pool_tokens": POOL,
        "schedule_conservativeness": 0.01,
        FLAG: "host_pool",
        **args,
    }
    with envs.SGLANG_HICACHE_CHECKED_SHARE.override(1.0):
        rig = DecodeRig(model, **settings)
    assert isinstance(rig.tree, HiRadixCache)
    with contextlib.closing(rig):
        yield rig, rig.tree


@pytest.fixture(scope="module")
def words(model: Path) -> list[list[int]]:
    with contextlib.closing(SchedulerRig(model, disable_radix_cache=True)) as rig:
        return rig.generate(IDS, NEW)


@dataclass
class Retracted:
    """The first retracted request."""

    req: Req
    node: TreeNode
    """The end of its pages in the tree."""
    pages: list[torch.Tensor]
    """Their keys and values before they left L1, by layer."""


def content(rig: DecodeRig, node: TreeNode) -> list[torch.Tensor]:
    slots, pool = rig.tree.tree.values_of(node.path_up()[::-1]), rig.pools[0]
    assert isinstance(pool, MHATokenToKVPool)
    return [layer[slots].clone() for part in pool.parts for layer in part]


def begin(rig: DecodeRig, cache: HiRadixCache, monkeypatch: pytest.MonkeyPatch) -> Retracted:
    """Run until a request is retracted."""
    found: list[Retracted] = []
    back_up = cache.host_backup.back_up

    def noting(path: list[TreeNode]) -> int:
        waiting = rig.scheduler.state.queues.waiting
        (req,) = (req for req in waiting if req.progress.output_ids)
        found.append(Retracted(req, path[-1], content(rig, path[-1])))
        return back_up(path)

    monkeypatch.setattr(cache.host_backup, "back_up", noting)
    rig.step(*(rig.request(f"r{n}", ids, greedy(NEW)) for n, ids in enumerate(IDS)))
    rig.run_until(lambda: bool(found))
    monkeypatch.setattr(cache.host_backup, "back_up", back_up)
    return found[0]


def outcomes(rig: DecodeRig) -> dict[str, int]:
    return counts_by_label(rig.scheduler.state.metrics.backed_up)


def assert_right(rig: DecodeRig, words: list[list[int]]) -> None:
    rig.settle()
    assert [rig.results[f"r{n}"].output_ids for n in range(len(IDS))] == words
    rig.assert_idle()
    assert_unpinned(rig.tree)


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_come_back_as_they_were(
    model: Path, words: list[list[int]], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(model, hicache_write_policy=policy) as (rig, cache):
        found = begin(rig, cache, monkeypatch)
        req, node = found.req, found.node
        assert node.depth == (req.progress.num_tokens - 1) // PAGE * PAGE > len(IDS[0])
        rig.run_until(lambda: node.backuped)
        assert node.wanted_by, "L2 evicts its pages last while it waits"
        computed, loads = rig.scheduler.state.counters.prefill_tokens, cache.newest_load
        rig.run_until(lambda: req in rig.scheduler.state.queues.decoding)
        assert rig.scheduler.state.counters.prefill_tokens - computed <= PAGE
        assert cache.newest_load > loads
        assert all(map(torch.equal, content(rig, node), found.pages))
        assert not node.wanted_by
        assert_right(rig, words)
        assert outcomes(rig)["kept"] > 0 == outcomes(rig)["l2_full"]


def test_from_a_buffer_they_go_to_the_store_and_come_back_from_it(
    model: Path, words: list[list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    settings = {
        "hicache_host_memory_mode": "buffer_only",
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": PAGE}),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    with rig_of(model, **settings) as (rig, cache):
        found = begin(rig, cache, monkeypatch)
        # The request goes on soon, so the scheduler stands still meanwhile.
        deadline = time.monotonic() + 60
        while not cache.storage_backup.has_stored(found.node):
            cache.check_hicache_events()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        cache.evict(EvictParams(num_tokens=POOL))
        cache.evict_host(cache.host_pool.size)
        assert not found.node.is_on_any_tier
        computed = rig.scheduler.state.counters.prefill_tokens
        rig.run_until(lambda: found.req in rig.scheduler.state.queues.decoding)
        assert rig.scheduler.state.counters.prefill_tokens - computed <= PAGE
        assert_right(rig, words)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_state_comes_back(family: str, tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(family, eos_token_id=None, **FAMILIES[family])
    with contextlib.closing(SchedulerRig(model, disable_radix_cache=True, page_size=PAGE)) as alone:
        words = alone.generate(IDS, NEW)
    alignment = {"snapshot_alignment": PAGE, "num_states": 12, "mamba_track_interval": 8}
    more = alignment if family in HYBRIDS else {}
    with rig_of(model, **more) as (rig, cache):
        rig.run(*(rig.request(f"r{n}", ids, greedy(NEW)) for n, ids in enumerate(IDS)))
        assert rig.scheduler.state.counters.retractions and cache.newest_load > -1
        assert_right(rig, words)


def test_without_the_flag_a_request_may_be_computed_again(
    model: Path, words: list[list[int]]
) -> None:
    with rig_of(model, **{FLAG: None}) as (rig, cache):
        rig.run(*(rig.request(f"r{n}", ids, greedy(NEW)) for n, ids in enumerate(IDS)))
        counters = rig.scheduler.state.counters
        assert counters.retractions and cache.newest_load == -1
        assert counters.prefill_tokens > len(IDS) * len(IDS[0]) + len(IDS[0])
        assert not outcomes(rig)
        assert_right(rig, words)


def test_a_full_l2_is_named(
    model: Path,
    words: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rig_of(model, hicache_ratio=1.2, hicache_write_policy="write_through") as (rig, cache):
        rig.run(rig.request("fills", prompt(9, 100), greedy(1)))
        rig.settle()
        pinned = [node for node in cache.nodes() if node.backuped]
        for node in pinned:
            cache.tree.host.pin(node)
        caplog.set_level(logging.WARNING)
        begin(rig, cache, monkeypatch)
        lost, kept = outcomes(rig)["l2_full"], outcomes(rig)["kept"]
        assert lost > 0
        assert f"for {lost} of {lost + kept} tokens of the retracted request" in caplog.text
        rig.run()
        for node in pinned:
            cache.tree.host.unpin(node)
        assert_right(rig, words)


@pytest.mark.parametrize("when", ["backup", "waiting", "load"])
def test_an_abort_at_any_time_gives_everything_back(
    model: Path, words: list[list[int]], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(model) as (rig, cache):
        flow = {"backup": cache.host_backup, "load": cache.host_load}.get(when)
        with monkeypatch.context() as held:
            found = begin(rig, cache, monkeypatch)
            if flow is not None:
                held.setattr(flow, "settle", lambda num_ended: None)
            if when == "load":
                rig.run_until(lambda: bool(cache.host_load.loading))
            elif when == "waiting":
                rig.run_until(lambda: found.node.backuped)
            else:
                assert cache.host_backup.writing
            rig.step(rig.abort(found.req.rid))
            rig.step()
            rig.check()
        rig.run()
        rig.settle()
        for n, rid in enumerate(f"r{n}" for n in range(len(IDS))):
            got = rig.results[rid].output_ids
            assert got == words[n][: len(got)]
            assert (len(got) < NEW) == (rid == found.req.rid)
        rig.assert_idle()
        assert_unpinned(cache)
