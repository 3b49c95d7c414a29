"""The command line of the benchmarks, and their report. The measurements run in `bench/`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from benchmark import __main__ as program
from benchmark.command import COMMANDS, Command, description, load_command, module_name
from benchmark.gpu_hybrid.steps import costs_by_ends
from benchmark.report import Report
from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

MEASUREMENTS = [(name, part) for name, parts in COMMANDS.items() for part in parts or (None,)]
ON_GPUS = [(name, part) for name, part in MEASUREMENTS if name.startswith("gpu-")]
ON_GPUS.append(("remote-weights", "nvlink"))


_SPINS_AT_TORCH: Final = """
import os, runpy, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder())
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Prints the setting that torch's OpenMP library would read in a command."""


def words(name: str, part: str | None) -> list[str]:
    return [name] if part is None else [name, part]


def shown(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    """The text that `--help` prints."""
    with pytest.raises(SystemExit, match=r"^0$"):
        program.main([*line, "--help"])
    return capsys.readouterr().out


def test_help_has_a_line_for_each_command_and_part(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys).splitlines()
    for name, parts in COMMANDS.items():
        assert any(line.split()[:1] == [name] and len(line) > 40 for line in lines), name
        of_parts = shown(capsys, name).splitlines() if parts else []
        for part in parts:
            assert any(line.split()[:1] == [part] for line in of_parts), (name, part)


@pytest.mark.parametrize(("name", "part"), MEASUREMENTS)
def test_each_measurement_has_help(
    name: str, part: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, *words(name, part))
    assert description(module_name(name, part)).splitlines()[0] in text
    assert "--quick" in text and "--output-file" in text


@pytest.mark.parametrize(("name", "part"), MEASUREMENTS)
def test_defaults_of_quick_runs_are_options(name: str, part: str | None) -> None:
    measurement = load_command(module_name(name, part))
    plain = vars(program.parse_options(measurement, name, "", []))
    quick = vars(program.parse_options(measurement, name, "", ["--quick"]))
    assert plain.keys() == quick.keys()
    assert {key: quick[key] for key in measurement.quick} == dict(measurement.quick)
    assert quick["device"] in measurement.devices


@pytest.mark.parametrize(("name", "part"), ON_GPUS)
def test_gpus_that_are_not_there_are_named(
    name: str,
    part: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert program.main(words(name, part)) == 2
    output = capsys.readouterr()
    command = name if part is None else f"{name} {part}"
    assert output.err.startswith(f"benchmark {command}: needs ")
    assert "CUDA GPU" in output.err and output.err.endswith("; this host has none\n")
    assert not output.out


def test_an_option_overrides_a_quick_default() -> None:
    command = Command(run=lambda args, report: None, repeats=7, quick={"repeats": 1})
    for line, repeats in (([], 7), (["--quick"], 1), (["--quick", "--repeats", "3"], 3)):
        assert program.parse_options(command, "x", "", line).repeats == repeats


@pytest.mark.parametrize("line", [["nothing"], ["simulate"], ["simulate", "nothing"]])
def test_a_name_that_is_not_there_is_an_error(line: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        program.main(line)


def test_a_figure_is_a_line_of_the_table_and_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.jsonl"
    report = Report("storage keys", {"repeats": 3, "folder": tmp_path}, "cpu", path)
    case = {"page_size": 64}
    report.add("hash", 1 / 3, "us", case, expected=0.3, target="at most 1", raw=[0.3333333333])
    report.add_all("count", {"pages": 8, "absent": None}, case)
    hashed, pages = (json.loads(line) for line in path.read_text().splitlines())
    about: dict[str, Any] = {name: hashed.pop(name) for name in ("date", "commit", "host")}
    assert about.items() <= pages.items()
    assert hashed == {
        "device": "cpu",
        "command": "storage keys",
        "arguments": {"repeats": 3, "folder": str(tmp_path)},
        "case": case,
        "metric": "hash",
        "value": 0.333333,
        "unit": "us",
        "expected": 0.3,
        "target": "at most 1",
        "details": {"raw": [0.333333]},
    }
    assert (pages["metric"], pages["value"]) == ("pages", 8)
    first, of_case, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("storage keys: commit ") and of_case == "page_size 64"
    assert [row.split() for row in rows] == [
        ["hash", "0.333333", "us", "expected", "0.3,", "target", "at", "most", "1"],
        ["pages", "8", "count"],
    ]


def test_a_kernel_costs_what_it_adds_to_the_timeline() -> None:
    spans = [(5, 14, "a"), (0, 10, "a"), (2, 8, "b"), (20, 25, "c")]
    assert costs_by_ends(spans) == {"a": [10, 4], "b": [0], "c": [11]}


@pytest.mark.parametrize(
    "command", ["sglang.bench_one_batch", "sglang.hicache_plan", "benchmark cpu-costs tree"]
)
def test_commands_that_compute_spin_as_a_server_does(command: str) -> None:
    settings: list[tuple[dict[str, str], str]]
    settings = [({}, "1000"), ({"OMP_WAIT_POLICY": "active"}, "None")]
    for given, spins in settings:
        env = {
            name: value
            for name, value in child_environment(given).items()
            if name in given or name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
        }
        done = subprocess.run(
            [sys.executable, "-c", _SPINS_AT_TORCH, *command.split()],
            env=env, check=True, capture_output=True, text=True,
        )  # fmt: skip
        assert done.stdout.split() == [spins], done.stderr
