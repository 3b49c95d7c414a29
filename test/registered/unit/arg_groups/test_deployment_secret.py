"""The secret of prefill and decode servers: where it comes from, who needs it, who sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

MODE: Final = "--disaggregation-mode"
FILE: Final = "--disaggregation-secret-file"
NONE: Final = "--disaggregation-allow-no-secret"
TEXT: Final = "correct horse battery staple"


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_text(f"{TEXT}\n")
    file.chmod(0o600)
    return str(file)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(envs.SGLANG_DISAGGREGATION_SECRET.name, raising=False)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_it_comes_from_a_file_or_the_environment(mode: str, path: str) -> None:
    assert prepare_server_args([MODE, mode]).disaggregation_secret is None
    assert prepare_server_args([MODE, mode, FILE, path]).disaggregation_secret == TEXT
    with envs.SGLANG_DISAGGREGATION_SECRET.override(TEXT):
        args = prepare_server_args([MODE, mode, "--host", "10.0.0.1"])
        assert args.disaggregation_secret == TEXT
        with pytest.raises(ValueError, match=f"^{FILE} and SGLANG_DISAGGREGATION_SECRET: give"):
            prepare_server_args([MODE, mode, FILE, path])


def test_it_is_not_shown(path: str) -> None:
    args = prepare_server_args([MODE, "prefill", FILE, path])
    assert TEXT not in repr(args)
    shown = args.to_public_dict()
    assert shown["disaggregation_secret"] == "***"
    assert TEXT not in str(shown)


def test_it_is_no_flag() -> None:
    """Users of the machine could read it."""
    with pytest.raises(ValueError, match=f"unknown flag --disaggregation-secret; did.* {FILE}"):
        prepare_server_args([MODE, "prefill", "--disaggregation-secret", TEXT])
    assert ServerArgs(disaggregation_mode="prefill", disaggregation_secret=TEXT).resolve()


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "this-host"])
def test_servers_that_others_reach_need_one(mode: str, host: str, path: str) -> None:
    reached = [MODE, mode, "--host", host]
    with pytest.raises(ValueError, match=f"^--host {host} with {MODE} {mode} needs .*{FILE}"):
        prepare_server_args(reached)
    assert prepare_server_args([*reached, FILE, path]).disaggregation_secret == TEXT
    assert prepare_server_args([*reached, NONE]).disaggregation_secret is None
    with pytest.raises(ValueError, match=f"^{NONE} contradicts the secret; drop one of them$"):
        prepare_server_args([*reached, NONE, FILE, path])


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_those_on_loopback_need_none(host: str) -> None:
    assert prepare_server_args([MODE, "prefill", "--host", host]).disaggregation_secret is None


def test_servers_that_do_both_halves_have_none(path: str) -> None:
    assert prepare_server_args(["--host", "0.0.0.0"]).disaggregation_secret is None
    for argv in ([FILE, path], [NONE]):
        with pytest.raises(ValueError, match=f"^{argv[0]}.* has no effect with {MODE} null$"):
            prepare_server_args(argv)


def test_one_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("15 characters !")
    with pytest.raises(ValueError, match=f"^{FILE}: the secret has fewer than 16 .*openssl rand"):
        prepare_server_args([MODE, "prefill", FILE, str(short)])
    short.write_text("")
    with pytest.raises(ValueError, match=f"^{FILE} .*expected a file with one line"):
        prepare_server_args([MODE, "prefill", FILE, str(short)])
