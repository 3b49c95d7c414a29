"""run_suite: collecting without importing, partitions, counts, timeouts."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from sglang.srt.environ import child_environment
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=42, suite="base-b-test-cpu")

SCRIPT = Path(__file__).resolve().parents[3] / "run_suite.py"
HEAD = "import pytest\nfrom sglang.test.ci.ci_register import register_cpu_ci\n"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_suite", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_suite"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


run_suite = load()


def write(root: Path, name: str, register: str, body: str = "") -> None:
    (root / name).write_text(f"{HEAD}{register}\n{textwrap.dedent(body)}\n")


def run(root: Path, *argv: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--hw", "cpu", "--root", str(root), *argv],
        # No plugin: Hypothesis takes 1.6 CPU seconds to import, in the process of each file.
        env=child_environment({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_collect_reads_literals_and_imports_nothing(tmp_path: Path) -> None:
    body = "raise RuntimeError('imported')"
    write(tmp_path, "test_a.py", "register_cpu_ci(3, 's')", body)
    write(tmp_path, "test_b.py", "register_cpu_ci(est_time=1.5, stage='x', runner_config='cpu')")
    write(tmp_path, "test_c.py", "register_cpu_ci(1, 's', True, 'broken')")
    a, b, c = run_suite.collect(tmp_path)
    assert (a.est_time, a.suite, a.hw, a.nightly, a.disabled) == (3.0, "s", "cpu", False, None)
    assert (b.est_time, b.suite) == (1.5, "x-test-cpu")
    assert (c.nightly, c.disabled) == (True, "broken")


@pytest.mark.parametrize(
    ("register", "message"),
    [
        ("", "not registered"),
        ("def f():\n    register_cpu_ci(1, 's')", "not registered"),
        ("register_cpu_ci(1)", "give `suite`, or `stage`"),
        ("register_cpu_ci(1, 's', stage='x', runner_config='y')", "give `suite`"),
        ("register_cpu_ci(suite='s')", "`est_time` is missing"),
        ("register_cpu_ci(T, 's')", "must be literals"),
        ("register_cpu_ci(1, 's', gpus=2)", "unknown arguments"),
    ],
)
def test_files_that_cannot_be_collected_are_reported(
    tmp_path: Path, register: str, message: str
) -> None:
    write(tmp_path, "test_bad.py", register)
    with pytest.raises(run_suite.CollectionError, match=f"test_bad.py: .*{message}"):
        run_suite.collect(tmp_path)


def test_partitions_are_disjoint_complete_and_even(tmp_path: Path) -> None:
    for index, seconds in enumerate([9, 1, 5, 5, 4, 4, 2]):
        write(tmp_path, f"test_{index}.py", f"register_cpu_ci({seconds}, 's')")
    files = run_suite.collect(tmp_path)
    parts = [run_suite.partition(files, index, 3) for index in range(3)]
    assert sorted(f.path for part in parts for f in part) == [f.path for f in files]
    assert [sum(f.est_time for f in part) for part in parts] == [11, 10, 9]
    with pytest.raises(ValueError, match="count from 0"):
        run_suite.partition(files, 3, 3)


def test_counts_and_the_last_line(tmp_path: Path) -> None:
    two = "def test_x(): pass\ndef test_y(): pass"
    write(tmp_path, "test_good.py", "register_cpu_ci(1, 's')", two)
    write(tmp_path, "test_bad.py", "register_cpu_ci(1, 's')", "def test_z(): assert 0")
    write(tmp_path, "test_dies.py", "register_cpu_ci(1, 's')", "raise SystemExit(3)")
    write(tmp_path, "test_empty.py", "register_cpu_ci(1, 's')")
    write(tmp_path, "test_off.py", "register_cpu_ci(1, 's', disabled='because')", "1 / 0")
    write(tmp_path, "test_other.py", "register_cpu_ci(1, 'other')", "1 / 0")
    status, lines = run(tmp_path, "--suite", "s", "--continue-on-error")
    assert status == 1
    assert lines[-1] == "2 passed, 3 failed"
    assert "disabled: test_off.py: because" in lines
    assert any("exit status 3" in line for line in lines)


def test_it_stops_at_the_first_failure_by_default(tmp_path: Path) -> None:
    alone = "register_cpu_ci(1, 's', alone=True)"
    write(tmp_path, "test_1.py", alone, "def test_z(): assert 0")
    write(tmp_path, "test_2.py", alone, "def test_z(): pass")
    status, lines = run(tmp_path, "--suite", "s")
    assert (status, lines[-1]) == (1, "0 passed, 2 failed")
    assert any("not run" in line for line in lines)


def test_none_starts_after_a_failure_beside_it(tmp_path: Path) -> None:
    """The first two meet, the third is still to come when both have failed."""
    meet = """
        import time, pathlib
        def test_z():
            here = pathlib.Path(__file__)
            here.with_suffix(".began").touch()
            deadline = time.monotonic() + 60
            while len(list(here.parent.glob("*.began"))) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert 0, "both have run at once"
    """
    for name, seconds in (("test_1.py", 3), ("test_2.py", 2), ("test_3.py", 1)):
        write(tmp_path, name, f"register_cpu_ci({seconds}, 's')", meet)
    status, lines = run(tmp_path, "--suite", "s", "--at-once", "2")
    assert (status, lines[-1]) == (1, "0 passed, 3 failed")
    assert sum("both have run at once" in line for line in lines if line.startswith("E ")) == 2
    assert not (tmp_path / "test_3.began").exists()


def test_a_file_that_is_alone_shares_the_machine_with_none(tmp_path: Path) -> None:
    body = """
        import os, time, pathlib
        def test_z():
            log = pathlib.Path(__file__).parent / "log"
            for word in ("begin", "end"):
                with log.open("a") as out:
                    out.write(f"{pathlib.Path(__file__).stem} {word}\\n")
                time.sleep(0.3)
    """
    names = [f"test_{number}" for number in range(4)]
    for name in names:
        write(tmp_path, f"{name}.py", f"register_cpu_ci(1, 's', alone={name in names[:2]})", body)
    status, lines = run(tmp_path, "--suite", "s", "--at-once", "2")
    assert (status, lines[-1]) == (0, "4 passed, 0 failed")
    log = (tmp_path / "log").read_text().split("\n")
    assert log[4:8] == [f"{name} {word}" for name in names[:2] for word in ("begin", "end")]


def test_files_run_one_after_the_other(tmp_path: Path) -> None:
    body = """
        import pathlib
        def test_z():
            busy = pathlib.Path(__file__).parent / "busy"
            busy.touch(exist_ok=False)
            busy.unlink()
    """
    for number in range(3):
        write(tmp_path, f"test_{number}.py", "register_cpu_ci(1, 's')", body)
    status, lines = run(tmp_path, "--suite", "s")
    assert (status, lines[-1]) == (0, "3 passed, 0 failed")
    # The first summary comes before the second file's name: each is shown while it runs.
    shown = [line for line in lines if line.startswith("--- ") or "passed in" in line]
    assert [line.startswith("--- ") for line in shown] == [True, False] * 3


def test_files_of_devices_and_of_the_night_are_alone(tmp_path: Path) -> None:
    write(tmp_path, "test_a.py", "register_cuda_ci(1, 's')")
    write(tmp_path, "test_b.py", "register_cpu_ci(1, 's', nightly=True)")
    write(tmp_path, "test_c.py", "register_cpu_ci(1, 's')")
    assert [file.is_alone for file in run_suite.collect(tmp_path)] == [True, True, False]


def test_a_unit_suite_runs_in_parts(tmp_path: Path) -> None:
    count = run_suite.PARTS
    files = [f"test_{number}.py" for number in range(count)]
    for name in files:
        body = "import os\ndef test_z(): print('pid', os.getpid()); assert 0"
        write(tmp_path, name, "register_cpu_ci(1, 'base-a-test-cpu')", body)
    status, lines = run(tmp_path, "--suite", "base-a-test-cpu", "--continue-on-error")
    assert (status, lines[-1]) == (1, f"0 passed, {count} failed")
    for name in files:
        assert any(line.startswith("FAILED ") and name in line for line in lines)
    pids = [line for line in lines if line.startswith("pid ")]
    assert len(pids) == len(set(pids)) == count


def test_suites_run_in_the_given_order(tmp_path: Path) -> None:
    write(tmp_path, "test_1.py", "register_cpu_ci(1, 's')", "def test_z(): pass")
    write(tmp_path, "test_2.py", "register_cpu_ci(1, 't')", "def test_z(): pass")
    status, lines = run(tmp_path, "--suite", "t", "--suite", "s")
    assert (status, lines[-1]) == (0, "2 passed, 0 failed")
    started = [Path(line).name for line in lines if line.startswith("--- ")]
    assert started == ["test_2.py", "test_1.py"]


def test_the_next_suite_begins_before_one_has_ended(tmp_path: Path) -> None:
    """Its file starts what the other waits for."""
    waits = """
        import pathlib, time
        def test_z():
            while not (pathlib.Path(__file__).parent / "begun").exists():
                time.sleep(0.05)
    """
    begins = "def test_z(): __import__('pathlib').Path(__file__).with_name('begun').touch()"
    write(tmp_path, "test_1.py", "register_cpu_ci(1, 's')", waits)
    write(tmp_path, "test_2.py", "register_cpu_ci(1, 't')", begins)
    status, lines = run(tmp_path, "--suite", "s", "--suite", "t", "--at-once", "2")
    assert (status, lines[-1]) == (0, "2 passed, 0 failed")


def test_files_run_beside_the_first_part_of_a_unit_suite(tmp_path: Path) -> None:
    """All parts wait for what the file starts."""
    waits = """
        import pathlib, time
        def test_z():
            while not (pathlib.Path(__file__).parent / "begun").exists():
                time.sleep(0.05)
    """
    begins = "def test_z(): __import__('pathlib').Path(__file__).with_name('begun').touch()"
    for number in range(2):
        write(tmp_path, f"test_{number}.py", "register_cpu_ci(1, 'base-a-test-cpu')", waits)
    write(tmp_path, "test_b.py", "register_cpu_ci(1, 't')", begins)
    suites = ("--suite", "base-a-test-cpu", "--suite", "t", "--timeout-per-file", "60")
    status, lines = run(tmp_path, *suites, "--at-once", "2")
    assert (status, lines[-1]) == (0, "3 passed, 0 failed")


def test_a_hanging_file_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hang = f"""
        import os, time
        child = os.posix_spawnp("sleep", ["sleep", "300"], os.environ, setsid=True)
        open({str(pid_file)!r}, "w").write(str(child))
        time.sleep(300)
    """
    (tmp_path / "test_hang.py").write_text(
        f"{textwrap.dedent(hang)}\n{HEAD}\nregister_cpu_ci(1, 's')\n"
    )
    status, lines = run(tmp_path, "--suite", "s", "--timeout-per-file", "12")
    assert (status, lines[-1]) == (1, "0 passed, 1 failed")
    assert any("killed after 12 s" in line for line in lines)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not is_alive(psutil.Process(int(pid_file.read_text())))


def test_forked_processes_run_and_end_as_commands_do(tmp_path: Path) -> None:
    body = """
        import atexit, os, pathlib, sys, torch
        import helper
        here = pathlib.Path(__file__)
        def test_z():
            assert sys.argv[1:] == ["-q", os.path.relpath(here)]
            assert __import__("multiprocessing").parent_process() is not None, "it is forked"
            assert torch.get_num_threads() == 1
            atexit.register(here.with_suffix(".left").touch)
    """
    (tmp_path / "helper.py").touch()
    write(tmp_path, "test_good.py", "register_cpu_ci(1, 's')", body)
    write(tmp_path, "test_bad.py", "register_cpu_ci(1, 's')", "def test_z(): assert 0")
    write(tmp_path, "test_dies.py", "register_cpu_ci(1, 's')", "raise SystemExit(3)")
    hang = """
        import multiprocessing, time
        leak = multiprocessing.get_context("spawn").Event()
        def test_z(capsys):
            with capsys.disabled():
                print('it hangs', flush=True)
            time.sleep(300)
    """
    write(tmp_path, "test_hangs.py", "register_cpu_ci(1, 's')", hang)
    body = "def test_z(): assert __import__('multiprocessing').parent_process() is not None"
    for name in ("test_1.py", "test_2.py"):
        write(tmp_path, name, "register_cpu_ci(1, 'base-a-test-cpu')", body)
    flags = ("--preload", "--at-once", "2", "--continue-on-error", "--timeout-per-file", "40")
    status, lines = run(tmp_path, "--suite", "base-a-test-cpu", "--suite", "s", *flags)
    assert (status, lines[-1]) == (1, "3 passed, 3 failed"), "\n".join(lines)
    assert (tmp_path / "test_good.left").exists()
    for said in ("exit status 3", "killed after 40 s", "it hangs", "assert 0"):
        assert any(said in line for line in lines), said


def test_a_check_counts_as_one_test(tmp_path: Path) -> None:
    write(tmp_path, "test_1.py", "register_cpu_ci(1, 's')", "def test_z(): pass")
    for check, count in (("true", "2 passed, 0 failed"), ("false", "1 passed, 1 failed")):
        status, lines = run(tmp_path, "--suite", "s", "--continue-on-error", "--check", check)
        assert (status == 0, lines[-1]) == (check == "true", count)


def test_collect_only_lists_the_files_without_running_them(tmp_path: Path) -> None:
    write(tmp_path, "test_1.py", "register_cpu_ci(1, 's')", "def test_z(): assert 0")
    write(tmp_path, "test_2.py", "register_cpu_ci(1, 't')", "def test_z(): assert 0")
    assert run(tmp_path, "--suite", "s", "--collect-only") == (0, ["s: test_1.py"])
    write(tmp_path, "test_3.py", "")
    assert run(tmp_path, "--suite", "s", "--collect-only")[0] == 2


def test_an_unknown_suite_is_refused_with_the_known_names(tmp_path: Path) -> None:
    write(tmp_path, "test_1.py", "register_cpu_ci(1, 's')")
    status, lines = run(tmp_path, "--suite", "t")
    assert status == 2
    assert "there are ['s']" in lines[-1]


def test_files_that_take_long_give_their_tests_the_time() -> None:
    """pytest ends a test after the configured time, whatever its file's registration says."""
    repo = SCRIPT.parents[1]
    config = tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))
    limit_s = config["tool"]["pytest"]["ini_options"]["timeout"]
    files = run_suite.collect(repo / "test" / "registered")
    long = [file.path for file in files if file.est_time > limit_s]
    assert long
    for path in long:
        assert "@pytest.mark.timeout(" in path.read_text(encoding="utf-8"), path
