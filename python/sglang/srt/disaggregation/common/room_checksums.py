"""Checksums of the pages and states that rooms move: computed by the prefill server where they are
made, and by the decode server where they have arrived."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from sglang.srt.disaggregation.common.geometry import StateSlots
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.page_digests import (
    DIGEST_BYTES,
    EvenShare,
    PageHasher,
    make_page_hasher,
)
from sglang.srt.mem_cache.device.state_spec import ItemKind

_NONE = b""


@dataclass(frozen=True, slots=True)
class _Pool:
    name: str
    kind: ItemKind
    page_items: int
    hasher: PageHasher | None


_Pages: TypeAlias = tuple[_Pool, Sequence[int]]
"""A pool, and the numbers of pages or states there."""


class RoomChecksums:
    """Hashes pages and states of a rank's pools, concurrently with the device's other work.

    The pages must be complete: no work of the device may be about to write them. Any thread.

    Args:
        pools: The model's pools. Servers of the same model have them in the same order.
        share: Share of the pages, and of the states, that `draw_pages` and `draw_state` hash.
    """

    def __init__(self, pools: Sequence[BaseDevicePool], share: float = 1.0) -> None:
        self._pools: list[_Pool] = []
        self._state_pools: list[_Pool] = []
        for pool in pools:
            name, kind = pool.spec.name, pool.spec.item
            hasher = make_page_hasher(pool.parts, pool.page_items, by_token=False, pool=name)
            known = self._pools if kind is ItemKind.TOKEN else self._state_pools
            known.append(_Pool(name, kind, pool.page_items, hasher))
        self._runtime = device_runtime(pools[0].device)
        self._stream = self._runtime.make_side_stream()
        self._stream.follow()  # The stream must see the tables of the hashers.
        self._lock = threading.Lock()
        self._drawn_pages, self._drawn_states = EvenShare(share), EvenShare(share)

    def draw_pages(self, pages: Sequence[int]) -> list[list[bytes]]:
        """For each page the checksums of its parts in all pools of pages, 16 bytes each; empty
        where a pool is not hashed, and an empty list for pages that are not drawn."""
        with self._lock:
            drawn = [self._drawn_pages.takes_next() for _ in pages]
        return self._digests_of([(pool, pages) for pool in self._pools], drawn)

    def draw_state(self, slots: StateSlots) -> list[bytes]:
        """The checksums of a prompt's states in all pools of states, as `draw_pages`."""
        with self._lock:
            drawn = [self._drawn_states.takes_next()]
        return self._digests_of(self._states_of(slots), drawn)[0]

    def compare_pages(
        self, names: Collection[str], pages: Sequence[int], expected: Sequence[Sequence[bytes]]
    ) -> Comparison:
        """Compare pages with the checksums that another server has for them.

        Args:
            names: Pools whose pages have the same bytes there.
            pages: Pages of this server.
            expected: For each page what `draw_pages` has returned there.
        """
        found = self._digests_of(
            [(pool, pages) for pool in self._pools], [bool(known) for known in expected]
        )
        return _compare(self._pools, names, found, expected)

    def compare_state(
        self, names: Collection[str], slots: StateSlots, expected: Sequence[bytes]
    ) -> Comparison:
        """Like `compare_pages`, but for the states of a prompt."""
        found = self._digests_of(self._states_of(slots), [bool(expected)])
        return _compare(self._state_pools, names, found, [expected])

    def _states_of(self, slots: StateSlots) -> list[_Pages]:
        found: list[_Pages] = []
        for pool in self._state_pools:
            slot = slots.of(pool.kind)
            assert slot is not None, f"a prompt has a slot in pool {pool.name}"
            found.append((pool, [slot]))
        return found

    def _digests_of(self, pools: Sequence[_Pages], drawn: Sequence[bool]) -> list[list[bytes]]:
        """Checksums of the pages that are `drawn`; an empty list for the others."""
        if not any(drawn):
            return [[] for _ in drawn]
        num_hashed = sum(drawn)
        self._runtime.enter_thread()
        columns = []
        with self._lock, self._stream.use():
            begun = [
                None
                if pool.hasher is None
                else pool.hasher.digests(_items(pool, list(itertools.compress(pages, drawn))))
                for pool, pages in pools
            ]
        for copies in begun:
            if copies is None:
                columns.append([_NONE] * num_hashed)
                continue
            (digests,) = copies.wait()
            assert digests is not None
            raw = digests.numpy().tobytes()
            columns.append([raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)])
        rows = map(list, zip(*columns, strict=True))
        return [next(rows) if one else [] for one in drawn]


@dataclass(slots=True)
class Comparison:
    """Pages or states of a room, compared with their checksums."""

    damaged: list[int] = field(default_factory=list)
    """Indices of those that differ in some pool, ascending."""
    pools: set[str] = field(default_factory=set)
    """The pools in which they differ."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Numbers by outcome, one for each pool: `intact`, `damaged`, `unchecked`."""


def _compare(
    pools: Sequence[_Pool],
    names: Collection[str],
    found: Sequence[Sequence[bytes]],
    expected: Sequence[Sequence[bytes]],
) -> Comparison:
    result = Comparison()
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if len(theirs) != len(pools) or not mine:
            result.outcomes["unchecked"] += len(pools)
            continue
        for pool, own, other in zip(pools, mine, theirs, strict=True):
            if pool.name not in names or _NONE in (own, other):
                result.outcomes["unchecked"] += 1
            elif own == other:
                result.outcomes["intact"] += 1
            else:
                result.outcomes["damaged"] += 1
                result.pools.add(pool.name)
                if result.damaged[-1:] != [index]:
                    result.damaged.append(index)
    return result


def _items(pool: _Pool, pages: Sequence[int]) -> torch.Tensor:
    first = torch.tensor(pages, dtype=torch.int64) * pool.page_items
    return (first[:, None] + torch.arange(pool.page_items)).reshape(-1)
