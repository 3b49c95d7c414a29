"""A request's metadata: results of its prefill beside the pages."""

from __future__ import annotations

import msgspec

from sglang.srt.managers.messages.io_struct import CachedTokensDetails, TopLogprobs


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
    state_slot: int | None = None
    """Slot, in the prefill server's pool, of the recurrent state after the prompt's last token;
    None: the model has none."""
    queue_seconds: float = 0.0
    """Seconds from the first question for the room to the request's first step, by the prefill
    server's clock."""
    prefill_seconds: float = 0.0
    """Seconds from that step to the token."""
