"""The attention of DeepSeek-V4 that a backend runs step by step, beside the one in plain torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.compressed_backend import CompressedTorchBackend, row_store
from sglang.srt.layers.attention_kind import COMPRESSED
from sglang.srt.layers.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    StateBatch,
    compute_extend_positions,
)
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool, PagedDevicePool
from sglang.srt.mem_cache.device.pool_registry import kv_pool, make_pools
from sglang.srt.mem_cache.device.request_pool import RequestPool
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.srt.models.deepseek_v4 import DeepseekV4Layer, DeepseekV4Model

REQUESTS = 5
STATES = 12


class Work(NamedTuple):
    """New tokens of a request in a prefill."""

    row: int
    new: int
    first: int | None = None
    """Snapshot that it continues from, if it begins anew."""
    track: tuple[int, int] | None = None
    """Slot for a snapshot, and new tokens before it."""


class _World(NamedTuple):
    backend: AttentionBackend
    pools: dict[PoolName, BaseDevicePool]


class CompressedLayers:
    """The attention of each layer of a tiny model, in two worlds: one in plain torch, and one whose
    memory is NaN where nobody has written, except for the padding. Request r has row r - 1 of the
    table, and state slot r; slots from 6 on are for snapshots."""

    def __init__(
        self,
        path: Path,
        make: Any,
        device: str,
        *,
        page_size: int = 16,
        length: int = 256,
        dtype: torch.dtype = torch.float32,
        **overrides: Any,
    ) -> None:
        """Args:
        make: Class of the backend that is tested.
        length: Longest context.
        overrides: Fields of the tiny model's config.
        """
        save_tiny_checkpoint(path, "deepseek_v4", dtype=dtype, **overrides)
        runner = StepDriver(
            path, page_size=page_size, pool_tokens=page_size, max_requests=1, device=device,
            attention_backend="torch_native", disable_cuda_graph=True,
        ).runner  # fmt: skip
        model = runner.model.model
        assert isinstance(model, DeepseekV4Model)
        self.model, self.device, self.dtype = model, device, dtype
        config = AttentionConfig(
            num_heads=runner.model_config.num_attention_heads,
            specs={spec.name: spec for spec in runner.state_specs},
            page_size=page_size,
            dtype=dtype,
            device=device,
            has_sinks=True,
        )
        self.worlds = []
        pages = -(-length // page_size) * REQUESTS
        for kind in (CompressedTorchBackend, make):
            pools = make_pools(
                runner.state_specs, pages * page_size, page_size, device, STATES, REQUESTS
            )
            self.worlds.append(_World(kind(config), pools))
        self._poison(self.worlds[1].pools)
        self.numbers = torch.Generator().manual_seed(3)
        order = torch.randperm(pages, generator=self.numbers) + 1
        slots = order[:, None] * page_size + torch.arange(page_size)
        self.table = slots.view(REQUESTS, -1).to(torch.int32).to(device)
        self.page_size = page_size
        self.lens = dict.fromkeys(range(1, STATES + 1), 0)
        """Tokens whose states each slot has."""
        self.saved: dict[int, list[list[torch.Tensor]]] = {}
        """Rows and keys before each snapshot, by world."""

    def _poison(self, pools: Mapping[PoolName, BaseDevicePool]) -> None:
        for pool in pools.values():
            padding = pool.page_size // pool.spec.stride if isinstance(pool, PagedDevicePool) else 1
            for part in pool.parts:
                for buffer in part:
                    buffer[padding:] = torch.nan

    def extend(self, work: Sequence[Work], *, last_only: bool = False) -> torch.Tensor:
        """Run a prefill in all layers. Returns the largest error against plain torch."""
        new = [one.new for one in work]
        sources = [one.row if one.first is None else one.first for one in work]
        prefix = [self.lens[slot] for slot in sources]
        for one in work:
            if one.first is not None:
                self._restore(one.row, one.first)
        total = [known + count for known, count in zip(prefix, new, strict=True)]
        states = StateBatch(slots=self._ids([one.row for one in work]))
        if any(one.first is not None for one in work):
            states.first_slots = self._ids(sources)
        if any(one.track is not None for one in work):
            tracks = [one.track or (0, 0) for one in work]
            states.track_slots = self._ids([slot for slot, _ in tracks])
            states.track_lens_cpu = [count for _, count in tracks]
        positions = compute_extend_positions(prefix, new, self.device)
        rows = [one.row for one in work]
        ends = self._ids([sum(new[: i + 1]) - 1 for i in range(len(new))])
        error = self._run(
            ForwardMode.EXTEND, rows, positions, total, states, ends if last_only else None,
            extend_prefix_lens_cpu=prefix, extend_seq_lens_cpu=new,
            req_pool_indices_cpu=[row - 1 for row in rows],
        )  # fmt: skip
        for one, length, known in zip(work, total, prefix, strict=True):
            self.lens[one.row] = length
            if one.track is not None:
                slot, count = one.track
                self.lens[slot] = known + count
                self.saved[slot] = [
                    [part[items].clone() for part, items in self._parts(world, one.row, slot)]
                    for world in self.worlds
                ]
        return error

    def decode(self, rows: Sequence[int]) -> torch.Tensor:
        """Run a decode step."""
        states = StateBatch(slots=self._ids(rows))
        total = [self.lens[row] + 1 for row in rows]
        positions = self._ids([length - 1 for length in total])
        error = self._run(ForwardMode.DECODE, rows, positions, total, states, None)
        self.lens.update(zip(rows, total, strict=True))
        return error

    def repeat(self, row: int, slot: int) -> torch.Tensor:
        """Compute a snapshot's last token again, whose rows and keys are there. The request has the
        snapshot's state then, as the runner would restore it."""
        self._restore(row, slot)
        length = self.lens[slot]
        states = StateBatch(slots=self._ids([row]), first_slots=self._ids([slot]))
        error = self._run(
            ForwardMode.EXTEND, [row], self._ids([length - 1]), [length], states, None,
            is_repeated=True, extend_prefix_lens_cpu=[length - 1], extend_seq_lens_cpu=[1],
            req_pool_indices_cpu=[row - 1],
        )  # fmt: skip
        for world in self.worlds:
            for pool in world.pools.values():
                if isinstance(pool, StatePool):
                    for buffer in pool.buffers:
                        buffer[:, row] = buffer[:, slot]
                elif isinstance(pool, RequestPool):
                    pool.zero([row - 1])
        self.lens[row] = length
        return error

    def walk(self, seed: int, steps: int) -> torch.Tensor:
        """Run random steps, with snapshots at the ends of pages. Returns the largest error."""
        rng, worst = random.Random(seed), torch.zeros(())
        longest = self.table.shape[1]
        for _ in range(steps):
            rows = rng.sample(range(1, REQUESTS + 1), rng.randint(1, 3))
            for row in rows:
                if self.lens[row] > longest - 40:
                    self.lens[row] = 0
            known = [slot for slot in self.saved if rng.random() < 0.3]
            first = {row: rng.choice(known) for row in rows if known and rng.random() < 0.3}
            if known and rng.random() < 0.2:
                error = self.repeat(rows[0], rng.choice(known))
            elif rng.random() < 0.5:
                error = self.decode(rows)
            else:
                targets = [s for s in range(6, STATES + 1) if s not in first.values()]
                work = []
                for row in rows:
                    new, begin = rng.choice([1, 3, 16, 33]), self.lens[first.get(row, row)]
                    ahead = -begin % self.page_size or self.page_size
                    track = None
                    if ahead <= new and rng.random() < 0.6:
                        track = targets.pop(rng.randrange(len(targets))), ahead
                    work.append(Work(row, new, first.get(row), track))
                error = self.extend(work, last_only=rng.random() < 0.2)
            worst = torch.maximum(worst, error)
        return worst

    def _run(
        self,
        mode: ForwardMode,
        rows: Sequence[int],
        positions: torch.Tensor,
        total: list[int],
        states: StateBatch,
        only: torch.Tensor | None,
        *,
        is_repeated: bool = False,
        **fields: Any,
    ) -> torch.Tensor:
        counts = fields.get("extend_seq_lens_cpu", [1] * len(rows))
        owners = torch.tensor([row - 1 for row in rows], device=self.device)
        loc = self.table[owners.repeat_interleave(self._ids(counts)), positions].long()
        if is_repeated:
            loc.zero_()
        layers: list[Any] = self.model.decoder_layers
        hidden = self.model.embed_tokens.weight.shape[-1]
        inputs = torch.randn(len(layers), len(positions), hidden, generator=self.numbers)
        inputs = inputs.to(self.dtype).to(self.device)
        table: Any = _Table(self.table)
        found = []
        for backend, pools in self.worlds:
            batch = ForwardBatch(
                forward_mode=mode,
                input_ids=torch.zeros_like(positions),
                positions=positions,
                req_pool_indices=owners,
                seq_lens=self._ids(total),
                seq_lens_cpu=total,
                out_cache_loc=loc,
                req_to_token_pool=table,
                token_to_kv_pool=kv_pool(pools),
                states=StateBatch(
                    slots=states.slots, first_slots=states.first_slots,
                    track_slots=states.track_slots, track_lens_cpu=states.track_lens_cpu,
                ),
                pools=pools,
                attn_backends={COMPRESSED: backend},
                **fields,
            )  # fmt: skip
            backend.init_forward_metadata(batch)
            model = self.model
            of_window, of_rows, *starts = model.rotations.forward(positions)
            by_ratio = dict(zip(model.ratios, starts, strict=True))
            row_store(batch).plan_rows(batch, positions, by_ratio)
            outs = []
            for layer, x in zip(layers, inputs, strict=True):
                assert isinstance(layer, DeepseekV4Layer)
                step = LayerStep(of_rows if layer.has_rows else of_window, batch, only)
                outs.append(layer.attn.forward(x, step))
            found.append(torch.stack(outs).float().cpu())
        want, got = found
        error: torch.Tensor = ((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max()
        return error

    def check_pools(self, tolerance: float) -> None:
        """The worlds keep the same, where the tested one has written anything."""
        want, got = (world.pools for world in self.worlds)
        for name, pool in want.items():
            padding = pool.page_size // pool.spec.stride if isinstance(pool, PagedDevicePool) else 1
            for mine, other in zip(pool.parts, got[name].parts, strict=True):
                for one, two in zip(mine, other, strict=True):
                    known, found = one[padding:].float(), two[padding:].float().nan_to_num(0.0)
                    torch.testing.assert_close(
                        found, known, rtol=tolerance, atol=tolerance, msg=f"{name} differs"
                    )

    def _restore(self, row: int, slot: int) -> None:
        """Give a request the rows and keys before a snapshot."""
        for world, saved in zip(self.worlds, self.saved[slot], strict=True):
            for (part, items), values in zip(self._parts(world, row, slot), saved, strict=True):
                part[items] = values

    def _parts(self, world: _World, row: int, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's rows and keys, and the items that a request has for a snapshot's tokens."""
        slots = self.table[row - 1, : self.lens[slot]].long()
        return [
            (part, slots[:: pool.spec.stride] // pool.spec.stride)
            for pool in world.pools.values()
            if isinstance(pool, PagedDevicePool)
            for layers in pool.parts
            for part in layers
        ]

    def _ids(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)


class _Table:
    def __init__(self, req_to_token: torch.Tensor) -> None:
        self.req_to_token = req_to_token
