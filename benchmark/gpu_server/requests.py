"""Requests for a scheduler in this process."""

from __future__ import annotations

from benchmark.prompts import random_prompt
from benchmark.servers import VOCABULARY
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams


def greedy_requests(
    name: str, count: int, length: int, new_tokens: int, first_seed: int = 0
) -> list[TokenizedGenerateReqInput]:
    """Streamed requests of random prompts of `length` tokens, for answers of `new_tokens`."""
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    params.normalize()
    return [
        TokenizedGenerateReqInput(
            rid=f"{name}-{i}",
            input_ids=token_array(random_prompt(first_seed + i, length, *VOCABULARY)),
            sampling_params=params,
            seed=i,
            stream=True,
        )
        for i in range(count)
    ]
