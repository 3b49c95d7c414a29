"""Three tiers, one tree: every path of a page, its owner at every step. L3 is the file backend."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.caches.cache_rig import RIG_LAYOUTS, CacheRig, Reused
from rigs.caches.tier_rigs import (
    FlakyStorage,
    other_prompts,
    three_tiers,
    two_tiers,
    wait_for,
)
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
)
from sglang.srt.mem_cache.l3 import prefetch_table
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")
register_cuda_ci(est_time=10, suite="base-b-test-1-gpu-large")


@pytest.mark.parametrize("layout", RIG_LAYOUTS)
def test_evicted_pages_come_back_from_the_host(layout: str) -> None:
    rig = two_tiers(hicache_mem_layout=layout)
    rig.run(range(16))
    rig.settle()
    other_prompts(rig)
    assert rig.run(range(17)) == Reused(host=16)
    rig.settle()
    assert rig.run(range(17)) == Reused(device=16)


@pytest.mark.parametrize("layout", RIG_LAYOUTS)
def test_flushed_pages_come_back_from_storage(layout: str) -> None:
    rig = three_tiers(hicache_mem_layout=layout)
    rig.run(range(16))
    rig.flush()
    assert rig.run(range(17)) == Reused(storage=16)
    rig.settle()


def test_another_engine_reads_what_the_first_wrote() -> None:
    first, second = three_tiers(), three_tiers()
    first.run(range(16))
    first.settle()
    assert second.run(range(17)) == Reused(storage=16)
    second.settle()


def test_layouts_with_equal_page_bytes_share_and_others_do_not() -> None:
    writer = three_tiers(hicache_mem_layout="layer_first")
    writer.run(range(16))
    writer.settle()
    alike = "page_first_kv_split" if "page_first_kv_split" in RIG_LAYOUTS else "page_first_direct"
    assert three_tiers(hicache_mem_layout=alike).run(range(17)).storage == 16
    assert three_tiers(hicache_mem_layout="page_first").run(range(17)).storage == 0


def test_engines_that_differ_share_nothing() -> None:
    rig = three_tiers()
    rig.run(range(32))
    rig.settle()
    changes: list[dict[str, Any]] = [
        {"weights_identity": "other"},
        {"dtype": torch.float16},
        {"page_size": 2},
    ]
    for change in changes:
        other = CacheRig(**{"l1_pages": 32, "settings": rig.hi_settings(), **change})
        assert other.run(range(33)) == Reused(), change
        other.settle()


def test_prefix_comes_from_three_tiers_at_once() -> None:
    writer = three_tiers(l1_pages=16)
    writer.run(range(24))
    writer.settle()
    rig = three_tiers(l1_pages=6)
    rig.run(range(8))
    rig.settle()
    rig.run(range(500, 516))
    rig.settle()
    rig.run(range(4))
    rig.tree.evict(EvictParams(num_tokens=24))
    request, reused = rig.start(range(5))
    assert reused == Reused(host=4)
    rig.finish(request)
    rig.settle()
    assert rig.run(range(21)) == Reused(device=4, host=4, storage=12)
    rig.settle()


def test_an_aborted_request_gives_its_pages_back() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    rig.arrive("gone", list(range(17)))
    rig.tree.release_aborted_request("gone")
    rig.settle()
    assert rig.tree.pop_prefetch_loaded_tokens("gone") == 0


def test_best_effort_never_waits() -> None:
    rig = three_tiers(hicache_storage_prefetch_policy="best_effort")
    rig.run(range(16))
    rig.flush()
    rig.arrive("r", list(range(17)))
    assert rig.tree.check_prefetch_progress("r")
    rig.tree.note_scheduled("r")
    rig.settle()


def test_two_requests_for_the_same_pages_publish_them_once() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    for rid in ("a", "b"):
        rig.arrive(rid, list(range(17)))
    for rid in ("a", "b"):
        rig.until(lambda rid=rid: rig.tree.check_prefetch_progress(rid))  # type: ignore[misc]
    assert rig.tree.pop_prefetch_loaded_tokens("a") == 16
    assert rig.tree.pop_prefetch_loaded_tokens("b") == 0
    rig.settle()


def test_a_damaged_page_shortens_the_prefix() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    FlakyStorage(rig).mode = "hole"
    assert rig.run(range(17)) == Reused(storage=8)
    rig.settle()


def test_a_backend_that_answers_for_fewer_pages_than_it_was_asked_brings_none() -> None:
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    flaky = FlakyStorage(rig)
    flaky.mode = "terse"
    assert rig.run(range(17)) == Reused()
    rig.settle()
    rig.close()


def test_a_prompt_of_which_the_store_has_nothing_waits_for_no_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetch_table, "_ANSWER_S", 30.0)
    rig = three_tiers()
    rig.arrive("new", list(range(17)))
    rig.tree.check_hicache_events()
    assert rig.tree.check_prefetch_progress("new")
    rig.settle()
    rig.close()


def test_prompts_that_come_in_one_tick_are_one_question() -> None:
    rig = three_tiers()
    flaky = FlakyStorage(rig)
    for number in range(3):
        rig.arrive(f"new-{number}", list(range(20 * number, 20 * number + 17)))
    rig.until(lambda: all(rig.tree.check_prefetch_progress(f"new-{n}") for n in range(3)))
    assert flaky.calls.count("prompts_exist") == 1
    rig.settle()
    rig.close()


@pytest.mark.parametrize("policy", ["timeout", "best_effort"])
def test_a_tick_waits_a_moment_for_the_store_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    # best_effort must not wait at all: a wait would take half a minute.
    monkeypatch.setattr(prefetch_table, "_ANSWER_S", 0.001 if policy == "timeout" else 30.0)
    rig = three_tiers(hicache_storage_prefetch_policy=policy)
    flaky = FlakyStorage(rig)
    flaky.mode = "hangs"
    rig.arrive("new", list(range(17)))
    began = time.monotonic()
    for _ in range(3):
        rig.tree.check_hicache_events()
    assert time.monotonic() - began < 15
    assert rig.tree.check_prefetch_progress("new") is (policy == "best_effort")
    flaky.goes_on.set()
    rig.until(lambda: rig.tree.check_prefetch_progress("new"))
    rig.settle()
    rig.close()


def test_a_store_that_is_down_costs_no_request_and_is_left_alone() -> None:
    rig = three_tiers()
    flaky = FlakyStorage(rig)
    flaky.mode = "down"
    for _ in range(5):
        assert rig.run(range(16)) == Reused()
        rig.flush()
    asked = [name for name in flaky.calls if name.startswith(("batch", "prompts"))]
    assert len(asked) == 1, "the breaker lets one failure through"
    flaky.mode = "ok"
    rig.close()


def test_what_was_read_before_the_store_came_back_is_written_again(storage_dir: Path) -> None:
    """A read that was begun before a store was lost says nothing of what the new one has."""
    rig = three_tiers()
    rig.run(range(16))
    rig.flush()
    rig.arrive("reads", list(range(17)))
    rig.tick()
    begun_in = rig.hi.store.epoch
    (operation,) = rig.hi.storage_prefetch.table.operations
    wait_for(lambda: operation.outcome is not None)
    rig.hi.store.epoch += 1  # The store came back empty.
    for path in storage_dir.rglob("*"):
        path.unlink() if path.is_file() else None
    rig.until(lambda: rig.tree.check_prefetch_progress("reads"))
    (node,) = rig.hi.nodes()
    assert (node.storage_epoch, rig.hi.storage_backup.has_stored(node)) == (begun_in, False)
    assert rig.run(range(17)) == Reused(host=16)
    rig.settle()
    assert rig.hi.storage_backup.has_stored(node)
    files = [path for path in storage_dir.rglob("*") if path.is_file()]
    assert len([path for path in files if ".notes" not in path.parts]) == 4
    rig.close()


def test_the_shown_configuration_has_no_secret(
    storage_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from sglang.srt.mem_cache.hicache_storage import HiCacheFile as TheirStore\n"
    (tmp_path / "their_store.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = {"backend_name": "mine", "module_path": "their_store", "class_name": "TheirStore"}
    rig = two_tiers()
    extra = json.dumps({**names, "access_token": "s3cret"})
    assert rig.hi.attach_storage_backend("dynamic", extra) == (True, "attached dynamic")
    shown = rig.hi.storage_state()["hicache_storage_backend_extra_config"]
    assert json.loads(shown) == {**names, "access_token": "***"}
    rig.close()


def test_runtime_attach_update_detach_clear(storage_dir: Path) -> None:
    rig = two_tiers()
    rig.run(range(16))
    rig.settle()
    extra = json.dumps({"prefetch_threshold": 4})
    assert rig.hi.storage_state()["hicache_storage_backend_extra_config"] is None
    assert rig.hi.attach_storage_backend("file", extra) == (True, "attached file")
    # The config is text, as in the request and in SGLang's answer.
    assert rig.hi.storage_state()["hicache_storage_backend_extra_config"] == extra
    assert not rig.hi.attach_storage_backend("mooncake")[0]
    done, why = rig.hi.attach_storage_backend("file", extra, served_model_name="other")
    assert not done and "served_model_name" in why
    rig.hi.detach_storage_backend()
    waits = json.dumps({"prefetch_threshold": 4, "on_unreachable": "wait"})
    done, why = rig.hi.attach_storage_backend("file", waits)
    assert not done and "on_unreachable" in why, "a running server must not stand still"
    assert rig.hi.attach_storage_backend("file", extra)[0]
    done, _ = rig.hi.attach_storage_backend("file", hicache_storage_prefetch_policy="best_effort")
    assert done
    assert rig.hi.storage_state()["hicache_storage_prefetch_policy"] == "best_effort"
    assert not rig.hi.attach_storage_backend("file", hicache_write_policy="sometimes")[0]
    # Used again, the old pages go to the new L3.
    rig.run(range(16))
    rig.settle()
    assert list(storage_dir.rglob("*")), "written"
    assert rig.hi.detach_storage_backend() == (True, "detached file")
    assert rig.hi.detach_storage_backend() == (True, "no storage backend is attached")
    state = rig.hi.storage_state()
    assert state["hicache_storage_backend"] is None
    assert state["hicache_storage_backend_extra_config"] is None
    assert [path for path in storage_dir.rglob("*") if path.is_file()], "detaching deletes nothing"
    rig.hi.attach_storage_backend("file", extra)
    assert rig.hi.clear_storage_backend()[0]
    files = [path for path in storage_dir.rglob("*") if path.is_file()]
    assert not [path for path in files if ".notes" not in path.parts]
    rig.flush()
    assert rig.run(range(17)) == Reused()
    rig.close()


def test_administration_is_refused_while_busy() -> None:
    rig = three_tiers()
    rig.run(range(16))
    for done, why in (
        rig.hi.detach_storage_backend(),
        rig.hi.clear_storage_backend(),
        rig.hi.attach_storage_backend("file", hicache_write_policy="write_back"),
        rig.hi.attach_storage_backend("file", hicache_write_policy="write_through"),
    ):
        assert not done
        assert "writes" in why
    rig.settle()


def test_short_prompts_are_not_fetched() -> None:
    rig = three_tiers(prefetch_threshold=12)
    rig.run(range(16))
    rig.flush()
    assert rig.run(range(11)) == Reused()
    assert rig.run(range(17)) == Reused(device=8, storage=0)
    rig.settle()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hicache_mem_layout": "diagonal"}, "hicache-mem-layout"),
        (
            {"hicache_io_backend": "kernel", "hicache_mem_layout": RIG_LAYOUTS[-1]},
            "hicache-io-backend",
        ),
        ({"hicache_size": 10**6}, "--hicache-size"),
        ({"hicache_storage_prefetch_policy": "never"}, "prefetch_policy"),
    ],
)
def test_what_cannot_work_is_refused_at_start(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        two_tiers(**settings)
