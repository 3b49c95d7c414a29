"""A request's metadata: results of its prefill beside the pages; whether they fit a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import xxhash

from sglang.srt.messages.cache_report import CacheReport
from sglang.srt.messages.io_struct import CachedTokensDetails, TopLogprobs

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a prefill beside keys and values."""

    token_id: int | None
    """The first token; None: the request wants no token."""
    prompt_len: int
    prompt_digest: str
    """Digest of the prompt's token ids, by which the decode server checks that both have the same
    prompt."""
    sampling_digest: str = ""
    """See `sampling_digest`. It differs between requests that share a room and a prompt by
    mistake."""
    logprob: float | None = None
    top_logprobs: TopLogprobs | None = None
    cached: CachedTokensDetails | None = None
    cache_report: CacheReport | None = None
    """Set if the prefill server's request asks for it."""
    state_slot: int | None = None
    """Slot, in the prefill server's pool, of the recurrent state after the prompt's last token;
    None: the model has none."""
    request_row: int | None = None
    """The request's row in the prefill server's pools of states without snapshots; None: the model
    has none."""
    hidden: bytes | None = None
    """The hidden state of the prompt's last token, in the model's dtype, with which drafts begin;
    None: nothing is drafted, or the recurrent state has it."""
    queue_seconds: float = 0.0
    """Seconds from the first question for the room to the request's first step, by the prefill
    server's clock."""
    l3_wait_seconds: float | None = None
    """The part of its time on the prefill server in which its read from L3 was awaited, or None."""
    prefill_seconds: float = 0.0
    """Seconds from that step to the token."""


def prompt_digest(ids: npt.NDArray[np.uint32]) -> str:
    return xxhash.xxh3_64_hexdigest(ids.tobytes())


def sampling_digest(params: SamplingParams) -> str:
    """Digest of the parameters by which the first token may differ from the likeliest; "" if there
    are none.

    A seed that a server has drawn is not included.
    """
    draws = None
    if not params.is_greedy:
        draws = params.temperature, params.top_p, params.top_k, params.min_p, params.sampling_seed
    facts = (
        draws,
        params.min_new_tokens,
        params.repetition_penalty,
        sorted((params.logit_bias or {}).items()),
        params.constraint,
    )
    if facts == (None, 0, 1.0, [], None):
        return ""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(facts))


def mismatch_of(
    spec: TokenizedGenerateReqInput, metadata: FirstToken, vocab_size: int, hidden_bytes: int = 0
) -> str | None:
    """Reason why a request cannot go on with the prefill server's result, or None. This server
    needs a hidden state of `hidden_bytes`."""
    ids, token = spec.input_ids, metadata.token_id
    if metadata.prompt_len != len(ids) or metadata.prompt_digest != prompt_digest(ids):
        return (
            f"the prefill server computed another prompt, of {metadata.prompt_len} tokens: "
            "both servers need the same tokenizer and chat template"
        )
    found = len(metadata.hidden or b"")
    if found != hidden_bytes:
        return (
            f"the prefill server sent a hidden state of {found} bytes, not of {hidden_bytes}: both "
            "servers need the same --speculative-algorithm"
        )
    is_unlike = (
        (token is not None) != (spec.sampling_params.max_new_tokens > 0)
        or (token is not None and spec.return_logprob and metadata.logprob is None)
        or (token is not None and len(metadata.top_logprobs or ()) != _num_tops(spec, vocab_size))
        or metadata.sampling_digest != sampling_digest(spec.sampling_params)
    )
    if is_unlike:
        return (
            "the prefill server was sent another request: sampling or logprobs differ; or the "
            "servers have different --sampling-defaults or generation_config.json: give both the "
            "same"
        )
    if token is not None and not 0 <= token < vocab_size:
        return f"the prefill server chose token {token}, which the model does not have"
    return None


def fake_metadata(spec: TokenizedGenerateReqInput, vocab_size: int) -> FirstToken:
    """Metadata of a prompt that was not moved: the first token is token 0."""
    tops = [(0.0, token) for token in range(_num_tops(spec, vocab_size))]
    return FirstToken(
        token_id=0 if spec.sampling_params.max_new_tokens > 0 else None,
        prompt_len=len(spec.input_ids),
        prompt_digest=prompt_digest(spec.input_ids),
        logprob=0.0,
        top_logprobs=tops,
    )


def _num_tops(spec: TokenizedGenerateReqInput, vocab_size: int) -> int:
    return min(spec.top_logprobs_num, vocab_size) * spec.return_logprob
