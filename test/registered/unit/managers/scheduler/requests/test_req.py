"""The parts of a request."""

from __future__ import annotations

import msgspec

from rigs.schedulers.scheduler_rig import greedy
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import (
    TokenizedGenerateReqInput,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def test_keys_of_a_request_are_of_its_prompt_and_output() -> None:
    message = TokenizedGenerateReqInput(
        rid="r",
        input_ids=token_array([5, 6, 7, 8]),
        sampling_params=greedy(8),
        seed=0,
        extra_key="k",
    )
    req = Req(message, max_new_tokens=8)
    assert req.match_key() is req.match_key(), "the tree knows it again"
    assert (list(req.match_key()), req.match_key().extra_key) == ([5, 6, 7, 8], "k")
    for output in (9, 10):
        progress = req.progress
        progress.output_ids.append(output)
        progress.kv_committed_len = progress.num_tokens - 1
        before = [5, 6, 7, 8, *progress.output_ids[:-1]]
        assert req.slots.kv_committed_ids.tolist() == before
        assert list(req.match_key()) == [*before, output]
        whole = [*before, output]
        for begin in range(len(whole) + 1):
            for end in range(begin, len(whole) + 1):
                assert progress.ids_between(begin, end).tolist() == whole[begin:end]
    req.progress.kv_committed_len = 2
    assert req.slots.kv_committed_ids.tolist() == [5, 6]
    scored = Req(msgspec.structs.replace(message, logprob_start_len=1), max_new_tokens=8)
    assert list(scored.match_key()) == [5]
