"""`--config FILE` and the flags of TLS: what a command line takes from a file, and refusals."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import sglang
from rigs.servers.tls_server import Certificates
from sglang.srt.arg_groups.cli import FlagErrors
from sglang.srt.entrypoints.start_checks import check_tls
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.yaml"


def parsed(file: Path, text: str, *flags: str) -> ServerArgs:
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)
    return prepare_server_args(["--device", "cpu", "--config", str(file), *flags])


def refusal(file: Path, text: str, *flags: str) -> str:
    with pytest.raises(FlagErrors) as caught:
        parsed(file, text, *flags)
    return str(caught.value)


def test_names_with_dashes_underscores_and_aliases(file: Path) -> None:
    args = parsed(
        file,
        "page-size: 32\nmax_total_tokens: 4096\ntp: 2\n--host: 0.0.0.0\nenable-metrics: true\n"
        "enable_cache_report: false\nhicache-ratio: 3\nenable-hierarchical-cache: yes\n"
        "max-queued-requests:\n",
    )
    assert (args.page_size, args.max_total_tokens, args.tp_size) == (32, 4096, 2)
    assert (args.host, args.enable_metrics, args.enable_cache_report) == ("0.0.0.0", True, False)
    assert (args.hicache_ratio, args.max_queued_requests) == (3.0, ServerArgs.max_queued_requests)


def test_the_command_line_wins_wherever_it_stands(file: Path) -> None:
    file.write_text("port: 1\npage-size: 4\n")
    for flags in (
        ["--port", "31000", "--config", str(file)],
        [f"--config={file}", "--port", "31000"],
    ):
        args = prepare_server_args(["--device", "cpu", *flags])
        assert (args.port, args.page_size) == (31000, 4)


def test_mappings_become_json(file: Path) -> None:
    args = parsed(
        file,
        "hicache-storage-backend: file\nhicache-storage-backend-extra-config:\n"
        "  prefetch_threshold: 64\n",
    )
    assert args.extra_config() == {"prefetch_threshold": 64}


def test_a_flag_may_differ_from_the_mapping_that_is_merged(file: Path) -> None:
    args = parsed(file, "page-size: 4\n<<: {page-size: 8, max-total-tokens: 4096}\n")
    assert (args.page_size, args.max_total_tokens) == (4, 4096)


def test_an_empty_file_changes_nothing(file: Path) -> None:
    assert parsed(file, "# nothing\n") == prepare_server_args(["--device", "cpu"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("page-siz: 4", "unknown flag --page-siz; did you mean --page-size?"),
        ("page-siz: false", "unknown flag --page-siz; did you mean --page-size?"),
        ("max_model_len: 4", "use --context-length"),
        ("enable-lora: true", "--enable-lora: SGLang has it, this engine does not: LoRA"),
        ("page-size: four", "--page-size: invalid int value: 'four'"),
        ("page-size: [1, 2]", "--page-size: a list is no value"),
        ("enable-metrics: 3", "--enable-metrics: must be true or false, not 3"),
        ("served-model-name: yes", "--served-model-name: True needs quotes"),
        ("- page-size", "is not a mapping"),
        ("a: [", "line 2: is not YAML"),
        ("page-size: 4\npage_size: 5", "--page-size is there 2 times: keep one"),
        ("page-size: 4\npage-size: 5\n--page-size:", "--page-size is there 3 times: keep one"),
        ("config: other.yaml", "a file cannot name another file"),
    ],
)
def test_mistakes_of_a_file_name_the_flag(file: Path, text: str, words: str) -> None:
    assert words in refusal(file, text + "\n")


def test_a_flag_that_is_off_here_may_be_false(file: Path) -> None:
    assert parsed(file, "enable-lora: false\npage-size: 8\n").page_size == 8


def test_a_missing_file_and_two_files_are_refused(file: Path) -> None:
    with pytest.raises(FlagErrors, match=r"none\.yaml: cannot be read: No such file"):
        prepare_server_args(["--config", "none.yaml"])
    with pytest.raises(FlagErrors, match="--config: give one file"):
        prepare_server_args(["--config"])


def test_keys_may_be_in_the_file_and_others_must_not_read_it(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "only-for-this-test"
    with caplog.at_level(logging.WARNING):
        args = parsed(file, f"api-key: {key}\n")
    assert args.api_key == key and key not in repr(args) and not caplog.messages
    file.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        prepare_server_args(["--device", "cpu", "--config", str(file)])
    assert any("others may read --api-key: chmod 600" in one for one in caplog.messages)
    assert key not in caplog.text


def test_without_a_command_line_it_is_refused() -> None:
    with pytest.raises(ValueError, match="--config is read on the command line"):
        sglang.Engine(config="server.yaml")


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    def lines(**given: str) -> str:
        with pytest.raises(FlagErrors) as caught:
            ServerArgs(device="cpu", **given).resolve()  # type: ignore[arg-type]
        return str(caught.value)

    assert "--ssl-certfile needs --ssl-keyfile" in lines(ssl_certfile="a")
    assert "--ssl-keyfile needs --ssl-certfile" in lines(ssl_keyfile="a")
    assert "no effect without --ssl-certfile" in lines(ssl_keyfile_password="a")


def test_files_of_a_certificate_are_checked_at_the_start(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)

    def check(certfile: Path, keyfile: Path) -> None:
        check_tls(
            ServerArgs(device="cpu", ssl_certfile=str(certfile), ssl_keyfile=str(keyfile)).resolve()
        )

    check(made.certfile, made.keyfile)
    with pytest.raises(ValueError, match=r"--ssl-keyfile .*none: cannot be read"):
        check(made.certfile, tmp_path / "none")
    with pytest.raises(ValueError, match="no certificate with its key in PEM"):
        check(made.keyfile, made.keyfile)
    (tmp_path / "other").mkdir()
    other = Certificates.make(tmp_path / "other")
    with pytest.raises(ValueError, match="no certificate with its key in PEM"):
        check(made.certfile, other.keyfile)
