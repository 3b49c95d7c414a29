"""Flags of weights from a running server: what they need, and what contradicts them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rigs.stores.fake_transfer_engine import listening_peer
from sglang.srt.arg_groups.remote_weights import (
    START_SEED,
    offers_weights,
    reads_weights,
    seed_host_port,
)
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.start_checks import check_model, check_seed
from sglang.srt.environ import child_environment
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

IP = "--remote-instance-weight-loader-seed-instance-ip"
PORT = "--remote-instance-weight-loader-seed-instance-service-port"
BACKEND = "--remote-instance-weight-loader-backend"
REMOTE = ("--load-format", "remote_instance")
SEED = (IP, "10.0.0.1", PORT, "30000")


def prepare(*argv: str) -> ServerArgs:
    return prepare_server_args(["--model-path", "dummy", *argv])


def test_flags_make_a_server_a_reader_or_a_seed() -> None:
    reader = prepare(*REMOTE, *SEED, BACKEND, "transfer_engine")
    assert reads_weights(reader)
    assert offers_weights(reader), "a reader is a seed in its turn"
    assert seed_host_port(reader) == ("10.0.0.1", 30000)
    seed = prepare(START_SEED)
    assert (reads_weights(seed), offers_weights(seed)) == (False, True)
    neither = prepare()
    assert (reads_weights(neither), offers_weights(neither)) == (False, False)
    assert prepare(*REMOTE, *SEED, START_SEED).resolve() is not None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*REMOTE, IP, "10.0.0.1"), f"^--load-format remote_instance needs {PORT}"),
        (
            (*REMOTE, PORT, "30000"),
            f"^--load-format remote_instance needs {IP}: name the server to read from$",
        ),
        ((IP, "10.0.0.1"), f"^{IP} 10.0.0.1 has no effect without --load-format remote_instance$"),
        ((PORT, "1"), f"^{PORT} 1 has no effect without --load-format remote_instance"),
        ((*REMOTE, IP, "10.0.0.1", PORT, "0"), f"^{PORT} 0: must be from 1 to 65535"),
        ((*REMOTE, IP, "10.0.0.1", PORT, "65536"), f"^{PORT} 65536: must be from 1 to 65535"),
        ((*REMOTE, IP, "", PORT, "1"), f"^{IP} is empty"),
        ((*REMOTE, IP, "127.0.0.1", PORT, "30000"), "30000 are this server's own address"),
        ((*REMOTE, *SEED, BACKEND, "nccl"), f"^{BACKEND} nccl: SGLang has it, .*: use transfer_e"),
        ((*REMOTE, *SEED, BACKEND, "rdma"), f"^{BACKEND} rdma: choose one of transfer_engine"),
        (
            ("--remote-instance-weight-loader-send-weights-group-ports", "[1]"),
            "SGLang has it, this engine does not: loading weights from another server other than",
        ),
    ],
)
def test_contradictions_are_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        prepare(*argv)
    assert "\n" not in str(caught.value)


def test_an_engine_without_http_cannot_be_a_seed() -> None:
    with pytest.raises(ValueError, match=f"^{START_SEED} has no effect here"):
        Engine(remote_instance_weight_loader_start_seed_via_transfer_engine=True)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.delenv("ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE", raising=False)


@pytest.mark.usefixtures("over_tcp")
def test_the_seed_is_looked_for_at_the_start() -> None:
    with listening_peer() as address:
        port = address.rpartition(":")[2]
        check_seed(prepare(*REMOTE, IP, "127.0.0.1", PORT, port))
    gone = prepare(*REMOTE, IP, "127.0.0.1", PORT, str(get_free_port()))
    with pytest.raises(ValueError, match=r"no server accepts connections .* http://127\.0\.0\.1:"):
        check_seed(gone)


@pytest.mark.usefixtures("over_tcp")
def test_what_a_seed_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    check_seed(prepare(START_SEED))
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tpc")
    with pytest.raises(ValueError, match="MOONCAKE_PROTOCOL"):
        check_seed(prepare(START_SEED))
    check_seed(prepare())
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^weights from a running server: Mooncake cannot be"):
        check_seed(prepare(START_SEED))


def test_a_reader_needs_no_weight_files(tmp_path: Path) -> None:
    builtin = ServerArgs().resolve().model_path
    assert builtin is not None
    for file in Path(builtin).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    model = ["--model-path", str(tmp_path)]
    check_model(prepare_server_args([*model, *REMOTE, *SEED]))
    with pytest.raises(ValueError, match=r"has no \*\.safetensors files"):
        check_model(prepare_server_args(model))


def test_refusing_takes_no_torch() -> None:
    code = (
        "import sys\n"
        "from sglang.srt.entrypoints.start_checks import check_seed\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        f"args = ['--load-format', 'remote_instance', {IP!r}, '127.0.0.1', {PORT!r}, "
        f"'{get_free_port()}']\n"
        "try: check_seed(prepare_server_args(args))\n"
        "except ValueError as error: print(error, 'torch' in sys.modules)\n"
    )
    env = child_environment({"MOONCAKE_PROTOCOL": "tcp"})
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("no server accepts connections"), done.stdout
    assert done.stdout.endswith(" False\n")
