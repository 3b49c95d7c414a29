"""Products of a CPU: rows of zeros that save compiling change nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers.linear import apply_linear
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 7, 32, 33, 40, 64, 65, 100, 500, 513])
def test_any_number_of_rows_gives_each_its_product(rows: int, dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 48, generator=numbers).to(dtype)
    weight = torch.randn(24, 48, generator=numbers).to(dtype)
    bias = torch.randn(24, generator=numbers).to(dtype)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    got = apply_linear(x, weight, bias)
    assert got.shape == (rows, 24) and got.dtype == dtype
    # The product is rounded, then its sum with the bias; sums are in fp32.
    unit = torch.finfo(dtype).eps / 2
    summed = 48 * torch.finfo(torch.float32).eps * (x.double().abs() @ weight.double().abs().T)
    bound = unit * (2 * wanted.abs() + bias.double().abs()) + summed
    assert ((got.double() - wanted).abs() <= bound).all()
    out = torch.empty(rows, 24)
    assert apply_linear(x, weight, bias, out=out, out_dtype=torch.float32) is out
    assert torch.equal(out, got.float())


def test_numbers_of_rows_that_are_multiplied_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = set()
    product = F.linear

    def noting(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        multiplied.add(x.shape[0])
        return product(x, weight, bias)

    monkeypatch.setattr("sglang.srt.layers.linear.F.linear", noting)
    weight = torch.ones(2, 4, dtype=torch.bfloat16)
    for rows in range(33, 2049):
        apply_linear(torch.ones(rows, 4, dtype=torch.bfloat16), weight)
        assert rows <= min(n for n in multiplied if n >= rows) <= rows * 1.25
    assert len(multiplied) == 4 * 6  # from 40 to 2,048
