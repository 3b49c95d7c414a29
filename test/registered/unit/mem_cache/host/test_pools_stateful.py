"""Free lists and pools against a dict of pages: who owns a page, and which bytes are in it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rigs.caches.cache_rig import CacheRig
from rigs.caches.mla_pools import make_indexer_pool, make_mla_pool
from rigs.caches.random_runs import run_machine
from rigs.stores.host_pools import device_bytes, make_device_pool, page_slots
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.mem_cache.host.host_layout import HostLayout
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.memory_pool_host import (
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    NSAIndexerPoolHost,
)
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

EXAMPLES = 40
"""The nightly profile beside this file sets more."""


class Allocator(RuleBasedStateMachine):
    """Requests grow token by token or in chunks; the model maps each to its slots."""

    @initialize(
        page=st.sampled_from((1, 2, 4, 16)), pages=st.integers(1, 24), need_sort=st.booleans()
    )
    def build(self, page: int, pages: int, need_sort: bool) -> None:
        self.page = page
        self.allocator: TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator
        if page == 1:
            self.allocator = TokenToKVPoolAllocator(pages, torch.float32, "cpu", None, need_sort)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                pages * page, page, torch.float32, "cpu", None, need_sort
            )
        self.requests: list[list[int]] = []

    def free_pages(self) -> int:
        held = {slot // self.page for slots in self.requests for slot in slots}
        return self.allocator.num_pages - len(held)

    def pages_for(self, length: int) -> int:
        return -(-length // self.page)

    @rule(pages=st.integers(0, 8))
    def alloc(self, pages: int) -> None:
        slots = self.allocator.alloc(pages * self.page)
        assert (slots is None) == (pages > self.free_pages())
        if slots is not None and pages:
            self.requests.append(slots.tolist())

    @precondition(lambda self: self.requests)
    @rule(grow=st.lists(st.integers(0, 9), min_size=1, max_size=3), new=st.integers(0, 20))
    def extend(self, grow: list[int], new: int) -> None:
        """The first requests by `grow` each, and a new one."""
        chosen = self.requests[: len(grow)]
        before = [len(slots) for slots in chosen] + [0]
        after = [len(slots) + more for slots, more in zip(chosen, grow, strict=False)] + [new]
        last = [slots[-1] for slots in chosen] + [-1]
        needed = sum(
            self.pages_for(b) - self.pages_for(a) for a, b in zip(before, after, strict=True)
        )
        got = self.allocator.alloc_extend(
            torch.tensor(before), before, torch.tensor(after), after,
            torch.tensor(last), sum(after) - sum(before),
        )  # fmt: skip
        assert (got is None) == (needed > self.free_pages())
        if got is None:
            return
        parts = torch.split(got, [b - a for a, b in zip(before, after, strict=True)])
        for slots, part in zip([*chosen, []], parts, strict=True):
            slots += part.tolist()
            if slots and slots not in self.requests:
                self.requests.append(slots)

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 4))
    def decode(self, count: int) -> None:
        chosen = self.requests[:count]
        lengths = [len(slots) + 1 for slots in chosen]
        needed = sum(self.pages_for(n) - self.pages_for(n - 1) for n in lengths)
        last = torch.tensor([slots[-1] for slots in chosen])
        got = self.allocator.alloc_decode(torch.tensor(lengths), lengths, last)
        assert (got is None) == (needed > self.free_pages())
        if got is not None:
            for slots, slot in zip(chosen, got.tolist(), strict=True):
                slots.append(slot)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 20), grouped=st.booleans(), shuffle=st.integers(0, 99))
    def free(self, which: int, grouped: bool, shuffle: int) -> None:
        slots = self.requests.pop(which % len(self.requests))
        random.Random(shuffle).shuffle(slots)
        if not grouped:
            self.allocator.free(torch.tensor(slots))
            return
        self.allocator.free_group_begin()
        for part in torch.split(torch.tensor(slots), 3):
            self.allocator.free(part)
        self.allocator.free_group_end()

    @precondition(lambda self: self.requests and self.page > 0)
    @rule(which=st.integers(0, 20))
    def freeing_twice_is_caught(self, which: int) -> None:
        slots = torch.tensor(self.requests.pop(which % len(self.requests)))
        self.allocator.free(slots)
        with pytest.raises(AssertionError, match="freed twice"):
            self.allocator.free(slots)

    @invariant()
    def page_ownership(self) -> None:
        if not hasattr(self, "allocator"):
            return
        held = [slot for slots in self.requests for slot in slots]
        assert len(held) == len(set(held)), "a slot has two owners"
        assert all(self.page <= slot < self.allocator.size + self.page for slot in held)
        free = torch.cat([*self.allocator.free_page_ids()]).tolist()
        assert len(free) == len(set(free)) == self.free_pages()
        assert self.allocator.available_size() == len(free) * self.page
        assert not set(free) & {slot // self.page for slot in held}
        for slots in self.requests:
            for position, slot in enumerate(slots):
                if self.page > 1 and slots == sorted(slots) and position % self.page:
                    assert slot == slots[position - 1] + 1, "a page holds its tokens in order"


class HostPool(RuleBasedStateMachine):
    """Pages go down, move as flat pages, and come up; the model has the bytes."""

    @initialize(
        kind=st.sampled_from(
            (
                (make_device_pool, MHATokenToKVPoolHost),
                (make_mla_pool, MLATokenToKVPoolHost),
                (make_indexer_pool, NSAIndexerPoolHost),
            )
        ),
        layout=st.sampled_from(list(HostLayout)),
        page=st.sampled_from((1, 2, 4)),
        seed=st.integers(0, 9),
    )
    def build(
        self,
        kind: tuple[Callable[..., PagedDevicePool], type[HostKVCache]],
        layout: HostLayout,
        page: int,
        seed: int,
    ) -> None:
        make_device, host_class = kind
        self.page = page
        self.device = make_device(num_pages=8, page_size=page, seed=seed)
        self.host = host_class.make(self.device, page_num=16, layout=layout)
        self.pages: dict[int, bytes] = {}
        """Host page to the bytes that it must hold."""

    @rule(sources=st.lists(st.integers(1, 8), min_size=1, max_size=6, unique=True))
    def back_up(self, sources: list[int]) -> None:
        slots = self.host.alloc(len(sources) * self.page)
        room = self.host.page_num - len(self.pages)
        assert (slots is None) == (len(sources) > room)
        if slots is None:
            return
        device = page_slots(sources, self.page)
        self.host.backup_from_device_all_layer(self.device, slots, device, "direct")
        for at, source in zip(slots[:: self.page].tolist(), sources, strict=True):
            assert at // self.page not in self.pages
            bytes_of = device_bytes(self.device, page_slots([source], self.page))
            self.pages[at // self.page] = bytes_of

    @precondition(lambda self: self.pages)
    @rule(which=st.lists(st.integers(0, 15), min_size=1, max_size=4), first=st.integers(1, 4))
    def load(self, which: list[int], first: int) -> None:
        chosen = sorted({sorted(self.pages)[one % len(self.pages)] for one in which})
        targets = list(range(first, first + len(chosen)))
        for layer in range(self.device.layer_num):
            self.host.load_to_device_per_layer(
                self.device, page_slots(chosen, self.page), page_slots(targets, self.page),
                layer, "direct",
            )  # fmt: skip
        for source, into in zip(chosen, targets, strict=True):
            assert device_bytes(self.device, page_slots([into], self.page)) == self.pages[source]

    @precondition(lambda self: self.pages)
    @rule(which=st.integers(0, 15))
    def copy_flat(self, which: int) -> None:
        """Copy a page as a third party's storage backend does."""
        source = sorted(self.pages)[which % len(self.pages)]
        slots = self.host.alloc(self.page)
        if slots is not None:
            flat = self.host.get_data_page(source * self.page).clone()
            self.host.set_from_flat_data_page(int(slots[0]), flat)
            self.pages[int(slots[0]) // self.page] = self.pages[source]

    @precondition(lambda self: self.pages)
    @rule(which=st.lists(st.integers(0, 15), min_size=1, max_size=4))
    def free(self, which: list[int]) -> None:
        chosen = {sorted(self.pages)[one % len(self.pages)] for one in which}
        assert self.host.free(page_slots(sorted(chosen), self.page)) == len(chosen) * self.page
        for page in chosen:
            del self.pages[page]
        with pytest.raises(AssertionError, match="double free"):
            self.host.free(page_slots([chosen.pop()], self.page))

    @invariant()
    def page_ownership(self) -> None:
        if not hasattr(self, "host"):
            return
        self.host.check_integrity()
        free = set(self.host.free_page_ids()[0].tolist())
        assert free | set(self.pages) == set(range(self.host.page_num))
        assert not free & set(self.pages)


Prefix = tuple[int, ...]


class Radix(RuleBasedStateMachine):
    """One tier: the model maps each whole prefix to the slots of its last page."""

    @initialize(
        page=st.sampled_from((1, 2, 4)), policy=st.sampled_from(("lru", "lfu", "mru", "slru"))
    )
    def build(self, page: int, policy: str) -> None:
        self.page = page
        self.rig = CacheRig(l1_pages=24, page_size=page, eviction_policy=policy)
        self.tree = self.rig.tree
        assert isinstance(self.tree, RadixCache)
        self.model: dict[Prefix, list[int]] = {}
        self.locked: list[tuple[Prefix, TreeNode]] = []

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=7)

    def tokens(self, shape: list[int]) -> Prefix:
        return tuple(which * 100 + n for which in shape for n in range(self.page))

    def prefixes(self, tokens: Prefix) -> list[Prefix]:
        return [tokens[:end] for end in range(self.page, len(tokens) + 1, self.page)]

    def known(self, tokens: Prefix) -> list[int]:
        slots: list[int] = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.model:
                break
            slots += self.model[prefix]
        return slots

    @rule(shape=prompts)
    def insert(self, shape: list[int]) -> None:
        tokens = self.tokens(shape)
        slots = self.rig.allocator.alloc(len(tokens))
        if slots is None:
            return
        known = self.known(tokens)
        result = self.tree.insert(InsertParams(key=RadixKey(list(tokens)), value=slots))
        assert result.prefix_len == len(known)
        if known:
            self.rig.allocator.free(slots[: len(known)])
        for prefix in self.prefixes(tokens)[len(known) // self.page :]:
            self.model[prefix] = slots[len(prefix) - self.page : len(prefix)].tolist()

    @rule(shape=prompts, lock=st.booleans())
    def match(self, shape: list[int], lock: bool) -> None:
        """A match splits where the prompt leaves a node, at any page."""
        tokens = self.tokens(shape)
        match = self.tree.match_prefix(MatchPrefixParams(RadixKey(list(tokens))))
        assert match.device_indices.tolist() == self.known(tokens)
        if lock and len(self.locked) < 3:
            self.tree.inc_lock_ref(match.last_device_node)
            self.locked.append((tokens[: len(match.device_indices)], match.last_device_node))

    @precondition(lambda self: self.locked)
    @rule(which=st.integers(0, 2))
    def unlock(self, which: int) -> None:
        _, node = self.locked.pop(which % len(self.locked))
        self.tree.dec_lock_ref(node)

    @rule(pages=st.integers(1, 24))
    def evict(self, pages: int) -> None:
        could = self.tree.evictable_size()
        freed = self.tree.evict(EvictParams(num_tokens=pages * self.page)).num_tokens_evicted
        assert min(pages * self.page, could) <= freed <= could
        here = {slot for node in self.tree.nodes() for slot in _slots(node)}
        kept = {prefix: slots for prefix, slots in self.model.items() if set(slots) <= here}
        assert (len(self.model) - len(kept)) * self.page == freed
        self.model = kept

    @invariant()
    def page_ownership(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        protected = {prefix for tokens, _ in self.locked for prefix in self.prefixes(tokens)}
        assert protected <= set(self.model), "a locked page has left"
        assert self.tree.protected_size() == len(protected) * self.page
        assert self.tree.total_size() == len(self.model) * self.page
        assert all(
            prefix[: -self.page] in self.model for prefix in self.model if prefix[self.page :]
        )


def _slots(node: TreeNode) -> list[int]:
    slots: list[int] = [] if node.value is None else node.value.tolist()
    return slots


@pytest.mark.parametrize("machine", [Allocator, HostPool, Radix])
def test_pools_behave_like_a_dict_of_pages(machine: type[RuleBasedStateMachine]) -> None:
    run_machine(machine, EXAMPLES, steps=30)
