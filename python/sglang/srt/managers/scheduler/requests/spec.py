"""Specification of a request, cut to the limits of this engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.tree.radix_key import TokenArray, token_array

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import Bootstrap, TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """Specification of a request. It never changes."""

    rid: str
    origin_input_ids: TokenArray
    """The prompt."""
    sampling_params: SamplingParams
    seed: int
    arrival_number: int
    """See `policy.Arrival`."""
    max_new_tokens: int
    """Limit of new tokens, cut to the room of the context and the pool."""
    stop_token_ids: frozenset[int] = frozenset()
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    """The first prompt token whose successor's logprob is wanted; negative: none is."""
    extra_key: str | None = None
    """See `CacheableRequest`."""
    priority: int = 0
    sample_of: str | None = None
    """Id of the request that computes the same prompt first."""
    bootstrap: Bootstrap | None = None
    """Meeting with the server that computes the other half; None: this server computes both."""
    is_probe: bool = False
    """Whether it is a health check, which is neither counted nor cached."""

    @classmethod
    def from_message(
        cls,
        message: TokenizedGenerateReqInput,
        *,
        arrival_number: int,
        max_request_tokens: int,
        eos_token_ids: Sequence[int],
        is_probe: bool = False,
    ) -> RequestSpec:
        """The specification of `message`, whose prompt is shorter than `max_request_tokens`."""
        params = message.sampling_params
        # A prefill always samples a token; a request that wants none does not get it.
        most = max(1, min(params.max_new_tokens, max_request_tokens - len(message.input_ids)))
        stops = () if params.ignore_eos else (*eos_token_ids, *(params.stop_token_ids or ()))
        return cls(
            rid=message.rid,
            origin_input_ids=token_array(message.input_ids),
            sampling_params=params,
            seed=message.seed,
            arrival_number=arrival_number,
            max_new_tokens=most,
            stop_token_ids=frozenset(stops),
            stream=message.stream,
            return_logprob=message.return_logprob,
            top_logprobs_num=message.top_logprobs_num,
            logprob_start_len=message.logprob_start_len,
            extra_key=message.extra_key,
            priority=message.priority,
            sample_of=message.sample_of,
            bootstrap=message.bootstrap,
            is_probe=is_probe,
        )
