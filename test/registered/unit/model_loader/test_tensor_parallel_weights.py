"""A rank of several has its part of every tensor, and reads nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.placement import Share, TensorPlacement, WeightSlot
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.mem_cache.device.state_spec import RankShare, RankSplit
from sglang.srt.model_loader.loader import get_model
from sglang.srt.model_loader.weight_source import LoadConfig
from sglang.srt.models.causal_lm import CausalLM
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

HEADS, KV_HEADS, DIM, SIZE = 8, 2, 16, 128
LAYER = "model.layers.1"
RANKS = [(rank, size) for size in (2, 4) for rank in range(size)]


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[..., Path]) -> Path:
    """Everything that is split: biases too, and a vocabulary that four ranks do not divide."""
    return tiny_model(
        "llama", num_attention_heads=HEADS, attention_bias=True, mlp_bias=True, vocab_size=162
    )


def load(path: Path, rank: int, size: int, load_format: str = "auto") -> CausalLM:
    return get_model(
        ModelConfig.from_path(str(path)),
        LoadConfig(load_format=load_format, tp_group=PlaceInGroup(rank, size), show_progress=False),
    )


def parts(model: CausalLM) -> dict[str, torch.Tensor]:
    return {name: slot.dest for name, slot in model.weight_slots()}


def expected(name: str, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's part by hand: rows of layers that make features, columns of their readers."""
    module = name.split(".")[-2]
    if module in ("k_proj", "v_proj"):
        head = rank * KV_HEADS // size  # two ranks of four have the same head
        return whole[head * DIM : (head + KV_HEADS // min(size, KV_HEADS)) * DIM]
    if module in ("q_proj", "gate_proj", "up_proj"):
        return whole.chunk(size)[rank]
    if module in ("embed_tokens", "lm_head"):
        rows = -(-len(whole) // size)
        return whole[rank * rows : (rank + 1) * rows]
    if module in ("o_proj", "down_proj"):
        if name.endswith("weight"):
            return whole.chunk(size, dim=1)[rank]
        return whole if rank == 0 else whole[:0]
    return whole


@pytest.mark.parametrize(("rank", "size"), RANKS)
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_each_rank_has_its_slice_of_each_tensor(
    checkpoint: Path, rank: int, size: int, load_format: str
) -> None:
    whole = parts(load(checkpoint, 0, 1, load_format))
    got = parts(load(checkpoint, rank, size, load_format))
    assert set(got) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(got[name], expected(name, tensor, rank, size)), name
    assert got[f"{LAYER}.self_attn.q_proj.weight"].shape == (HEADS * DIM // size, 96)
    assert got[f"{LAYER}.self_attn.k_proj.bias"].shape == (DIM * (2 if size == 1 else 1),)
    assert got[f"{LAYER}.mlp.down_proj.weight"].shape == (96, SIZE // size)


def test_pickled_weights_are_split_likewise(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    torch.save(load_file(checkpoint / "model.safetensors"), tmp_path / "pytorch_model.bin")
    want, got = parts(load(checkpoint, 3, 4)), parts(load(tmp_path, 3, 4, "pt"))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_heads_of_queries_and_keys_are_normed_on_every_rank(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen3", num_attention_heads=HEADS)
    whole = load_file(tmp_path / "model.safetensors")
    got = parts(load(tmp_path, 1, 2))
    for kind, heads in (("q", HEADS // 2), ("k", KV_HEADS // 2)):
        name = f"{LAYER}.self_attn.{kind}_norm.weight"
        assert torch.equal(got[name], whole[name].expand(heads, DIM))


class Recorder:
    """A tensor in a file: notes which part of it is read."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole
        self.read: list[tuple[int, ...]] = []

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        part = self.whole[index]
        self.read.append(tuple(part.shape))
        return part


def test_a_slot_reads_its_part_alone() -> None:
    whole = Recorder(torch.arange(24.0).view(4, 6))
    dest = torch.empty(4, 2)
    WeightSlot.of(dest, Share(2, 4, 6), dim=1).fill(whole)
    assert whole.read == [(4, 2)]
    assert dest[0].tolist() == [2.0, 3.0]
    WeightSlot.of(torch.empty(0), Share(0, 0, 4)).fill(whole)
    assert whole.read == [(4, 2)]


def test_the_first_rank_alone_adds_a_row_parallel_bias() -> None:
    halves = []
    for rank in range(2):
        placement = TensorPlacement(
            dtype=torch.float32, device="cpu", tp_group=PlaceInGroup(rank, 2)
        )
        layer = RowParallelLinear(
            Share(rank * 3, rank * 3 + 3, 6), 4, bias=True, placement=placement
        )
        for weight in layer.parameters():
            weight.fill_(1.0)
        if layer.bias is not None:
            layer.bias.fill_(5.0)
        halves.append(layer.forward(torch.ones(1, 3), torch.zeros(1, 4))[0])
    first, second = halves
    assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    assert (first + second).tolist() == [[11.0] * 4]


def test_a_table_that_does_not_divide_ends_in_zeros() -> None:
    placement = TensorPlacement(dtype=torch.float32, device="cpu", tp_group=PlaceInGroup(3, 4))
    last = VocabParallelEmbedding(9, 2, placement=placement)
    assert last.tokens == Share(9, 9, 9)
    assert last.weight.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize(
    ("rank", "size", "share"),
    [
        (1, 2, RankShare(RankSplit.HEADS, 1, 2, 2)),
        (2, 4, RankShare(RankSplit.REPLICATED, 1, 2, 2)),
    ],
)
def test_a_ranks_state_is_that_of_its_heads(
    checkpoint: Path, rank: int, size: int, share: RankShare
) -> None:
    (kv,) = load(checkpoint, rank, size, "dummy").state_specs(torch.bfloat16)
    assert kv.share == share
    assert kv.layers == (0, 1)
    assert kv.num_bytes == 2 * 2 * DIM * 2  # K and V of one head, both layers, bf16


def test_heads_that_do_not_divide_are_refused() -> None:
    placement = TensorPlacement(dtype=torch.float32, device="cpu", tp_group=PlaceInGroup(0, 4))
    with pytest.raises(ValueError, match="3 KV heads cannot be split over 4 ranks"):
        placement.kv_head_share(3)
    with pytest.raises(
        ValueError, match="6 KV heads cannot be split over 4 ranks: use a --tp-size"
    ):
        placement.kv_head_share(6)
