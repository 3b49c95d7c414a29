"""The host pools of one model: a primary pool whose pages prefixes are made of, and extra pools."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import Event, device_runtime
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.page_digests import DIGEST_BYTES, EvenShare
from sglang.srt.mem_cache.device.pool_transfer import PoolTransfer, SidecarPoolSpec
from sglang.srt.mem_cache.device.state_spec import PoolHitPolicy, PoolName, StateSpec
from sglang.srt.mem_cache.host.host_page_list import whole_pages
from sglang.srt.mem_cache.host.host_pool import HostKVCache
from sglang.srt.mem_cache.host.load_steps import LoadSteps, join_steps
from sglang.srt.mem_cache.host.page_checksums import PageDigests
from sglang.srt.utils.parts import Parts


@dataclass(slots=True)
class PoolEntry:
    """One pool of a group. The tree alone takes and frees device slots."""

    name: PoolName
    host_pool: HostKVCache
    device_pool: BaseDevicePool
    layer_mapper: Callable[[int], int | None]
    """Model layer (0-based in the stack) to this pool's layer, None where it has no such layer."""
    is_primary_index_anchor: bool = False
    host_evict_fn: Callable[[int], Any] | None = None
    """Frees that many host slots of this pool, if it can. Scheduler's thread. For other builders of
    groups: this project's pools have none, since their tree makes room before it writes."""

    @classmethod
    def of(
        cls, host_pool: HostKVCache, device_pool: BaseDevicePool, *, is_primary: bool
    ) -> PoolEntry:
        """The entry of a pair of pools, with the name and the layers of their spec."""
        layers = {layer: own for own, layer in enumerate(device_pool.spec.layers)}
        return cls(device_pool.spec.name, host_pool, device_pool, layers.get, is_primary)

    @property
    def spec(self) -> StateSpec:
        """Spec of the pool: layers, buffers, owner of its slots, hit policy."""
        return self.device_pool.spec


@dataclass(slots=True)
class _Moved:
    """What a copy moves of a pool."""

    entry: PoolEntry
    host: torch.Tensor
    device: torch.Tensor
    staged: torch.Tensor | None
    """`device` on the device; None: nothing needs it there."""


class HostPoolGroup:
    """The operations on all pools of a model. `primary` is for the primary pool alone.

    Args:
        entries: One of them the primary pool.
        num_layers: Layers of the model on this rank, with or without state; by default up to the
            last one that the primary pool has.

    Raises:
        ValueError: There is not exactly one primary pool, two entries share a name, or one shares
            the slots of a pool that is not there or has others.
    """

    def __init__(self, entries: Sequence[PoolEntry], num_layers: int | None = None) -> None:
        primaries = [entry for entry in entries if entry.is_primary_index_anchor]
        if len(primaries) != 1:
            raise ValueError(f"a pool group needs one primary pool, got {len(primaries)}")
        self.entries: dict[str, PoolEntry] = {entry.name: entry for entry in entries}
        if len(self.entries) != len(entries):
            raise ValueError(f"pool names repeat: {[str(entry.name) for entry in entries]}")
        self.primary_entry = primaries[0]
        self.primary = self.primary_entry.host_pool
        self.num_layers = self.primary.end_layer + 1 if num_layers is None else num_layers
        self._layers: dict[str, dict[int, int]] = {
            entry.name: self._layers_of(entry) for entry in entries
        }
        """For each pool, its own layer numbers by the model's."""
        self._runtime = device_runtime(self.primary_entry.device_pool.device)
        first_layer = min(min(layers, default=0) for layers in self._layers.values())
        # One entry for each set of pools and of their steps, which are few.
        self._join_steps = functools.cache(
            lambda steps: join_steps(
                [(self._layers[name], pool_steps) for name, pool_steps in steps],
                first_layer,
                self.num_layers,
            )
        )
        self._checked_loads = EvenShare(envs.SGLANG_HICACHE_CHECKED_SHARE.get())
        """Loads that are compared with checksums: the same on all ranks, since none goes on before
        all have compared."""
        self.auxiliary_pools = tuple(
            self._auxiliary(entry) for entry in entries if entry.spec.indices_from_pool
        )
        """The pools without slots of their own."""

    def _layers_of(self, entry: PoolEntry) -> dict[int, int]:
        own = ((layer, entry.layer_mapper(layer)) for layer in range(self.num_layers))
        return {layer: mapped for layer, mapped in own if mapped is not None}

    def _auxiliary(self, entry: PoolEntry) -> SidecarPoolSpec:
        shared = entry.spec.indices_from_pool
        assert shared is not None
        own, owner = entry.host_pool, self.get_pool(shared)
        if (own.page_num, own.page_size) != (owner.page_num, owner.page_size):
            raise ValueError(
                f"host pool {entry.name} shares the slots of {shared}, but has "
                f"{own.page_num} pages of {own.page_size}, not {owner.page_num} of "
                f"{owner.page_size}"
            )
        return SidecarPoolSpec(entry.name, shared, entry.spec.hit_policy)

    def get_pool(self, name: str) -> HostKVCache:
        """The host pool called `name`. Raises ValueError that lists the known."""
        if name not in self.entries:
            raise self._unknown(name)
        return self.entries[name].host_pool

    def _unknown(self, name: str) -> ValueError:
        known = ", ".join(self.entries)
        return ValueError(f"no host pool {name!r} in this group; it has: {known}")

    # -- copies ------------------------------------------------------------------------------------

    def backup(self, transfers: Sequence[PoolTransfer], io_backend: str) -> list[PageDigests]:
        """Copy all layers of every transfer's pages to the host; copy thread.

        Args:
            transfers: Each must have both index tensors.
            io_backend: Resolved; see host_layout.py.

        Returns:
            For each transfer the checksums of its pages on the device.

        Raises:
            ValueError: A transfer names no pool of the group, lacks slots, or has slots outside
                its pool.
        """
        moved = self._stage(transfers)
        for one in moved:
            one.entry.host_pool.backup_from_device_all_layer(
                one.entry.device_pool, one.host, one.device, io_backend, one.staged
            )
        return self._digests(moved)

    def load_steps(self, transfers: Sequence[PoolTransfer], io_backend: str) -> LoadSteps:
        """The steps in which `load` copies `transfers`. Raises as `load`; any thread."""
        moved = [(entry, host.shape[0]) for entry, host, _ in self._moved(transfers)]
        load_bytes = sum(
            slots // entry.host_pool.page_size * entry.host_pool.page_bytes
            for entry, slots in moved
        )
        steps = (
            entry.host_pool.load_steps(entry.device_pool, slots, io_backend, load_bytes)
            for entry, slots in moved
        )
        names = (entry.name for entry, _ in moved)
        return self._join_steps(tuple(zip(names, steps, strict=True)))

    def load(
        self,
        transfers: Sequence[PoolTransfer],
        steps: LoadSteps,
        steps_done: Sequence[Event],
        io_backend: str,
    ) -> list[PageDigests]:
        """Copy every transfer's pages to the device, step by step; copy thread.

        Args:
            transfers: Each must have both index tensors.
            steps: Their `load_steps`.
            steps_done: One event for each step, which is recorded after it.
            io_backend: Resolved; see host_layout.py.

        Returns:
            For each transfer the checksums of its pages as they have arrived.

        Raises:
            ValueError: See `backup`.
        """
        is_checked = self._checked_loads.takes_next()
        moved = self._stage(transfers, None if is_checked else io_backend)
        loads = [
            one.entry.host_pool.begin_load(
                one.entry.device_pool, one.host, one.device, io_backend, one.staged, own
            )
            for one, own in zip(moved, steps.of_pools, strict=True)
        ]
        for issued, done in zip(steps.issued, steps_done, strict=True):
            for place, layer in issued:
                loads[place].issue(layer)
            done.record()
        return self._digests(moved, is_checked=is_checked)

    def forget_checksums(self, transfers: Sequence[PoolTransfer]) -> None:
        """Note that the pages of `transfers` are going to have other contents. Pools without slots
        of their own follow."""
        for transfer in transfers:
            assert transfer.host_indices is not None
            names: list[str] = [transfer.name]
            names += [a.pool_name for a in self.auxiliary_pools if a.indices_from_pool == names[0]]
            for pool in map(self.get_pool, names):
                pages = whole_pages(transfer.host_indices, pool.page_size, pool.page_num)
                pool.checksums.forget(pages)

    def _stage(
        self, transfers: Sequence[PoolTransfer], loaded_by: str | None = None
    ) -> list[_Moved]:
        """Stage the device slots of all transfers at once.

        Args:
            loaded_by: I/O backend of a load that is not hashed: some pools need no slots there.
        """
        moved = [_Moved(*one, None) for one in self._moved(transfers)]
        needed = [
            one
            for one in moved
            if loaded_by is None
            or not one.entry.host_pool.loads_straight(one.entry.device_pool, one.device, loaded_by)
        ]
        staged = self._runtime.stage_all([one.device for one in needed])
        for one, on_device in zip(needed, staged, strict=True):
            one.staged = on_device
        return moved

    def _digests(self, moved: Sequence[_Moved], *, is_checked: bool = True) -> list[PageDigests]:
        """Begin to hash the pages on the device, in order with the current stream, if `is_checked`.

        The copy's own last event tells that they are hashed.
        """
        found = []
        for one in moved:
            pool, device_pool = one.entry.host_pool, one.entry.device_pool
            pages = one.host[:: pool.page_size].numpy() // pool.page_size  # The copy checked them.
            digests = None
            if is_checked and (hasher := pool.hasher_of(device_pool)) is not None:
                digests = self._runtime.empty_on_host(len(pages) * DIGEST_BYTES, torch.uint8)
                assert one.staged is not None, "the slots of hashed pages are staged"
                hasher.hash_into(digests, device_pool.items_of(one.staged))
            found.append(PageDigests(one.entry.name, pages, digests))
        return found

    def _moved(
        self, transfers: Sequence[PoolTransfer]
    ) -> Iterator[tuple[PoolEntry, torch.Tensor, torch.Tensor]]:
        """Entry, host slots and device slots of each transfer, unless it has none: a state may be
        copied without pages."""
        for transfer in transfers:
            entry, host = self.entries.get(transfer.name), transfer.host_indices
            if entry is None:
                raise self._unknown(transfer.name)
            if host is None or transfer.device_indices is None:
                raise ValueError(
                    f"pool transfer {transfer.name}: a copy needs host_indices and device_indices"
                )
            if host.shape[0] or transfer.device_indices.shape[0]:
                yield entry, host, transfer.device_indices

    def prefers_cpu_slots(self, io_backend: str) -> bool:
        """True if any pool backs up faster with its device slots on the CPU.

        Other pools then back up a little slower: their slots go back to the device.
        """
        return any(
            entry.host_pool.prefers_cpu_slots(entry.device_pool, io_backend)
            for entry in self.entries.values()
        )

    # -- all pools ---------------------------------------------------------------------------------

    @property
    def extra_pools(self) -> dict[str, HostKVCache]:
        """All pools but the primary pool, by name. A storage backend registers them after it."""
        return {
            name: entry.host_pool
            for name, entry in self.entries.items()
            if entry is not self.primary_entry
        }

    @property
    def extra_queries(self) -> list[PoolTransfer]:
        """One transfer for each extra pool, with its hit policy, for questions to a store."""
        return [
            PoolTransfer(self.entries[name].name, hit_policy=self.entries[name].spec.hit_policy)
            for name in self.extra_pools
        ]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of a prefix, over the pools that have a page for each."""
        return sum(
            entry.host_pool.page_bytes
            for entry in self.entries.values()
            if entry.spec.hit_policy is PoolHitPolicy.ALL_PAGES
        )

    @property
    def nbytes(self) -> int:
        """Bytes of host memory of all pools."""
        return sum(entry.host_pool.nbytes for entry in self.entries.values())

    def clear(self) -> None:
        """Free every page of every pool."""
        for entry in self.entries.values():
            entry.host_pool.clear()

    def integrity_parts(self) -> Parts:
        """Assert every pool's invariants, in parts."""
        for entry in self.entries.values():
            yield from entry.host_pool.integrity_parts()
