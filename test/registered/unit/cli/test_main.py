"""The command `sglang`."""

from __future__ import annotations

import os
import sys

import pytest

import sglang
from sglang.cli.main import main
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--port", "31000", "--help"], ["--port", "31000", "--help"]),
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
    ("words", "status", "said"),
    [
        (["--version"], 0, f"{sglang.__version__}\n"),
        (["--help"], 0, "start a server"),
        ([], 2, "required: command"),
        (["server"], 2, "choose from 'serve'"),
        (["--ver"], 2, "required: command"),
    ],
)
def test_all_else(
    words: list[str],
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sglang", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
