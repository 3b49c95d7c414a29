"""Reading a seed's memory: what arrives, what is checked, and what goes wrong on the way."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.models.weight_rig import (
    IDENTITY,
    WeightRig,
    copying,
    weight_rig,
    weights_of,
    with_session,
)
from rigs.stores.fake_transfer_engine import FakeCall, FakeTransferEngine, Hanging
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.rank_group import SingleRank
from sglang.srt.hardware_backend import leaf_hash
from sglang.srt.model_loader import remote_weights as source_module
from sglang.srt.model_loader import weight_seed as seed_module
from sglang.srt.model_loader.remote_weights import RemoteInstanceWeights, cut_batches
from sglang.srt.model_loader.seed_answer import SeedAnswer
from sglang.srt.model_loader.weight_plan import cell_views
from sglang.srt.model_loader.weight_seed import WeightSeed, checksums
from sglang.srt.model_loader.weight_source import LoadConfig, SeedAddress, WeightSlots
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

SEED_NAME = "the seed at http://127.0.0.1:1: "


def with_session_of(rig: WeightRig, session_id: str) -> list[SeedAnswer]:
    """The seed of one rank at another address."""
    return [with_session(answer, session_id) for answer in rig.client.told]


def refusal(rig: WeightRig) -> str:
    """The reason why nothing is read: one line that names the seed."""
    with pytest.raises(ValueError) as caught:
        rig.read()
    line = str(caught.value)
    assert line.startswith(SEED_NAME)
    assert "\n" not in line
    return line


@pytest.mark.usefixtures("on_a_cpu_over_tcp")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_arrives_and_nothing_is_written(tmp_path: Path, dtype: torch.dtype) -> None:
    save_tiny_checkpoint(tmp_path, "qwen2", dtype=dtype)
    with weight_rig(tmp_path) as rig:
        model, source = rig.read()
        want, got = weights_of(rig.seed_model), weights_of(model)
        assert set(got) == set(want)
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name
            assert tensor.dtype == dtype
        assert source.identity() == IDENTITY
        assert {call.op for call in rig.fakes.calls} == {"read"}


@pytest.mark.usefixtures("on_a_cpu_over_tcp")
def test_a_draft_layer_travels_with_the_model(tmp_path: Path) -> None:
    """Both servers have one, or neither has."""
    save_tiny_checkpoint(tmp_path, "qwen3_5_moe", mtp=True)
    with weight_rig(tmp_path, has_draft_layer=True) as rig:
        model, _ = rig.read()
        want, got = weights_of(rig.seed_model), weights_of(model)
        assert "mtp.fc.weight" in want and set(got) == set(want)
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), name
        rig.config = ModelConfig.from_path(str(tmp_path))
        line = refusal(rig)
    assert "tensor 'mtp.fc.weight' is not in this server's model: start both with the " in line
    assert "--speculative-algorithm" in line


def test_neighbours_travel_together(rig: WeightRig) -> None:
    rig.read()
    (call,) = rig.fakes.calls
    num_tensors = len(rig.client.told[0].places)
    # Queries, keys and values are one request; gate and up projections.
    assert len(call.requests) == num_tensors - 2 * 3


def test_batches_keep_to_a_size(rig: WeightRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_BATCH_BYTES", 50_000)
    model, _ = rig.read()
    sizes = [sum(length for _, _, length in call.requests) for call in rig.fakes.calls]
    assert len(sizes) > 5
    # The embedding is larger and goes alone.
    assert sorted(sizes)[-1] == 160 * 96 * 4
    assert sorted(sizes)[-2] <= 50_000
    assert torch.equal(
        weights_of(model)["model.norm.weight"], weights_of(rig.seed_model)["model.norm.weight"]
    )
    assert list(cut_batches([], 1, 1)) == []


def test_a_reader_is_a_seed_in_its_turn(rig: WeightRig) -> None:
    model, source = rig.read()
    (told,) = rig.client.told
    again = WeightSeed(
        rig.engine, model, group=SingleRank(), config=told.weights.config, identity=source.identity
    )
    assert wait_until(lambda: again.answer(0)["weights"]["digest"] is not None, 30)
    answer = again.answer(0)
    assert answer["weights"] == msgspec.to_builtins(told.weights)
    session_id, places = answer["remote_instance_transfer_engine_info"]
    assert session_id == rig.engine.get_session_id()
    theirs = {name: list(place[1:]) for name, place in told.places.items()}
    assert {name: list(place[1:]) for name, place in places.items()} == theirs
    assert all(places[name][0] != told.places[name][0] for name in places)


def test_a_byte_that_changes_on_the_way_is_noticed(rig: WeightRig) -> None:
    norm = "model.layers.1.post_attention_layernorm.weight"
    address = rig.client.told[0].places[norm][0]

    def damaging(engine: FakeTransferEngine, call: FakeCall) -> int:
        copying(engine, call)
        for local, remote, _ in call.requests:
            if remote == address:
                ctypes.c_uint8.from_address(local + 5).value ^= 1
        return 0

    rig.fakes.answer = damaging
    line = refusal(rig)
    assert f"tensor {norm!r} arrived with checksum" in line
    assert "start again" in line


def test_hashing_that_fails_ends_the_reading(
    rig: WeightRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that wait to be hashed are given up; those not read yet stay unread."""
    monkeypatch.setattr(source_module, "_BATCH_BYTES", 5_000)
    rig.read()
    whole = sum(bool(call.requests) for call in rig.fakes.calls)
    assert whole > 10
    has_failed = threading.Event()

    def fail(cells: object) -> list[str]:
        has_failed.set()
        raise MemoryError("no memory for hashes")

    monkeypatch.setattr(source_module, "checksums", fail)
    reads = 0

    def after_the_failure(engine: FakeTransferEngine, call: FakeCall) -> int:
        nonlocal reads
        reads += bool(call.requests)
        assert reads <= 1 or has_failed.wait(30)
        return copying(engine, call)

    rig.fakes.answer = after_the_failure
    with pytest.raises(MemoryError, match="no memory for hashes"):
        rig.read()
    assert reads < whole / 2
    assert not [one for one in threading.enumerate() if one.name.startswith("weights-digest")]


def test_a_replaced_seed_is_named(rig: WeightRig) -> None:
    rig.fakes.answer = lambda engine, call: -1 if call.requests else 0
    assert "was replaced by another process" in refusal(rig)


def test_a_seed_that_ended_is_named(rig: WeightRig) -> None:
    rig.client.told = with_session_of(rig, "127.0.0.1:9")
    line = refusal(rig)
    assert "accepts no connection: it is not running; no weights were taken over" in line
    assert "name another seed" in line


@pytest.mark.parametrize("contacts", [True, False])
def test_hangs_are_named(rig: WeightRig, monkeypatch: pytest.MonkeyPatch, contacts: bool) -> None:
    monkeypatch.setattr(source_module, "_BATCH_TIMEOUT_S", 0.2)
    hanging = Hanging(contacts=contacts)
    rig.fakes.answer = hanging
    assert "has not given tensor 'model." in refusal(rig), "told while it still hangs"
    hanging.go_on.set()
    assert wait_until(lambda: not rig.engine.describe()["transfers_under_way"], 30)


def test_a_session_elsewhere_is_refused(rig: WeightRig) -> None:
    source = rig.source(SeedAddress(host="10.0.0.7", port=1))
    with pytest.raises(ValueError, match=r"0\.7:1: its Transfer Engine is at 127\.0\.0\.1, which"):
        source.fill(WeightSlots(rig.empty_model(), lambda: None))
    rig.client.told = with_session_of(rig, rig.engine.get_session_id())
    assert "is this server's own" in refusal(rig)
    rig.client.told = with_session_of(rig, "nowhere")
    assert "'nowhere' is no session id" in refusal(rig)
    assert not rig.fakes.calls


def test_a_model_that_differs_is_refused_before_anything_is_read(
    rig: WeightRig, tmp_path: Path
) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True, rope_theta=77.0)
    rig.config = ModelConfig.from_path(str(tmp_path))
    line = refusal(rig)
    assert "another model: rope_parameters.rope_theta in its config.json is 10000.0, in" in line
    assert "in the one in --model-path 77.0; give a copy" in line
    assert not rig.fakes.calls


def test_remote_weights_need_a_seed_and_an_engine(tiny_qwen3: Path) -> None:
    config = ModelConfig.from_path(str(tiny_qwen3))
    with pytest.raises(ValueError, match="'remote_instance' needs a seed and a Transfer Engine"):
        RemoteInstanceWeights(config, LoadConfig(load_format="remote_instance"))


def test_a_digest_is_computed_once_and_not_before_it_is_asked_for(rig: WeightRig) -> None:
    computed: list[str] = []
    go_on = threading.Event()

    def counted() -> str:
        computed.append("identity")
        assert go_on.wait(30)
        return IDENTITY

    seed = seed_alone(rig, counted)
    assert not computed
    assert seed.answer(0)["weights"]["digest"] is None
    go_on.set()
    assert wait_until(lambda: seed.answer(0)["weights"]["digest"] is not None, 30)
    digest = seed.answer(0)["weights"]["digest"]
    assert digest["identity"] == IDENTITY
    slots = dict(rig.seed_model.weight_slots())
    assert digest["checksums"] == {
        name: checksums(cell_views(slot)) for name, slot in slots.items()
    }
    # Weights that ranks could split are hashed in eighths, all others whole.
    assert len(digest["checksums"]["model.layers.0.mlp.down_proj.weight"]) == 8
    assert len(digest["checksums"]["model.norm.weight"]) == 1
    assert computed == ["identity"]
    with pytest.raises(ValueError, match=r"there is no rank 1 here: ask for rank 0$"):
        seed.answer(1)


def seed_alone(rig: WeightRig, identity: Callable[[], str]) -> WeightSeed:
    """A seed of one rank."""
    return WeightSeed(rig.engine, rig.seed_model, group=SingleRank(), config={}, identity=identity)


def test_a_digest_that_fails_is_told_and_tried_again(rig: WeightRig) -> None:
    lines = ["weights were deleted", ""]

    def identity() -> str:
        if line := lines.pop(0):
            raise ValueError(line)
        return IDENTITY

    seed = seed_alone(rig, identity)
    told: list[str] = []

    def has_digest() -> bool:
        try:
            return seed.answer(0)["weights"]["digest"] is not None
        except ValueError as error:
            told.append(str(error))
            return False

    assert wait_until(has_digest, 30)
    assert told == ["the weights' identity cannot be computed: weights were deleted"]


def test_a_seed_without_an_identity_hashes_nothing_else(
    rig: WeightRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seed whose files have changed is asked often."""
    hashed: list[str] = []
    monkeypatch.setattr(seed_module, "checksums", lambda _: hashed.append("tensor"))

    def changed() -> str:
        raise ValueError("model.safetensors has changed")

    seed = seed_alone(rig, changed)

    def is_refused() -> bool:
        try:
            return bool(seed.answer(0)["weights"]["digest"])
        except ValueError:
            return True

    assert wait_until(is_refused, 30)
    assert not hashed


@pytest.mark.parametrize("shape", [(1, 0), (1, 3), (5, 7), (30, 90)])
def test_a_checksum_is_of_all_bytes(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaf_hash, "LEAF_BYTES", 512)
    monkeypatch.setattr(leaf_hash, "BLOCK_BYTES", 256)
    data = torch.arange(shape[0] * shape[1]).to(torch.uint8).view(shape)
    (whole,) = checksums([data])
    assert len(whole) == 32
    # Columns of a wider matrix have the checksum that they have by themselves.
    wide = torch.zeros(shape[0], shape[1] + 4, dtype=torch.uint8)
    wide[:, 2:-2] = data
    for size in (4, 8, 1 << 20):
        monkeypatch.setattr(leaf_hash, "_PIECE_BYTES", size)
        assert checksums([data, wide[:, 2:-2], data[:0]])[:2] == [whole, whole]
    # Zeros that pad the last leaf are not bytes of the tensor.
    longer = torch.nn.functional.pad(data.reshape(1, -1), (0, 1))
    assert checksums([longer]) != [whole]
    if data.numel():
        data[-1, -1] += 1
        assert checksums([data]) != [whole]
