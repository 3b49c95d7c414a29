"""`scripts/versions.sh` runs the suites in environments of its own. Its Pythons are fakes here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-b-test-cpu")

REPO = Path(__file__).parents[2]
PYTHONS = {"oldest": "3.12", "newest": "3.13"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with this script and fake Pythons, which write their arguments to `calls`."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    shutil.copy(REPO / "scripts" / "versions.sh", tmp_path / "scripts")
    for version in PYTHONS.values():
        python = tmp_path / "bin" / f"python{version}"
        python.write_text(
            f"""#!/bin/bash
            case "$*" in
                *ensurepip*) ;;
                "-c "*) exec {sys.executable} "$@" ;;
                "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
                "-m pip list"*) echo torch==1.0 ;;
                *install*)
                    echo "$*" >>calls
                    for one in "$@"; do [[ $one != /dev/fd/* ]] || cat "$one" >>packages; done
                    [ ! -e fails ]
                    ;;
                *) echo "${{0#$PWD/}} $* $PYTHONPATH" >>calls ;;
            esac
            """
        )
        python.chmod(0o755)
    return tmp_path


def run(checkout: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/versions.sh", *names],
        cwd=checkout,
        env={"PATH": f"{checkout / 'bin'}:{os.defpath}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_each_combination_has_its_environment_and_runs_both_suites(checkout: Path) -> None:
    done = run(checkout)
    assert done.returncode == 0, done.stderr
    calls = (checkout / "calls").read_text().splitlines()
    suites = [line for line in calls if "run_suite.py" in line]
    assert [line.partition(" test/run_suite.py ")[0] for line in suites] == [
        f".venv/versions/{name}/bin/python" for name in PYTHONS
    ]
    assert all("--suite base-a-test-cpu --suite base-b-test-cpu test" in line for line in suites)
    installs = [line for line in calls if "--upgrade" in line]
    for words, line in zip(
        ("torch==2.11.0 transformers==5.17.0 numpy<2.4", "torch transformers"),
        installs,
        strict=True,
    ):
        assert f"--upgrade {words} --requirement" in line
    # Requirements of the project would undo the choice.
    packages = (checkout / "packages").read_text().splitlines()
    assert "pytest" in packages and "numpy" in packages
    assert not [one for one in packages if re.match(r"(torch|transformers)\b", one)]


def test_words_after_a_name_choose_what_runs(checkout: Path) -> None:
    assert run(checkout, "oldest", "--suite", "some", "--root", "a folder").returncode == 0
    *_, suites = (checkout / "calls").read_text().splitlines()
    assert suites.startswith(".venv/versions/oldest/bin/python test/run_suite.py --hw cpu")
    assert suites.endswith("--preload --suite some --root a folder test")


def test_a_failed_installation_runs_no_suite_and_the_other_combination_follows(
    checkout: Path,
) -> None:
    (checkout / "fails").touch()
    assert run(checkout).returncode == 1
    calls = (checkout / "calls").read_text()
    assert "run_suite" not in calls and calls.count("--upgrade") == len(PYTHONS)


def test_a_missing_python_is_named_and_nothing_is_made(checkout: Path) -> None:
    (checkout / "bin" / "python3.12").write_text("exit 1")
    done = run(checkout, "oldest")
    assert done.returncode == 1
    assert "versions: 'oldest' needs python3.12 with the modules venv and ensurepip" in done.stderr
    assert not (checkout / ".venv").exists()
    assert run(checkout, "other").stderr == (
        "versions: no combination 'other'; there are oldest and newest\n"
    )


def test_the_workflow_and_the_docs_have_the_combinations() -> None:
    workflow = yaml.safe_load((REPO / ".github/workflows/nightly.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert {one["combination"]: one["python"] for one in matrix} == PYTHONS
    page = (REPO / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(\w+)` \| (3\.\d+) \|", page, re.MULTILINE)) == PYTHONS
