"""Where the pages of a server's pools are, and which bytes to read for pages of another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from sglang.srt.disaggregation.common.protocol import VERSION, Offer, PoolBuffer
from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The pages of all pools of a server's rank.

    Attributes:
        buffers: In the same order on servers of the same layout.
        facts: All that determines a page's bytes.
    """

    buffers: tuple[PoolBuffer, ...]
    sizes: tuple[int, ...]
    """Bytes of each buffer."""
    facts: dict[str, str]

    @classmethod
    def of(cls, pools: Sequence[BaseDevicePool], weights_identity: str) -> PoolGeometry:
        """Of the pools of a model whose requests own slots of one of them.

        Raises:
            ValueError: One of them has no pages.
        """
        buffers: list[PoolBuffer] = []
        sizes: list[int] = []
        facts = {"weights": weights_identity, "page size": str(pools[0].page_size)}
        for pool in pools:
            if not isinstance(pool, PagedDevicePool):
                raise ValueError(
                    f"--disaggregation-mode: pool {pool.spec.name} holds recurrent states, which "
                    "do not move between prefill and decode servers yet: leave the flag out"
                )
            addresses, lengths, page_bytes = pool.get_contiguous_buf_infos()
            buffers += map(PoolBuffer, addresses, page_bytes)
            sizes += lengths
            shapes = [f"{part.name}{list(part.shape)}" for part in pool.spec.buffers]
            facts[f"pool {pool.spec.name}"] = f"{' '.join(shapes)} {pool.dtype}"
            facts[f"layers of pool {pool.spec.name}"] = str(list(pool.spec.layers))
            share = pool.spec.share
            facts[f"heads of pool {pool.spec.name}"] = f"{share.begin} to {share.end}"
        return cls(tuple(buffers), tuple(sizes), facts)

    @property
    def digest(self) -> str:
        """Equal where pages of two servers can be exchanged."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(self.facts.items())))

    def offer(self, instance_id: str, session_id: str) -> Offer:
        """What is told to those who want to read."""
        return Offer(VERSION, instance_id, session_id, self.digest, self.facts, list(self.buffers))

    def why_not(self, offer: Offer) -> str | None:
        """Why pages of `offer` cannot be read into these; None: they can."""
        if offer.version != VERSION:
            return f"it speaks version {offer.version} of the protocol, this server {VERSION}"
        if offer.layout == self.digest:
            theirs, own = len(offer.buffers), len(self.buffers)
            if theirs == own:
                return None
            return f"its pages differ: it has {theirs} buffers, this server {own}"
        names = sorted(self.facts.keys() | offer.layout_facts.keys())
        unlike = [
            f"{name} {offer.layout_facts.get(name, 'none')} there, {self.facts.get(name, 'none')} "
            "here"
            for name in names
            if offer.layout_facts.get(name) != self.facts.get(name)
        ]
        return "its pages differ: " + "; ".join(unlike)

    def blocks(self, offer: Offer, theirs: Sequence[int], own: Sequence[int]) -> list[Block]:
        """What to read for pages `theirs` of `offer` to get them as pages `own`.

        Pages that follow one another on both sides are one block of each buffer.
        """
        there, here = np.asarray(theirs, dtype=np.int64), np.asarray(own, dtype=np.int64)
        assert len(there) == len(here)
        breaks = np.flatnonzero((np.diff(there) != 1) | (np.diff(here) != 1)) + 1
        begins = np.concatenate([[0], breaks])
        lengths = np.diff(np.concatenate([begins, [len(there)]])).tolist()
        runs = list(zip(here[begins].tolist(), there[begins].tolist(), lengths, strict=True))
        return [
            Block(
                mine.address + page * mine.page_bytes,
                other.address + remote * mine.page_bytes,
                count * mine.page_bytes,
            )
            for mine, other in zip(self.buffers, offer.buffers, strict=True)
            for page, remote, count in runs
        ]
