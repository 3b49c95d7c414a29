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
from rigs.models.attention_cases import PagedContexts, attention_layer, queries
from sglang.srt.layers.attention import triton_backend
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
