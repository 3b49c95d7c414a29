"""A server's keys come from a flag, a file or the environment, and no message shows them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

KEY = "s3cret-of-a-test"


def prepare(*argv: str) -> ServerArgs:
    return prepare_server_args(["--model-path", "dummy", *argv])


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("which", ["api_key", "admin_api_key"])
def test_each_source_gives_the_key_and_no_log_shows_it(
    which: str, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flag = "--" + which.replace("_", "-")
    assert getattr(prepare(), which) is None
    with getattr(envs, f"SGLANG_{which.upper()}").override(KEY):
        from_environment = prepare()
    for args in (prepare(flag, KEY), prepare(f"{flag}-file", str(key_file)), from_environment):
        assert getattr(args, which) == KEY
        assert KEY not in json.dumps(args.to_public_dict())
        assert args.to_public_dict()[which] == "***"
    assert KEY not in caplog.text
    assert caplog.records == []


def test_two_sources_of_one_key_are_refused(key_file: Path) -> None:
    path = str(key_file)
    with pytest.raises(ValueError, match="--api-key and --api-key-file: give the key once"):
        prepare("--api-key", KEY, "--api-key-file", path)
    with envs.SGLANG_ADMIN_API_KEY.override(KEY):
        with pytest.raises(ValueError, match="--admin-api-key-file and SGLANG_ADMIN_API_KEY: give"):
            prepare("--admin-api-key-file", path)
        assert prepare("--api-key-file", path).admin_api_key == KEY


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "one line, the key"),
        (b" \n", "one line, the key"),
        (KEY.encode() + b"\nmore", "one line, the key"),
        (KEY.encode() * 1000, "at most 4096"),
        (b"\xff\xfe", "one line, the key"),
        (None, "cannot be read: No such file"),
    ],
)
def test_an_error_names_a_file_without_a_key_but_not_its_text(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as refused:
        prepare("--api-key-file", str(path))
    assert str(refused.value).startswith(f"--api-key-file {path}: ")
    assert KEY not in str(refused.value)


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="expected a file"):
        prepare("--api-key-file", str(path))


def test_a_file_that_others_may_read_causes_a_warning(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key_file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        assert prepare("--api-key-file", str(key_file)).api_key == KEY
    assert f"{key_file}: others may read the key" in caplog.text
