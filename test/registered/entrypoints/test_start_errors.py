"""A server that cannot start says so in one line with the remedy, and exits non-zero.

Errors that can be found without torch come before a process is started or a weight loaded.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rigs.forked_starts import ForkedStarts
from rigs.servers.forked_servers import ForkedProcess
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.environ import child_environment
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.srt.utils.process import is_alive, kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import new_log_path

register_cpu_ci(est_time=13, suite="base-b-test-cpu")

BOUND_S = 80.0
"""Under the 90 s that Mooncake's own set-up would try; most of it is importing torch."""
LIST_IMPORTS = {"PYTHONPROFILEIMPORTTIME": "1"}
"""Every Python process writes a line for each module that it has imported."""
STARTS_A_PROCESS = "multiprocessing.popen_spawn_posix"
"""Imported by a process that starts another of the engine's, when it does."""
MOONCAKE = ("--hicache-storage-backend", "mooncake")
DYNAMIC = ("--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config")
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 16\n"


def command() -> list[str]:
    return [sys.executable, "-m", "sglang.launch_server", "--port", str(get_free_port())]


@pytest.fixture(scope="module")
def starts() -> Iterator[ForkedStarts]:
    with ForkedStarts(LIST_IMPORTS) as starts:
        yield starts


def last_line(status: int, output: str) -> tuple[str, set[str]]:
    """The last line of a server that must not start, and what its processes imported."""
    assert status == 1, output[-2000:]
    assert "Traceback" not in output, output[-2000:]
    lines, modules = split_imports(output)
    assert lines[-1].startswith("error: ")
    return lines[-1], modules


def split_imports(output: str) -> tuple[list[str], set[str]]:
    """The lines of a log, and the modules of those that `LIST_IMPORTS` adds."""
    lines, modules = [], set()
    for line in output.splitlines():
        if line.startswith("import time:"):
            modules.add(line.rpartition("|")[2].strip())
        elif line.strip():
            lines.append(line)
    return lines, modules


def refused_at_once(starts: ForkedStarts, *flags: str, env: Mapping[str, str] | None = None) -> str:
    """The line of a server that must be refused before torch is imported and a process started."""
    port = ("--port", str(get_free_port()))
    line, modules = last_line(*starts.start((*port, *flags), env or {}))
    assert modules & {"torch", STARTS_A_PROCESS} == set(), line
    return line


def model_with(tmp_path: Path, **changes: object) -> Path:
    """The built-in model with another config."""
    copy = tmp_path / "model"
    shutil.copytree(BUILTIN_MODEL_DIR, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(["--lora-paths", "a"], ["--lora-paths", "SGLang has it"], id="known"),
        pytest.param(["--quantization", "awq"], ["weights are not quantized"], id="format"),
        pytest.param(["--page-sise", "4"], ["--page-sise", "--page-size"], id="typo"),
        pytest.param(["--model-path", "/nowhere/model"], ["/nowhere/model"], id="no-model"),
        pytest.param(["--tokenizer-path", "/nowhere/t"], ["tokenizer path '/nowhere/t'"], id="tok"),
        pytest.param(
            ["--chat-template", "/nowhere/c"],
            ["--chat-template /nowhere/c: no such file"],
            id="chat",
        ),
    ],
)
def test_flags_and_paths_are_looked_at_first(
    starts: ForkedStarts, flags: list[str], words: list[str]
) -> None:
    line = refused_at_once(starts, *flags)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("env", "extra_config", "words"),
    [
        pytest.param({}, None, ["no master", "MOONCAKE_MASTER=host:port"], id="not-named"),
        pytest.param(
            {"MOONCAKE_MASTER": "127.0.0.1:1", "MOONCAKE_PROTOCOL": "tcp"},
            None,
            ["MOONCAKE_MASTER", "127.0.0.1:1"],
            id="no-master",
        ),
        pytest.param(
            {"MOONCAKE_MASTER": "127.0.0.1:1", "MOONCAKE_PROTOCOL": "rdma"},
            '{"on_unreachable": "degrade"}',
            ["MOONCAKE_PROTOCOL=tcp"],
            id="no-rdma-device",
        ),
        pytest.param(
            {"MOONCAKE_MASTER": "127.0.0.1:1", "MOONCAKE_PROTOCOL": "infiniband"},
            None,
            ["MOONCAKE_PROTOCOL='infiniband'"],
            id="no-protocol",
        ),
        pytest.param({}, '{"on_unreachable": "hope"}', ["on_unreachable", "hope"], id="setting"),
    ],
)
def test_the_store_is_looked_for_first(
    starts: ForkedStarts, env: dict[str, str], extra_config: str | None, words: list[str]
) -> None:
    extra = ["--hicache-storage-backend-extra-config", extra_config] if extra_config else []
    line = refused_at_once(starts, *MOONCAKE, *extra, env=env)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"class_name": "Store"}, ["needs 'module_path'"]),
        ({"module_path": "no.such", "class_name": "Store"}, ["no.such.Store", "no module"]),
        ({"module_path": "torn_backend", "class_name": "Store"}, ["torn_backend.py", "line 2"]),
        ({"module_path": "my.backend", "class_name": "Stoer"}, ["my.backend.Stoer", "no 'Stoer'"]),
    ],
)
def test_a_backend_of_ones_own_is_looked_for_first(
    starts: ForkedStarts, tmp_path: Path, config: dict[str, str], words: list[str]
) -> None:
    (tmp_path / "torn_backend.py").write_text("import torch\nclass Store(:\n")
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "__init__.py").write_text("import torch\n")
    (tmp_path / "my" / "backend.py").write_text("import torch\nclass Store: ...\n")
    settings = json.dumps({"backend_name": "b", **config})
    line = refused_at_once(starts, *DYNAMIC, settings, env={"PYTHONPATH": str(tmp_path)})
    for word in words:
        assert word in line


def test_a_port_in_use_is_named(starts: ForkedStarts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused_at_once(starts, "--port", str(port))
    assert str(port) in line
    assert "--port" in line


def test_another_architecture_is_named_with_the_supported(
    starts: ForkedStarts, tmp_path: Path
) -> None:
    model = model_with(tmp_path, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    line = refused_at_once(starts, "--model-path", str(model))
    assert "GPT2LMHeadModel" in line
    assert "Qwen3ForCausalLM" in line


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_git_lfs_pointer_in_place_of_a_file_is_named(
    starts: ForkedStarts, tmp_path: Path, name: str
) -> None:
    model = model_with(tmp_path)
    (model / name).write_text(LFS_POINTER)
    line = refused_at_once(starts, "--model-path", str(model))
    assert f"{model / name} is a git-lfs pointer" in line
    assert "git lfs pull" in line


def test_weights_that_are_not_there_are_named(starts: ForkedStarts, tmp_path: Path) -> None:
    model = model_with(tmp_path)
    (model / "model.safetensors").unlink()
    assert "no *.safetensors files" in refused_at_once(starts, "--model-path", str(model))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(
            ["--enable-hierarchical-cache", "--hicache-size", "100000"],
            ["--hicache-size", "available"],
            id="too-little-memory-for-l2",
        ),
        pytest.param(
            ["--max-total-tokens", "1000000000000"], ["--max-total-tokens"], id="l1-too-large"
        ),
        pytest.param(
            ["--tool-call-parser", "auto"], ["--tool-call-parser auto", "no tools"], id="no-tools"
        ),
    ],
)
def test_what_needs_the_model_to_be_known_is_one_line_too(
    flags: list[str], words: list[str]
) -> None:
    log = new_log_path()
    process = ForkedProcess(["--port", str(get_free_port()), *flags], log)
    line, _ = last_line(process.wait(BOUND_S), log.read_text())
    for word in words:
        assert word in line


@contextmanager
def starting(log: Path, program: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program that starts, the leader of a process group, writing to `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            program, env=child_environment(LIST_IMPORTS), stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_process_tree(process.pid)
        process.wait()


def interrupt(log: Path, program: list[str], when: Callable[[str, list[Any]], bool]) -> list[str]:
    """Press Ctrl-C when `when(log, child processes)`; the log of what then ended as it should."""
    with starting(log, program) as process:
        family = psutil.Process(process.pid)
        assert wait_until(lambda: when(log.read_text(), family.children()), BOUND_S, interval=0.005)
        children = family.children(recursive=True)
        # The terminal sends it to every process of the group.
        for one in (family, *children):
            one.send_signal(signal.SIGINT)
        assert process.wait(BOUND_S) == 128 + signal.SIGINT, log.read_text()[-2000:]
        assert wait_until(lambda: not any(map(is_alive, children)), 30)
    lines, _ = split_imports(log.read_text())
    assert not [line for line in lines if "Traceback" in line or "Interrupt" in line], lines
    return lines


@pytest.mark.parametrize(
    ("module", "first_words"),
    [("launch_server", "starting sglang-builtin"), ("serve_embedded", "serve: ")],
)
def test_ctrl_c_during_the_first_imports_ends_without_a_word(
    tmp_path: Path, module: str, first_words: str
) -> None:
    program = [sys.executable, "-m", f"sglang.{module}"]
    lines = interrupt(tmp_path / "log", program, lambda log, _: "arg_groups.foreign_flags" in log)
    # On a busy machine the program may have come further before the signal reached it.
    assert not lines or first_words in lines[0]


def test_ctrl_c_after_the_first_line_ends_without_a_traceback(tmp_path: Path) -> None:
    lines = interrupt(tmp_path / "log", command(), lambda log, _: "starting sglang-builtin" in log)
    assert "for http://127.0.0.1:" in lines[0]


def test_ctrl_c_while_processes_import_ends_without_a_traceback(tmp_path: Path) -> None:
    """The scheduler has no handler yet, and the server is importing torch."""

    def scheduler_runs(log: str, children: list[Any]) -> bool:
        return any("scheduler" in " ".join(one.cmdline()) for one in children)

    interrupt(tmp_path / "log", command(), scheduler_runs)
