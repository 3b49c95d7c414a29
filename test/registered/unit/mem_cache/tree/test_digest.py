"""The digest of a tree: equal for equal states, other for others, and what differs then."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rigs.caches.memory_ranks import MemoryExchange
from sglang.srt.mem_cache.tree import replicated_state
from sglang.srt.mem_cache.tree.digest import empty_prefix, prefix_with
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.replicated_state import CacheState, check_digest, explain_difference
from sglang.srt.mem_cache.tree.tree_node import ROOT_ID, TreeNode
from sglang.srt.utils.parts import do_all
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

PAGE = 2


class Tree:
    """Nodes by hand. Slots begin where the test says, for no digest depends on them."""

    def __init__(self, first_slot: int = 0) -> None:
        self.root = TreeNode(ROOT_ID, RadixKey([]))
        self.nodes: list[TreeNode] = []
        self._first_slot = first_slot

    @property
    def digest(self) -> int:
        do_all(check_digest(self.root, [node for node in self.nodes if node.parent is not None]))
        return self.root.tree_digest.value

    def add(
        self, *tokens: int, parent: TreeNode | None = None, extra_key: str | None = None
    ) -> TreeNode:
        """A node on the device."""
        node = TreeNode(len(self.nodes) + 1, RadixKey(tokens, extra_key))
        node.attach(parent or self.root, PAGE)
        node.set_value(self.slots(node))
        self.nodes.append(node)
        return node

    def slots(self, node: TreeNode) -> torch.Tensor:
        return torch.arange(self._first_slot, self._first_slot + len(node.key))

    def cache_state(self, **counts: int) -> CacheState:
        def constant(number: int) -> Callable[[], int]:
            return lambda: number

        return CacheState(lambda: self.root, {k: constant(v) for k, v in counts.items()})


def test_equal_trees_have_equal_digests_whatever_their_slots_and_order() -> None:
    one, other = Tree(), Tree(first_slot=700)
    a = one.add(1, 2)
    one.add(3, 4, parent=a)
    one.add(5, 6)
    other.add(5, 6)
    other.add(3, 4, parent=other.add(1, 2))
    assert one.digest == other.digest != 0


@pytest.mark.parametrize(
    "change",
    [
        lambda tree, node: node.set_value(None),
        lambda tree, node: node.set_host_value(tree.slots(node)),
        lambda tree, node: setattr(node, "storage_epoch", 0),
        lambda tree, node: tree.add(9, 9, parent=node),
    ],
    ids=["off the device", "on the host", "in L3", "a child"],
)
def test_each_tier_and_each_node_counts(change: Callable[[Tree, TreeNode], object]) -> None:
    tree, equal = Tree(), Tree()
    node = tree.add(1, 2)
    equal.add(1, 2)
    before = tree.digest
    change(tree, node)
    assert tree.digest != before == equal.digest


def test_what_is_undone_leaves_no_trace() -> None:
    tree = Tree()
    tree.add(7, 8, 9, 10)
    before = tree.digest
    node = tree.add(1, 2)
    node.set_host_value(tree.slots(node))
    node.storage_epoch = 3
    node.storage_epoch = 4
    node.set_host_value(None)
    node.set_value(None)
    node.detach(PAGE)
    assert tree.digest == before
    node.storage_epoch = 5
    assert tree.digest == before, "it is in no tree any more"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((("a", 1, 2), ("b", 3, 4)), (("a", 3, 4), ("b", 1, 2))),
        (((None, 1, 2),), (("", 1, 2),)),
        (((None, 1, 2),), ((None, 2, 1),)),
        (((None, 0, 0),), ((None, 0, 0, 0, 0),)),
    ],
    ids=["keys", "no key", "order", "length"],
)
def test_other_prompts_make_other_digests(
    one: tuple[tuple[str | None, int, int], ...], other: tuple[tuple[str | None, int, int], ...]
) -> None:
    digests = []
    for prompts in (one, other):
        tree = Tree()
        for extra_key, *tokens in prompts:
            tree.add(*tokens, extra_key=extra_key)
        digests.append(tree.digest)
    assert digests[0] != digests[1]


def test_a_split_changes_nothing() -> None:
    whole, split = Tree(), Tree()
    node = whole.add(1, 2, 3, 4, 5, 6)
    node.set_host_value(whole.slots(node))
    upper = split.add(1, 2)
    lower = split.add(3, 4, 5, 6, parent=upper)
    for part in (upper, lower):
        part.set_host_value(split.slots(part))
    assert whole.digest == split.digest
    assert node.prefix is not None and lower.prefix is not None
    assert node.prefix.digest() == lower.prefix.digest()


def test_pages_that_swap_their_places_below_two_parents_show() -> None:
    digests = []
    for left, right in ((1, 2), (2, 1)):
        tree = Tree()
        tree.add(left, left, parent=tree.add(5, 5))
        tree.add(right, right, parent=tree.add(6, 6))
        digests.append(tree.digest)
    assert digests[0] != digests[1]


def test_prefix_hashes_of_long_prompts_are_those_of_their_parts() -> None:
    tokens = RadixKey(range(5000)).ids
    begin = empty_prefix("key")
    whole = prefix_with(begin, tokens)
    for cut in (1, 60, 64, 1023, 1024, 4999):
        part = prefix_with(begin, tokens[:cut])
        assert prefix_with(part, tokens[cut:]).digest() == whole.digest()
        assert part.digest() == prefix_with(begin, tokens[:cut]).digest(), "it is left as it was"


def test_counts_and_queues_are_part_of_the_digest() -> None:
    tree = Tree()
    tree.add(1, 2)
    assert tree.cache_state(free=3, pinned=4).digest == tree.cache_state(free=3, pinned=4).digest
    assert tree.cache_state(free=3, pinned=4).digest != tree.cache_state(free=4, pinned=3).digest
    state = tree.cache_state()
    without = state.digest
    state.queues = Tree().cache_state(waiting=1)
    assert state.digest != without


def test_a_description_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_state, "_MAX_ENTRIES", 3)
    tree = Tree()
    for token in range(5):
        tree.add(token, token)
    state = tree.cache_state(free=5)
    assert len(state.describe()) == 3
    state.queues = tree.cache_state(**{"x" * 500: 1, "y": 2, "z": 3})
    assert max(map(len, state.describe())) == 120
    assert len(state.describe()) == 3


def name_of(node: TreeNode) -> str:
    assert node.prefix is not None
    return node.prefix.hexdigest()


def explained(*states: CacheState) -> list[str]:
    exchange = MemoryExchange(len(states), deadline_s=60)
    with ThreadPoolExecutor(len(states)) as pool:
        return list(
            pool.map(
                lambda rank: explain_difference(exchange.group(rank), states[rank]),
                range(len(states)),
            )
        )


def test_every_rank_learns_which_rank_differs_and_where_first() -> None:
    trees = [Tree() for _ in range(3)]
    for tree in trees:
        tree.add(7, 8)
        node = tree.add(1, 2, 3, 4)
        node.set_host_value(tree.slots(node))
    trees[2].nodes[1].set_host_value(None)
    trees[2].nodes[1].storage_epoch = 6
    name = f"node {name_of(trees[0].nodes[1])}: tokens 0 to 4 (1, 2, 3, 4, ...)"
    assert (
        explained(*(tree.cache_state(free=5) for tree in trees))
        == [
            f"rank 2 has {name}: L1 and L3 in epoch 6, "
            "rank 0 tokens 0 to 4 (1, 2, 3, 4, ...): L1 and L2"
        ]
        * 3
    )


def test_a_node_that_one_rank_alone_has_is_named() -> None:
    one, other = Tree(), Tree()
    node = other.add(1, 2)
    (line, _) = explained(one.cache_state(free=5), other.cache_state(free=5))
    state = f"node {name_of(node)}: tokens 0 to 2 (1, 2, ...): L1"
    assert line == f"rank 1 has {state}, rank 0 nothing"


def test_a_count_that_differs_is_named_before_nodes() -> None:
    one, other = Tree(), Tree()
    other.add(1, 2)
    assert (
        explained(one.cache_state(free=5), other.cache_state(free=3))[0]
        == "rank 1 has free: 3, rank 0 5"
    )
