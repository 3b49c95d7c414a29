"""What is refused before torch is imported: devices whose package is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sglang.srt.entrypoints.start_checks import check_device
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


def test_looking_for_a_device_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch_npu'] = None\n"
        "from sglang.srt.entrypoints.start_checks import check_device\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "try: check_device(ServerArgs(model_path='m', device='npu').resolve())\n"
        "except ValueError as error: print(error, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("--device npu: torch_npu is not installed")
    assert done.stdout.endswith(" False\n")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
