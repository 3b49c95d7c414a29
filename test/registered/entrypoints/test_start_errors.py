"""What cannot start says so in one line with the remedy, at once, and exits non-zero."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.environ import child_environment
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=90, suite="base-b-test-cpu")

BOUND_S = 40.0
"""Well under the 90 s that Mooncake's own set-up would try; most of it is importing torch."""


def start(*flags: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and last line of a server that must not start."""
    command = [sys.executable, "-m", "sglang.launch_server", "--port", str(get_free_port()), *flags]
    began = time.monotonic()
    done = subprocess.run(
        command, env=child_environment(env), capture_output=True, text=True, timeout=BOUND_S * 2
    )
    assert time.monotonic() - began < BOUND_S
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode, lines[-1]


def model_with(tmp_path: Path, **changes: object) -> Path:
    """The built-in model with another config."""
    copy = tmp_path / "model"
    shutil.copytree(BUILTIN_MODEL_DIR, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        pytest.param(
            ["--quantization", "fp8"], {}, ["--quantization", "SGLang has it"], id="known"
        ),
        pytest.param(["--page-sise", "4"], {}, ["--page-sise", "--page-size"], id="typo"),
        pytest.param(["--model-path", "/nowhere/model"], {}, ["/nowhere/model"], id="no-model"),
        pytest.param(
            ["--enable-hierarchical-cache", "--hicache-size", "100000"],
            {},
            ["--hicache-size", "available"],
            id="too-little-memory-for-l2",
        ),
        pytest.param(
            ["--max-total-tokens", "1000000000000"], {}, ["--max-total-tokens"], id="l1-too-large"
        ),
        pytest.param(
            ["--hicache-storage-backend", "mooncake"],
            {"MOONCAKE_MASTER": "127.0.0.1:1", "MOONCAKE_PROTOCOL": "tcp"},
            ["MOONCAKE_MASTER", "127.0.0.1:1"],
            id="no-master",
        ),
        pytest.param(
            ["--hicache-storage-backend", "mooncake"],
            {"MOONCAKE_MASTER": "127.0.0.1:1", "MOONCAKE_PROTOCOL": "rdma"},
            ["MOONCAKE_PROTOCOL=tcp"],
            id="no-rdma-device",
        ),
    ],
)
def test_one_line_with_the_remedy(flags: list[str], env: dict[str, str], words: list[str]) -> None:
    status, line = start(*flags, env=env)
    assert status != 0
    for word in words:
        assert word in line


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, line = start("--port", str(port))
    assert status != 0
    assert str(port) in line
    assert "--port" in line


def test_a_torn_checkpoint_is_named(tmp_path: Path) -> None:
    model = model_with(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    status, line = start("--model-path", str(model))
    assert status != 0
    assert "model.safetensors" in line


def test_another_architecture_is_named_with_the_supported(tmp_path: Path) -> None:
    model = model_with(tmp_path, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    status, line = start("--model-path", str(model))
    assert status != 0
    assert "GPT2LMHeadModel" in line
    assert "Qwen3ForCausalLM" in line


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
