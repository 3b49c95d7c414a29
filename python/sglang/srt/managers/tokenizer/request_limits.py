"""All limits of a request, checked before the scheduler sees it, and its message to the scheduler.

`check_request` comes before the prompt is tokenized, `check_prompt` and `tokenized` after it. They
raise InvalidRequest, which names the field, what is wrong and what is allowed. Pure functions, but
for a drawn seed.
"""

from __future__ import annotations

import copy
import re
import secrets
from dataclasses import dataclass
from typing import Final

from sglang.srt.arg_groups.disaggregation import (
    FAKE_BOOTSTRAP_HOST,
    PREFILL_HOSTS_FLAG,
    DisaggregationMode,
    PrefillHosts,
)
from sglang.srt.constants import DEFAULT_BOOTSTRAP_PORT, HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest, InvalidRequest
from sglang.srt.mem_cache.tree.radix_key import TokenArray
from sglang.srt.messages.cache_key import combine_extra_key
from sglang.srt.messages.io_struct import MAX_ROOM, Bootstrap, TokenizedGenerateReqInput
from sglang.srt.utils.network import base_url

MAX_KEY_CHARS: Final = 4096
"""Limit for `extra_key` and for `cache_salt`."""
MAX_RID_CHARS: Final = 256
MAX_TOP_LOGPROBS: Final = 128
MAX_PROMPT_LOGPROBS: Final = 1 << 19
"""Limit of the prompt logprobs of one body: tokens times (1 + `top_logprobs_num`). They pass
through three processes and take some 100 bytes each in every one."""
MAX_CHARS_PER_TOKEN: Final = 32
"""Characters per token above which a text surely does not fit. It is refused before it is
tokenized, which takes a second and 300 MB per million characters. Prose has four to five."""
CHEAP_CHARS: Final = 1 << 16
"""Characters up to which texts are always tokenized, so that errors give the number of tokens."""
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of the model and the pools, in tokens."""

    vocab_size: int
    context_len: int
    max_input_len: int
    """Longest prompt that fits the pools and leaves room for one output token."""
    max_queued_requests: int
    """Requests that may wait to be scheduled. The requests of one body come at once."""
    disaggregation_mode: str = DisaggregationMode.NULL
    """Mode of the server: a request needs a room (`prefill`, `decode`) or must have none."""
    prefill_hosts: PrefillHosts | None = None
    """Decode server: the prefill servers that requests may name; None: any, because none is
    contacted."""
    draws_rooms: bool = False
    """True if a request without a room gets a room that no other server shares."""

    num_dp_groups: int = 1
    """DP groups of the server, of which a request may name one."""

    @property
    def max_text_chars(self) -> int:
        """Characters of the longest text that is tokenized at all."""
        tokens = min(self.context_len, self.max_input_len)
        return max(MAX_CHARS_PER_TOKEN * tokens, CHEAP_CHARS)

    def may_contact(self, bootstrap: Bootstrap) -> bool:
        """True if this server may contact the prefill server that a request names. A decode server
        reads its pages into the cache that all requests share."""
        hosts = self.prefill_hosts
        return hosts is None or hosts.has(bootstrap.host, bootstrap.port)


def check_request(request: GenerateRequest, limits: RequestLimits) -> None:
    """Make the checks that do not need the prompt's tokens."""
    _check_fields(request)
    check_session(request.session_id, request.extra_key, request.cache_salt)
    if request.num_outputs > limits.max_queued_requests:
        # A retry would not help: the queue cannot hold them.
        raise InvalidRequest(
            f"n: the body asks for {request.num_outputs} outputs, and at most "
            f"{limits.max_queued_requests} may wait (--max-queued-requests): split it",
            field="n",
        )
    _check_role(request, limits)
    last = limits.num_dp_groups - 1
    if request.dp_rank is not None and not 0 <= request.dp_rank <= last:
        allowed = f"must be from 0 to {last}" if last else "must be 0, the only group"
        raise InvalidRequest(
            f"routed_dp_rank={str(request.dp_rank)[:32]} {allowed}: the "
            "server's groups of ranks have these numbers (--attn-dp-size); or leave it out, and "
            "data_parallel_rank, its other name",
            field="routed_dp_rank",
        )
    room = request.bootstrap
    if room is not None and not limits.may_contact(room):
        raise InvalidRequest(
            f"bootstrap_host: {base_url(room.host, room.port)} is none of the prefill servers of "
            f"this decode server: name it with {PREFILL_HOSTS_FLAG}",
            field="bootstrap_host",
        )
    try:
        request.sampling_params.verify(limits.vocab_size)
    except ValueError as error:
        name, place = _leading_name(str(error)), request.sampling_place
        field = name and f"{place}{name}"
        raise InvalidRequest(f"{place}{error}", field=field) from error
    if request.input_ids is not None:
        return
    num_chars, field = len(request.text or ""), request.prompt_field
    if num_chars == 0:
        raise InvalidRequest(f"{field} is empty: give at least one character", field=field)
    if num_chars > limits.max_text_chars:
        raise InvalidRequest(
            f"{field} has {num_chars} characters, more than {limits.max_text_chars} cannot fit "
            f"into a context of {limits.context_len} tokens: shorten it, or send token ids",
            field=field,
            code="context_length_exceeded",
        )


def check_prompt(request: GenerateRequest, tokens: TokenArray, limits: RequestLimits) -> None:
    """Check the prompt's tokens, and all limits that depend on their number."""
    _check_tokens(tokens, limits, request.prompt_field)
    if request.logprob_start_len != -1:
        _check_logprob_start(request, len(tokens))
    _check_room(request, len(tokens), limits)


def _check_fields(request: GenerateRequest) -> None:
    # The id is written to the log, where a line break in it would forge a line.
    if not (1 <= len(request.rid) <= MAX_RID_CHARS and request.rid.isprintable()):
        raise InvalidRequest(
            f"rid must have 1 to {MAX_RID_CHARS} characters, all of them printable", field="rid"
        )
    if not 0 <= request.top_logprobs_num <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs_num={request.top_logprobs_num} must be from 0 to {MAX_TOP_LOGPROBS}",
            field="top_logprobs_num",
        )
    if not -_INT32_MAX <= request.priority <= _INT32_MAX:
        raise InvalidRequest(
            f"priority={request.priority} must be from {-_INT32_MAX} to {_INT32_MAX}",
            field="priority",
        )


def check_session(session_id: str | None, extra_key: str | None, cache_salt: str | None) -> None:
    """Raises InvalidRequest: one of the texts has another length than it may have."""
    for name, value in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if value is not None and len(value) > MAX_KEY_CHARS:
            raise InvalidRequest(
                f"{name} has {len(value)} characters, at most {MAX_KEY_CHARS} are allowed: "
                "send a digest of it",
                field=name,
            )
    if session_id is not None and not 1 <= len(session_id) <= MAX_RID_CHARS:
        raise InvalidRequest(
            f"session_id must have 1 to {MAX_RID_CHARS} characters", field="session_id"
        )


def _check_role(request: GenerateRequest, limits: RequestLimits) -> None:
    """Check that requests have rooms on prefill and decode servers, and none on others. The
    server's own probes have none."""
    mode = limits.disaggregation_mode
    if request.bootstrap is not None and mode == DisaggregationMode.NULL:
        raise InvalidRequest(
            "bootstrap_room: this server serves whole requests (--disaggregation-mode null), and "
            "rooms are for a pair of a prefill and a decode server: send the request to these, or "
            "leave bootstrap_host, bootstrap_port and bootstrap_room out",
            field="bootstrap_room",
        )
    may_have_none = limits.draws_rooms or request.rid.startswith(HEALTH_CHECK_RID_PREFIX)
    if request.bootstrap is None and mode != DisaggregationMode.NULL and not may_have_none:
        raise InvalidRequest(
            f"bootstrap_room is missing: this server does the {mode} of requests only "
            f"(--disaggregation-mode {mode}): send the request to the router in front of it, which "
            "adds bootstrap_host, bootstrap_port and bootstrap_room",
            field="bootstrap_room",
        )


def _check_tokens(tokens: TokenArray, limits: RequestLimits, field: str) -> None:
    if not len(tokens):
        raise InvalidRequest(f"{field} is empty: give at least one token", field=field)
    high = int(tokens.max())
    if high >= limits.vocab_size:
        raise InvalidRequest(
            f"{field} has token id {high}, the vocabulary has ids 0 to {limits.vocab_size - 1}",
            field=field,
        )
    longest = min(limits.context_len - 1, limits.max_input_len)
    if len(tokens) > longest:
        raise InvalidRequest(
            f"{field} has {len(tokens)} tokens, at most {longest} are allowed (context length "
            f"{limits.context_len}, largest input the cache holds {limits.max_input_len}): "
            "shorten the prompt, or start the server with a larger --context-length or "
            "--max-total-tokens",
            field=field,
            code="context_length_exceeded",
        )


def _check_logprob_start(request: GenerateRequest, prompt_len: int) -> None:
    start = request.logprob_start_len
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


def _check_room(request: GenerateRequest, prompt_len: int, limits: RequestLimits) -> None:
    """Check that the number of tokens that the client named fits after the prompt; a default
    shrinks."""
    params = request.sampling_params
    if request.default_max_new_tokens is None:
        field, wanted = request.max_tokens_field, params.max_new_tokens
    else:
        field, wanted = "min_new_tokens", params.min_new_tokens
    room = limits.context_len - prompt_len
    if wanted > room:
        raise InvalidRequest(
            f"{field}={wanted} and a prompt of {prompt_len} tokens exceed the context length of "
            f"{limits.context_len}: ask for at most {room}, or shorten the prompt",
            field=field,
            code="context_length_exceeded",
        )


def _leading_name(message: str) -> str | None:
    """The field that a `SamplingParams` error begins with."""
    match = re.match(r"[a-z][a-z_]*", message)
    return match[0] if match else None


_SEED_BITS: Final = 63


def tokenized(
    request: GenerateRequest,
    tokens: TokenArray,
    limits: RequestLimits,
    created_time: float,
    *,
    is_traced: bool = False,
) -> TokenizedGenerateReqInput:
    """The message for `request`, with a completed copy of its sampling parameters. The request
    passed `check_request`, and with `tokens` `check_prompt`."""
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
    bootstrap = request.bootstrap
    if draws_room:
        # No other server takes part in this room.
        number = secrets.randbelow(MAX_ROOM + 1)
        bootstrap = Bootstrap(FAKE_BOOTSTRAP_HOST, DEFAULT_BOOTSTRAP_PORT, number)
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
        session_id=request.session_id,
        priority=request.priority,
        sample_of=request.sample_of,
        return_cache_report=request.return_cache_report,
        is_traced=is_traced,
        bootstrap=bootstrap,
        created_time=created_time,
    )
