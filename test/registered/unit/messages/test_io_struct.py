"""Messages on their way through a socket."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.messages.io_struct import (
    SCHEDULER_DECODER,
    AbortReq,
    TokenizedGenerateReqInput,
    encode,
    frame_of,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.bad_messages import MALFORMED
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def request(ids: list[int]) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid="r", input_ids=token_array(ids), sampling_params=SamplingParams(), seed=1
    )


def test_a_frame_gives_the_messages_back_in_order() -> None:
    ids = [0, 1, 151_935, 2**32 - 1]
    frame = frame_of([encode(request(ids)), encode(AbortReq(rid="x"))])
    first, second = SCHEDULER_DECODER.decode(frame)
    assert isinstance(first, TokenizedGenerateReqInput)
    assert first.input_ids.dtype == np.uint32
    assert first.input_ids.tolist() == ids
    assert second == AbortReq(rid="x")


def test_a_prompt_takes_four_bytes_a_token() -> None:
    longer, shorter = (len(encode(request([7] * count))) for count in (32_768, 16_384))
    assert longer - shorter == 4 * 16_384


@pytest.mark.parametrize("ids", [[1, 2], "abcd", 7, b"abc", None, {"a": 1}])
def test_tokens_of_another_form_are_malformed(ids: Any) -> None:
    fields = msgspec.msgpack.decode(encode(request([1])))
    frame = msgspec.msgpack.encode([{**fields, "input_ids": ids}])
    with pytest.raises(MALFORMED):
        SCHEDULER_DECODER.decode(frame)
