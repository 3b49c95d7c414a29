"""Kernels that are launched without a look at their arguments: one binary, whatever they are."""

# ruff: noqa: ANN001, ANN202  (the language of the kernels is not Python)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton import knobs
from triton.runtime.jit import JITFunction

from sglang.srt.hardware_backend.cuda.bound_kernel import BoundKernel, unspecialized
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")
register_cuda_ci(est_time=10, suite="base-b-test-1-gpu-large")

ON_GPU = detect_device() == "cuda"
DEVICE = "cuda" if ON_GPU else "cpu"


@unspecialized
def _add(
    source: tl.int64, target: tl.int64, value: tl.int64, count: tl.int32, BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The interpreter makes a small integer an int32, whatever its annotation says.
    source = source.to(tl.int64).to(tl.pointer_type(tl.int64))
    target = target.to(tl.int64).to(tl.pointer_type(tl.int64))
    words = tl.load(source + at, mask=at < count)
    tl.store(target + at, words * FACTOR + value, mask=at < count)


class Binary:
    """Takes notes of its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.launches.append((grid, *arguments))


class Kernel:
    """A kernel of Triton that is compiled at once."""

    fn = staticmethod(_add.fn)
    __name__ = "_add"

    def __init__(self) -> None:
        self.binaries: list[Binary] = []
        self.constants: list[dict[str, object]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Binary]:
        def launch(*arguments: int, **constants: object) -> Binary:
            self.binaries.append(Binary())
            self.constants.append(constants)
            return self.binaries[-1]

        return launch


def test_a_binary_is_found_once_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    monkeypatch.setattr("torch.cuda.current_device", lambda: current[0])
    kernel = Kernel()
    bound = BoundKernel(kernel, FACTOR=3, BLOCK=64, num_warps=2)
    bound((1, 1, 1), 16, 8, 1, 5)
    bound((2, 1, 1), 17, 9, 32, 6)
    current[0] = 1
    bound((1, 1, 1), 16, 8, 1, 5)
    bound((3, 1, 1), 1, 2, 3, 4)
    assert kernel.constants == [{"FACTOR": 3, "BLOCK": 64, "num_warps": 2}] * 2
    assert [binary.launches for binary in kernel.binaries] == [
        [((2, 1, 1), 17, 9, 32, 6, 64, 3)],
        [((3, 1, 1), 1, 2, 3, 4, 64, 3)],
    ], "constants follow the parameters, in the kernel's order"


def test_wrong_numbers_of_arguments_and_constants_are_refused() -> None:
    with pytest.raises(TypeError, match=r"_add: constants \['FACTOR'\] have no value"):
        BoundKernel(Kernel(), BLOCK=64)
    bound = BoundKernel(Kernel(), BLOCK=64, FACTOR=1)
    with pytest.raises(TypeError, match="_add: 3 arguments for 4 parameters"):
        bound((1, 1, 1), 1, 2, 3)


def test_parameters_have_types_and_come_first() -> None:
    def constant_first(SIZE: tl.constexpr, source: tl.int64): ...

    def untyped(source, SIZE: tl.constexpr): ...

    def a_float(value: tl.float32): ...

    for wrong, message in (
        (constant_first, "constant_first: constants come after all parameters"),
        (untyped, "untyped: source needs one of the types"),
        (a_float, "a_float: value needs one of the types"),
    ):
        with pytest.raises(TypeError, match=message):
            unspecialized(wrong)


@pytest.mark.skipif(knobs.runtime.interpret, reason="interpreted kernels have no binaries")
def test_triton_looks_at_no_value() -> None:
    assert isinstance(_add, JITFunction)
    kinds = {one.name: (one.annotation_type, one.do_not_specialize) for one in _add.params[:4]}
    assert kinds == {
        "source": ("i64", True), "target": ("i64", True), "value": ("i64", True),
        "count": ("i32", True),
    }  # fmt: skip


@pytest.mark.skipif(
    not (ON_GPU or knobs.runtime.interpret), reason="needs a GPU, or TRITON_INTERPRET=1"
)
def test_all_values_are_right_with_one_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that 16 divides and that it does not, short and long integers, 1."""
    bound = BoundKernel(_add, BLOCK=64, FACTOR=2)
    words = torch.arange(200, device=DEVICE)
    for index, (begin, count, value) in enumerate([(0, 128, 5), (1, 1, 1), (3, 64, -(1 << 40))]):
        if index and ON_GPU:
            monkeypatch.setattr(JITFunction, "run", _never)
        target = torch.zeros_like(words)
        source = words[begin:]
        bound((-(-count // 64), 1, 1), source.data_ptr(), target.data_ptr(), value, count)
        assert torch.equal(target[:count], source[:count] * 2 + value)
        assert not target[count:].any()


def _never(*_: Any, **__: Any) -> None:
    raise AssertionError("the binary is known")
