"""`scripts/setup.sh` chooses a Python and reports its progress, with a fake in place of
`scripts/install.py`, which installs nothing."""

from __future__ import annotations

import fcntl
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Sequence
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


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The machine's commands without its Pythons, which the script would choose among."""
    made = tmp_path_factory.mktemp("tools")
    commands = {
        path.name: path for folder in ("/usr/bin", "/bin") for path in Path(folder).iterdir()
    }
    for name, path in commands.items():
        if not name.startswith("python"):
            (made / name).symlink_to(path)
    return made


@pytest.fixture
def checkout(tmp_path: Path, tools: Path) -> Path:
    """A checkout with this script and a fake interpreter that installs nothing."""
    (tmp_path / "tools").symlink_to(tools)
    (tmp_path / "scripts").mkdir()
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    text = (CHECKOUT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    # The script's own period is too long for a test.
    text = text.replace("quiet_s=15", "quiet_s=1")
    # The devices of the machine are those below `dev` and `sys`.
    for root in ("/dev/", "/sys/"):
        text = text.replace(f" {root}", f" {tmp_path}{root}")
    (tmp_path / "scripts" / "setup.sh").write_text(text)
    shutil.copy(CHECKOUT / "scripts" / "install.py", tmp_path / "scripts")
    (tmp_path / "pip.sh").write_text(PIP)
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/bash
        case "$*" in
            "-m venv .venv")
                mkdir -p .venv/bin {SITE}
                cp "$0" .venv/bin/python
                [ ! -e "$0.identity" ] || cp "$0.identity" .venv/bin/python.identity
                ;;
            "-m pip --version") [ -e .venv/bin/python ] ;;
            "-m pip install -q uv") [ ! -e {tmp_path}/no-uv ] ;;
            "scripts/install.py "*) echo "$*" >>{tmp_path}/pip.calls; bash {tmp_path}/pip.sh ;;
            "-m pip uninstall"*) echo "$*" >>{tmp_path}/pip.calls ;;
            *torch.version.cuda*) [ -e {tmp_path}/torch-has-cuda ] ;;
            *CONFIG_ARGS*) exec {sys.executable} -c "$(cat "$0.is" 2>/dev/null)
$2" ;;
            *ensurepip*) [ ! -e {tmp_path}/no-ensurepip ] ;;
            *base_prefix*)
                [ "${{0##*/}}" != broken ] || {{ echo "no libpython" >&2; exit 127; }}
                cat "$0.identity" 2>/dev/null || exec {sys.executable} "$@"
                ;;
            *mooncake.store* | *ctypes*) ;;
            *) exec {sys.executable} "$@" ;;
        esac
        """
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def start(
    checkout: Path,
    python: str | None = "python",
    use: str | None = None,
    path: Sequence[str] = ("bin",),
) -> subprocess.Popen[str]:
    """Run the script. `python`: an interpreter in the checkout; None: the script chooses one from
    the folders `path` of the checkout."""
    named = {"PYTHON": str(checkout / python)} if python else {}
    folders = [*(str(checkout / folder) for folder in path), str(checkout / "tools")]
    return subprocess.Popen(
        ["bash", "scripts/setup.sh", *([use] if use else [])],
        cwd=checkout,
        env={"PATH": ":".join(folders), "HOME": str(checkout), **named},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def set_up(
    checkout: Path,
    python: str | None = "python",
    use: str | None = None,
    path: Sequence[str] = ("bin",),
) -> subprocess.CompletedProcess[str]:
    process = start(checkout, python, use, path)
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
    wanted: tuple[str, ...]
    others: tuple[str, ...]
    wanted = ("transformers/models/llama/a.py", "some/a.py", "some/tests.py", "tests/a.py")
    wanted += ("torch/a.py", "torch/_inductor_not/a.py", "some/pip/a.py", "sympy/core/a.py")
    others = ("transformers/models/bert/a.py", "some/tests/a.py", "some/more/tests/a.py")
    others += ("torch/_inductor/a.py", "pip/a.py", "sympy/stats/a.py")
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


def interpreter(checkout: Path, name: str, identity: str) -> str:
    """A copy of the fake interpreter: a version and a prefix. Its path in the checkout."""
    (checkout / name).parent.mkdir(exist_ok=True)
    shutil.copy(checkout / "python", checkout / name)
    (checkout / f"{name}.identity").write_text(f"{identity}\n")
    (checkout / "pip.sh").write_text("true\n")
    return name


def refused(checkout: Path, python: str | None) -> str:
    """Message of a set-up that is refused. The script must not call pip or touch `.venv`."""
    before = sorted((checkout / ".venv").rglob("*"))
    calls = checkout / "pip.calls"
    called = calls.read_text() if calls.exists() else ""
    done = set_up(checkout, python)
    assert done.returncode == 1 and done.stdout == ""
    assert (calls.read_text() if calls.exists() else "") == called
    left = {*(checkout / ".venv").rglob("*")} - {*before, checkout / ".venv" / "setup.lock"}
    assert not left
    return done.stderr


def test_a_python_that_is_named_and_cannot_be_used_is_refused(checkout: Path) -> None:
    """Although another that fits is there."""
    interpreter(checkout, "bin/python3.11", "3.11 /opt/a")
    absent = refused(checkout, "absent")
    assert re.fullmatch(
        rf"setup: PYTHON={checkout}/absent does not run: .*No such file.*\n", absent
    )
    broken = refused(checkout, interpreter(checkout, "broken", "3.11 /opt/b"))
    assert broken == f"setup: PYTHON={checkout}/broken does not run: no libpython\n"
    for version in ("2.7", "3.10", "3.14", "4.0"):
        said = refused(checkout, interpreter(checkout, "other", f"{version} /opt/c"))
        assert said == (
            f"setup: PYTHON={checkout}/other is Python {version}; needs Python 3.11 to 3.13\n"
        )


def test_the_named_python_makes_the_environment(checkout: Path) -> None:
    interpreter(checkout, "bin/python3.11", "3.11 /opt/a")
    done = set_up(checkout, interpreter(checkout, "mine", "3.13 /opt/b"))
    assert done.returncode == 0, done.stderr
    assert "installing into .venv with Python 3.13 /opt/b" in done.stdout
    assert (checkout / ".venv/bin/python.identity").read_text() == "3.13 /opt/b\n"


def test_an_environment_of_another_python_is_refused_by_name(checkout: Path) -> None:
    """An environment that is up to date is refused too. The script accepts the Python that made the
    environment, and no Python at all."""
    mine = interpreter(checkout, "mine", "3.12 /opt/a")
    assert set_up(checkout, mine).returncode == 0
    for other in ("3.13 /opt/a", "3.12 /opt/b"):
        said = refused(checkout, interpreter(checkout, "other", other))
        assert said == (
            f"setup: .venv has Python 3.12 /opt/a, PYTHON={checkout}/other is {other}: "
            "rm -r .venv, then the same command; or leave PYTHON out to keep .venv\n"
        )
    for same in (mine, None):
        done = set_up(checkout, same)
        assert (done.returncode, done.stdout) == (0, "")
    # Not with the first Python that fits, which the script would choose for a new environment.
    interpreter(checkout, "bin/python3.11", "3.11 /opt/c")
    (checkout / ".venv" / "setup.stamp").unlink()
    done = set_up(checkout, None)
    assert "installing into .venv with Python 3.12 /opt/a" in done.stdout
    assert done.returncode == 0


def test_an_environment_that_cannot_be_used_is_refused(checkout: Path) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    venv_python = checkout / ".venv/bin/python"
    venv_python.symlink_to(checkout / "removed")
    assert "/python does not run; make .venv again: rm -r .venv" in refused(checkout, None)
    venv_python.unlink()
    interpreter(checkout, ".venv/bin/python", "3.10 /opt/a")
    assert ".venv has Python 3.10; needs Python 3.11 to 3.13: rm -r" in refused(checkout, "python")


def test_without_a_name_the_first_python_that_fits_is_taken(checkout: Path) -> None:
    interpreter(checkout, "bin/python3.11", "3.10 /opt/a")
    for name in ("python3.12", "python3.13", "python3"):
        interpreter(checkout, f"bin/{name}", "3.14 /opt/b")
    assert refused(checkout, None).startswith("setup: found no Python 3.11 to 3.13; name one")
    interpreter(checkout, "bin/python3.13", "3.13 /opt/c")
    assert "with Python 3.13 /opt/c;" in set_up(checkout, None).stdout


FAST = """
import os, sys, sysconfig
sysconfig.get_config_vars()["CONFIG_ARGS"] = "'--prefix=/opt/a' '--enable-optimizations'"
sys.base_prefix = "/opt/a"
os.path.exists = lambda path: path.endswith("include/Python.h")
sysconfig.get_path = lambda name: "/opt/" + name
"""
SLOW = FAST + "sysconfig.get_config_vars()['CONFIG_ARGS'] = '--prefix=/opt/a'\n"


@pytest.mark.parametrize(
    ("second", "third", "taken"),
    [
        (FAST, FAST, "second"),
        (SLOW, FAST, "third"),
        (SLOW, SLOW, "first"),
        # Debian compiles with a profile, and the options do not say so.
        (SLOW + "sys.base_prefix = '/usr'", FAST, "second"),
        (FAST + "del sysconfig.get_config_vars()['CONFIG_ARGS']", FAST, "third"),
        # Triton compiles with the headers, which Debian has in a package of their own.
        (FAST + "os.path.exists = lambda path: False", FAST, "third"),
        (FAST + "sys.modules['ensurepip'] = None", FAST, "third"),
    ],
    ids=["fast", "slow", "all slow", "distribution", "unknown", "no headers", "no ensurepip"],
)
def test_of_a_version_the_first_fast_python_is_taken(
    checkout: Path, second: str, third: str, taken: str
) -> None:
    """Another version is not taken because it is fast. Folders' names may have spaces."""
    pythons = {
        "bin/python3.11": ("3.11 first", SLOW),
        "bin/python3.12": ("3.12 other", FAST),
        "more bin/python3.11": ("3.11 second", second),
        "third/python3.11": ("3.11 third", third),
    }
    for name, (identity, built) in pythons.items():
        interpreter(checkout, name, identity)
        (checkout / f"{name}.is").write_text(built)
    done = set_up(checkout, None, path=("bin", "more bin", "third"))
    assert f"with Python 3.11 {taken};" in done.stdout


def test_missing_modules_of_a_python_are_installed_or_named(checkout: Path) -> None:
    """Debian has them in a package of each version; others are refused."""
    (checkout / "no-ensurepip").touch()
    said = refused(checkout, interpreter(checkout, "mine", "3.13 /opt/a"))
    assert f"{checkout}/mine lacks the modules venv and ensurepip; name another" in said
    for name in ("apt-get", "id"):
        script = checkout / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text("#!/bin/bash\necho 1000\n")
        script.chmod(0o755)
    done = set_up(checkout, interpreter(checkout, "debians", "3.13 /usr"))
    assert done.returncode == 1
    assert "(Debian: sudo apt-get install -y python3.13-venv)" in done.stderr


def pip_calls(checkout: Path, use: str | None = None) -> list[str]:
    """Arguments of the installations, and other calls of pip."""
    (checkout / "pip.sh").write_text("true\n")
    done = set_up(checkout, use=use)
    assert done.returncode == 0, done.stderr
    common = "scripts/install.py "
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


def test_serving_needs_less_than_testing(checkout: Path) -> None:
    """An environment for tests serves, too."""
    expected = ["torch==2.13.0", "--editable ."]
    assert pip_calls(checkout, "serve") == expected
    assert pip_calls(checkout, "serve") == expected
    expected += ["torch==2.13.0", "--editable .[pd]"]
    assert pip_calls(checkout, "pd") == expected
    assert pip_calls(checkout, "serve") == expected
    expected += ["torch==2.13.0", "--editable .[test]"]
    assert pip_calls(checkout) == expected
    for use in ("test", "pd", "serve"):
        assert pip_calls(checkout, use) == expected


def test_a_host_without_uv_is_set_up(checkout: Path) -> None:
    (checkout / "no-uv").touch()
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    assert "there is no uv; pip takes longer" in done.stdout


def test_an_unknown_use_is_refused(checkout: Path) -> None:
    done = set_up(checkout, use="fly")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "setup: fly must be one of serve pd test\n"


def extra(name: str) -> str:
    """The wheel of an extra of pyproject.toml."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wheel,) = project["optional-dependencies"][name]
    assert isinstance(wheel, str)
    return wheel
