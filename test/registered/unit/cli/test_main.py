"""The command `sglang`, and that of a store node."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

import sglang
from sglang import mooncake_node
from sglang.cli.main import main
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--port", "31000"], ["--port", "31000"]),
        (["owner/name", "--port", "1"], ["--model-path", "owner/name", "--port", "1"]),
        ([], []),
    ],
)
def test_serve_becomes_a_server_with_the_same_flags(
    monkeypatch: pytest.MonkeyPatch, words: list[str], flags: list[str]
) -> None:
    became: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: became.append((path, argv)))
    monkeypatch.setattr(sys, "argv", ["sglang", "serve", *words])
    main()
    python = sys.executable
    module = "sglang.launch_server"
    assert became == [(python, [python, "-m", module, *flags])]


@pytest.mark.parametrize(
    ("program", "words", "status", "said"),
    [
        (main, ["--version"], 0, f"{sglang.__version__}\n"),
        (main, ["version"], 0, f"{sglang.__version__}\n"),
        (main, ["--help"], 0, "start a server"),
        (main, ["serve", "--help"], 0, "usage: sglang serve [MODEL] [flags]\n"),
        (main, ["serve", "owner/name", "-h", "--port", "1"], 0, "usage: sglang serve [MODEL]"),
        (main, ["serve", "--help=all"], 0, "Longest context in tokens"),
        (main, [], 2, "required: command"),
        (main, ["server"], 2, "choose from 'serve', 'version'"),
        (main, ["--ver"], 2, "required: command"),
        # A store node answers before it looks for a master.
        (mooncake_node.main, ["--help"], 0, "MOONCAKE_GLOBAL_SEGMENT_SIZE=64gb"),
        (mooncake_node.main, ["--port", "7"], 2, "unrecognized arguments: --port 7"),
    ],
)
def test_all_else_prints_help_or_an_error(
    program: Callable[[], object],
    words: list[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sglang", *words])
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(SystemExit) as ended:
        program()
    assert ended.value.code == status
    shown = capsys.readouterr()
    assert said in shown.out + shown.err
