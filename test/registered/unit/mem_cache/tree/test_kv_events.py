"""Events of all tiers: whoever hears them all knows which pages each tier has."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import msgspec
import pytest

from rigs.caches.cache_rig import CacheRig, HiCacheSettings
from rigs.caches.event_listener import TierListeners, block_of, blocks_on_disk
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from sglang.srt.environ import envs
from sglang.srt.mem_cache.l3 import storage_writes
from sglang.srt.mem_cache.tree import kv_events
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def test_a_prompt_is_stored_and_its_eviction_removes_it() -> None:
    rig = CacheRig(l1_pages=4, page_size=2, kv_events=True)
    rig.run([1, 2, 3, 4, 5])
    first = get_hash_str([1, 2])
    second = get_hash_str([3, 4], first)
    stored = rig.tree.take_events()
    assert stored == [
        BlockStored(
            block_hashes=[hash_str_to_int64(first), hash_str_to_int64(second)],
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4],
            block_size=2,
            lora_id=None,
            medium="GPU",
        )
    ]
    assert rig.tree.take_events() == []
    rig.run([1, 2, 9, 9])
    (branch,) = rig.tree.take_events()
    assert isinstance(branch, BlockStored)
    assert branch.parent_block_hash == hash_str_to_int64(first)
    rig.tree.reset()
    assert rig.tree.take_events() == [AllBlocksCleared()]


KEYS = [None, None, *itertools.starmap(combine_extra_key, [("a", None), (None, "a"), ("a", "b")])]


@pytest.mark.parametrize(("tiers", "keyed"), [(1, True), (2, True), (3, True), (3, False)])
def test_a_listener_knows_the_tiers_of_a_random_run(
    tiers: int, keyed: bool, tmp_path: Path
) -> None:
    random_run(tiers, tmp_path, seed=tiers, steps=150, keyed=keyed)


def rig_of(
    tiers: int, folder: Path, *, kv_events: bool = True, announce_keyed: bool = False
) -> CacheRig:
    settings = HiCacheSettings() if tiers > 1 else None
    if tiers == 3:
        extra = json.dumps({"prefetch_threshold": 4})
        settings = HiCacheSettings(
            hicache_storage_backend="file", hicache_storage_backend_extra_config=extra
        )
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(folder)):
        return CacheRig(
            l1_pages=12, settings=settings, kv_events=kv_events, announce_keyed=announce_keyed
        )


def random_run(tiers: int, folder: Path, seed: int, steps: int, *, keyed: bool = True) -> None:
    """Send prompts to a cache with `tiers`, and build up their contents from events alone. L3, in
    `folder`, may lose objects and be cleared. Prompts with keys count if they are announced."""
    rig = rig_of(tiers, folder, announce_keyed=keyed)
    with patch.object(storage_writes, "_GATHER_S", 0.0):
        follow(rig, tiers, folder, random.Random(seed), steps)
    rig.close()


def follow(rig: CacheRig, tiers: int, folder: Path, rng: random.Random, steps: int) -> None:
    told = TierListeners(rig)
    have_been: list[set[int]] = [set(), set()]
    removed: set[int] = set()
    for step in range(steps):
        pages = [rng.choice(((0, 1, 2, 0), (1, 1, 0, 2))) for _ in range(rng.randrange(8))]
        prompt = [*itertools.chain(*pages), *range(rng.randrange(1, 4))]
        rig.run(prompt, extra_key=rng.choice(KEYS))
        told.hear()
        have_been[0] |= set(told.host.tokens)
        have_been[1] |= set(told.store.tokens)
        if rng.random() < 0.02:
            rig.flush()
            told.hear()
            assert not told.device.tokens and not told.host.tokens
        if step % 10 == 9:
            rig.settle()
            told.hear()
            assert set(told.store.tokens) <= blocks_on_disk(folder) | removed
            if not removed and rig.announce_keyed:
                assert set(told.store.tokens) == blocks_on_disk(folder)
        if tiers == 3 and step > steps // 3 and rng.random() < 0.2:
            files = sorted(folder.glob("*/??/*"))
            for file in rng.sample(files, min(len(files), 3)):
                file.unlink()
                removed.add(block_of(file))
        if tiers == 3 and step == 2 * steps // 3:
            rig.settle()
            assert rig.hi.clear_storage_backend().done
            told.hear()
            assert not told.store.tokens
            removed.clear()
    rig.settle()
    assert told.device.tokens or not rig.announce_keyed, "prompts with keys may have all of L1"
    assert [bool(seen) for seen in have_been] == [tiers > 1, tiers > 2]
    assert tiers == 1 or have_been[0] - set(told.host.tokens), "some left the host"


@pytest.mark.parametrize("tiers", [1, 2, 3])
def test_nobody_pays_for_events_that_nobody_wants(tiers: int, tmp_path: Path) -> None:
    """No function of the events module runs, so it takes neither time nor memory."""
    rig = rig_of(tiers, tmp_path, kv_events=False)
    ran: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == kv_events.__file__:
            ran.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        for start in range(0, 200, 20):
            rig.run([*range(start, start + 20), 7])
        rig.settle()
    finally:
        sys.setprofile(None)
    assert ran == []
    assert rig.tree.take_events() == []
    if tiers < 3:
        assert all(node.hash_value is None for node in rig.tree.nodes())
    rig.tree.shutdown()


@pytest.mark.parametrize("tiers", [1, 3])
def test_prompts_with_a_key_are_not_told(tiers: int, tmp_path: Path) -> None:
    """Neither are their removals: consumers would count both for prompts without a key."""
    rig = rig_of(tiers, tmp_path)
    for key in KEYS[2:]:
        rig.run([*range(20), 7], extra_key=key)
    rig.settle()
    assert tiers == 1 or blocks_on_disk(tmp_path)
    for start in range(100, 300, 40):  # Others take their place.
        rig.run([*range(start, start + 40), 7], extra_key=KEYS[2])
    assert rig.tree.take_events() == []
    rig.run([*range(20), 7])
    rig.settle()
    media = [event.medium for event in rig.tree.take_events() if isinstance(event, BlockStored)]
    assert media == ["GPU", "CPU_PINNED", "DISK"][:tiers]
    if tiers == 3:
        rig.flush()
        assert rig.hi.clear_storage_backend().done
        gone = rig.tree.take_events()
        assert [len(one.block_hashes) for one in gone if isinstance(one, BlockRemoved)] == [5] * 3
    rig.flush()
    assert rig.tree.take_events() == [AllBlocksCleared()]
    rig.close()


def test_announced_keys_are_fields_of_their_own() -> None:
    rig = CacheRig(page_size=2, kv_events=True, announce_keyed=True)
    for key in (("k", None), (None, "s"), ("k", "s")):
        rig.run([1, 2, 3], extra_key=combine_extra_key(*key))
        (event,) = rig.tree.take_events()
        raw = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
        assert (raw.get("lora_name"), raw.get("cache_salt")) == key
        assert raw["lora_id"] is None and raw["parent_block_hash"] is None
    rig.run([1, 2, 3])
    (plain,) = rig.tree.take_events()
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(plain))
    assert "lora_name" not in raw and "cache_salt" not in raw


@pytest.mark.parametrize("key", ["a", combine_extra_key("", None), combine_extra_key("k", "")])
def test_keys_that_consumers_take_for_others_are_never_announced(key: str) -> None:
    """Dynamo's indexer takes an empty text for an absent one."""
    rig = CacheRig(l1_pages=4, page_size=2, kv_events=True, announce_keyed=True)
    rig.run([1, 2, 3], extra_key=key)
    rig.run([*range(10, 16), 7], extra_key=key)
    assert rig.tree.take_events() == []


def test_an_event_of_l1_names_the_session_that_computed_its_blocks() -> None:
    rig = CacheRig(page_size=2, kv_events=True, settings=HiCacheSettings())
    rig.run([1, 2, 3, 4, 5], session="agent")
    rig.run([1, 2, 3, 4, 6, 7, 8])
    rig.run([1, 2, 9, 9, 9], session="other")
    rig.settle()
    events = [event for event in rig.tree.take_events() if isinstance(event, BlockStored)]
    told = [(event.session_id, event.token_ids) for event in events if event.medium == "GPU"]
    assert told == [("agent", [1, 2, 3, 4]), (None, [6, 7]), ("other", [9, 9])]
    assert {event.session_id for event in events if event.medium == "CPU_PINNED"} == {None}
    last = BlockStored.__struct_fields__[-2:]
    assert last == ("session_id", "lora_name"), "SGLang's order"
    rig.close()


def test_texts_of_events_count() -> None:
    plain = BlockStored(
        block_hashes=[1], parent_block_hash=None, token_ids=[1], block_size=1, lora_id=None
    )
    for field in ("cache_salt", "session_id", "lora_name"):
        assert msgspec.structs.replace(plain, **{field: "x" * 100}).num_numbers == 2 + 10


def test_events_that_nobody_takes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_MOST_NUMBERS", 60)
    rig = CacheRig(l1_pages=200, page_size=1, kv_events=True)
    for start in range(0, 100, 4):
        rig.run(range(start * 10, start * 10 + 3))
    events = rig.tree.take_events()
    assert len(events) > 1
    assert sum(event.num_numbers for event in events) <= 60
    assert events[0] == AllBlocksCleared()
    assert all(isinstance(event, BlockStored) for event in events[1:])


def test_events_are_maps_with_a_type() -> None:
    event = BlockRemoved(block_hashes=[-5], medium="GPU")
    raw = msgspec.msgpack.encode(KVEventBatch(1.5, [event, AllBlocksCleared()]))
    assert msgspec.msgpack.decode(raw) == [
        1.5,
        [
            {"type": "BlockRemoved", "block_hashes": [-5], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        None,
    ]
    assert msgspec.msgpack.decode(raw, type=KVEventBatch).events == [event, AllBlocksCleared()]


def test_bigrams_have_hashes_of_their_own() -> None:
    tokens = RadixKey([1, 2, 3, 4])
    assert tokens.page_hashes(1)[0] == get_hash_str([1])
    assert RadixKey([1, 2, 3], is_bigram=True).page_hashes(1)[0] == get_hash_str([(1, 2)])
