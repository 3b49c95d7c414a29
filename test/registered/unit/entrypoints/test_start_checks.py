"""What is refused before torch is imported: devices whose package is missing, and layouts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang.srt.entrypoints.start_checks import check_device, check_host_layout
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.recorded_calls import fake_torch_npu

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

NPU_FLAGS = [
    {"device": "npu"},
    {"attention_backend": "ascend"},
    {"enable_hierarchical_cache": True, "hicache_io_backend": "kernel_ascend"},
]


@pytest.mark.parametrize("flags", NPU_FLAGS)
def test_what_needs_torch_npu_is_refused_by_name(
    flags: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ServerArgs.from_kwargs(model_path="m", **flags).resolve()
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    name, value = list(flags.items())[-1]
    flag = f"--{name.replace('_', '-')} {value}"
    with pytest.raises(ValueError, match=f"^{flag}: torch_npu is not installed; install CANN"):
        check_device(args)
    monkeypatch.setitem(sys.modules, "torch_npu", fake_torch_npu([], {}))
    check_device(args)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_other_devices_need_no_package(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    check_device(ServerArgs(model_path="m", device=device).resolve())


@pytest.mark.parametrize(
    ("device", "io_backend", "message"),
    [
        ("cuda", "auto", "on cuda with --hicache-io-backend auto; on cuda use kernel with"),
        ("cuda", "direct", "on cuda with --hicache-io-backend direct; on cuda use kernel with"),
        ("cpu", "kernel", "--hicache-io-backend kernel does not work on cpu; on cpu use direct"),
        ("cpu", "kernel_ascend", "kernel_ascend does not work on cpu; on cpu use direct with"),
        ("cpu", "direct", None),
        ("npu", "auto", None),
        ("auto", "kernel", None),  # which device that is takes torch
    ],
)
def test_a_layout_that_the_device_cannot_copy_is_refused(
    device: str, io_backend: str, message: str | None
) -> None:
    args = ServerArgs(
        model_path="m",
        device=device,
        enable_hierarchical_cache=True,
        hicache_io_backend=io_backend,
        hicache_mem_layout="page_first_kv_split",
    ).resolve()
    if message is None:
        check_host_layout(args)
        return
    with pytest.raises(ValueError, match=message):
        check_host_layout(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("device='npu'", "--device npu: torch_npu is not installed"),
        (
            "device='cuda', enable_hierarchical_cache=True, "
            "hicache_mem_layout='page_first_kv_split'",
            "--hicache-mem-layout page_first_kv_split does not work on cuda",
        ),
    ],
)
def test_looking_imports_no_torch(flags: str, message: str) -> None:
    code = (
        "import sys; sys.modules['torch_npu'] = None\n"
        "from sglang.srt.entrypoints.start_checks import check_start\n"
        "from sglang.srt.server_args import ServerArgs\n"
        f"try: check_start(ServerArgs(model_path='m', {flags}).resolve())\n"
        "except ValueError as error: print(error, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(message)
    assert done.stdout.endswith(" False\n")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
