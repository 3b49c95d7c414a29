"""4-bit floats as a GPU's instructions unpack them, which are carried out here one by one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import pytest
import torch

from sglang.srt.layers.quantization.quantized_tensor import E2M1, E8M0
from sglang.test.ci.ci_register import register_cpu_ci

pytest.importorskip("triton")
from sglang.srt.layers.triton_ops.scaled import fp4

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

WORD: Final = 0xFFFFFFFF


def permuted(low: int, high: int, selector: int) -> int:
    """PTX's `prmt.b32`: bytes of both words by number, or eight copies of their sign bits."""
    both, out = low | high << 32, 0
    for place in range(4):
        chosen = selector >> 4 * place & 15
        byte = both >> 8 * (chosen & 7) & 255
        if chosen & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << 8 * place
    return out


def looked_up(a: int, b: int, c: int, table: int) -> int:
    """PTX's `lop3.b32`: any function of three bits."""
    out = 0
    for place in range(32):
        index = (a >> place & 1) << 2 | (b >> place & 1) << 1 | (c >> place & 1)
        out |= (table >> index & 1) << place
    return out


def on_halves(run: Callable[..., torch.Tensor], *words: int) -> int:
    """Two products of bf16, each rounded once."""
    pairs = [torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32) for word in words]
    values = [pair.to(torch.uint16).view(torch.bfloat16).double() for pair in pairs]
    first, second = run(*values).to(torch.bfloat16).view(torch.uint16).tolist()
    return int(first | second << 16)


OPERATIONS: Final[dict[str, Callable[..., int]]] = {
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & WORD,
    "mov.b32": lambda a: a,
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
    "fma.rn.bf16x2": lambda *words: on_halves(lambda a, b, c: a * b + c, *words),
    "mul.rn.bf16x2": lambda *words: on_halves(torch.mul, *words),
}


def run(code: str, **registers: int) -> dict[str, int]:
    """The registers after some instructions; operands are called as in the code."""
    for line in re.findall(r"[^;{}]+(?=;)", code):
        name, *operands = re.split(r"[ ,]+", line.strip())
        if name == ".reg":
            continue
        to, *given = operands
        values = [registers[one] if one in registers else int(one, 0) for one in given]
        registers[to] = OPERATIONS[name](*values)
    return registers


WORDS: Final = [sum((4 * n + k) % 256 << 8 * k for k in range(4)) for n in range(64)]
"""All bytes, four in a word."""


def floats(word: int) -> list[float]:
    """The low and the high floats of four bytes."""
    all_bytes = [word >> 8 * place & 255 for place in range(4)]
    return [E2M1[one & 15] for one in all_bytes] + [E2M1[one >> 4] for one in all_bytes]


def test_bytes_become_integers_in_fp32() -> None:
    zero = int(fp4.ZERO.value)
    for word in WORDS:
        found = run(fp4.FP4_TO_FLOATS.value, **{"$8": word})
        bits = torch.tensor([found[f"${place}"] for place in range(8)]).to(torch.uint32)
        got = (bits.view(torch.float32) - 128 - zero) / 2
        assert got.tolist() == floats(word)


@pytest.mark.parametrize("exponent", [0, 1, 2, 126, 127, 128, 253])
def test_bytes_become_numbers_in_bf16(exponent: int) -> None:
    """Also with the least scale, which is a subnormal number, and with the greatest."""
    bits = max(exponent << 7, 1 << 6)
    scales = {"$5": bits | bits << 16, "$6": bits | bits << 16}
    for word in WORDS:
        found = run(fp4.FP4_TO_BF16.value, **scales, **{"$4": word})
        got = torch.tensor(
            [found[f"${n}"] >> shift & 0xFFFF for n in range(4) for shift in (0, 16)]
        )
        want = (torch.tensor(floats(word)).double() * E8M0[exponent]).to(torch.bfloat16)
        assert torch.equal(got.to(torch.uint16).view(torch.bfloat16), want)


def test_pairs_have_their_own_scales() -> None:
    found = run(fp4.FP4_TO_BF16.value, **{"$4": 0x22222222, "$5": 0x40003F80, "$6": 0x40804100})
    # 1, times 1, 2, 8 and 4.
    assert [found[f"${n}"] for n in range(4)] == [0x40003F80, 0x40804100] * 2
