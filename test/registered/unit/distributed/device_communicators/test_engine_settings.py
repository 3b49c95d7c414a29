"""Transport that a Transfer Engine starts with, and refusals before anything starts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rigs.stores.fake_transfer_engine import (
    BASE,
    FakeCall,
    FakeTransferEngine,
    FakeTransferEngines,
    apart,
    listening_peer,
)
from sglang.srt.constants import MIB
from sglang.srt.distributed import device_context
from sglang.srt.distributed.device_communicators import mooncake_transfer_engine as module
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
    get_mooncake_transfer_engine,
    init_mooncake_transfer_engine,
)
from sglang.srt.distributed.device_communicators.transfer_types import TransferOp
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs
from sglang.srt.hardware_backend import device_runtime
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

ALL = ("rdma", "tcp", "efa", "ascend", "nvlink", "nvlink_intra", "barex")
PLAIN = ("rdma", "tcp")
"""Protocols of a wheel for CPUs."""


class Host:
    """One process on a machine of the test's own making."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._patch = patch
        self.engines = FakeTransferEngines()
        (root / "class").mkdir()

    def add_device(self, name: str, driver: str) -> None:
        (self._root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (self._root / "class" / name / "device").mkdir(parents=True)
        link = self._root / "class" / name / "device" / "driver"
        link.symlink_to(self._root / "drivers" / driver)

    def set_device(self, device: str) -> None:
        self._patch.setattr(device_context, "_device", None)
        mark_device_set(device)

    def start(
        self, protocol: str | None = None, *, wheel: tuple[str, ...] = ALL, **kwargs: Any
    ) -> MooncakeTransferEngine:
        if protocol is not None:
            self._patch.setenv("MOONCAKE_PROTOCOL", protocol)
        return MooncakeTransferEngine(
            kwargs.pop("hostname", "10.0.0.1"),
            **kwargs,
            new_engine=self.engines.new_engine,
            supported=wheel,
            rdma_root=self._root / "class",
        )

    def refusal(self, protocol: str, **kwargs: Any) -> str:
        """The one line; no engine object was made."""
        with pytest.raises(ValueError) as refused:
            self.start(protocol, **kwargs)
        assert not self.engines.made
        assert "\n" not in str(refused.value)
        return str(refused.value)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    for name in envs.fields():
        monkeypatch.setenv(name, "")  # so that what a test exports is taken back
        monkeypatch.delenv(name)
    made = Host(tmp_path, monkeypatch)
    made.set_device("cuda:0")
    return made


DRIVERS = {
    "none": (),
    "mlx": ("mlx5_core",),
    "erdma": ("erdma",),
    "efa": ("efa",),
    "both": ("efa", "mlx5_core"),
}
RDMA = {"mlx", "erdma", "both"}


@pytest.mark.parametrize("wheel", [ALL, PLAIN], ids=["full wheel", "plain wheel"])
@pytest.mark.parametrize("drivers", DRIVERS)
@pytest.mark.parametrize(
    ("protocol", "on", "cure"),
    [
        ("rdma", RDMA, {"none": "PROTOCOL=tcp", "efa": "set MOONCAKE_PROTOCOL=efa"}),
        (
            "efa",
            {"efa", "both"},
            {
                "none": "PROTOCOL=tcp",
                "mlx": "set MOONCAKE_PROTOCOL=rdma",
                "erdma": "set MOONCAKE_PROTOCOL=rdma",
            },
        ),
        ("tcp", set(DRIVERS), {}),
        ("nvlink", set(DRIVERS), {}),
        ("nvlink_intra", set(DRIVERS), {}),
        (
            "barex",
            RDMA,
            {"none": "no eRDMA or RDMA device: set MOONCAKE_PROTOCOL=tcp", "efa": "are EFA's"},
        ),
    ],
)
def test_wheel_and_drivers_decide_the_protocol(
    host: Host,
    protocol: str,
    on: set[str],
    cure: dict[str, str],
    drivers: str,
    wheel: tuple[str, ...],
) -> None:
    for index, driver in enumerate(DRIVERS[drivers]):
        host.add_device(f"dev{index}", driver)
    if protocol not in wheel:
        assert "built without it" in host.refusal(protocol, wheel=wheel)
        return
    if drivers not in on:
        assert cure[drivers] in host.refusal(protocol, wheel=wheel)
        return
    engine = host.start(protocol, wheel=wheel)
    assert host.engines.made[0].initialized == [("10.0.0.1", "P2PHANDSHAKE", protocol, "")]
    assert engine.describe()["protocol"] == protocol
    assert not engine.describe()["is_fallback"]


def test_the_default_is_rdma(host: Host) -> None:
    host.add_device("mlx5_0", "mlx5_core")
    assert host.start().describe()["protocol"] == "rdma"


@pytest.mark.parametrize(
    ("protocol", "message"),
    [("bogus", "'bogus' is unknown"), ("cxl", "this engine does not support it")],
)
def test_names_that_are_none_of_ours(host: Host, protocol: str, message: str) -> None:
    assert message in host.refusal(protocol)


@pytest.mark.parametrize(
    ("variable", "value", "refused"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:true", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,expandable_segments:False", False),
        ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "NVLINK", True),
        ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK", True),
        ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "", False),
    ],
)
@pytest.mark.parametrize("protocol", ["efa", "tcp"])
def test_efa_takes_plain_allocations_alone(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    variable: str,
    value: str,
    refused: bool,
) -> None:
    host.add_device("rdmap0s6", "efa")
    monkeypatch.setenv(variable, value)
    if protocol == "efa" and refused:
        assert variable in host.refusal(protocol)
    else:
        assert host.start(protocol).describe()["protocol"] == protocol


@pytest.mark.parametrize(
    ("variable", "value", "refused"),
    [
        ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK", False),
        ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "NVLINK", True),
        ("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "BAREX", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
    ],
)
def test_nvlink_within_a_node_exports_plain_allocations_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, refused: bool
) -> None:
    host.set_device("cuda")
    monkeypatch.setenv(variable, value)
    if refused:
        assert variable in host.refusal("nvlink_intra")
    else:
        engine = host.start("nvlink_intra")
        assert engine.stays_on_host


def test_an_unknown_pool_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE")
    assert "'INTRA_NODE' is unknown" in host.refusal("tcp")


def test_a_fallback_that_is_allowed_is_said_and_shown(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK", "1")
    with caplog.at_level(logging.WARNING):
        facts = host.start("rdma").describe()
    assert "Mooncake uses tcp" in caplog.text
    assert (facts["requested_protocol"], facts["protocol"]) == ("rdma", "tcp")
    assert facts["is_fallback"]


@pytest.mark.parametrize(
    ("protocol", "forced"),
    [
        ("tcp", ["MC_FORCE_TCP"]),
        ("nvlink", ["MC_FORCE_MNNVL"]),
        ("nvlink_intra", ["MC_INTRANODE_NVLINK"]),
        ("barex", ["USE_BAREX"]),
        ("rdma", []),
    ],
)
def test_mooncake_is_made_to_install_what_was_chosen(
    host: Host, protocol: str, forced: list[str]
) -> None:
    """Mooncake goes by the devices that it sees and by these variables, not the protocol's name."""
    host.add_device("mlx5_0", "mlx5_core")
    host.start(protocol)
    assert host.engines.made[0].forced == forced


@pytest.mark.parametrize(
    ("protocol", "request_bytes", "batch_bytes"),
    [
        ("tcp", 16 * MIB, 256 * MIB),
        ("rdma", 16 * MIB, 256 * MIB),
        ("nvlink_intra", 256 * MIB, 8192 * MIB),
    ],
)
def test_requests_are_cut_where_several_move_at_once(
    host: Host, protocol: str, request_bytes: int, batch_bytes: int
) -> None:
    host.add_device("mlx5_0", "mlx5_core")
    engine = host.start(protocol)
    assert engine.protocol == protocol
    settings = engine._settings
    assert (settings.request_bytes, settings.batch_bytes) == (request_bytes, batch_bytes)


def test_the_library_is_called_with_the_process_s_device_as_current(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake maps a peer's memory for the current device of the thread that calls it."""
    entered: dict[int, str] = {}

    class Runtime:
        def __init__(self, device: str) -> None:
            self._device = device

        def enter_thread(self) -> None:
            entered[threading.get_ident()] = self._device

    monkeypatch.setattr(device_runtime, "device_runtime", Runtime)
    host.set_device("cuda:3")
    seen: list[str | None] = []

    def answer(_: FakeTransferEngine, call: FakeCall) -> int:
        if call.requests:
            seen.append(entered.get(threading.get_ident()))
        return 0

    host.engines.answer = answer
    engine = host.start("nvlink_intra")
    engine.register(BASE, 64 * MIB)
    with listening_peer() as peer:
        engine.transfer(peer, TransferOp.READ, apart(3), timeout=30)
    assert seen == ["cuda:3"]
    engine.close()


@pytest.mark.parametrize("protocol", ["barex", "rdma"])
def test_a_fallback_is_for_rdma_alone(
    host: Host, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK", "1")
    if protocol == "barex":
        assert "set MOONCAKE_PROTOCOL=tcp" in host.refusal(protocol)
    host.add_device("mlx5_0", "mlx5_core")
    message = "names mlx5_9, which this host does not have; it has: mlx5_0"
    assert message in host.refusal(protocol, ib_device="mlx5_9")


@pytest.mark.parametrize("wheel", [ALL, PLAIN], ids=["full wheel", "plain wheel"])
@pytest.mark.parametrize("drivers", DRIVERS)
def test_tcp_is_forced_only_where_mooncake_would_prefer_something(
    host: Host, wheel: tuple[str, ...], drivers: str
) -> None:
    """NVLink, if the wheel has it, or any InfiniBand device."""
    for index, driver in enumerate(DRIVERS[drivers]):
        host.add_device(f"device_{index}", driver)
    host.start("tcp", wheel=wheel)
    forced = ["MC_FORCE_TCP"] if wheel is ALL or drivers != "none" else []
    assert host.engines.made[0].forced == forced


def test_forced_tcp_is_not_taken_for_rdma(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.add_device("mlx5_0", "mlx5_core")
    monkeypatch.setenv("MC_FORCE_TCP", "")
    assert "unset MC_FORCE_TCP" in host.refusal("rdma")
    host.start("tcp")


def test_nvlink_needs_a_cuda_device(host: Host) -> None:
    host.set_device("cpu")
    for protocol in ("nvlink", "nvlink_intra"):
        assert "this process is on cpu" in host.refusal(protocol)


# -- Ascend --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("physical", "gpu_id", "name"), [(None, 3, "npu_3"), ("5", 3, "npu_5"), ("5", None, "npu_5")]
)
@pytest.mark.parametrize("by_variable", [True, False])
def test_ascend_tells_its_npu(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    physical: str | None,
    gpu_id: int | None,
    name: str,
    by_variable: bool,
) -> None:
    host.set_device("npu:3")
    monkeypatch.setenv("ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE", str(int(by_variable)))
    if physical is not None:
        monkeypatch.setenv("ASCEND_NPU_PHY_ID", physical)
    engine = host.start("rdma" if by_variable else "ascend", gpu_id=gpu_id)
    ((local_name, _, protocol, _),) = host.engines.made[0].initialized
    address, port, npu = local_name.split(":")
    assert (address, npu, protocol) == ("10.0.0.1", name, "ascend")
    assert 0 < int(port) < 65536
    assert engine.get_session_id() == "10.0.0.1:15000"


def test_ascend_needs_an_npu_and_its_number(host: Host) -> None:
    assert "built without it" in host.refusal("ascend", wheel=PLAIN)
    assert "this process is on cuda:0" in host.refusal("ascend")
    host.set_device("npu:0")
    assert "ASCEND_NPU_PHY_ID=-1 is no NPU" in host.refusal("ascend")


# -- devices -------------------------------------------------------------------------------------


def test_devices_are_those_of_this_gpu(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(2):
        host.add_device(f"mlx5_{index}", "mlx5_core")
    by_gpu = '{"0": "mlx5_0", "1": "mlx5_1"}'
    engine = host.start("rdma", gpu_id=1, ib_device=by_gpu)
    assert engine.get_ib_device() == "mlx5_1"
    assert host.engines.made[0].initialized[0][3] == "mlx5_1"
    monkeypatch.setenv("MOONCAKE_DEVICE", "mlx5_0, mlx5_1")
    assert host.start("rdma").get_ib_device() == "mlx5_0,mlx5_1"
    with pytest.raises(ValueError, match=r"--disaggregation-ib-device.*this process has none"):
        host.start("rdma", ib_device=by_gpu)


def test_missing_devices_are_refused(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.add_device("mlx5_0", "mlx5_core")
    host.add_device("rdmap0s6", "efa")
    assert "names mlx5_9, which this host" in host.refusal("rdma", ib_device="mlx5_0,mlx5_9")
    assert "set MOONCAKE_PROTOCOL=efa" in host.refusal("rdma", ib_device="rdmap0s6")
    host.start("tcp", ib_device="mlx5_9")
    assert "mlx5_9 is ignored" in caplog.text


# -- starting ------------------------------------------------------------------------------------


def test_an_engine_that_does_not_start_names_transport_address_and_remedy(host: Host) -> None:
    host.engines.initialize_code = -1
    with pytest.raises(RuntimeError, match=r"over tcp at 10\.0\.0\.1.*MOONCAKE_PROTOCOL") as raised:
        host.start("tcp")
    assert "\n" not in str(raised.value)


def test_a_port_that_another_process_has_taken_meanwhile_is_replaced(host: Host) -> None:
    host.engines.initialize_errors = ["bind: Address already in use"] * 3
    host.start("tcp")
    assert [len(made.initialized) for made in host.engines.made] == [1] * 4


@pytest.mark.parametrize(("error", "tries"), [("bind: Address already in use", 4), ("bad", 1)])
def test_other_errors_of_a_start_and_ports_that_stay_in_use_end_it(
    host: Host, error: str, tries: int
) -> None:
    host.engines.initialize_errors = [error] * 4
    with pytest.raises(RuntimeError, match=error):
        host.start("tcp")
    assert len(host.engines.made) == tries


def test_there_is_one_initialize_and_it_happens_once(host: Host) -> None:
    engine = host.start("tcp")
    with pytest.raises(RuntimeError, match="runs already"):
        engine.initialize("10.0.0.2", "")
    assert [len(made.initialized) for made in host.engines.made] == [1]


@pytest.fixture
def no_engine_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_engine", None)
    monkeypatch.setattr(module, "_engine_arguments", None)


@pytest.mark.usefixtures("no_engine_yet")
def test_a_process_has_one(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_mooncake_transfer_engine() is None
    make: Callable[..., MooncakeTransferEngine] = lambda *args: host.start(  # noqa: E731
        "tcp", hostname=args[0], gpu_id=args[1], ib_device=args[2]
    )
    monkeypatch.setattr(module, "MooncakeTransferEngine", make)
    first = init_mooncake_transfer_engine("10.0.0.1", gpu_id=0)
    assert init_mooncake_transfer_engine("10.0.0.1", gpu_id=0) is first
    assert get_mooncake_transfer_engine() is first
    with pytest.raises(ValueError, match="cannot have a second one"):
        init_mooncake_transfer_engine("10.0.0.2", gpu_id=0)
    assert len(host.engines.made) == 1
