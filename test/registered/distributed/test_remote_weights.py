"""Servers that start with the weights of a running one: a chain of three, and every way to fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from rigs.servers.engine_server import EXACT, EngineServer
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.seed_servers import remote_flags, weight_digest
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.remote_weights import SEED_PATH, START_SEED
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import Block, Transfer, TransferOp
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import child_environment, envs
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.model_loader import remote_weights
from sglang.srt.model_loader.loader import build_model
from sglang.srt.model_loader.remote_weights import RemoteInstanceWeights
from sglang.srt.model_loader.seed_client import SeedClient
from sglang.srt.model_loader.weight_files import weights_identity
from sglang.srt.model_loader.weight_seed import register_weights
from sglang.srt.model_loader.weight_source import LoadConfig, SeedAddress, WeightSlots
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=17, suite="base-b-test-cpu")

TCP = {"MOONCAKE_PROTOCOL": "tcp"}
PROMPT = "The code of heron is 7391. What is the code of heron?"
LONG_PROMPT = "The code of heron is 7391. " * 40 + "What is the code of heron?"
OLDER_PATH = f"/get{SEED_PATH.replace('/', '_')}"
PROGRESS_S = 4


def reading(seed: EngineServer, *flags: str, **options: Any) -> EngineServer:
    """A server that reads the weights of another one."""
    return ForkedServer(
        *remote_flags(seed), *flags, env={**TCP, **options.pop("env", {})}, **options
    )


def without_weights(target: Path) -> Path:
    """A copy of the built-in model that has no weight files."""
    shutil.copytree(BUILTIN_MODEL_DIR, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


def digest(server: EngineServer) -> dict[str, Any]:
    """Identity and checksums of a server's weights, once it has computed them."""
    return weight_digest(server, path=OLDER_PATH)


def words(server: EngineServer) -> list[Any]:
    """Greedy tokens with their log probabilities."""
    answer = server.generate(PROMPT, max_new_tokens=12, return_logprob=True)
    return list(answer.meta_info["output_token_logprobs"])


def test_a_reader_is_a_seed_for_the_next_server(tmp_path: Path) -> None:
    """The second and third have no weight files; the third reads when the first is gone."""
    store = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "store")}
    flags = (
        "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete",
        *EXACT,
    )  # fmt: skip
    model = str(without_weights(tmp_path / "model"))
    with ForkedServer(START_SEED, *flags, env={**TCP, **store}) as first:
        want, told = words(first), digest(first)
        long = first.generate(LONG_PROMPT)
        first.flush()
        with reading(first, *flags, model=model, env=store) as second:
            assert words(second) == want
            assert digest(second) == told
            # One store: pages that the seed has written are read by who has its weights.
            answer = second.generate(LONG_PROMPT)
            assert answer.cached["storage"] >= 256, answer.cached
            assert answer.output_ids == long.output_ids
            info = second.request("GET", "/server_info").body["transfer_engine"]
            assert (info["protocol"], info["is_fallback"]) == ("tcp", False)
            assert info["registered_bytes"] > 3_000_000
            first.kill()
            with reading(second, *flags, model=model, env=store) as third:
                assert words(third) == want
                assert digest(third) == told
                assert third.stop() == 0
            assert second.stop() == 0


def test_random_weights_are_read_in_another_dtype() -> None:
    flags = ("--dtype", "float32")
    random = ("--load-format", "dummy")
    with (
        ForkedServer(START_SEED, *random, *flags, env=TCP) as first,
        reading(first, *flags) as second,
    ):
        assert words(second) == words(first)
        assert digest(second) == digest(first)


@pytest.fixture(scope="module")
def seed() -> Iterator[EngineServer]:
    """Whom tests do no harm, but for the last, which kills it."""
    with ForkedServer(START_SEED, env=TCP) as server:
        yield server


def last_line(server: EngineServer) -> str:
    """The one line of a refused start."""
    with pytest.raises(RuntimeError, match="ended with status 1") as caught, server:
        pass
    output = str(caught.value)
    assert "Traceback" not in output, output
    line = output.splitlines()[-1]
    assert line.startswith("error: "), output
    return line


def test_an_unlike_reader_is_refused_and_the_seed_serves_on(tmp_path: Path) -> None:
    other = without_weights(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    key = ("--api-key", "user")
    with ForkedServer(START_SEED, *key, env=TCP) as server:
        here = re.escape(f"error: the seed at {server.url}: ")
        starts: Sequence[tuple[EngineServer, str]] = [
            (
                reading(server, *key, model=str(other)),
                "it serves another model: rms_norm_eps in its config.json is",
            ),
            (
                reading(server, *key, "--dtype", "float32"),
                r"tensor \'model\.embed_.* is bfloat16 ",
            ),
            (reading(server), "it refuses this server's key .* the seed's --api-key"),
        ]
        for reader, message in starts:
            assert re.match(here + message, last_line(reader))
        assert server.process.poll() is None
        assert server.request("GET", "/health").status == 200


def change_weights(model: Path) -> None:
    """Put other weights into the place of a model's, as one who copies a new release does."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, model / "new", metadata={"format": "pt"})
    (model / "new").rename(file)


def test_changed_files_of_a_seed_are_refused(tmp_path: Path) -> None:
    """Its readers have what it loaded. They never get the namespace of what the files have now."""
    model = tmp_path / "model"
    shutil.copytree(BUILTIN_MODEL_DIR, model)
    reader_model = str(without_weights(tmp_path / "reader"))
    loaded = weights_identity(str(model), load_format="auto")
    with ForkedServer(START_SEED, env=TCP, model=str(model)) as server:
        want = words(server)
        change_weights(model)
        line = last_line(reading(server, model=reader_model))
        assert "it answers with status 400: the weights' identity cannot be computed: " in line
        assert "model.safetensors has changed since the weights were loaded" in line
        assert line.endswith("restart this server")
        assert words(server) == want
    shutil.rmtree(model)
    shutil.copytree(BUILTIN_MODEL_DIR, model)
    store = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "store")}
    flags = ("--enable-hierarchical-cache", "--hicache-storage-backend", "file")
    with ForkedServer(START_SEED, *flags, env={**TCP, **store}, model=str(model)) as server:
        change_weights(model)
        # The server and its readers write to the namespace of the weights that the server loaded.
        with reading(server, model=reader_model) as reader:
            assert words(reader) == want
            assert digest(reader)["identity"] == digest(server)["identity"] == loaded


def test_a_seed_without_the_flag_and_a_missing_one_are_named(tmp_path: Path) -> None:
    with ForkedServer() as server:
        reply = server.request("GET", f"{SEED_PATH}?rank=0")
        assert (reply.status, START_SEED in str(reply.body)) == (400, True)
        line = last_line(reading(server))
        assert "it answers with status 400: no server may read the weights of this one" in line
        assert START_SEED in line
    line = last_line(reading(server))
    assert f"no server accepts connections at the seed's address {server.url}" in line


def test_what_a_seed_tells(seed: EngineServer) -> None:
    body = seed.request("GET", f"{SEED_PATH}?rank=0").body
    session, places = body["remote_instance_transfer_engine_info"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", session)
    address, count, size = places["model.norm.weight"]
    assert (address > 0, count, size) == (True, 192, 2)
    part = body["weights"]["tensors"]["model.norm.weight"]
    whole = {"split_dim": 0, "split_ranges": [], "split_runs": []}
    assert part == {"dtype": "bfloat16", "shape": [192], **whole}
    assert (body["rank"], body["weights"]["ranks"]) == (0, 1)
    for query, message in (
        ("?rank=1", "there is no rank 1"),
        ("", "name a rank"),
        ("?rank=x", "rank='x'"),
    ):
        reply = seed.request("GET", SEED_PATH + query)
        assert (reply.status, message in str(reply.body)) == (400, True), reply


class Reader:
    """Reads a seed's weights in this process, a little at a time."""

    def __init__(self, seed_url: str, answer_timeout: float = 20.0) -> None:
        config = ModelConfig.from_path(str(BUILTIN_MODEL_DIR))
        mark_device_set(detect_device())
        self.engine = MooncakeTransferEngine(LOOPBACK)
        self.model = build_model(config, LoadConfig())
        register_weights(self.engine, (slot for _, slot in self.model.weight_slots()))
        address = SeedAddress(host=LOOPBACK, port=int(seed_url.rpartition(":")[2]))
        load_config = LoadConfig(seed_instance=address)
        client = SeedClient(address, answer_timeout=answer_timeout)
        self.source = RemoteInstanceWeights(config, load_config, engine=self.engine, client=client)
        self.batches = 0

    def before_batch(self, number: int, act: Callable[[], object]) -> None:
        """Do something when this many batches have been read."""
        transfer = self.engine.transfer

        def acting(
            peer: str, op: TransferOp, blocks: Sequence[Block], *, timeout: float | None
        ) -> Transfer:
            if self.batches == number:
                act()
            self.batches += 1
            return transfer(peer, op, blocks, timeout=timeout)

        self.engine.transfer = acting  # type: ignore[method-assign]

    def read(self) -> None:
        with torch.inference_mode():
            self.source.fill(WeightSlots(self.model, lambda: None))


@pytest.fixture
def in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.setattr(remote_weights, "_BATCH_BYTES", 400_000)
    for field in (envs.MC_TCP_PROGRESS_TIMEOUT_SEC, envs.MC_TCP_STATUS_TIMEOUT_SEC):
        monkeypatch.setenv(field.name, str(PROGRESS_S))


def send(server: EngineServer, number: signal.Signals) -> None:
    """Signal all processes of a server, and wait until those that are to stop have stopped: on a
    busy machine a process may run on for a while after the signal."""
    first = psutil.Process(server.process.pid)
    processes = (first, *first.children(recursive=True))
    for process in processes:
        process.send_signal(number)
    if number == signal.SIGSTOP:
        stopped = psutil.STATUS_STOPPED
        assert wait_until(lambda: all(one.status() == stopped for one in processes), 30)


def die_reading(seed_url: str) -> None:
    """The end of this process, in the middle of reading."""
    remote_weights._BATCH_BYTES = 400_000  # type: ignore[misc]
    reader = Reader(seed_url)
    reader.before_batch(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    reader.read()


def has_read_all(reader: Reader, seed: EngineServer) -> bool:
    """True if its weights are the seed's, after `read`."""
    told = digest(seed)
    names = {name for name, _ in reader.model.weight_slots()}
    return reader.source.identity() == told["identity"] and names == set(told["checksums"])


@pytest.mark.usefixtures("in_small_batches")
def test_a_reader_that_is_killed_does_the_seed_no_harm(seed: EngineServer) -> None:
    want = words(seed)
    code = f"import runpy; runpy.run_path({__file__!r})['die_reading']({seed.url!r})"
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(TCP), timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert words(seed) == want
    second = Reader(seed.url)
    second.read()
    assert has_read_all(second, seed)
    second.engine.close()


@pytest.mark.usefixtures("in_small_batches")
def test_a_seed_that_is_stopped_or_killed_in_the_middle(seed: EngineServer) -> None:
    """The last of the tests with this seed."""
    want = words(seed)
    stopped, unread = Reader(seed.url), Reader(seed.url, answer_timeout=1.0)
    killed, whole = Reader(seed.url), Reader(seed.url)
    stopped.before_batch(3, lambda: send(seed, signal.SIGSTOP))
    with pytest.raises(ValueError, match=r"peer \S+ moved nothing for \d+ s; no weights were"):
        stopped.read()
    assert stopped.batches == 4
    with pytest.raises(ValueError, match="has not answered for 1 s: it is stopped or overl"):
        unread.read()

    # A reader's end does it no harm: it serves on, with the same weights.
    send(seed, signal.SIGCONT)
    for reader in (stopped, unread):
        reader.engine.close()
    assert words(seed) == want
    whole.read()
    assert has_read_all(whole, seed)

    killed.before_batch(3, seed.kill)
    with pytest.raises(ValueError, match=r"(ended during|accepts no connection).* no weights"):
        killed.read()
    for reader in (killed, whole):
        reader.engine.close()
