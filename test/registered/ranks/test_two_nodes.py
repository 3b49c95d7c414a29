"""Two machines' parts of one server, on one machine: they serve, drain and end together."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from rigs.machines.two_nodes import Nodes
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.forked_servers import ForkedServer
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import wait_until
from sglang.srt.utils.process import is_alive
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=16, suite="base-b-test-cpu")

IDS: Final = prompt(1, 100)
FLAGS: Final = (
    "--tp-size", "2", "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR),
    "--max-total-tokens", "4096", "--page-size", "16", "--enable-hierarchical-cache",
    "--served-model-name", "tiny",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", num_attention_heads=8, vocab_size=2176, eos_token_id=2)


@contextmanager
def two_nodes(model: Path) -> Iterator[Nodes]:
    """Both serve inside the block; nothing is left behind it."""
    nodes = Nodes(model, FLAGS)
    try:
        children = nodes.await_ready()
        assert len(children) == 3, "a rank each, and one detokenizer"
        yield nodes
        assert wait_until(lambda: not any(map(is_alive, children)), 60), "processes are left"
    finally:
        nodes.kill()


def test_they_say_what_one_rank_says_and_drain_together(model: Path) -> None:
    with ForkedServer(*FLAGS[2:], model=str(model)) as server:
        expected = server.generate(IDS).output_ids
    with two_nodes(model) as nodes:
        assert nodes.server.generate(IDS).output_ids == expected
        assert nodes.server.generate(IDS).cached["device"] == 96
        nodes.first.send_signal(signal.SIGTERM)
        assert nodes.ends() == (0, 0)
        assert nodes.second.log_tail(1).endswith("scheduler 1] I shut down")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_killed_takes_the_other_down(model: Path, victim: int) -> None:
    with two_nodes(model) as nodes:
        (nodes.first, nodes.second)[victim].kill()
        statuses = nodes.ends()
        assert statuses[victim] == -signal.SIGKILL
        assert statuses[1 - victim] == 1
        log = (nodes.second, nodes.first)[victim].log_tail(5)
        assert f"rank {victim} " in log and ": this rank ends" in log


def test_sigterm_to_node_1_ends_the_server(model: Path) -> None:
    with two_nodes(model) as nodes:
        nodes.second.send_signal(signal.SIGTERM)
        assert nodes.ends() == (1, 128 + signal.SIGTERM)
        assert "rank 1 has given no sign of life" in nodes.first.log_tail(5)


def ends_of_start(nodes: Nodes) -> tuple[str, str]:
    """The last lines of both, whose starts have failed."""
    try:
        assert nodes.ends() == (1, 1)
        return nodes.first.log_tail(2), nodes.second.log_tail(1)
    finally:
        nodes.kill()


def test_flags_that_differ_end_the_start_of_both(model: Path) -> None:
    nodes = Nodes(model, FLAGS, "--page-size", "32")
    why = "error: rank {}: --page-size is 16 on rank 0, 32 on rank 1: give all machines the same"
    first, second = ends_of_start(nodes)
    assert why.format(0) in first
    assert why.format(1) in second


def test_models_that_differ_end_the_start_of_both(model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / model.name)
    config = other / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    first, second = ends_of_start(Nodes(model, FLAGS, model_of_1=other))
    assert "error: rank 0: config.json of the model is" in first
    assert "error: rank 1: config.json of the model is" in second


def test_a_node_that_cannot_read_its_weights_ends_the_start_of_both(
    model: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model, tmp_path / model.name)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    first, second = ends_of_start(Nodes(model, FLAGS, model_of_1=other))
    assert "error: rank 1: " in second and "model.safetensors" in second
    assert "scheduler_TP0 process ended while it started" in first
