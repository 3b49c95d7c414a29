"""Refusals before torch is imported: devices whose package is missing, and layouts."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rigs.models.recorded_calls import fake_torch_npu
from sglang.srt.distributed.device_communicators.mooncake_protocol import RdmaDevice
from sglang.srt.entrypoints import start_checks
from sglang.srt.entrypoints.start_checks import (
    check_device,
    check_disaggregation,
    check_host_layout,
    check_seed,
    check_storage,
)
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

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


def role_args(mode: str, port: int = 8998) -> ServerArgs:
    return ServerArgs(
        model_path="m", disaggregation_mode=mode, disaggregation_bootstrap_port=port
    ).resolve()


def test_nixl_needs_its_package_and_not_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    args = ServerArgs(
        model_path="m", disaggregation_mode="decode", disaggregation_transfer_backend="nixl"
    ).resolve()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^--disaggregation-transfer-backend nixl: .*extra nixl"):
        check_disaggregation(args)
    monkeypatch.setattr("importlib.util.find_spec", {"nixl_cu12": object()}.get)
    check_disaggregation(args)
    monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "NVLINK")
    with pytest.raises(ValueError, match=r"^SGLANG_MOONCAKE_CUSTOM_MEM_POOL=NVLINK does not go"):
        check_disaggregation(args)


def test_a_prefill_server_needs_a_free_bootstrap_port() -> None:
    with envs.MOONCAKE_PROTOCOL.override("tcp"), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f":{port}: .* another with --disaggregation-boot"):
            check_disaggregation(role_args("prefill", port))
        check_disaggregation(role_args("prefill", get_free_port()))
        check_disaggregation(role_args("decode"))


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_roles_need_mooncake_with_its_transfer_engine(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with envs.MOONCAKE_PROTOCOL.override("bogus"), pytest.raises(ValueError, match="bogus"):
        check_disaggregation(role_args(mode))
    with (
        envs.SGLANG_MOONCAKE_CUSTOM_MEM_POOL.override("NVLINKS"),
        pytest.raises(ValueError, match="'NVLINKS' is unknown; use one of: NVLINK, BAREX"),
    ):
        check_disaggregation(role_args(mode))
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    with pytest.raises(ValueError, match=f"^--disaggregation-mode {mode}: .*no module 'mooncake.e"):
        check_disaggregation(role_args(mode))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(ValueError, match="there is no package 'mooncake'"):
        check_disaggregation(role_args(mode))
    check_disaggregation(ServerArgs(model_path="m").resolve())


SEED = ServerArgs(
    model_path="m", remote_instance_weight_loader_start_seed_via_transfer_engine=True
).resolve()
STORE = ServerArgs(
    model_path="m",
    enable_hierarchical_cache=True,
    hicache_storage_backend="mooncake",
    hicache_storage_backend_extra_config='{"on_unreachable": "degrade"}',
).resolve()
USERS: dict[str, Callable[[], None]] = {
    "seed": lambda: check_seed(SEED),
    "prefill": lambda: check_disaggregation(role_args("prefill", get_free_port())),
    "store": lambda: check_storage(STORE),
}


@pytest.fixture
def rdma_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two devices, on which a fallback to TCP is allowed."""
    there = [RdmaDevice(f"mlx5_{index}", "mlx5_core") for index in range(2)]
    monkeypatch.setattr(start_checks, "list_rdma_devices", lambda: there)
    monkeypatch.setenv("SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK", "1")
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)


@pytest.mark.usefixtures("rdma_host")
@pytest.mark.parametrize("user", USERS)
def test_devices_by_gpu_are_accepted_and_misspelt_ones_refused(
    user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = USERS[user]
    by_gpu = '{"0": "mlx5_0", "1": "mlx5_1"}'
    (tmp_path / "x.json").write_text(by_gpu)
    for devices in ("mlx5_1", by_gpu, str(tmp_path / "x.json")):
        monkeypatch.setenv("MOONCAKE_DEVICE", devices)
        check()
    monkeypatch.setenv("MOONCAKE_DEVICE", "mlx5_9")
    with pytest.raises(ValueError, match=r"MOONCAKE_DEVICE.* names mlx5_9, which this host does"):
        check()
    monkeypatch.setenv("MOONCAKE_DEVICE", "{")
    with pytest.raises(ValueError, match=r"MOONCAKE_DEVICE.* \{: not JSON"):
        check()


@pytest.mark.usefixtures("rdma_host")
def test_a_protocol_that_no_store_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "barex")
    check_seed(SEED)  # whether the wheel has it takes Mooncake's library
    with pytest.raises(ValueError, match="backend mooncake cannot use MOONCAKE_PROTOCOL=barex"):
        check_storage(STORE)


@pytest.mark.usefixtures("rdma_host")
def test_an_engine_that_would_offload_its_own_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_ENABLE_SSD_OFFLOAD", "1")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "/ssd")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "1gb")
    with pytest.raises(ValueError, match=r"enable_ssd_offload .*only store nodes"):
        check_storage(STORE)


def test_looking_for_mooncake_loads_nothing() -> None:
    code = (
        "import sys\n"
        "from sglang.srt.entrypoints.start_checks import check_disaggregation\n"
        "from sglang.srt.environ import envs\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "args = ServerArgs(model_path='m', disaggregation_mode='decode').resolve()\n"
        "with envs.MOONCAKE_PROTOCOL.override('tcp'): check_disaggregation(args)\n"
        "print([one in sys.modules for one in ('torch', 'mooncake.engine')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False]\n"


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
