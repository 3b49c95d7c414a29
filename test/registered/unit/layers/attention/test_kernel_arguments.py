"""Kernels of attention know which keys a step writes, and suit indices at any place in memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sglang
from rigs.models.attention_cases import (
    PagedContexts,
    assert_close,
    attend,
    attention_layer,
    queries,
)
from sglang.srt.layers.attention import partial_attention, triton_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionConfig
from sglang.srt.layers.forward_batch_info import AttentionInputs, ForwardMode
from sglang.srt.mem_cache.device.state_spec import KVSpec
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

KERNELS = Path(sglang.__file__).parent / "srt" / "layers" / "triton_ops" / "attention"
INDICES = {
    f"{name}_ptr"
    for name in "rows lens indptr slots first read track positions bounds track_lens".split()
}
"""Neighbours in one upload: those of a single request are aligned to 8 bytes, not to 16."""


def kernels() -> Iterator[tuple[str, set[str], set[str]]]:
    """Name of each kernel with indices, these, and those that may have any alignment."""
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
                continue
            given = {one.arg for one in node.args.args} & INDICES
            options = [
                keyword.value
                for decorator in node.decorator_list
                if isinstance(decorator, ast.Call)
                for keyword in decorator.keywords
                if keyword.arg == "do_not_specialize_on_alignment"
            ]
            if given:
                free = set(ast.literal_eval(options[0])) if options else set()
                yield f"{path.stem}:{node.name}", given, free


def test_indices_of_any_alignment_use_the_same_kernel() -> None:
    found = list(kernels())
    assert len(found) >= 5
    for name, given, free in found:
        assert given <= free, name


def test_attention_knows_which_keys_a_step_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads all other keys before the kernel that writes the step's keys has ended."""
    contexts = PagedContexts([70, 40], 2, 16, page_size=16, dtype=torch.float32, device="cpu")
    given: list[tuple[int, int]] = []

    def note(q: torch.Tensor, *_: Any, written: int, **__: Any) -> torch.Tensor:
        given.append((len(q), written))
        return q

    monkeypatch.setattr(triton_backend, "decode_attention", note)
    kv = KVSpec.of_heads((0,), 2, 16, torch.float32)
    config = AttentionConfig(
        num_heads=4, specs={kv.name: kv}, page_size=16, dtype=torch.float32, device="cpu"
    )
    backend, layer = triton_backend.TritonAttnBackend(config), attention_layer(4, 2, 16)
    step = contexts.decode_batch()
    backend.forward_decode(queries(2, 4, 16, torch.float32, "cpu"), layer, step)
    verified = replace(
        step, forward_mode=ForwardMode.TARGET_VERIFY, input_ids=step.input_ids.repeat(4)
    )
    many = queries(8, 4, 16, torch.float32, "cpu")
    backend.forward_decode_gated(many, many, layer, verified)
    extend = contexts.extend_batch([3, 30])
    some = queries(77, 4, 16, torch.float32, "cpu")
    inputs = AttentionInputs(some, some, some, rows=torch.tensor([66, 76]))
    backend.forward_extend(inputs, layer, extend)
    assert given == [(2, 1), (8, 4), (2, 67)]


def test_every_way_to_attend_counts_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN, of which a plain softmax takes the place, knows no sinks; kernels are given them."""
    prefix, new, heads = 1500, 1100, 4
    contexts = PagedContexts([prefix + new], 2, 16, page_size=1, dtype=torch.float32, device="cpu")
    given: list[torch.Tensor] = []

    def densely(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part = partial_attention.attend(
            *map(partial_attention.heads_first, (q, k, v)), scale=scaling, causal=causal
        )
        return part.out[0].transpose(0, 1).contiguous(), part.lse[0].contiguous()

    def merge(out: torch.Tensor, lse: torch.Tensor, *other: torch.Tensor) -> torch.Tensor:
        weight = torch.sigmoid(lse - other[1]).t().unsqueeze(2)
        out.copy_(out * weight + other[0] * (1 - weight))
        return torch.logaddexp(lse, other[1])

    def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
        given.append(sinks)
        out.mul_(torch.sigmoid(lse - sinks.unsqueeze(1)).t().unsqueeze(2))

    def note(q: torch.Tensor, *rest: Any, sinks: torch.Tensor, **__: Any) -> torch.Tensor:
        given.append(sinks)
        return q.flatten(1)

    for name, stub in (
        ("dense_attention", densely),
        ("merge_into_", merge),
        ("add_sinks_", add_sinks),
        ("decode_attention", note),
        ("extend_attention", note),
    ):
        monkeypatch.setattr(triton_backend, name, stub)
    kv = KVSpec.of_heads((0,), 2, 16, torch.float32)
    config = AttentionConfig(
        num_heads=heads, specs={kv.name: kv}, page_size=1, dtype=torch.float32, device="cpu"
    )
    backend, layer = triton_backend.TritonAttnBackend(config), attention_layer(heads, 2, 16)
    layer.sinks = torch.tensor([2.0, -50.0, 60.0, 0.5])
    backend._can_be_dense = True
    step = contexts.extend_batch([prefix])
    backend.init_forward_metadata(step)
    q = queries(new, heads, 16, torch.float32, "cpu")
    k, v = (x[step.out_cache_loc] for x in (contexts.k, contexts.v))
    got = backend.forward(AttentionInputs(q, k, v), layer, step)
    assert len(backend._plan.dense) == 1
    count = backend._plan.dense[0].end
    want = attend(q, *contexts.context(0, prefix + new), prefix=prefix, sinks=layer.sinks)
    assert_close(got[:count], want[:count], torch.float32)
    last = AttentionInputs(q, k, v, rows=torch.tensor([new - 1]))
    backend.forward(last, layer, step)
    backend.forward_decode(q[:1], layer, contexts.decode_batch())
    backend.forward_decode_gated(q[:1], q[:1], layer, contexts.decode_batch())
    backend._can_be_dense = False
    backend.init_forward_metadata(step)
    backend.forward(AttentionInputs(q, k, v), layer, step)
    assert len(given) == 5 + (count < new)
    assert all(one is layer.sinks for one in given)
