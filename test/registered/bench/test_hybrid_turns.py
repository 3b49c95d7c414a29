"""`gpu-hybrid turns` with the built-in hybrid on a CPU: servers, load and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from benchmark import servers
from benchmark.__main__ import parse_options
from benchmark.command import Refused
from benchmark.gpu_hybrid import turns
from benchmark.report import Report
from rigs.servers.forked_servers import ForkedServer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=16, suite="base-b-test-cpu")

SMALL: Final = ("--quick", "--rounds", "3", "--output-length", "64", "--l1", "1024")


def test_servers_find_what_the_simulation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Server(ForkedServer):
        def flush(self, timeout: float = 60.0) -> None:
            done.append("flush")
            super().flush(timeout)

    def talk(*args: Any, barrier: bool) -> Any:
        done.append("talk in rounds" if barrier else "talk")
        return servers.talk(*args, barrier=barrier)

    monkeypatch.setattr(turns, "EngineServer", Server)
    monkeypatch.setattr(turns, "talk", talk)
    path = tmp_path / "lines.jsonl"
    args = parse_options(turns.COMMAND, "turns", "", SMALL)
    turns.run(args, Report("gpu-hybrid turns", vars(args), "cpu", path))
    assert done == ["flush", "talk in rounds"] * 2
    start, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert start["metric"] == "start" and len(start["details"]["tiers"]) == 2
    found = {(one["metric"], *one["case"].values()): one for one in lines}
    assert found["failed", "GPU only", "all"]["value"] == 0
    # Prompts of 128, 320 and 512 tokens. The last token of an answer of 64 is not computed, so the
    # last snapshot is that behind the prompt.
    cached = [found["cached_tokens", "+ L2", number] for number in (1, 2, 3)]
    assert [one["value"] for one in cached] == [0, 4 * 128, 4 * 320]
    assert [one["expected"] for one in cached] == [0, 4 * 128, 4 * 320]
    assert found["cached_from_host", "+ L2", 3]["value"] > 0
    for number in (1, 2):
        hits = found["hit_rate", "GPU only", number]
        assert hits["value"] == hits["expected"]
    assert found["hit_rate", "GPU only", 3]["value"] < found["hit_rate", "+ L2", 3]["value"]
    assert found["mean_ttft", "+ L2", "all"]["value"] > 0
    assert found["output_throughput", "+ L2", "all"]["value"] > 0
    assert found["mean_ttft_ratio", "L2"]["value"] > 0


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    args = parse_options(turns.COMMAND, "turns", "", ["--tp", "2"])
    with pytest.raises(Refused, match="--tp 2: this host has fewer GPUs"):
        turns.run(args, Report("gpu-hybrid turns", {}, "cuda", tmp_path / "lines.jsonl"))
