"""`n` samples of one prompt: as many requests, with ids and seeds of their own."""

from __future__ import annotations

import pytest

from sglang.srt.managers.tokenizer.generate_request import GenerateRequest, InvalidRequest
from sglang.srt.managers.tokenizer.samples import expand_samples
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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
