"""`n` samples of one prompt: as many requests, with ids and seeds of their own."""

from __future__ import annotations

import pytest

from sglang.srt.managers.tokenizer.generate_request import (
    GenerateRequest,
    InvalidRequest,
    expand_samples,
)
from sglang.srt.messages.io_struct import MAX_ROOM, Bootstrap
from sglang.srt.sampling.sampling_params import MAX_SEED, SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def test_samples_of_a_seed_have_seeds_of_their_own() -> None:
    base = GenerateRequest(
        rid="x", text="a", sampling_params=SamplingParams(n=3, sampling_seed=MAX_SEED)
    )
    other = GenerateRequest(rid="y", text="b")
    samples = expand_samples([base, other])
    assert [one.rid for one in samples] == ["x", "x-1", "x-2", "y"]
    assert [one.sample_of for one in samples] == [None, "x", "x", None]
    seeds = [one.sampling_params.sampling_seed for one in samples[:3]]
    assert seeds[0] == MAX_SEED
    assert len(set(seeds)) == 3
    assert all(seed is not None and 0 <= seed <= MAX_SEED for seed in seeds)
    with pytest.raises(InvalidRequest, match="n: 9 prompts ask for 1152 outputs, at most 1024"):
        expand_samples([GenerateRequest(sampling_params=SamplingParams(n=128))] * 9)


def room(number: int) -> Bootstrap:
    return Bootstrap(host="p", port=8998, room=number)


def rooms_of(samples: list[GenerateRequest]) -> list[int]:
    rooms = [one.bootstrap for one in samples]
    assert all(one is not None and (one.host, one.port) == ("p", 8998) for one in rooms)
    return [one.room for one in rooms if one is not None]


def test_samples_have_rooms_that_both_servers_derive_alike() -> None:
    bodies = [
        GenerateRequest(text="a", bootstrap=room(number), sampling_params=SamplingParams(n=3))
        for number in (7, 8, MAX_ROOM)
    ]
    on_prefill, on_decode = rooms_of(expand_samples(bodies)), rooms_of(expand_samples(bodies))
    assert on_prefill == on_decode
    assert on_prefill[::3] == [7, 8, MAX_ROOM], "the first sample has the request's own"
    # The same in every process and release: the two servers need not be of one age.
    assert on_prefill[1:3] == [8108386739710361206, 2634027135298203255]
    assert len(set(on_prefill)) == 9
    assert all(0 <= one <= MAX_ROOM for one in on_prefill)


def test_a_router_may_name_a_room_for_each_sample() -> None:
    base = GenerateRequest(
        text="a", bootstrap=room(7), sampling_params=SamplingParams(n=2, sampling_seed=1)
    )
    samples = expand_samples([base], [room(7), room(5)])
    assert rooms_of(samples) == [7, 5]
    assert samples[1].sample_of == base.rid
    with pytest.raises(InvalidRequest, match="bootstrap_room has 3 values for 2 outputs"):
        expand_samples([base], [room(7), room(5), room(6)])
    with pytest.raises(InvalidRequest, match="bootstrap_room has 2 values for 1 outputs"):
        expand_samples([GenerateRequest(text="a", bootstrap=room(7))], [room(7), room(5)])
