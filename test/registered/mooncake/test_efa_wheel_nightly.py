"""The wheel of the extra `efa`, in a throw-away folder: it has EFA, and a host without a device is
refused with the documented text. Uses the network, and Debian's packages where libfabric lacks."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

from sglang.srt.distributed.device_communicators.mooncake_protocol import list_rdma_devices
from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="nightly-test-cpu", nightly=True)

REPO: Final = Path(__file__).parents[3]
LIBRARIES: Final = (
    "libfabric1", "libpsm-infinipath1", "libpsm2-2", "librdmacm1", "ibverbs-providers",
    "libatomic1",
)  # fmt: skip
REFUSAL: Final = "MOONCAKE_PROTOCOL=efa, but this host has no EFA device"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process whose Mooncake is the wheel of the extra."""
    folder = tmp_path_factory.mktemp("efa")
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wheel,) = project["optional-dependencies"]["efa"]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, wheel], check=True)
    found = {"PYTHONPATH": str(folder), "MOONCAKE_PROTOCOL": "efa"}
    try:
        ctypes.CDLL("libfabric.so.1")
    except OSError:
        found["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, unpacked(folder / "debian")))
    return child_environment(found)


def unpacked(folder: Path) -> list[Path]:
    """Folders of libfabric and its libraries, unpacked without installing them."""
    assert shutil.which("apt-get"), "install libfabric1: this host has no apt-get to fetch it with"
    folder.mkdir()
    subprocess.run(["apt-get", "download", *LIBRARIES], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
    # Debian makes this link when it configures the package.
    (library,) = folder.rglob("libpsm_infinipath.so.1.*")
    library.with_name("libpsm_infinipath.so.1").symlink_to(library)
    return sorted({one.parent for one in folder.rglob("*.so*")})


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def test_the_wheel_has_efa(environment: dict[str, str]) -> None:
    code = (
        "from sglang.srt.distributed.device_communicators import mooncake_library as library\n"
        "from sglang.srt.distributed.device_communicators import mooncake_protocol as protocol\n"
        "engine = library.load_transfer_engine()\n"
        "print(engine.SUPPORT_EFA, 'efa' in protocol.wheel_protocols())"
    )
    done = run(environment, "-c", code)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_a_host_without_a_device_is_refused_by_the_check(environment: dict[str, str]) -> None:
    assert not any(one.is_efa for one in list_rdma_devices()), "this host has an EFA device"
    done = run(environment, "-m", "sglang.check_env", "--json")
    findings: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    (efa,) = (one for one in findings if (one["section"], one["name"]) == ("transports", "efa"))
    assert done.returncode == 1 and efa["state"] == "refused"
    assert REFUSAL in efa["remedy"]


def test_a_server_does_not_start_there(environment: dict[str, str]) -> None:
    flags = ("--disaggregation-mode", "prefill", "--device", "cpu")
    done = run(environment, "-m", "sglang.launch_server", *flags)
    assert done.returncode == 1 and REFUSAL in done.stderr
