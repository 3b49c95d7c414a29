"""`sglang.check_env` on this machine, and on planted ones that lack something."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from sglang.check_env import main, to_text
from sglang.diagnosis.findings import Finding, State
from sglang.diagnosis.machine_facts import (
    gpu_findings,
    limit_findings,
    locked_finding,
    package_findings,
    rdma_findings,
)
from sglang.diagnosis.start_findings import transport_findings
from sglang.srt.distributed.device_communicators.mooncake_protocol import RdmaDevice
from sglang.srt.entrypoints import start_checks
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_free_ports
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

H200: Final = "NVIDIA H200, 143771 MiB, 580.65.06, 5, 16\n"
CPU_WHEEL: Final = "mooncake-transfer-engine-non-cuda"


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in findings}


def checked(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    status = main(["--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_this_machine_is_described_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = checked(capsys, "--port", "39217")
    assert found["ok"] is (status == 0)
    sections = {one["section"] for one in found["findings"]}
    assert sections == {"versions", "devices", "transports", "limits", "ports", "start"}
    (torch,) = (one for one in found["findings"] if one["name"] == "torch")
    assert torch["value"].startswith("2.")


def test_flags_and_a_port_in_use_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, found = checked(capsys, "--port", port, "--model-path", "/none")
    assert status == 1
    refused = {one["name"]: one["remedy"] for one in found["findings"] if one["state"] == "refused"}
    assert f"127.0.0.1:{port}" in refused["port"] and "/none" in refused["model"]
    assert f"127.0.0.1:{port} is in use" in ports_of(found)
    status, found = checked(capsys, "--tp-siz", "2")
    assert status == 1 and "did you mean --tp-size?" in json.dumps(found)


def ports_of(found: dict[str, Any]) -> list[str]:
    return [one["value"] for one in found["findings"] if one["section"] == "ports"]


def test_ports_are_those_of_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = get_free_ports(2)
    _, found = checked(capsys, "--port", str(one))
    assert ports_of(found) == [f"127.0.0.1:{one} is free"]
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(other))
    _, found = checked(capsys, "--port", str(one), "--host", "127.0.0.2", *prefill)
    assert ports_of(found) == [f"127.0.0.2:{port} is free" for port in (one, other)]


def test_it_makes_the_checks_of_a_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_planted(args: ServerArgs) -> None:
        raise ValueError(f"--port {args.port} is planted")

    monkeypatch.setattr(start_checks, "CHECKS", (*start_checks.CHECKS, check_planted))
    assert start_checks.check_tracing in start_checks.CHECKS
    _, found = checked(capsys, "--port", "39217")
    refused = {one["name"]: one["remedy"] for one in found["findings"]}
    assert refused["planted"] == "--port 39217 is planted"
    with pytest.raises(ValueError, match="--port 39217 is planted"):
        start_checks.check_start(ServerArgs(port=39217).resolve())


def test_flags_stand_for_variables_as_in_a_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "no such protocol")
    backend = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend")
    for name, is_refused in (("mooncake", True), ("mooncake_tcp", False)):
        _, found = checked(capsys, *backend, name)
        refused = [one["name"] for one in found["findings"] if one["state"] == "refused"]
        assert ("disaggregation" in refused) is is_refused, refused


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from sglang.check_env import main; main([]); "
        "raise SystemExit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a server would start" in done.stdout or "refused (!)" in done.stdout


def test_cuda_wheels_are_loaded_behind_torch() -> None:
    code = (
        "import sys; from sglang.diagnosis.start_findings import protocols_of_wheel; "
        "protocols_of_wheel(['mooncake-transfer-engine-cuda13']); "
        "raise SystemExit('torch' not in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_and_overlapping_packages_are_told() -> None:
    found = by_name(package_findings({"torch": "2.13.0"}))
    assert found["torch"].state is State.OK
    assert found["mooncake"].state is State.ABSENT and CPU_WHEEL in found["mooncake"].remedy
    both = {CPU_WHEEL: "0.3.13", "mooncake-transfer-engine-cuda13": "0.3.13"}
    found = by_name(package_findings(both))
    assert found["mooncake"].state is State.REFUSED
    assert "install the same files" in found["mooncake"].remedy


def test_a_gpu_with_packages_for_cpus_is_refused() -> None:
    versions = {"torch": "2.13.0+cpu", CPU_WHEEL: "0.3.13"}
    found = by_name(gpu_findings(versions, H200 * 2, "GPU0\tX\tNV18\nGPU1\tNV18\tX", has_node=True))
    assert found["gpu 1"].value == "NVIDIA H200, 143771 MiB, driver 580.65.06, PCIe 5 x16"
    assert found["nvlink"].value == "NV18"
    assert found["torch"].state is found["mooncake"].state is State.REFUSED
    fitting = {"torch": "2.13.0+cu130", "mooncake-transfer-engine-cuda13": "0.3.13"}
    found = by_name(gpu_findings(fitting, H200, "GPU0\tX", has_node=True))
    assert found.keys() == {"gpu 0", "nvlink"} and found["nvlink"].state is State.ABSENT


def test_a_driver_without_a_gpu_is_refused_and_no_driver_is_not() -> None:
    assert [one.state for one in gpu_findings({}, None, None, has_node=True)] == [State.REFUSED]
    assert [one.state for one in gpu_findings({}, None, None, has_node=False)] == [State.ABSENT]


def test_rdma_and_efa_devices_are_told_apart(tmp_path: Path) -> None:
    assert all(one.state is State.ABSENT for one in rdma_findings(tmp_path))
    for name, driver in (("mlx5_0", "mlx5_core"), ("rdmap0s6", "efa")):
        device = tmp_path / "sys/class/infiniband" / name / "device"
        device.mkdir(parents=True)
        target = tmp_path / "drivers" / driver
        target.mkdir(parents=True)
        (device / "driver").symlink_to(target)
    found = by_name(rdma_findings(tmp_path))
    assert found["rdma"].value == "mlx5_0 (mlx5_core)"
    assert found["efa"].value == "rdmap0s6 (efa)"


def test_transports_that_this_host_or_wheel_lacks_are_refused() -> None:
    wheel = frozenset({"rdma", "tcp"})
    with envs.MOONCAKE_PROTOCOL.override("rdma"):
        found = by_name(transport_findings([], wheel))
        assert found["rdma"].state is State.REFUSED
        assert "set MOONCAKE_PROTOCOL=tcp" in found["rdma"].remedy
        assert (found["tcp"].state, found["efa"].state) == (State.OK, State.ABSENT)
        found = by_name(transport_findings([RdmaDevice("mlx5_0", "mlx5_core")], wheel))
        assert found["rdma"].state is State.OK and found["rdma"].value == "chosen"
        (lost,) = transport_findings([], "libibverbs.so.1 is missing")
        assert lost.state is State.REFUSED and "libibverbs" in lost.remedy
    with envs.MOONCAKE_PROTOCOL.override("rmda"):
        found = by_name(transport_findings([], wheel))
        assert found["rmda"].state is State.REFUSED
        assert "did you mean rdma" in found["rmda"].remedy


def test_limits_of_memory_are_told_with_remedies(tmp_path: Path) -> None:
    found = by_name(limit_findings(tmp_path, needs_locked=False))
    assert found["huge pages"].state is State.ABSENT
    assert "madvise" in found["transparent huge pages"].remedy
    (tmp_path / "proc").mkdir()
    text = "HugePages_Total:    8\nHugePages_Free:     6\nHugepagesize:    2048 kB\n"
    (tmp_path / "proc/meminfo").write_text(text)
    found = by_name(limit_findings(tmp_path, needs_locked=False))
    assert found["huge pages"].value == "6 free of 8, 2048 kB each"
    assert locked_finding(65536, needs_locked=True).state is State.REFUSED
    assert locked_finding(65536, needs_locked=False).state is State.OK
    assert locked_finding(resource.RLIM_INFINITY, needs_locked=True).state is State.OK


def test_the_text_marks_what_is_refused() -> None:
    bad = Finding(section="a", name="x", value="no", state=State.REFUSED, remedy="do this")
    text = to_text([bad, Finding(section="b", name="long", value="yes")])
    assert text.splitlines() == [
        "a", " ! x     no", "         do this", "", "b", "   long  yes", "", "1 refused (!)",
    ]  # fmt: skip
