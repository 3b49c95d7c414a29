"""The scheduler's message for a checked request and its tokens. Pure, but for a drawn seed."""

from __future__ import annotations

import copy
import secrets
from typing import Final

from sglang.srt.arg_groups.disaggregation import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.constants import DEFAULT_BOOTSTRAP_PORT, HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.messages.io_struct import MAX_ROOM, Bootstrap, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest
from sglang.srt.managers.tokenizer.request_limits import RequestLimits
from sglang.srt.mem_cache.tree.radix_key import TokenArray
from sglang.srt.utils.cache_key import combine_extra_key

_SEED_BITS: Final = 63


def tokenized(
    request: GenerateRequest, tokens: TokenArray, limits: RequestLimits, created_time: float
) -> TokenizedGenerateReqInput:
    """The message for `request`, with a completed copy of its sampling parameters.

    Args:
        request: Request that passed `check_request`, and with `tokens` `check_prompt`.
        tokens: The prompt.
        limits: Limits of the server.
        created_time: `time.monotonic()` on arrival.
    """
    params = copy.copy(request.sampling_params)
    params.normalize()
    if params.top_k > limits.vocab_size:
        params.top_k = -1
    if request.default_max_new_tokens is not None:
        room = limits.context_len - len(tokens)
        default = max(min(request.default_max_new_tokens or room, room), 1)
        # A minimum above the default raises the limit.
        params.max_new_tokens = max(default, params.min_new_tokens)
    seed = params.sampling_seed
    decodes_only = limits.disaggregation_mode == DisaggregationMode.DECODE
    draws_room = (
        limits.draws_rooms
        and request.bootstrap is None
        and not request.rid.startswith(HEALTH_CHECK_RID_PREFIX)
    )
    return TokenizedGenerateReqInput(
        rid=request.rid,
        input_ids=tokens,
        sampling_params=params,
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        stream=request.stream,
        return_logprob=request.return_logprob,
        top_logprobs_num=request.top_logprobs_num,
        # The prefill server computes the logprobs of the prompt.
        logprob_start_len=-1 if decodes_only else request.logprob_start_len,
        extra_key=combine_extra_key(request.extra_key, request.cache_salt),
        priority=request.priority,
        sample_of=request.sample_of,
        bootstrap=_drawn_room() if draws_room else request.bootstrap,
        created_time=created_time,
    )


def _drawn_room() -> Bootstrap:
    """A room in which no other server takes part."""
    return Bootstrap(FAKE_BOOTSTRAP_HOST, DEFAULT_BOOTSTRAP_PORT, secrets.randbelow(MAX_ROOM + 1))
