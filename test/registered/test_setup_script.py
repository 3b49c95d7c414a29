"""`scripts/setup.sh` reports its progress. Its pip is a fake here, which installs nothing."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-b-test-cpu")

CHECKOUT = Path(__file__).parents[2]
SITE = ".venv/lib/python3/site-packages"
PIP = """
echo "Collecting small"
echo "  Downloading small-1.0-py3-none-any.whl (20 kB)"
echo "  Downloading large-2.0-py3-none-any.whl (202.5 MB)"
sleep 3
echo "Installing collected packages: small, large, last"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with this script and a fake interpreter that installs nothing."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    text = (CHECKOUT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    # The script's own period is too long for a test.
    text = text.replace("quiet_s=15", "quiet_s=1")
    # The devices of the machine are those below `dev` and `sys`.
    for root in ("/dev/", "/sys/"):
        text = text.replace(f" {root}", f" {tmp_path}{root}")
    (tmp_path / "scripts" / "setup.sh").write_text(text)
    (tmp_path / "pip.sh").write_text(PIP)
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/bash
        case "$*" in
            "-m venv .venv") mkdir -p .venv/bin {SITE}; cp "$0" .venv/bin/python ;;
            "-m pip --version") [ -e .venv/bin/python ] ;;
            "-m pip install"*) echo "$*" >>{tmp_path}/pip.calls; bash {tmp_path}/pip.sh ;;
            "-m pip uninstall"*) echo "$*" >>{tmp_path}/pip.calls ;;
            *torch.version.cuda*) [ -e {tmp_path}/torch-has-cuda ] ;;
            *mooncake.store* | *ctypes* | *ensurepip*) ;;
            *) exec {sys.executable} "$@" ;;
        esac
        """
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def start(checkout: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "scripts/setup.sh"],
        cwd=checkout,
        env={"PATH": os.defpath, "PYTHON": str(checkout / "python"), "HOME": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def set_up(checkout: Path) -> subprocess.CompletedProcess[str]:
    process = start(checkout)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_stages_downloads_and_quiet_periods_are_reported(checkout: Path) -> None:
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("setup: ") and " s  " in line for line in lines)
    stages = [line.partition(" s  ")[2] for line in lines]
    for words in (
        "making .venv",
        "installing everything else",
        "Downloading large-2.0-py3-none-any.whl (202.5 MB)",
        "... downloading; 0 packages are there",
        "installing 3 packages",
        "done",
    ):
        assert words in stages, stages
    assert "small-1.0" not in done.stdout
    assert "small-1.0" in (checkout / ".venv" / "setup.log").read_text()
    assert (checkout / SITE / "rigs.pth").read_text() == f"{checkout / 'test'}\n"
    again = set_up(checkout)
    assert (again.returncode, again.stdout) == (0, "")


def test_quiet_periods_are_those_of_what_is_shown(checkout: Path) -> None:
    """pip says much that is not."""
    (checkout / "pip.sh").write_text(
        "for i in 1 2 3 4 5 6 7 8; do echo 'Requirement already satisfied: x'; sleep 0.4; done\n"
    )
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    assert "already satisfied" not in done.stdout
    assert "... working; 0 packages are there" in done.stdout


def test_what_nothing_imports_is_not_compiled(checkout: Path) -> None:
    site = checkout / SITE
    wanted = ("transformers/models/llama/a.py", "some/a.py", "some/tests.py", "tests/a.py")
    others = ("transformers/models/bert/a.py", "some/tests/a.py", "some/more/tests/a.py")
    for name in (*wanted, *others):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).touch()
    assert set_up(checkout).returncode == 0
    compiled = {path.parents[1] / f"{path.name.split('.')[0]}.py" for path in site.rglob("*.pyc")}
    assert {str(path.relative_to(site)) for path in compiled} == set(wanted)


def test_the_wait_for_another_set_up_is_not_silent(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    with (checkout / ".venv" / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(checkout)
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
    out, _ = process.communicate(timeout=60)
    assert "another set-up of this checkout runs" in said[0]
    assert all(line.rstrip().endswith("... waiting") for line in said[1:])
    assert (process.returncode, out.rstrip().endswith("done")) == (0, True)


def test_a_full_disk_is_said_with_what_is_left_and_where(checkout: Path) -> None:
    (checkout / "pip.sh").write_text("echo 'ERROR: [Errno 28] No space left on device'; exit 1\n")
    done = set_up(checkout)
    assert done.returncode == 1
    assert re.search(r"failed; \.venv has \S+ free; /tmp has \S+ free; the last", done.stderr)


def test_a_failure_is_reported_and_not_recorded_as_done(checkout: Path) -> None:
    (checkout / "pip.sh").write_text("echo 'ERROR: no space left'; echo why; exit 1\n")
    done = set_up(checkout)
    assert done.returncode == 1
    assert "ERROR: no space left" in done.stdout
    assert "failed" in done.stderr and done.stderr.splitlines()[-1] == "why"
    assert not (checkout / ".venv" / "setup.stamp").exists()


def pip_calls(checkout: Path) -> list[str]:
    """Arguments of pip's calls, without those that all have."""
    (checkout / "pip.sh").write_text("true\n")
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    common = "-m pip install --progress-bar off --no-compile "
    return [
        line.removeprefix(common).removeprefix("-m pip ")
        for line in (checkout / "pip.calls").read_text().splitlines()
    ]


def plant(checkout: Path, *, gpu: bool = False, driver: str | None = None) -> None:
    """Device files of a GPU, and an InfiniBand device with a driver."""
    if gpu:
        (checkout / "dev").mkdir()
        (checkout / "dev" / "nvidiactl").touch()
    if driver is not None:
        (checkout / "drivers" / driver).mkdir(parents=True)
        device = checkout / "sys/class/infiniband/dev0/device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(checkout / "drivers" / driver)


def test_a_cpu_host_keeps_the_cpu_wheels(checkout: Path) -> None:
    plant(checkout, driver="mlx5_core")
    assert pip_calls(checkout) == ["torch==2.13.0", "--editable .[test]"]


def test_a_gpu_host_gets_cuda_builds_by_itself(checkout: Path) -> None:
    plant(checkout, gpu=True)
    assert pip_calls(checkout) == [
        "torch==2.13.0",
        "--force-reinstall --index-url https://download.pytorch.org/whl/cu130 "
        "--extra-index-url https://pypi.org/simple torch==2.13.0",
        "--editable .[test]",
        "uninstall -y mooncake-transfer-engine-non-cuda",
        f"--no-deps {extra('cuda')}",
    ]


def test_a_cuda_build_of_torch_is_not_fetched_twice(checkout: Path) -> None:
    plant(checkout, gpu=True)
    (checkout / "torch-has-cuda").touch()
    calls = pip_calls(checkout)
    assert calls[:2] == ["torch==2.13.0", "--editable .[test]"] and len(calls) == 4


@pytest.mark.parametrize(("gpu", "name"), [(False, "efa"), (True, "efa-cuda")])
def test_efa_has_wheels_of_its_own(checkout: Path, gpu: bool, name: str) -> None:
    plant(checkout, gpu=gpu, driver="efa")
    assert pip_calls(checkout)[-1] == f"--no-deps {extra(name)}"


def test_other_devices_set_up_again(checkout: Path) -> None:
    assert pip_calls(checkout)[-1] == "--editable .[test]"
    plant(checkout, gpu=True)
    assert pip_calls(checkout)[-1] == f"--no-deps {extra('cuda')}"


def extra(name: str) -> str:
    """The wheel of an extra of pyproject.toml."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wheel,) = project["optional-dependencies"][name]
    assert isinstance(wheel, str)
    return wheel


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
