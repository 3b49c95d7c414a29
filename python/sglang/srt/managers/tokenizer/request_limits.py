"""Every limit a request must keep, checked before the scheduler sees it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from sglang.srt.managers.tokenizer.generate_request import (
    GenerateRequest,
    InvalidRequest,
    PromptIds,
)
from sglang.srt.mem_cache.tree.radix_key import TokenArray, token_array

MAX_KEY_CHARS: Final = 4096
"""Of `extra_key` and `cache_salt` each."""
MAX_RID_CHARS: Final = 256
MAX_TOP_LOGPROBS: Final = 128
MAX_PROMPT_LOGPROBS: Final = 1 << 19
"""Logprobs of prompts that one body may ask for: tokens times (1 + `top_logprobs_num`). They pass
through three processes and take some 100 bytes each in every one."""
MAX_CHARS_PER_TOKEN: Final = 32
"""A text with more characters than this for each token that fits is refused before it is
tokenized, which takes a second and 300 MB for each million. Prose has four to five."""
CHEAP_CHARS: Final = 1 << 16
"""Tokenized in any case: a client may count the tokens of what is a little too long."""
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What the model and the pools allow, in tokens."""

    vocab_size: int
    context_len: int
    max_input_len: int
    """Longest prompt that fits the pools and leaves room for one output token."""

    @property
    def max_text_chars(self) -> int:
        """Characters of the longest text that is tokenized at all."""
        tokens = min(self.context_len, self.max_input_len)
        return max(MAX_CHARS_PER_TOKEN * tokens, CHEAP_CHARS)


def check_fields(request: GenerateRequest) -> None:
    """Check what needs neither tokens nor the model.

    Raises:
        InvalidRequest: Names the field.
    """
    # It is a word of the log, where a line break would make a line of the client's own.
    if not (1 <= len(request.rid) <= MAX_RID_CHARS and request.rid.isprintable()):
        raise InvalidRequest(
            f"rid must have 1 to {MAX_RID_CHARS} characters, all of them printable", field="rid"
        )
    for name in ("extra_key", "cache_salt"):
        value = getattr(request, name)
        if value is not None and len(value) > MAX_KEY_CHARS:
            raise InvalidRequest(
                f"{name} has {len(value)} characters, at most {MAX_KEY_CHARS} are allowed: "
                "send a digest of it",
                field=name,
            )
    if not 0 <= request.top_logprobs_num <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs_num={request.top_logprobs_num} must be from 0 to {MAX_TOP_LOGPROBS}",
            field="top_logprobs_num",
        )
    if not -_INT32_MAX <= request.priority <= _INT32_MAX:
        raise InvalidRequest("priority must fit in 32 bits", field="priority")


def check_sampling(request: GenerateRequest, limits: RequestLimits, tokenizer: object) -> None:
    """Verify and normalise the parameters in place; a `top_k` beyond the vocabulary is all of it.

    Raises:
        InvalidRequest: Names the field.
    """
    params = request.sampling_params
    if request.default_max_new_tokens is not None:
        # `fit_max_new_tokens` settles it: a wish for a least number of tokens raises a default.
        params.max_new_tokens = max(params.max_new_tokens, params.min_new_tokens)
    try:
        params.verify(limits.vocab_size)
        params.normalize(tokenizer)
    except ValueError as error:
        name, place = _leading_name(str(error)), request.sampling_place
        field = name and f"{place}{name}"
        raise InvalidRequest(f"{place}{error}", field=field) from error
    if params.top_k > limits.vocab_size:
        params.top_k = -1


def check_text(text: str, limits: RequestLimits, field: str) -> None:
    """Check the length of a text that is about to be tokenized.

    Raises:
        InvalidRequest: Names `field`, what is wrong and what is allowed.
    """
    if len(text) > limits.max_text_chars:
        raise InvalidRequest(
            f"{field} has {len(text)} characters, more than {limits.max_text_chars} cannot fit "
            f"into a context of {limits.context_len} tokens: shorten it, or send token ids",
            field=field,
            code="context_length_exceeded",
        )


def check_prompt(input_ids: PromptIds, limits: RequestLimits, field: str) -> TokenArray:
    """Check the prompt's tokens and their number; the tokens as an array.

    Raises:
        InvalidRequest: Names `field`, what is wrong and what is allowed.
    """
    if not len(input_ids):
        raise InvalidRequest(f"{field} is empty: give at least one token", field=field)
    tokens = None
    try:
        tokens = token_array(input_ids)
        low, high = int(tokens.min()), int(tokens.max())
    except OverflowError:
        low, high = min(input_ids), max(input_ids)
    if tokens is None or low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"{field} has token id {wrong}, the vocabulary has ids 0 to {limits.vocab_size - 1}",
            field=field,
        )
    longest = min(limits.context_len - 1, limits.max_input_len)
    if len(input_ids) > longest:
        raise InvalidRequest(
            f"{field} has {len(input_ids)} tokens, at most {longest} are allowed (context length "
            f"{limits.context_len}, largest input the cache holds {limits.max_input_len}): "
            "shorten the prompt, or start the server with a larger --context-length or "
            "--max-total-tokens",
            field=field,
            code="context_length_exceeded",
        )
    return tokens


def check_logprob_start(request: GenerateRequest, prompt_len: int) -> None:
    """Check from where on the prompt's logprobs are wanted.

    Raises:
        InvalidRequest: It is outside the prompt, no logprobs are wanted at all, or too many.
    """
    start = request.logprob_start_len
    if start == -1:
        return
    if not 0 <= start < prompt_len:
        raise InvalidRequest(
            f"logprob_start_len={start} must be -1 (no prompt logprobs) or from 0 to "
            f"{prompt_len - 1}, the prompt's last token",
            field="logprob_start_len",
        )
    if not request.return_logprob:
        raise InvalidRequest(
            "logprob_start_len needs return_logprob: true", field="logprob_start_len"
        )
    each = (prompt_len - start) * (1 + request.top_logprobs_num)
    if each * request.num_outputs > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{request.prompt_field} asks for {each} logprobs of its tokens (tokens times 1 + "
            f"alternatives) in each of {request.num_outputs} outputs, at most "
            f"{MAX_PROMPT_LOGPROBS} are allowed in one body: ask for those of fewer tokens or for "
            "fewer alternatives, or split the body",
            field=request.prompt_field,
        )


def fit_max_new_tokens(request: GenerateRequest, prompt_len: int, limits: RequestLimits) -> None:
    """Settle `max_new_tokens`: a default shrinks to the room that is left, a wish must fit it.

    Raises:
        InvalidRequest: More was asked for than the context has room for.
    """
    params = request.sampling_params
    room = limits.context_len - prompt_len
    if request.default_max_new_tokens is not None:
        params.max_new_tokens = max(min(request.default_max_new_tokens or room, room), 1)
        # A wish for a least number of tokens is also a wish for at least that many.
        if params.min_new_tokens > room:
            raise InvalidRequest(
                f"min_new_tokens={params.min_new_tokens} and a prompt of {prompt_len} tokens "
                f"exceed the context length of {limits.context_len}: ask for at most {room}, or "
                "shorten the prompt",
                field="min_new_tokens",
                code="context_length_exceeded",
            )
        params.max_new_tokens = max(params.max_new_tokens, params.min_new_tokens)
    elif params.max_new_tokens > room:
        raise InvalidRequest(
            f"{request.max_tokens_field}={params.max_new_tokens} and a prompt of {prompt_len} "
            f"tokens exceed the context length of {limits.context_len}: ask for at most {room}, "
            "or shorten the prompt",
            field=request.max_tokens_field,
            code="context_length_exceeded",
        )


def _leading_name(message: str) -> str | None:
    """The field that a `SamplingParams` error begins with."""
    match = re.match(r"[a-z][a-z_]*", message)
    return match[0] if match else None
