"""Servers of several ranks that read the weights of servers of other numbers of ranks, over TCP."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.schedulers import rank_faults
from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.forked_servers import ForkedProcess, ForkedServer
from rigs.servers.seed_servers import remote_flags, weight_digest
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.remote_weights import SEED_PATH, START_SEED
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.model_loader.loader import get_model
from sglang.srt.model_loader.weight_plan import cell_views
from sglang.srt.model_loader.weight_seed import checksums
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import await_health, new_log_path

register_cpu_ci(est_time=10, suite="base-b-test-cpu")

TCP: Final = {"MOONCAKE_PROTOCOL": "tcp"}
PAGE: Final = 16
IDS: Final = prompt(1, 100)
STORE: Final = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
L3: Final = (
    "--enable-hierarchical-cache", "--hicache-storage-backend", "file",
    "--hicache-storage-prefetch-policy", "wait_complete",
    "--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE}),
)  # fmt: skip
HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8, "vocab_size": 2176, "eos_token_id": 2}
DELTA: Final[dict[str, Any]] = {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8}


def flags_of(size: int, *flags: str) -> tuple[str, ...]:
    return (
        "--tp-size", str(size), "--device", "cpu", "--tokenizer-path", str(BUILTIN_MODEL_DIR),
        "--max-total-tokens", "1024", "--page-size", str(PAGE), "--served-model-name", "tiny",
        *flags,
    )  # fmt: skip


def server_of(model: Path, size: int, *flags: str, **options: Any) -> ForkedServer:
    env = {**TCP, **options.pop("env", {})}
    return ForkedServer(*flags_of(size, *flags), model=str(model), env=env, **options)


def reader_of(
    seed: ForkedServer, model: Path, size: int, *flags: str, **options: Any
) -> ForkedServer:
    return server_of(model, size, *remote_flags(seed), *flags, **options)


def without_weights(model: Path, target: Path) -> Path:
    """A copy of a model's config alone."""
    target.mkdir()
    (target / "config.json").write_bytes((model / "config.json").read_bytes())
    return target


def digests(server: ForkedServer, size: int) -> list[dict[str, Any]]:
    """Identity and checksums of what each rank has in its memory."""
    assert server.request("GET", f"{SEED_PATH}?rank=0").body["weights"]["ranks"] == size
    return [weight_digest(server, rank) for rank in range(size)]


def checksums_of_files(model: Path, size: int) -> list[dict[str, list[str]]]:
    """Checksums of the weights that each rank of a server would load."""
    config = ModelConfig.from_path(str(model))
    return [
        {
            name: checksums(cell_views(slot))
            for name, slot in get_model(
                config, LoadConfig(tp_group=PlaceInGroup(rank, size), show_progress=False)
            ).weight_slots()
        }
        for rank in range(size)
    ]


def check(server: ForkedServer, model: Path, size: int, identity: str) -> list[int]:
    """Every rank has the bits that it would load from files; the words."""
    told = digests(server, size)
    assert [one["checksums"] for one in told] == checksums_of_files(model, size)
    assert {one["identity"] for one in told} == {identity}
    return server.generate(IDS).output_ids


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3", tie_word_embeddings=True, **HEADS)


def test_weights_travel_from_two_ranks_to_one_and_back(model: Path, tmp_path: Path) -> None:
    """The third server reads after the first is gone. Equal splits share the pages of L3."""
    bare = without_weights(model, tmp_path / "bare")
    store = {STORE: str(tmp_path / "store")}
    with server_of(model, 2, START_SEED, *L3, env=store) as first:
        identity = digests(first, 2)[0]["identity"]
        words = check(first, model, 2, identity)
        first.flush()
        with reader_of(first, bare, 1) as second:
            assert check(second, model, 1, identity) == words
            reply = first.request("GET", f"{SEED_PATH}?rank=2")
            assert (reply.status, "ask for rank 0 to 1" in str(reply.body)) == (400, True)
            first.kill()
            with reader_of(second, bare, 2, *L3, env=store) as third:
                answer = third.generate(IDS)
                assert answer.output_ids == words
                assert answer.cached["storage"] == 96
                check(third, model, 2, identity)
                assert third.stop() == 0
            assert second.stop() == 0


@pytest.mark.parametrize(("family", "fields"), [("qwen3_moe", HEADS), ("qwen3_next", DELTA)])
def test_four_ranks_read_from_one(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    """Experts and states are split; each KV head is on two of the four ranks."""
    model = tmp_path / "model"
    save_tiny_checkpoint(model, family, **fields)
    bare = without_weights(model, tmp_path / "bare")
    states = ("--max-mamba-cache-size", "24") if family == "qwen3_next" else ()
    with server_of(model, 1, START_SEED, *states) as seed:
        words = seed.generate(IDS).output_ids
        identity = digests(seed, 1)[0]["identity"]
        with reader_of(seed, bare, 4, *states) as reader:
            assert check(reader, model, 4, identity) == words


def test_a_rank_reads_from_two_nodes(model: Path, tmp_path: Path) -> None:
    meeting = ("--nnodes", "2", "--dist-init-addr", f"{LOOPBACK}:{get_free_port()}", START_SEED)
    server = server_of(model, 2, *meeting)
    first = server.launch()
    flags = ["--model-path", str(model), *flags_of(2, *meeting), "--node-rank", "1"]
    second = ForkedProcess(flags, new_log_path(), TCP)
    try:
        await_health(first, server.url, 60)
        identity = digests(server, 2)[0]["identity"]
        with reader_of(server, without_weights(model, tmp_path / "bare"), 1) as reader:
            assert check(reader, model, 1, identity) == server.generate(IDS).output_ids
    finally:
        first.kill()
        second.kill()


@pytest.fixture(scope="module")
def seed(model: Path) -> Iterator[ForkedServer]:
    """A seed of two ranks. The last test kills one of them."""
    with server_of(model, 2, START_SEED) as server:
        yield server


def end_of_start(server: ForkedServer) -> str:
    """Last line of a server that does not start."""
    process = server.launch()
    try:
        assert wait_until(lambda: process.poll() is not None, 90)
        assert process.wait() == 1
    finally:
        process.kill()
    return process.log_tail(6)


def test_a_reader_of_another_model_is_told_the_field(
    seed: ForkedServer, model: Path, tmp_path: Path
) -> None:
    other = without_weights(model, tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    line = end_of_start(reader_of(seed, other, 2))
    assert f"the seed at {seed.url}: it serves another model: rms_norm_eps in its conf" in line


def test_a_readers_rank_that_dies_does_the_seed_no_harm(seed: ForkedServer, model: Path) -> None:
    words = seed.generate(IDS).output_ids
    dying = functools.partial(rank_faults.kills_while_it_reads_weights, None)
    line = end_of_start(reader_of(seed, model, 2, in_rank=dying))
    assert "scheduler_TP1" in line and "SIGKILL" in line
    assert seed.generate(IDS).output_ids == words
    with reader_of(seed, model, 2) as again:
        assert again.generate(IDS).output_ids == words


def test_a_seeds_rank_that_dies_is_named(seed: ForkedServer, model: Path) -> None:
    """The last of the tests with this seed."""
    children = psutil.Process(seed.process.pid).children(recursive=True)
    (victim,) = [one for one in children if "scheduler_TP1" in " ".join(one.cmdline())]
    killing = functools.partial(rank_faults.kills_while_it_reads_weights, victim.pid)
    line = end_of_start(reader_of(seed, model, 2, in_rank=killing))
    # The reader's other rank may have all its parts by then, and wait for the checksums.
    what = (
        rf"peer {LOOPBACK}:\d+ .*; no weights were taken over: check that it runs",
        r"it answers with status 503: the engine died: process scheduler_TP1",
        r"it does not answer",
    )
    assert re.search(f"error: rank [01]: the seed at {seed.url}: ({'|'.join(what)})", line), line
