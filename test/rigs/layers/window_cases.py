"""Requests with sliding windows that a backend runs step by step, against the definition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rigs.models.attention_cases import attend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.window_backend import window_spec
from sglang.srt.layers.attention_kind import SLIDING_WINDOW
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    ForwardBatch,
    ForwardMode,
    StateBatch,
    compute_extend_positions,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import KVSpec, PoolName, RankShare

LAYER = 3


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    window: int


class Work(NamedTuple):
    """New tokens of a request in a prefill."""

    slot: int
    new: int
    first: int | None = None
    """Slot that it continues from, if another."""
    track: tuple[int, int] | None = None
    """Slot for a snapshot, and new tokens before it."""


class Windows:
    """A backend, its rings, and the keys and values of all tokens so far, by slot."""

    def __init__(
        self,
        make: Any,
        shape: Shape,
        dtype: torch.dtype,
        device: str,
        *,
        has_sinks: bool = False,
        unwritten: float = torch.nan,
    ) -> None:
        """Args:
        make: The backend's class.
        unwritten: Contents of rows that no token was stored in; NaN shows whether they are read.
        """
        self.shape, self.dtype, self.device = shape, dtype, device
        heads, kv_heads, dim, window = shape
        spec = window_spec((LAYER,), window, kv_heads, dim, dtype, RankShare())
        kv = KVSpec.of_heads((0,), kv_heads, dim, dtype)
        self.config = AttentionConfig(
            num_heads=heads,
            specs={kv.name: kv, spec.name: spec},
            page_size=1,
            dtype=dtype,
            device=device,
            has_sinks=has_sinks,
        )
        self.backend: AttentionBackend = make(self.config)
        self.pool = StatePool(spec, 12, device)
        for buffer in self.pool.buffers:
            buffer.fill_(unwritten)
            buffer[:, 0] = 0.0
        self.numbers = torch.Generator().manual_seed(5)
        sinks = torch.randn(heads, generator=self.numbers).to(device) * 3 if has_sinks else None
        self.layer = RadixAttention(
            heads, dim, dim**-0.5, kv_heads, LAYER, kind=SLIDING_WINDOW, sinks=sinks
        )
        empty = torch.empty(2, 0, kv_heads, dim, dtype=dtype)
        self.contexts: dict[int, torch.Tensor] = dict.fromkeys(range(13), empty)
        """`[2, tokens, kv_heads, head_dim]`: keys and values."""

    def inputs(self, tokens: int) -> AttentionInputs:
        """Random queries, keys and values, as views of a projection with two more heads."""
        heads, kv_heads, dim, _ = self.shape
        wide = torch.randn(tokens, heads + 2 * kv_heads + 2, dim, generator=self.numbers)
        wide = wide.to(self.dtype).to(self.device)
        q, k, v, _ = torch.split(wide, [heads, kv_heads, kv_heads, 2], dim=1)
        return AttentionInputs(q, k, v)

    def extend(self, work: Sequence[Work], *, last_only: bool = False) -> torch.Tensor:
        """Run a prefill. Returns the largest error against the definition."""
        new = [one.new for one in work]
        inputs = self.inputs(sum(new))
        sources = [one.slot if one.first is None else one.first for one in work]
        prefix = [self.contexts[slot].shape[1] for slot in sources]
        begins = [sum(new[:i]) for i in range(len(new))]
        before = [self.contexts[slot] for slot in sources]
        rows = self.ids([b + n - 1 for b, n in zip(begins, new, strict=True)])
        batch = self.extend_batch(work, prefix)
        self.backend.init_forward_metadata(batch)
        got = self.layer.forward(
            inputs.q, inputs.k, inputs.v, batch, rows=rows if last_only else None
        )
        wanted = []
        for i, one in enumerate(work):
            own = slice(begins[i], begins[i] + one.new)
            fresh = torch.stack([inputs.k[own], inputs.v[own]]).cpu()
            whole = torch.cat([before[i], fresh], dim=1)
            if one.track is not None:
                self.contexts[one.track[0]] = whole[:, : prefix[i] + one.track[1]]
            self.contexts[one.slot] = whole
            want = self.definition(inputs.q[own].cpu(), whole)
            wanted.append(want[-1:] if last_only else want)
        return self.error(got, torch.cat(wanted))

    def decode(self, slots: Sequence[int]) -> torch.Tensor:
        """Run a decode step. Returns as `extend`."""
        inputs = self.inputs(len(slots))
        before = [self.contexts[slot] for slot in slots]
        states = StateBatch(slots=self.ids(slots))
        lens = [context.shape[1] + 1 for context in before]
        batch = self.batch(ForwardMode.DECODE, lens, states)
        batch.positions = self.ids([length - 1 for length in lens])
        self.backend.init_forward_metadata(batch)
        got = self.layer.forward(inputs.q, inputs.k, inputs.v, batch)
        wanted = []
        for i, slot in enumerate(slots):
            fresh = torch.stack([inputs.k[i : i + 1], inputs.v[i : i + 1]]).cpu()
            self.contexts[slot] = torch.cat([before[i], fresh], dim=1)
            wanted.append(self.definition(inputs.q[i : i + 1].cpu(), self.contexts[slot]))
        return self.error(got, torch.cat(wanted))

    def repeat(self, slot: int, source: int) -> torch.Tensor:
        """Compute the last token of `source` again, for another slot. Returns as `extend`."""
        context = self.contexts[source]
        inputs = self.inputs(1)
        inputs.k.copy_(context[0, -1:])
        inputs.v.copy_(context[1, -1:])
        batch = self.extend_batch([Work(slot, 1, source)], [context.shape[1] - 1])
        self.backend.init_forward_metadata(batch)
        got = self.layer.forward(inputs.q, inputs.k, inputs.v, batch)
        self.contexts[slot] = context
        return self.error(got, self.definition(inputs.q.cpu(), context))

    def walk(self, seed: int, steps: int) -> torch.Tensor:
        """Run random steps of 5 requests, which take snapshots in slots 6 to 12 and begin anew from
        them. Returns the largest error, after a check of all rings."""
        rng, worst = random.Random(seed), torch.zeros(())
        for _ in range(steps):
            slots = rng.sample(range(1, 6), rng.randint(1, 4))
            known = [s for s in range(6, 13) if self.contexts[s].shape[1]]
            if known and rng.random() < 0.2:
                worst = torch.maximum(worst, self.repeat(slots[0], rng.choice(known)))
                continue
            if rng.random() < 0.4:
                worst = torch.maximum(worst, self.decode(slots))
                continue
            # Snapshots of this step, which no request of the step continues from.
            targets = rng.sample(range(6, 13), len(slots))
            known = [slot for slot in known if slot not in targets]
            work = []
            for slot, target in zip(slots, targets, strict=True):
                new = rng.choice([1, 2, rng.randint(1, 3 * self.shape.window)])
                source = rng.choice(known) if known and rng.random() < 0.3 else None
                track = (target, rng.randint(1, new)) if rng.random() < 0.5 else None
                work.append(Work(slot, new, source, track))
            error = self.extend(work, last_only=rng.random() < 0.2)
            worst = torch.maximum(worst, error)
        self.check_rings(range(1, 13))
        return worst

    def extend_batch(self, work: Sequence[Work], prefix: Sequence[int]) -> ForwardBatch:
        new = [one.new for one in work]
        states = StateBatch(slots=self.ids([one.slot for one in work]))
        if any(one.first is not None for one in work):
            reads = [one.slot if one.first is None else one.first for one in work]
            states.first_slots = self.ids(reads)
        if any(one.track is not None for one in work):
            tracks = [one.track or (0, 0) for one in work]
            states.track_slots = self.ids([slot for slot, _ in tracks])
            states.track_lens_cpu = [count for _, count in tracks]
        total = [known + count for known, count in zip(prefix, new, strict=True)]
        batch = self.batch(ForwardMode.EXTEND, total, states)
        batch.positions = compute_extend_positions(list(prefix), new, self.device)
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = list(prefix), new
        batch.req_pool_indices_cpu = [one.slot for one in work]
        return batch

    def batch(self, mode: ForwardMode, lens: list[int], states: StateBatch) -> ForwardBatch:
        nothing: Any = None
        return ForwardBatch(
            forward_mode=mode,
            input_ids=self.ids([0]),
            positions=self.ids([0]),
            req_pool_indices=states.slots,
            seq_lens=self.ids(lens),
            seq_lens_cpu=lens,
            out_cache_loc=self.ids([0]),
            req_to_token_pool=nothing,
            token_to_kv_pool=nothing,
            states=states,
            pools={PoolName.SWA: self.pool},
            attn_backends={SLIDING_WINDOW: self.backend},
        )

    def ids(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def definition(self, q: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Attention of the last tokens of a context, in fp64: `[tokens, heads * head_dim]`."""
        sinks = None if self.layer.sinks is None else self.layer.sinks.cpu()
        prefix, window = context.shape[1] - len(q), self.shape.window
        return attend(q, *context, prefix=prefix, window=window, sinks=sinks)

    def error(self, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        assert got.shape == want.shape
        error: torch.Tensor = (got.cpu().double() - want).norm() / want.norm()
        return error

    def check_rings(self, slots: Sequence[int]) -> None:
        """Each slot's ring has exactly the last tokens of its context, each in its row."""
        window = self.shape.window
        for slot in slots:
            context = self.contexts[slot]
            for position in range(max(0, context.shape[1] - window), context.shape[1]):
                for buffer, values in zip(self.pool.buffers, context, strict=True):
                    row = buffer[0, slot, :, position % window].cpu()
                    assert torch.equal(row, values[position]), (slot, position)
