"""docs/monitoring by Prometheus' own tool: syntax, and what alerts do in time (alerts_test.yml).

The tool is that of the path, or else of Debian's package, which is unpacked and not installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="nightly-test-cpu", nightly=True)

MONITORING: Final = Path(__file__).parents[4] / "docs" / "monitoring"
CASES: Final = Path(__file__).with_name("alerts_test.yml")
PACKAGE: Final = "prometheus"


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the program."""
    if found := shutil.which("promtool"):
        return found
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip(f"no promtool, and no apt-get for Debian's package {PACKAGE}")
    folder: Path = tmp_path_factory.mktemp("debian")
    fetched = subprocess.run(
        ["apt-get", "download", PACKAGE], cwd=folder, capture_output=True, text=True, check=False
    )
    if fetched.returncode:
        pytest.skip(f"no promtool, and apt-get download {PACKAGE} says: {fetched.stderr[-300:]}")
    (package,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
    return str(folder / "root" / "usr" / "bin" / "promtool")


def run(promtool: str, *words: str, folder: Path = MONITORING) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [promtool, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


def test_the_files_are_accepted(promtool: str) -> None:
    for words in (["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"]):
        done = run(promtool, *words)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_in_their_time(promtool: str, tmp_path: Path) -> None:
    for file in (CASES, MONITORING / "alerts.yml"):
        shutil.copy(file, tmp_path)
    done = run(promtool, "test", "rules", CASES.name, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_cases_notice_other_rules(promtool: str, tmp_path: Path) -> None:
    """Each threshold and time of a tested alert is one that a case depends on."""
    shutil.copy(CASES, tmp_path)
    rules = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    for alert, old, new in (
        ("ServerDown", "for: 2m", "for: 4m"),
        ("RequestsWaitLong", "0.95", "0.97"),
        ("DraftsRejected", "< 0.1", "< 0.001"),
        ("DraftsStayOff", "< 0.05", "< 1.5"),
        ("StoreLeftAlone", "for: 5m", "for: 3m"),
        ("DamagedObjects", "[15m]", "[40m]"),
        ("NamespaceAlone", "> 1", "> 3"),
        ("NamespaceAlone", "for: 15m", "for: 13m"),
        ("NamespacesDiffer", "count by (job, model_name) (count", "count by (job) (count"),
    ):
        begin = rules.index(old, rules.index(f"alert: {alert}\n"))
        changed = rules[:begin] + new + rules[begin + len(old) :]
        (tmp_path / "alerts.yml").write_text(changed, encoding="utf-8")
        done = run(promtool, "test", "rules", CASES.name, folder=tmp_path)
        assert done.returncode == 1 and alert in done.stderr + done.stdout, alert
