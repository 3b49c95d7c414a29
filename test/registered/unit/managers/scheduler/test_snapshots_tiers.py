"""A model with recurrent states over three tiers: the same words, wherever a prefix comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt, stored_in_files
from rigs.stores.losing_store import LosingStore
from rigs.torch_launches import TorchLaunches
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.messages.io_struct import FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=14, suite="base-a-test-cpu")

pytestmark = pytest.mark.usefixtures("reads_are_never_late")

PAGE = 16
FAMILIES = ("kimi_linear", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h")
IDS = prompt(1, 100)


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    return {family: tiny_model(family, eos_token_id=None) for family in FAMILIES}


@pytest.fixture(scope="module")
def cold(models: dict[str, Path]) -> dict[str, list[int]]:
    """Words of each family after `IDS`, without a cache."""
    rigs = {
        family: SchedulerRig(path, disable_radix_cache=True, page_size=PAGE)
        for family, path in models.items()
    }
    return {family: rig.generate([IDS], 10)[0] for family, rig in rigs.items()}


def rig_of(path: Path, **args: Any) -> SchedulerRig:
    settings: dict[str, Any] = {
        "pool_tokens": 320,
        "num_states": 12,
        "page_size": PAGE,
        "mamba_track_interval": 2 * PAGE,
        "chunked_prefill_size": 64,
        "hicache_ratio": 4.0,
        **stored_in_files(PAGE),
        **args,
    }
    return SchedulerRig(path, **settings)


def ask(rig: SchedulerRig, rid: str, ids: list[int], count: int = 10) -> tuple[int, int, int]:
    """Tokens of the prompt that came from L1, L2 and L3."""
    rig.step(rig.request(rid, ids, greedy(count)))
    rig.settle()
    return rig.results[rid].cached


def flush(rig: SchedulerRig) -> None:
    rig.step(FlushCacheReqInput(req_id="flush"))
    assert rig.answers.pop().success


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_every_tier_gives_the_words_of_no_cache_also_after_a_restart(
    models: dict[str, Path], cold: dict[str, list[int]], family: str, layout: str
) -> None:
    rig = rig_of(models[family], hicache_mem_layout=layout)
    try:
        found = [ask(rig, rid, IDS) for rid in ("cold", "device")]
        # Push the prompt out of L1, not out of L2.
        for seed in range(10, 15):
            ask(rig, f"filler-{seed}", prompt(seed, 120))
        found.append(ask(rig, "host", IDS))
        flush(rig)
        found.append(ask(rig, "storage", IDS))
        assert found == [(0, 0, 0), (96, 0, 0), (0, 96, 0), (0, 0, 96)]
        for rid in ("cold", "device", "host", "storage"):
            assert rig.results[rid].output_ids == cold[family], rid
    finally:
        rig.close()
    restarted = rig_of(models[family], hicache_mem_layout=layout)
    try:
        assert ask(restarted, "restart", IDS) == (0, 0, 96)
        assert restarted.results["restart"].output_ids == cold[family]
    finally:
        restarted.close()


@pytest.mark.parametrize(("num_states", "reused"), [(1, 0), (2, 96)])
def test_a_state_is_loaded_only_where_a_slot_is_left_to_run_on(
    models: dict[str, Path], num_states: int, reused: int
) -> None:
    """The prompt is computed if there is one slot. Servers that keep prefixes have more."""
    ids = prompt(3, 100)
    writer = rig_of(models["qwen3_5"])
    try:
        ask(writer, "cold", ids)
    finally:
        writer.close()
    reader = rig_of(models["qwen3_5"], num_states=num_states, max_requests=1, hicache_ratio=8.0)
    try:
        for number in range(2):
            assert sum(ask(reader, str(number), ids)) == reused
            assert reader.results[str(number)].output_ids == writer.results["cold"].output_ids
            flush(reader)
    finally:
        reader.close()


def test_a_prompt_is_computed_rather_than_wait_with_a_state_in_the_last_slot(
    models: dict[str, Path],
) -> None:
    """Two slots, of which one runs; the state of the next prompt is on the host.

    The prompt is one chunk. The state after a first chunk would have to be copied to the host
    before the second chunk could leave another one.
    """
    rig = rig_of(
        models["qwen3_5"],
        num_states=2,
        chunked_prefill_size=128,
        mamba_scheduler_strategy="no_buffer",
        mamba_track_interval=256,
    )
    ids, runs = prompt(4, 100), prompt(9, 10)
    try:
        ask(rig, "cold", ids)
        rig.tree.evict(EvictParams(num_tokens=1000))
        match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(ids)))
        assert (match.host_hit_length, match.mamba_host_hit_length) == (96, 1)
        rig.step(rig.request("runs", runs, greedy(40)))
        rig.step(rig.request("next", ids, greedy(10)))
        for _ in range(4):
            rig.step()
        queues = rig.scheduler.state.queues
        assert (queues.num_holders, list(queues.waiting)) == (2, []), "it waits for nobody"
        rig.settle()
        assert rig.results["next"].output_ids == rig.results["cold"].output_ids
    finally:
        rig.close()


def test_a_state_alone_comes_back_from_the_host(models: dict[str, Path]) -> None:
    """Its slot was taken by others; its pages are still on the device."""
    rig = rig_of(models["qwen3_5"], pool_tokens=2048, num_states=4, max_requests=1)
    ids = prompt(2, 100)
    try:
        ask(rig, "cold", ids)
        for seed in range(20, 24):
            ask(rig, f"filler-{seed}", prompt(seed, 40))
        assert ask(rig, "warm", ids) == (96, 0, 0)
        assert rig.results["warm"].output_ids == rig.results["cold"].output_ids
        rig.assert_clean()
    finally:
        rig.close()


def test_pages_whose_state_finds_no_room_are_computed_again(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upper part of the prefix is on the device without a state, the lower part on the host."""
    rig = rig_of(models["qwen3_5"])
    ids = prompt(5, 100)
    try:
        ask(rig, "cold", ids)
        rig.tree.match_prefix(MatchPrefixParams(RadixKey([*ids[:48], 1])))
        rig.tree.evict(EvictParams(num_tokens=48))
        match = rig.tree.match_prefix(MatchPrefixParams(RadixKey(ids)))
        assert (len(match.device_indices), match.host_hit_length) == (48, 48)
        load = rig.tree.init_load_back
        monkeypatch.setattr(
            rig.tree, "init_load_back", lambda params: load(replace(params, mem_quota=0))
        )
        counters = rig.scheduler.state.counters
        before = counters.prefill_tokens
        assert ask(rig, "warm", ids) == (0, 0, 0)
        assert counters.prefill_tokens - before == len(ids)
        assert rig.results["warm"].output_ids == rig.results["cold"].output_ids
    finally:
        rig.close()


def test_what_was_said_comes_back_with_the_next_turn_from_storage(
    models: dict[str, Path],
) -> None:
    rig = rig_of(models["qwen3_5"])
    ids = prompt(3, 20)
    try:
        ask(rig, "first", ids, 60)
        flush(rig)
        turn = [*ids, *rig.results["first"].output_ids, *prompt(4, 5)]
        assert ask(rig, "next", turn) == (0, 0, 64)
        fresh = SchedulerRig(models["qwen3_5"], disable_radix_cache=True, page_size=PAGE)
        assert [rig.results["next"].output_ids] == fresh.generate([turn], 10)
    finally:
        rig.close()


# -- states that L3 loses or exchanges, rows C2 and C3 --------------------------------------------


def state_file(storage_dir: Path, ids: list[int]) -> Path:
    """File of the state after the last whole page of `ids`."""
    page_hash = RadixKey(ids).page_hashes(PAGE)[-1]
    (found,) = storage_dir.glob(f"*/??/{page_hash}%2Fmamba")
    return found


def test_a_state_lost_between_the_question_and_the_read_changes_no_word(
    models: dict[str, Path], storage_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {
        "backend_name": "losing",
        "class_name": LosingStore.__name__,
        "module_path": LosingStore.__module__,
    }
    rig = rig_of(
        models["qwen3_5"],
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": PAGE, **extra}),
    )
    ids = prompt(6, 100)
    try:
        ask(rig, "cold", ids)
        lost = state_file(storage_dir, ids)
        flush(rig)
        with monkeypatch.context() as patch:
            patch.setattr(LosingStore, "doomed", lost)
            assert ask(rig, "torn", ids) == (0, 0, 0)
        assert lost.is_file(), "written again"
        flush(rig)
        assert ask(rig, "healed", ids) == (0, 0, 96)
        words = [rig.results[rid].output_ids for rid in ("cold", "torn", "healed")]
        assert words == words[:1] * 3
    finally:
        rig.close()


def test_exchanged_states_change_no_word(models: dict[str, Path], storage_dir: Path) -> None:
    rig = rig_of(models["qwen3_5"])
    pair = {"one": prompt(7, 100), "other": prompt(8, 100)}
    try:
        for rid, ids in pair.items():
            ask(rig, f"{rid} cold", ids)
        files = [state_file(storage_dir, ids) for ids in pair.values()]
        contents = [file.read_bytes() for file in files]
        assert len(contents[0]) == len(contents[1])
        for file, content in zip(files, contents[::-1], strict=True):
            file.write_bytes(content)
        for when, found in (("exchanged", 0), ("healed", 96)):
            flush(rig)
            for rid, ids in pair.items():
                assert ask(rig, f"{rid} {when}", ids) == (0, 0, found)
                words = [rig.results[f"{rid} {at}"].output_ids for at in ("cold", when)]
                assert words[0] == words[1]
    finally:
        rig.close()


def test_whole_pages_replayed_hit_up_to_the_last_position_for_a_snapshot(
    models: dict[str, Path],
) -> None:
    """Row C14. Prompts of one chunk and of two, whose first ends beside such a position."""
    alignment = 4 * PAGE
    rig = rig_of(
        models["qwen3_5"],
        snapshot_alignment=alignment,
        mamba_track_interval=alignment,
        chunked_prefill_size=9 * PAGE,
    )
    try:
        for pages in (8, 12, 16):
            ids = prompt(30 + pages, pages * PAGE)
            reused = (len(ids) - 1) // alignment * alignment
            assert ask(rig, f"cold {pages}", ids) == (0, 0, 0)
            assert ask(rig, f"device {pages}", ids) == (reused, 0, 0)
            flush(rig)
            assert ask(rig, f"storage {pages}", ids) == (0, 0, reused)
            words = [rig.results[f"{at} {pages}"].output_ids for at in ("cold", "storage")]
            assert words[0] == words[1]
    finally:
        rig.close()


def test_few_launches_come_before_a_repeat_from_l2(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device each takes the CPU 10 to 20 us, while the request waits. L1 is full."""
    rig = SchedulerRig(
        models["qwen3_next"], pool_tokens=128, num_states=8, page_size=PAGE, hicache_ratio=4.0,
        enable_hierarchical_cache=True,
    )  # fmt: skip
    rig.worker.token_to_kv_pool_allocator._is_free = None  # As on a device.
    for _ in range(2):
        for seed in (1, 2):
            rig.generate([prompt(seed, 100)], 1)
            rig.settle()
    seen: list[str] = []
    forward = TpModelWorker.forward_batch_generation

    def noting(worker: TpModelWorker, batch: Any) -> Any:
        seen.extend(() if seen else launches.names)
        return forward(worker, batch)

    monkeypatch.setattr(TpModelWorker, "forward_batch_generation", noting)
    again = rig.request("again", prompt(1, 100), greedy(1))
    with TorchLaunches() as launches:
        rig.run(again)
    assert rig.results["again"].cached == (0, 96, 0)
    # The free list and slots of it; on the CPU the slots in L2 and the state's number; slots of the
    # new page, the request's state and its row of slots.
    assert seen == [
        "cat", "add", "cat", "_local_scalar_dense", "add", "fill_", "copy_", "copy_",
    ]  # fmt: skip
