"""Plans of reads from a seed's ranks, their batches, and every way in which seeds differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch

from sglang.srt.hardware_backend.leaf_hash import HASH_NAME
from sglang.srt.layers.placement import Share, WeightSlot
from sglang.srt.model_loader.remote_weights import cut_batches, staging_bytes
from sglang.srt.model_loader.seed_answer import (
    MemoryPlace,
    SeedAnswer,
    SeedWeights,
    TensorPart,
    WeightsDigest,
    check_seed,
    place_of,
)
from sglang.srt.model_loader.weight_plan import check_checksums, plan_reads
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

CONFIG = {"hidden_size": "4", "rope.theta": "1e4"}
FAR = 1_000_000
"""Distance of the seed's first rank's memory from ours, in bytes; the second's is twice that."""
MERGED = torch.zeros(6, 4)
BIAS = torch.zeros(3, dtype=torch.bfloat16)
Slots = dict[str, WeightSlot]


def make_slots() -> Slots:
    """Two tensors that share a parameter, one that is split, one without elements."""
    return {
        "k": WeightSlot.of(MERGED[4:]),
        "q": WeightSlot.of(MERGED[:4]),
        "b": WeightSlot.of(BIAS, Share(3, 6, 6)),
        "none": WeightSlot.of(MERGED[:0, 0], Share(0, 0, 6)),
    }


def make_answer(
    slots: Slots,
    rank: int = 0,
    ranks: int = 1,
    part: Callable[[str, TensorPart], TensorPart] = lambda name, part: part,
    place: Callable[[str, MemoryPlace], MemoryPlace] = lambda name, place: place,
    **offer: Any,
) -> SeedAnswer:
    """A seed's rank with these slots, whose memory is higher."""
    places = {name: place_of(slot.dest) for name, slot in slots.items()}
    far = {name: (at + FAR * (rank + 1), count, size) for name, (at, count, size) in places.items()}
    tensors = {name: part(name, TensorPart.of(slot)) for name, slot in slots.items()}
    fields = {
        "config": CONFIG, "protocol": "tcp", "ranks": ranks, "hash": HASH_NAME,
        "tensors": tensors, **offer,
    }  # fmt: skip
    return SeedAnswer(
        rank=rank,
        remote_instance_transfer_engine_info=(
            f"10.0.0.1:1500{rank}",
            {name: place(name, at) for name, at in far.items()},
        ),
        weights=SeedWeights(**fields),
    )


def blocks(
    answers: Sequence[SeedAnswer], slots: Slots, rank: int = 0
) -> list[tuple[int, int, int, int]]:
    """Holder, address here, address there and bytes of what is read in its place."""
    plans = plan_reads(answers, slots, rank=rank)
    found = []
    for read in (read for plan in plans for read in plan.reads):
        assert read.is_direct
        block = read.block()
        found.append((read.holder, block.local, block.remote, block.length))
    return found


def test_reads_are_in_the_order_of_the_memory_here() -> None:
    q, b = MERGED.data_ptr(), BIAS.data_ptr()
    slots = {**make_slots(), "b": WeightSlot.of(BIAS)}
    want = [(0, q, q + FAR, 64), (0, q + 64, q + 64 + FAR, 32), (0, b, b + FAR, 6)]
    got = blocks([make_answer(slots)], slots)
    assert got == sorted(want, key=lambda read: read[1])


def halves(tensor: torch.Tensor, dim: int, rank: int) -> WeightSlot:
    """One of two ranks' half of a tensor."""
    size = tensor.shape[dim]
    half = tensor.chunk(2, dim)[rank].contiguous()
    return WeightSlot.of(half, Share(rank * size // 2, (rank + 1) * size // 2, size), dim)


def test_rows_of_two_ranks_are_one_block_each() -> None:
    whole = WeightSlot.of(MERGED, Share(0, 6, 6))
    theirs = [halves(MERGED, 0, rank) for rank in range(2)]
    answers = [make_answer({"w": slot}, rank, 2) for rank, slot in enumerate(theirs)]
    here = MERGED.data_ptr()
    remote = [slot.dest.data_ptr() + FAR * (rank + 1) for rank, slot in enumerate(theirs)]
    assert blocks(answers, {"w": whole}) == [
        (0, here, remote[0], 48),
        (1, here + 48, remote[1], 48),
    ]
    # The other way round, the second rank reads the second half alone.
    half = theirs[1]
    seed = [make_answer({"w": whole})]
    assert blocks(seed, {"w": half}) == [(0, half.dest.data_ptr(), here + 48 + FAR, 48)]


def test_columns_come_as_whole_rows_and_are_cut_here() -> None:
    matrix = torch.arange(24, dtype=torch.float32).view(6, 4)
    half = halves(torch.zeros(6, 4), 1, 1)
    whole = WeightSlot.of(matrix, Share(0, 4, 4), 1)
    (plan,) = plan_reads([make_answer({"w": whole})], {"w": half}, rank=0)
    (read,) = plan.reads
    assert not read.is_direct
    assert (read.row_bytes, read.skipped, read.num_bytes) == (16, 8, 96)
    block = read.block(7)
    assert (block.local, block.remote, block.length) == (7, matrix.data_ptr() + FAR, 96)
    read.copy_from(matrix.view(-1).view(torch.uint8))
    assert torch.equal(half.dest, matrix[:, 2:])
    # Rows that end within a batch go on in the next one; a single row needs no memory beside.
    assert staging_bytes([plan], 1000) == 48
    assert staging_bytes([plan], 40) == 40
    assert staging_bytes([plan], 1) == 16
    batches = list(cut_batches([plan], 1000, 40))
    assert [[len(step.read.dest) for step in batch.steps] for batch in batches] == [[2], [2], [2]]
    assert [step.offset for batch in batches for step in batch.steps] == [0, 0, 0]
    assert [len(batch.done) for batch in batches] == [0, 0, 1]
    single = [step for batch in cut_batches([plan], 1000, 16) for step in batch.steps]
    assert [step.offset for step in single] == [None] * 6
    assert [step.block(0).remote - block.remote for step in single] == [
        8 + 16 * i for i in range(6)
    ]


def test_columns_of_two_ranks_go_side_by_side() -> None:
    whole = WeightSlot.of(torch.zeros(6, 4), Share(0, 4, 4), 1)
    theirs = {rank: halves(MERGED, 1, rank) for rank in range(2)}
    answers = [make_answer({"w": slot}, rank, 2) for rank, slot in theirs.items()]
    (plan,) = plan_reads(answers, {"w": whole}, rank=0)
    assert [(read.holder, read.num_bytes) for read in plan.reads] == [(0, 48), (1, 48)]
    for read in plan.reads:
        read.copy_from(torch.full((48,), read.holder + 1, dtype=torch.uint8))
    assert whole.dest.view(torch.uint8).sum(dim=0).tolist() == [6] * 8 + [12] * 8


def test_replicas_take_turns() -> None:
    slots = {f"norm{at}": WeightSlot.of(MERGED[at]) for at in range(6)}
    answers = [make_answer(slots, rank, 2) for rank in range(2)]
    assert [holder for holder, *_ in blocks(answers, slots)] == [0, 1] * 3
    assert [holder for holder, *_ in blocks(answers, slots, rank=1)] == [1, 0] * 3


def test_of_several_copies_one_is_read() -> None:
    dest = torch.zeros(3, 4)
    slot, seed = WeightSlot(dest, (4,)), WeightSlot(torch.ones(5, 4), (4,))
    (read,) = blocks([make_answer({"q_norm": seed})], {"q_norm": slot})
    assert read == (0, dest.data_ptr(), seed.dest.data_ptr() + FAR, 16)


def test_the_answer_survives_json_in_sglangs_form() -> None:
    answer = make_answer(make_slots())
    text = msgspec.json.encode(answer)
    assert msgspec.json.decode(text, type=SeedAnswer) == answer
    session, places = msgspec.json.decode(text)["remote_instance_transfer_engine_info"]
    assert session == "10.0.0.1:15000"
    assert places["b"] == [BIAS.data_ptr() + FAR, 3, 2]
    part = msgspec.json.decode(text)["weights"]["tensors"]["b"]
    assert part == {
        "dtype": "bfloat16",
        "shape": [6],
        "split_dim": 0,
        "split_ranges": [[3, 6]],
        "split_runs": [6],
    }


def changed(name: str, **fields: object) -> dict[str, Any]:
    """A seed whose tensor `name` differs."""

    def part(of: str, told: TensorPart) -> TensorPart:
        return msgspec.structs.replace(told, **fields) if of == name else told

    return {"part": part}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (changed("k", dtype="float16"), r"'k' is float16 \[2, 4\] there and float32 \[2, 4\] here"),
        (changed("k", shape=(8,)), r"'k' is float32 \[8\] there and float32 \[2, 4\] here"),
        (changed("b", split_ranges=((0, 3),)), r"'b': no rank has 3 to 6"),
        (changed("b", split_runs=(2, 4)), r"'b' is split differently there .*runs of \[2, 4\]"),
        (
            changed("k", split_dim=1, split_ranges=((0, 4),), split_runs=(4,)),
            r"'k' is split differently there \(dimension 1",
        ),
        ({"tensors": {}}, "tensor 'b' is not in the seed: .*the same model"),
        ({"place": lambda n, p: (p[0], 9 if n == "q" else p[1], p[2])}, "'q' has 9 elements of 4"),
        ({"place": lambda n, p: (p[0], p[1], 2 if n == "b" else 8)}, "'k' has 8 elements of 8"),
        ({"place": lambda n, p: (p[0], p[1] or 1, p[2])}, "'none' has 1 elements of 4"),
    ],
)
def test_every_difference_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        plan_reads([make_answer(make_slots(), **fields)], make_slots(), rank=0)
    assert "\n" not in str(caught.value)


def test_splits_without_checksums_are_refused() -> None:
    column = torch.zeros(48, 1)
    thirds = [
        WeightSlot.of(column[at : at + 16], Share(at, at + 16, 48)) for at in range(0, 48, 16)
    ]
    seed = [make_answer({"w": WeightSlot.of(column, Share(0, 48, 48))})]
    with pytest.raises(ValueError, match=r"'w': .* --tp-size 1 has no checksums of 16 to 32,"):
        plan_reads(seed, {"w": thirds[1]}, rank=0)
    # Three of each have the same bounds.
    answers = [make_answer({"w": slot}, rank, 3) for rank, slot in enumerate(thirds)]
    assert [holder for holder, *_ in blocks(answers, {"w": thirds[1]})] == [1]


def test_a_tensor_that_the_model_here_lacks_is_refused() -> None:
    slots = make_slots()
    extra = {**slots, "extra": WeightSlot.of(torch.zeros(1))}
    with pytest.raises(ValueError, match="'extra' is not in this server's model"):
        plan_reads([make_answer(extra)], slots, rank=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"protocol": "rdma"}, "over rdma, this server over tcp: .*the same MOONCAKE_PROTOCOL"),
        (
            {"config": {**CONFIG, "rope.theta": "2e4"}},
            r"another model: rope.theta in its config.json is 2e4, in the one in .* 1e4; give",
        ),
        (
            {"tensors": {"w": TensorPart(dtype="uint8", shape=(2, 2))}},
            "packed by pairs, those of this server by halves of blocks, words of floats: start",
        ),
        ({"hash": "md5"}, "checksums are md5, those of this .*: start both with the same release"),
        ({"config": {"rope.theta": "1e4"}}, "hidden_size in its config.json is missing, in .* 4;"),
        ({"config": {**CONFIG, "x": "9" * 99}}, "x in its config.json is 9{80}, in .* missing;"),
    ],
)
def test_another_model_or_transport_is_refused(fields: dict[str, Any], message: str) -> None:
    check_seed(make_answer({}).weights, config=CONFIG, protocol="tcp")
    with pytest.raises(ValueError, match=message) as caught:
        check_seed(make_answer({}, **fields).weights, config=CONFIG, protocol="tcp")
    assert "\n" not in str(caught.value)


def test_checksums_are_those_of_the_read_parts() -> None:
    whole = WeightSlot.of(MERGED, Share(0, 6, 6))
    theirs = [halves(MERGED, 0, rank) for rank in range(2)]
    answers = [make_answer({"w": slot}, rank, 2) for rank, slot in enumerate(theirs)]
    (plan,) = plan_reads(answers, {"w": whole}, rank=0)
    assert [(cell.holder, cell.index) for cell in plan.cells] == [
        (rank, at) for rank in range(2) for at in range(3)
    ]

    def digest(*checksums: str) -> WeightsDigest:
        return WeightsDigest(identity="1", checksums={"w": list(checksums), "not read": ["3"]})

    ours = ["a", "b", "c", "d", "e", "f"]
    check_checksums(plan, ours, [digest("a", "b", "c"), digest("d", "e", "f")])
    with pytest.raises(ValueError, match="'w' arrived with checksum e, rank 1 of the seed has x:"):
        check_checksums(plan, ours, [digest("a", "b", "c"), digest("d", "x", "f")])
    with pytest.raises(ValueError, match=r"'w' arrived with checksum f, rank 1 of .* has missing"):
        check_checksums(plan, ours, [digest("a", "b", "c"), digest("d", "e")])
