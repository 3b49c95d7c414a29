"""Weights of every family, read by servers of other numbers of ranks than the seed has."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.caches.memory_ranks import run_on_ranks
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.models.weight_rig import (
    IDENTITY,
    WeightRig,
    copying,
    start_bare_engine,
    weight_rig,
    weights_of,
)
from rigs.stores.fake_transfer_engine import (
    FakeCall,
    FakeTransferEngine,
    FakeTransferEngines,
    listening_peer,
)
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.model_loader import remote_weights
from sglang.srt.model_loader.remote_weights import RemoteInstanceWeights, StagingMemory
from sglang.srt.model_loader.weight_seed import WeightSeed
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=9, suite="base-a-test-cpu")

HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8}
"""Two KV heads: of four ranks each has one that another has too."""
LATENT: Final[dict[str, Any]] = {**HEADS, "num_key_value_heads": 8}
DELTA: Final[dict[str, Any]] = {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    # A vocabulary that ranks do not divide.
    "qwen2": {**HEADS, "vocab_size": 163},
    "qwen3": {**HEADS, "vocab_size": 161, "tie_word_embeddings": True},
    "qwen3_moe": HEADS,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "minimax_m2": HEADS,
    "gpt_oss": HEADS,
    "deepseek_v4": {**HEADS, "o_groups": 4},
    "glm5_next": LATENT,
    "kimi_linear": LATENT,
    "qwen3_next": DELTA,
    "nemotron_h": {**HEADS, "n_groups": 4},
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA,
    "qwen3_5_moe_vision": DELTA,
}
SIZES: Final = (1, 2, 4)

pytestmark = pytest.mark.usefixtures("on_a_cpu_over_tcp")


@pytest.fixture(scope="module")
def llama(tiny_model: Callable[..., Path]) -> Path:
    """Everything that is split: biases too, and rows that four ranks do not divide."""
    return tiny_model("llama", **HEADS, attention_bias=True, mlp_bias=True, vocab_size=162)


@pytest.fixture
def pair(llama: Path) -> Iterator[WeightRig]:
    """A seed of two ranks."""
    with weight_rig(llama, 2) as rig:
        yield rig


def raw(model: CausalLM) -> list[torch.Tensor]:
    """Every byte of a model's parameters, what pads them too."""
    return [one.data.view(-1).view(torch.uint8) for one in model.parameters()]


def assert_equal(got: CausalLM, want: CausalLM) -> None:
    ours, theirs = raw(got), raw(want)
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"parameter {at}"


def check(path: Path, there: int, sizes: tuple[int, ...], dtype: str = "auto") -> None:
    """Each rank of servers of `sizes` reads what it would load from files."""
    with weight_rig(path, there, dtype=dtype) as rig:
        for size in sizes:
            for rank in range(size):
                model, source = rig.read(rank, size)
                assert_equal(model, rig.load_rank(rank, size))
                assert source.identity() == IDENTITY
        assert {call.op for call in rig.fakes.calls} == {"read"}
        for rank, model in enumerate(rig.seed_models):
            assert_equal(model, rig.load_rank(rank, there))


@pytest.mark.half
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("there", SIZES)
def test_any_number_of_ranks_reads_from_any_other(llama: Path, there: int, dtype: str) -> None:
    check(llama, there, SIZES, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_by_other_numbers_of_ranks(tmp_path: Path, family: str) -> None:
    save_tiny_checkpoint(tmp_path, family, dtype=torch.bfloat16, **FAMILIES[family])
    check(tmp_path, 1, (4,))
    check(tmp_path, 4, (1, 2))


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each staging memory that was made."""
    sizes: list[int] = []

    class Recorded(StagingMemory):
        def __init__(self, engine: Any, num_bytes: int, *rest: Any) -> None:
            sizes.append(2 * num_bytes)
            super().__init__(engine, num_bytes, *rest)

    monkeypatch.setattr(remote_weights, "StagingMemory", Recorded)
    return sizes


def test_small_batches_through_a_small_memory_give_the_same_weights(
    llama: Path, staged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_weights, "_BATCH_BYTES", 5000)
    monkeypatch.setattr(remote_weights, "_STAGED_BYTES", 1200)
    check(llama, 1, (4,))
    check(llama, 4, (1,))
    check(llama, 2, (1,))
    assert staged == [2 * 1200] * 6


@pytest.mark.parametrize(("there", "here"), [(1, 4), (4, 1), (2, 2)])
def test_the_memory_beside_a_ranks_share(
    llama: Path, staged: list[int], there: int, here: int
) -> None:
    """The reader stages one tensor at most, none for equal splits, and frees it at the end."""
    with weight_rig(llama, there) as rig:
        model, _ = rig.read(here - 1, here)
        weights = {tensor.untyped_storage().data_ptr() for tensor in raw(model)}
        assert {begin for begin, _ in rig.engine._registry.ranges()} == weights
        parts = [96 * 128 * 4 // there for _ in ("o_proj", "down_proj")]
        assert staged == [max(parts) if there != here else 0]


def test_replicas_give_equally_much(llama: Path) -> None:
    """Four ranks share two KV heads: pairs of ranks have the same keys. All have the same norms."""
    with weight_rig(llama, 4) as rig:
        for rank in range(2):
            rig.read(rank, 2)
        given: Counter[str] = Counter()
        for call in rig.fakes.calls:
            given[call.peer] += sum(length for _, _, length in call.requests)
        assert len(given) == 4
        assert max(given.values()) - min(given.values()) < 0.05 * sum(given.values()) / 4, given
        # Each byte came once to each rank that needs it; the staging of columns added none.
        want = sum(
            tensor.numel() * tensor.element_size()
            for rank in range(2)
            for tensor in weights_of(rig.load_rank(rank, 2)).values()
        )
        assert sum(given.values()) == want


def test_a_reader_seeds_other_splits(pair: WeightRig, llama: Path) -> None:
    second, _ = pair.read()
    with listening_peer() as session_id:
        pair.client = pair.seed_of([second], [session_id])
        # All ranks but the first of what they read from are gone.
        for model in pair.seed_models:
            with torch.inference_mode():
                for tensor in model.parameters():
                    tensor.zero_()
        for rank in range(2):
            third, source = pair.read(rank, 2)
            assert_equal(third, pair.load_rank(rank, 2))
            assert source.identity() == IDENTITY


@pytest.mark.half
@pytest.mark.parametrize("what", ["mlp.down_proj", "self_attn.k_proj"])
@pytest.mark.parametrize("size", SIZES)
def test_a_byte_that_changes_on_the_way_is_noticed(pair: WeightRig, what: str, size: int) -> None:
    """Wherever it is, on the way from the second rank."""
    name = f"model.layers.1.{what}.weight"
    address, count, itemsize = pair.client.told[1].places[name]
    at = address + count * itemsize - 5
    hits: list[int] = []

    def damaging(engine: FakeTransferEngine, call: FakeCall) -> int:
        copying(engine, call)
        for local, remote, length in call.requests:
            if remote <= at < remote + length:
                hits.append(at)
                ctypes.c_uint8.from_address(local + at - remote).value ^= 1
        return 0

    pair.fakes.answer = damaging
    with pytest.raises(ValueError, match=f"tensor '{name}' arrived with .*, rank 1 of the seed"):
        pair.read(size - 1, size)
    assert len(hits) == 1


def test_an_ended_rank_is_named(pair: WeightRig) -> None:
    gone = pair.client.told[1].session_id
    pair.fakes.answer = lambda engine, call: -1 if call.peer == gone and call.requests else 0
    with pytest.raises(ValueError, match=f"peer {gone} no longer has tensor '(model|lm_head)"):
        pair.read(0, 1)


def test_a_digest_that_fails_on_one_rank_is_told_by_all_and_tried_again(pair: WeightRig) -> None:
    lines = ["weights were deleted", ""]

    def identity() -> str:
        if line := lines.pop(0):
            raise ValueError(line)
        return IDENTITY

    def told(group: RankGroup) -> list[str]:
        seed = WeightSeed(
            start_bare_engine(FakeTransferEngines()),
            pair.seed_models[group.rank],
            group=group,
            config={},
            identity=identity,
        )
        errors: list[str] = []

        def has_digest() -> bool:
            try:
                return seed.answer(1)["weights"]["digest"] is not None
            except ValueError as error:
                errors.append(str(error))
                return False

        assert wait_until(has_digest, 30)
        with pytest.raises(ValueError, match="there is no rank 2 here: ask for rank 0 to 1"):
            seed.answer(2)
        return errors

    why = "the weights' identity cannot be computed on rank 0: weights were deleted"
    assert run_on_ranks(2, told) == [[why]] * 2
    assert not lines, "rank 0 alone is asked"


def test_an_impossible_split_asks_nobody(pair: WeightRig) -> None:
    """The seed is not even asked."""
    with pytest.raises(ValueError, match="8 attention heads cannot be split over 3 ranks"):
        pair.read(0, 3)
    assert not pair.fakes.calls


def test_sources_tell_the_seeds_identity_after_reading_alone(pair: WeightRig) -> None:
    source: RemoteInstanceWeights = pair.source()
    with pytest.raises(AssertionError, match="asked before the weights were read"):
        source.identity()
