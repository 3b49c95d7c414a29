"""Recurrent states in the tree of one tier: where a match ends, who owns a slot, what leaves."""

from __future__ import annotations

import pytest
import torch

from rigs.caches.cache_rig import CacheRig, HiCacheSettings, Reused, RigRequest
from rigs.caches.state_rig import SPEC, StateRequest, StateRig, depth
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.tree.prefix_tree import PrefixTree
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.replicated_state import CacheState
from sglang.srt.mem_cache.tree.state_component import StateComponent
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def slots(rig: StateRig, count: int = 1) -> torch.Tensor:
    taken = rig.mamba.take(count)
    assert taken is not None
    return torch.tensor(taken)


def insert(rig: StateRig, ids: range | list[int]) -> tuple[bool, torch.Tensor]:
    """Insert pages with a fresh state; whether the tree had one, and the slot."""
    value, slot = rig.allocator.alloc(len(ids)), slots(rig)
    assert value is not None
    result = rig.tree.insert(InsertParams(RadixKey(list(ids)), value, mamba_value=slot))
    rig.allocator.free(value[: result.prefix_len])
    return result.mamba_exist, slot


def matched(rig: StateRig, ids: range | list[int]) -> int:
    return len(rig.match(ids).device_indices)


def test_a_transfer_leaves_its_slots_on_the_cpu() -> None:
    """All slots of a copy are staged together."""
    slot = torch.tensor([2])
    assert StateRig(page_size=4).states.transfer(device=slot).device_indices is slot


# -- matching ------------------------------------------------------------------------------------


def test_a_match_ends_where_a_state_is() -> None:
    rig = StateRig(page_size=4)
    insert(rig, range(8))
    insert(rig, range(20))
    assert matched(rig, [*range(8), 90, 91, 92, 93, 94]) == 8
    assert matched(rig, [*range(16), 90, 91, 92, 93, 94]) == 8, "four pages are there, two of use"
    assert matched(rig, range(21)) == 20
    assert matched(rig, [*range(4), 90]) == 0
    rig.check()


def test_the_last_token_is_never_part_of_a_match() -> None:
    """The last token is computed for its logits. The whole prompt's state has already seen it."""
    rig = StateRig(page_size=4)
    insert(rig, range(8))
    insert(rig, range(12))
    assert [matched(rig, range(length)) for length in (8, 9, 12, 13)] == [0, 8, 8, 12]
    rig.check()


def test_no_prompt_cuts_a_negative_number_of_tokens() -> None:
    """A request for the logprobs of its whole prompt matches an empty key."""
    rig = StateRig(page_size=4)
    insert(rig, range(8))
    cuts = [rig.match(range(length)).mamba_cut_length for length in (0, 1, 4, 5, 8, 9)]
    assert cuts == [0, 0, 3, 4, 7, 0]


@pytest.mark.parametrize(("alignment", "branching"), [(4, 12), (8, 8), (16, None)])
def test_a_match_says_where_a_snapshot_would_have_helped(
    alignment: int, branching: int | None
) -> None:
    rig = StateRig(page_size=4, alignment=alignment)
    insert(rig, range(16))
    match = rig.match([*range(12), 90, 91, 92, 93, 94])
    assert (len(match.device_indices), match.mamba_branching_seqlen) == (0, branching)
    assert rig.match(range(17)).mamba_branching_seqlen is None, "the state is at the end"
    assert rig.match(range(16)).mamba_branching_seqlen == branching, "before the last token"
    rig.check()


def test_a_branching_point_gets_a_state_when_a_second_request_passes() -> None:
    rig = StateRig(page_size=4, l1_pages=32)
    shared = list(range(12))
    assert rig.run([*shared, *range(100, 109)]) == Reused()
    assert rig.run([*shared, *range(200, 209)]) == Reused()
    assert rig.run([*shared, *range(300, 309)]) == Reused(device=12)
    rig.settle()


def test_a_snapshot_is_copied_at_once_and_may_go_right_after() -> None:
    rig = StateRig(page_size=4, num_states=3)
    rig.run(range(9))
    first, second = StateRequest("a", None, [], torch.empty(0), rig.tree.root_node), slots(rig)
    first.mamba_pool_idx = second
    params = MatchPrefixParams(RadixKey(range(9)), cow_mamba=True, req=first)
    assert len(rig.tree.match_prefix(params).device_indices) == 8
    assert rig.tree.evict(EvictParams(mamba_num=1)).mamba_num_evicted == 1
    first.kv_committed_ids = list(range(9))
    rig._check_state(first, 8)


def test_ten_requests_continue_from_one_snapshot() -> None:
    rig = StateRig(page_size=4, l1_pages=64, num_states=24)
    rig.run(range(9))
    running = [rig.start([*range(8), 100 + n, *range(50, 57)])[0] for n in range(10)]
    rig.check(running)
    assert len({int(slot) for one in running for slot in one.states()}) == 20  # type: ignore[attr-defined]
    for one in running:
        rig.finish(one)
    rig.settle()


def test_a_copy_needs_a_slot_to_go_to() -> None:
    rig = StateRig()
    with pytest.raises(ValueError, match="mamba_pool_idx"):
        rig.tree.match_prefix(MatchPrefixParams(RadixKey([1]), cow_mamba=True))
    with pytest.raises(ValueError, match="keeps no state"):
        CacheRig().tree.match_prefix(MatchPrefixParams(RadixKey([1]), cow_mamba=True))


# -- inserting -----------------------------------------------------------------------------------


def test_the_tree_takes_a_slot_where_it_has_no_state() -> None:
    rig = StateRig(page_size=4)
    assert insert(rig, range(8))[0] is False
    again, slot = insert(rig, range(8))
    assert again is True
    rig.tree.check_integrity((), [slot])
    rig.mamba.free(slot)
    rig.check()


def test_a_split_leaves_the_state_with_the_lower_part() -> None:
    rig = StateRig(page_size=4)
    _, slot = insert(rig, range(12))
    digest = rig.tree.root_node.tree_digest.value
    rig.match([*range(4), 90, 91, 92, 93])
    assert rig.tree.root_node.tree_digest.value == digest
    upper, lower = rig.tree.nodes()
    assert (depth(upper), depth(lower)) == (4, 12)
    assert upper.states[0].value is None
    assert lower.states[0].value is slot
    rig.check()


def test_an_insert_without_a_state_or_with_parts_of_pages_is_refused() -> None:
    rig = StateRig(page_size=4)
    value = torch.arange(4, 12)
    with pytest.raises(ValueError, match="mamba_value"):
        rig.tree.insert(InsertParams(RadixKey(range(8)), value))
    with pytest.raises(ValueError, match="whole pages"):
        rig.tree.insert(InsertParams(RadixKey(range(7)), value[:7], mamba_value=torch.tensor([1])))


def test_snapshots_that_do_not_end_with_a_page_are_refused() -> None:
    with pytest.raises(ValueError, match="every 6 tokens do not end with a page of 4"):
        StateRig(page_size=4, alignment=6)


def test_only_pages_up_to_the_last_snapshot_go_into_the_tree() -> None:
    rig = StateRig(page_size=4, alignment=8, l1_pages=16)
    request, _ = rig.start(range(23))
    assert isinstance(request, StateRequest)
    rig.tree.cache_unfinished_req(request)
    assert (request.cache_protected_len, len(request.prefix_indices)) == (16, 23)
    assert request.mamba_track_slot is None
    assert rig.tree.total_size() == 16
    rig.check([request])
    rig.tree.cache_unfinished_req(request)
    assert request.cache_protected_len == 16, "no snapshot since"
    rig.finish(request)
    assert rig.tree.total_size() == 16
    rig.settle()
    assert rig.mamba.available_size() == rig.num_states - 1


def test_a_request_keeps_the_slot_of_a_snapshot_that_the_tree_has() -> None:
    rig = StateRig(page_size=4)
    requests = [rig.start(range(8))[0] for _ in range(2)]
    for request in requests:
        rig.tree.cache_unfinished_req(request)
    first, second = requests
    assert isinstance(first, StateRequest)
    assert isinstance(second, StateRequest)
    assert first.mamba_track_slot is None
    assert second.mamba_track_slot is not None
    assert second.mamba_last_track_seqlen is None
    rig.check(requests)
    for request in requests:
        rig.finish(request)
    rig.settle()


def test_a_snapshot_at_the_end_of_its_prefix_replaces_a_state_that_was_evicted() -> None:
    rig = StateRig(page_size=4)
    rig.run(range(9))
    request, reused = rig.start(range(9))
    assert isinstance(request, StateRequest)
    assert (reused.total, request.cache_protected_len) == (8, 8)
    assert rig.tree.evict(EvictParams(mamba_num=1)).mamba_num_evicted == 1
    assert matched(rig, range(9)) == 0
    request.mamba_track_slot, request.mamba_last_track_seqlen = slots(rig), 8
    rig.fill(request.mamba_track_slot, request, 8)
    rig.tree.cache_unfinished_req(request)
    assert request.mamba_track_slot is None, "the tree has it"
    assert matched(rig, range(9)) == 8
    rig.check([request])
    rig.finish(request)
    assert rig.run(range(9)) == Reused(device=8), "which checks the state"
    rig.settle()


def test_a_running_state_that_is_a_step_too_far_never_reaches_the_tree() -> None:
    """Steps overlap: the snapshot is at the position that it was taken at, not at the end."""
    rig = StateRig(page_size=4)
    request, _ = rig.start(range(8))
    assert isinstance(request, StateRequest)
    running = request.states()[0]
    rig.finish(request)
    (node,) = rig.tree.nodes()
    assert node.states[0].value is not None
    assert int(node.states[0].value) != int(running)
    assert rig.run(range(9)) == Reused(device=8), "which checks the state"
    request, _ = rig.start([*range(50, 58)])
    assert isinstance(request, StateRequest)
    request.mamba_last_track_seqlen = 12
    with pytest.raises(AssertionError, match="behind 12 tokens, of which 8 are computed"):
        rig.tree.cache_unfinished_req(request)


def test_a_request_that_ends_without_an_insert_leaves_nothing() -> None:
    rig = StateRig(page_size=4)
    request, _ = rig.start(range(8))
    rig.finish(request, is_insert=False)
    assert rig.tree.total_size() == 0
    assert rig.mamba.available_size() == rig.num_states
    rig.settle()


# -- leaving -------------------------------------------------------------------------------------


def test_an_inner_node_loses_its_state_alone() -> None:
    rig = StateRig(page_size=4)
    insert(rig, range(8))
    insert(rig, range(16))
    result = rig.tree.evict(EvictParams(mamba_num=1))
    assert (result.mamba_num_evicted, result.num_tokens_evicted) == (1, 0)
    assert matched(rig, [*range(8), 90]) == 0
    assert matched(rig, range(17)) == 16
    rig.check()


def test_a_leaf_goes_with_its_state_and_so_does_what_it_leaves_useless() -> None:
    rig = StateRig(page_size=4)
    insert(rig, range(8))
    insert(rig, range(16))
    assert rig.tree.evict(EvictParams(mamba_num=1)).num_tokens_evicted == 0
    rig.match([*range(4), 90, 91, 92, 93])
    assert len(list(rig.tree.nodes())) == 3, "two of them have no state"
    result = rig.tree.evict(EvictParams(mamba_num=1))
    assert (result.mamba_num_evicted, result.num_tokens_evicted) == (1, 16)
    assert list(rig.tree.nodes()) == []
    rig.check()


def test_evicting_pages_frees_the_state_behind_them() -> None:
    rig = StateRig(page_size=4)
    insert(rig, range(8))
    insert(rig, range(16))
    result = rig.tree.evict(EvictParams(num_tokens=4))
    assert (result.mamba_num_evicted, result.num_tokens_evicted) == (1, 8)
    assert matched(rig, range(17)) == 8
    rig.check()


def test_pages_that_leave_with_a_state_count_as_evicted() -> None:
    rig = StateRig(page_size=4)
    insert(rig, range(8))
    insert(rig, range(20, 28))
    result = rig.tree.evict(EvictParams(num_tokens=8, mamba_num=1))
    assert (result.mamba_num_evicted, result.num_tokens_evicted) == (1, 8)
    assert matched(rig, range(20, 29)) == 8
    rig.check()


def test_what_a_request_uses_stays_without_its_state_until_it_ends() -> None:
    rig = StateRig(page_size=4)
    rig.run(range(9))
    request, reused = rig.start(range(9))
    assert reused == Reused(device=8)
    result = rig.tree.evict(EvictParams(mamba_num=5))
    assert (result.mamba_num_evicted, result.num_tokens_evicted) == (1, 0)
    assert rig.tree.protected_size() == 8
    rig.check([request])
    rig.finish(request, is_insert=False)
    assert rig.tree.total_size() == 0
    rig.settle()


@pytest.mark.parametrize(
    ("policy", "survivor"),
    [("lru", 0), ("lfu", 0), ("fifo", 2), ("mru", 1), ("filo", 0), ("slru", 0)],
)
def test_policies_choose_which_states_go(policy: str, survivor: int) -> None:
    """Prompts 0, 1, 2 in this order, then 0 again twice: who is left when two must go?"""
    rig = StateRig(l1_pages=16, page_size=4, eviction_policy=policy)
    prompts = [range(100 * i, 100 * i + 9) for i in range(3)]
    for index in (0, 1, 2, 0, 0):
        rig.run(prompts[index])
    assert rig.tree.evict(EvictParams(mamba_num=2)).mamba_num_evicted == 2
    assert [i for i in range(3) if matched(rig, prompts[i])] == [survivor]
    rig.check()


@pytest.mark.parametrize(
    ("max_per_path", "branches", "leaves"),
    [(-1, False, [16, 4]), (1, False, [4, 8]), (2, False, [4, 16]), (1, True, [8, 16])],
)
def test_replaced_states_of_a_path_leave_first(
    max_per_path: int, branches: bool, leaves: list[int]
) -> None:
    rig = StateRig(page_size=4)
    rig.states.max_per_path = max_per_path
    insert(rig, range(16))
    for end in (4, 8, 12):
        insert(rig, range(300, 300 + end))
    if branches:
        other = [*range(300, 304), *range(90, 106)]
        assert matched(rig, other) == 4
        insert(rig, other)
    ends = (16, 4, 8, 12)
    gone: list[int] = []
    for _ in leaves:
        rig.tree.evict(EvictParams(mamba_num=1))
        # A match would count as a use.
        nodes = {depth(node): node for node in rig.tree.nodes()}
        lost = [end for end in ends if end not in nodes or not rig.states.can_end(nodes[end])]
        gone += [end for end in lost if end not in gone]
    assert gone == leaves
    rig.check()


def test_a_request_that_goes_on_from_a_state_replaces_it() -> None:
    rig = StateRig(page_size=4)
    rig.states.max_per_path = 1
    for ids in (range(200, 209), range(9), range(13)):
        rig.run(ids)
    rig.tree.evict(EvictParams(mamba_num=1))
    assert [matched(rig, ids) for ids in (range(9), range(13), range(200, 209))] == [0, 12, 8]
    rig.check()


def test_a_replaced_state_that_is_used_again_leaves_in_the_usual_order() -> None:
    rig = StateRig(page_size=4)
    rig.states.max_per_path = 1
    for end in (4, 8):
        insert(rig, range(end))
    insert(rig, range(196, 200))
    assert matched(rig, [*range(4), 70]) == 4
    rig.tree.evict(EvictParams(mamba_num=1))
    assert [matched(rig, [*range(end), 70]) for end in (4, 8)] == [4, 4], "8 was the oldest"
    rig.check()


def test_what_waiting_requests_will_use_goes_last() -> None:
    rig = StateRig(l1_pages=16, page_size=4)
    for base in (0, 100):
        rig.run(range(base, base + 9))
    rig.arrive("waits", list(range(9)))
    rig.run(range(100, 109))
    rig.tree.evict(EvictParams(mamba_num=1))
    assert [matched(rig, range(base, base + 9)) for base in (0, 100)] == [8, 0]
    rig.tree.release_aborted_request("waits")
    rig.check()


def test_integrity_names_a_lost_state_and_one_with_two_owners() -> None:
    rig = StateRig(page_size=4)
    lost = slots(rig)
    with pytest.raises(AssertionError, match="1 of 12 pages have no owner"):
        rig.check()
    rig.mamba.free(lost)
    _, slot = insert(rig, range(8))
    with pytest.raises(AssertionError, match="is owned by"):
        rig.tree.check_integrity((), [slot])


def test_a_component_needs_an_alignment() -> None:
    component = StateComponent(MambaPool(SPEC, 1, "cpu"), 0)
    with pytest.raises(ValueError, match="every 0 tokens"):
        PrefixTree(StateRig().allocator, 4, "lru", [component])


def test_a_match_that_passes_a_state_does_not_use_it() -> None:
    rig = StateRig(page_size=4)
    for ids in (range(9), range(17), range(100, 109)):
        rig.run(list(ids))
    assert len(rig.match(range(17)).device_indices) == 16, "past the state behind 8 tokens"
    assert rig.tree.evict(EvictParams(mamba_num=1)).mamba_num_evicted == 1
    kept = [len(rig.match(ids).device_indices) for ids in (range(9), range(17), range(100, 109))]
    assert kept == [0, 16, 8]


def test_the_digest_counts_states() -> None:
    """Ranks that differ in a state alone have different states, and can say in which."""
    rigs = [StateRig(page_size=4) for _ in range(2)]
    for rig in rigs:
        insert(rig, range(8))
        insert(rig, range(16))
    first, second = (CacheState(lambda rig=rig: rig.tree.root_node, {}) for rig in rigs)  # type: ignore[misc]
    assert first.digest == second.digest
    rigs[0].tree.evict(EvictParams(mamba_num=1))
    assert first.digest != second.digest
    texts = zip(first.describe().values(), second.describe().values(), strict=True)
    (difference,) = [pair for pair in texts if pair[0] != pair[1]]
    assert [text.endswith("a state in L1") for text in difference] == [False, True]


def test_a_cache_that_keeps_nothing_asks_nothing_of_its_requests() -> None:
    rig = StateRig(page_size=4)
    params = CacheInitParams(
        disable=True,
        req_to_token_pool=rig.rows,
        token_to_kv_pool_allocator=rig.allocator,
        page_size=4,
        model_pools=rig.model_pools(),
    )
    tree = MambaRadixCache(params)
    assert not tree.supports_mamba()
    running = slots(rig)
    none = torch.empty(0, dtype=torch.int64)
    request = RigRequest("r", None, list(range(9)), none, tree.root_node)
    rig._compute(request)
    tree.cache_unfinished_req(request)
    tree.cache_finished_req(request)
    assert len(tree.match_prefix(MatchPrefixParams(RadixKey(range(9)))).device_indices) == 0
    tree.check_integrity()
    rig.mamba.free(running)


def test_a_cache_for_states_needs_a_model_with_states() -> None:
    rig = CacheRig()
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=rig.rows,
        token_to_kv_pool_allocator=rig.allocator,
        page_size=4,
    )
    with pytest.raises(ValueError, match="models with recurrent states"):
        MambaRadixCache(params)
    with pytest.raises(ValueError, match="models with recurrent states"):
        HiMambaRadixCache(params, HiCacheSettings())
