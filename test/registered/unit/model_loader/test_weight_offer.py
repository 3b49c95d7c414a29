"""What a seed tells, and every way in which it is not what a reader asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from sglang.srt.layers.placement import Share
from sglang.srt.layers.weight_slot import WeightSlot
from sglang.srt.model_loader.weight_offer import (
    MemoryPlace,
    SeedAnswer,
    TensorPart,
    WeightsOffer,
    check_checksums,
    place_of,
    plan_reads,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

CONFIG = "c0" * 16
MERGED = torch.zeros(6, 4)
BIAS = torch.zeros(3, dtype=torch.bfloat16)


def make_slots() -> dict[str, WeightSlot]:
    """Two tensors that share a parameter, one that is split, one without elements."""
    return {
        "k": WeightSlot.of(MERGED[4:]),
        "q": WeightSlot.of(MERGED[:4]),
        "b": WeightSlot.of(BIAS, Share(3, 6, 9)),
        "none": WeightSlot.of(MERGED[:0, 0], Share(0, 0, 6)),
    }


def make_answer(
    part: Callable[[str, TensorPart], TensorPart] = lambda name, part: part,
    place: Callable[[str, MemoryPlace], MemoryPlace] = lambda name, place: place,
    **offer: Any,
) -> SeedAnswer:
    """Of a seed with the same model, whose memory is 1,000,000 higher."""
    slots = make_slots()
    places = {
        name: (address + 1_000_000, count, size)
        for name, (address, count, size) in ((n, place_of(s.dest)) for n, s in slots.items())
    }
    fields = {
        "config": CONFIG,
        "protocol": "tcp",
        "tensors": {name: part(name, TensorPart.of(slot)) for name, slot in slots.items()},
        **offer,
    }
    return SeedAnswer(
        rank=0,
        remote_instance_transfer_engine_info=(
            "10.0.0.1:15000",
            {name: place(name, at) for name, at in places.items()},
        ),
        weights=WeightsOffer(**fields),
    )


def plan(answer: SeedAnswer) -> list[tuple[str, int, int, int]]:
    reads = plan_reads(answer, make_slots(), config=CONFIG, protocol="tcp")
    return [(read.name, read.dest.data_ptr(), read.remote, read.num_bytes) for read in reads]


def test_reads_are_in_the_order_of_the_memory_here() -> None:
    q, b = MERGED.data_ptr(), BIAS.data_ptr()
    want = [
        ("q", q, q + 1_000_000, 64),
        ("k", q + 64, q + 64 + 1_000_000, 32),
        ("b", b, b + 1_000_000, 6),
    ]
    assert plan(make_answer()) == sorted(want, key=lambda read: read[1])


def test_the_answer_survives_json_in_sglangs_form() -> None:
    answer = make_answer()
    text = msgspec.json.encode(answer)
    assert msgspec.json.decode(text, type=SeedAnswer) == answer
    session, places = msgspec.json.decode(text)["remote_instance_transfer_engine_info"]
    assert session == "10.0.0.1:15000"
    assert places["b"] == [BIAS.data_ptr() + 1_000_000, 3, 2]
    part = msgspec.json.decode(text)["weights"]["tensors"]["b"]
    assert part == {"dtype": "bfloat16", "shape": [9], "split_dim": 0, "split_ranges": [[3, 6]]}


def changed(name: str, **fields: object) -> dict[str, Any]:
    """A seed whose tensor `name` differs."""

    def part(of: str, told: TensorPart) -> TensorPart:
        return msgspec.structs.replace(told, **fields) if of == name else told

    return {"part": part}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config": "d0" * 16}, "another model: its config.json differs from the one in --model-p"),
        ({"protocol": "rdma"}, "over rdma, this server over tcp: .*the same MOONCAKE_PROTOCOL"),
        (changed("k", dtype="float16"), r"'k' is float16 \[2, 4\] there and float32 \[2, 4\] here"),
        (changed("k", shape=(8,)), r"'k' is float32 \[8\] there and float32 \[2, 4\] here"),
        (
            changed("b", split_ranges=((0, 3),)),
            r"'b' is .*, 0 to 3 of dim.* there and .*3 to 6",
        ),
        (changed("b", split_ranges=()), r"'b' is bfloat16 \[9\] there .* --tp-size"),
        ({"tensors": {}}, "tensor 'b' is not in the seed: .*the same model"),
        ({"place": lambda n, p: (p[0], 8 if n == "q" else p[1], p[2])}, "'q' has 8 elements of 4"),
        ({"place": lambda n, p: (p[0], p[1], 2 if n == "b" else 8)}, "'k' has 8 elements of 8"),
    ],
)
def test_every_difference_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        plan(make_answer(**fields))
    assert "\n" not in str(caught.value)


def test_a_tensor_that_the_model_here_lacks() -> None:
    tensors = {"extra": TensorPart(dtype="float32", shape=(1,))}
    answer = make_answer()
    told = {**answer.weights.tensors, **tensors}
    with pytest.raises(ValueError, match="'extra' is not in this server's model"):
        plan(make_answer(tensors=told))


def test_checksums() -> None:
    check_checksums({"a": "1", "b": "2", "not read": "3"}, {"a": "1", "b": "2"})
    with pytest.raises(ValueError, match="'b' arrived with checksum 3, the seed's is 2"):
        check_checksums({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    with pytest.raises(ValueError, match="'b' arrived with checksum 3, the seed's is missing"):
        check_checksums({"a": "1"}, {"a": "1", "b": "3"})


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
