"""Sliding-window attention on CUDA: Triton kernels over rings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionConfig
from sglang.srt.layers.attention.window_backend import ring_buffers
from sglang.srt.layers.forward_batch_info import (
    AttentionInputs,
    AttentionLayer,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.layers.linear_attention.extend_plan import ShortPlan
from sglang.srt.layers.triton_ops.attention.extend_attention import (
    plan_any_blocks,
    plan_blocks,
    put_blocks,
)
from sglang.srt.layers.triton_ops.attention.window_decode import RingStep, decode_in_rings
from sglang.srt.layers.triton_ops.attention.window_extend import (
    RingExtend,
    extend_in_rings,
    store_in_rings,
)


class WindowTritonBackend(AttentionBackend):
    """Sliding-window attention by Triton. It stores keys and values by itself, into the rings.
    Decoding needs no plan."""

    can_be_captured = True
    captures_extend = True
    rotates_in_decoding = True

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config
        self._step: RingExtend | None = None
        """The prefill that runs."""
        self._captured: dict[tuple[int, int], RingExtend] = {}
        """Captured prefills, by numbers of tokens and requests."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode is not ForwardMode.EXTEND:
            return
        states, num_new = forward_batch.states, forward_batch.extend_seq_lens_cpu
        assert states is not None and num_new is not None, "the maker of the batch gave it states"
        config, device = self._config, forward_batch.input_ids.device
        work = plan_blocks(
            _by_request(forward_batch),
            group=config.group,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=device,
        )
        plan = ShortPlan.of(num_new, states.track_lens_cpu, device)
        self._step = RingExtend(work=work, seq_lens=forward_batch.seq_lens, **plan._asdict())

    def init_forward_metadata_extend_graph(
        self, forward_batch: ForwardBatch, num_tokens: int, num_requests: int
    ) -> None:
        config, size = self._config, (num_tokens, num_requests)
        if forward_batch.is_captured:
            states = forward_batch.states
            assert states is not None, "the maker of the batch gave it states"
            plan = states.plan
            assert isinstance(plan, ShortPlan), "captured prefills are short"
            work = plan_any_blocks(
                num_tokens,
                num_requests,
                group=config.group,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                device=config.device,
            )
            step = RingExtend(work=work, seq_lens=forward_batch.seq_lens, **plan._asdict())
            self._captured[size] = step
        self._step = self._captured[size]
        put_blocks(self._step.work, _by_request(forward_batch), config.group)

    def forward(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend, and store K and V in the rings, which only this backend knows."""
        stores, has_index = inputs.save_kv_cache, inputs.index_query is not None
        assert stores and not has_index, f"{layer.kind} attention stores by itself"
        q, k, v = inputs.q, inputs.k, inputs.v
        rings = _rings_of(layer, forward_batch)
        if forward_batch.forward_mode.is_decode():
            return decode_in_rings(
                q, k, v, rings, forward_batch.positions, layer.scaling, layer.sinks, inputs.rotation
            )
        states, step = forward_batch.states, self._step
        assert states is not None and step is not None, "the step was planned"
        last_only = inputs.rows is not None
        out = extend_in_rings(q, k, v, rings, step, layer.scaling, layer.sinks, last_only=last_only)
        store_in_rings(k, v, rings, step, states.track_slots)
        return out

    def forward_extend(
        self, inputs: AttentionInputs, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        return self.forward(inputs, layer, forward_batch)

    def forward_decode(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        raise AssertionError("one kernel stores and attends: see `forward`")


def _rings_of(layer: AttentionLayer, forward_batch: ForwardBatch) -> RingStep:
    states = forward_batch.states
    assert states is not None, "the maker of the batch gave it states"
    k, v = ring_buffers(layer, forward_batch)
    return RingStep(k=k, v=v, slots=states.slots, first_slots=states.first_slots)


def _by_request(forward_batch: ForwardBatch) -> Sequence[tuple[int, int, int, int]]:
    """The segments of a prefill, with the index of the request in place of the table's row."""
    segments = forward_batch.segments()
    return [(i, one.begin, one.prefix, one.new) for i, one in enumerate(segments)]
