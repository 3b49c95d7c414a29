"""One prompt as endpoints hand it to `TokenizerManager`, its samples, and errors of requests."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from sglang.srt.mem_cache.tree.radix_key import TokenArray, token_array
from sglang.srt.messages.io_struct import MAX_ROOM, Bootstrap
from sglang.srt.sampling.sampling_params import MAX_SAMPLES, MAX_SEED, SamplingParams

_MAX_TOKEN_ID: Final = 2**32 - 1


class InvalidRequest(ValueError):
    """A mistake of the client; over HTTP its status is 400."""

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        """`message` names the field and the remedy; `field` is the field's name alone, for
        programs."""
        super().__init__(message)
        self.field = field
        self.code = code


class RequestFailed(RuntimeError):
    """The engine ended a request that it had accepted; `status_code` is the HTTP status that
    fits."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class EngineUnavailable(RuntimeError):
    """The engine is shutting down, has died, or did not answer in time; over HTTP the status is
    503."""


def prompt_ids(values: Sequence[int], field: str) -> TokenArray:
    """`values` as an array; `check_prompt` compares them with the vocabulary. Raises
    InvalidRequest, which names `field`, if a value does not fit 32 bits; TypeError if one is no
    integer."""
    try:
        return token_array(values)
    except OverflowError:
        wrong = next(value for value in values if not 0 <= value <= _MAX_TOKEN_ID)
        raise InvalidRequest(
            f"{field} has token id {str(wrong)[:32]}, which no vocabulary has: send ids as the "
            "tokenizer gives them",
            field=field,
        ) from None


def new_rid() -> str:
    return uuid.uuid4().hex


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a body, with all its parameters. Exactly one of `text` and `input_ids` is
    given.

    The request and its `sampling_params` never change; `tokenized` makes the scheduler's form of
    both.
    """

    rid: str = msgspec.field(default_factory=new_rid)
    text: str | None = None
    input_ids: TokenArray | None = None
    add_special_tokens: bool = True
    """True if the tokenizer may add e.g. a BOS to `text`; chat templates bring their own."""
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    default_max_new_tokens: int | None = None
    """Limit of new tokens if the client named none; the context may have less room. 0: the whole
    room of the context. None: the client named `sampling_params.max_new_tokens`, which must fit."""
    max_tokens_field: str = "sampling_params.max_new_tokens"
    """The client's name for that number, for errors."""
    prompt_field: str = "text"
    """The client's name for the prompt, for errors."""
    sampling_place: str = ""
    """Prefix of a sampling parameter's name in errors, e.g. `sampling_params[1].` if each prompt of
    a batch has its own parameters."""
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    """First prompt token of the prompt logprobs; -1: no prompt logprobs."""
    no_stop_trim: bool = False
    return_cache_report: bool = False
    bootstrap: Bootstrap | None = None
    """Bootstrap info of a prefill or decode server; None: the server does both."""
    extra_key: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int = 0
    dp_rank: int | None = None
    """The DP group that the client names; None: the server chooses."""
    num_outputs: int = 1
    """Requests of the same body, this one included: they share the limits of a body."""
    sample_of: str | None = None
    """Id of the first of the `n` samples of its prompt; None: this is the first."""


MAX_OUTPUTS: Final = 1024
"""Limit of the outputs of one body: prompts times samples."""

_SEED_STEP: Final = 0x9E3779B97F4A7C15
"""Distance between the seeds of two samples; odd, so that all seeds differ (modulo 2^63)."""


def expand_samples(
    requests: Sequence[GenerateRequest], rooms: Sequence[Bootstrap | None] = ()
) -> list[GenerateRequest]:
    """Replace each request, one for each prompt, by its `n` samples, in order.

    The first sample has the request's own id and seed, so it answers as the request alone would.
    The others wait for it, to find its prompt in the cache. If the client named a seed, each sample
    gets a seed of its own, derived from it. Rooms are derived in the same way: a prefill and a
    decode server get the same rooms for the same body. If the client named more rooms than prompts,
    `rooms` has those of all samples.

    Raises:
        InvalidRequest: `n` is out of range, there are too many samples, or they do not match
            `rooms`.
    """
    counts = [request.sampling_params.n for request in requests]
    for n in counts:
        if not 1 <= n <= MAX_SAMPLES:
            raise InvalidRequest(f"n={n} must be from 1 to {MAX_SAMPLES}", field="n")
    if sum(counts) > MAX_OUTPUTS:
        raise InvalidRequest(
            f"n: {len(requests)} prompts ask for {sum(counts)} outputs, at most {MAX_OUTPUTS} are "
            "allowed in one body: split it",
            field="n",
        )
    has_all_rooms = len(rooms) > len(requests)
    if has_all_rooms and len(rooms) != sum(counts):
        raise InvalidRequest(
            f"bootstrap_room has {len(rooms)} values for {sum(counts)} outputs: give one value, "
            "or one for each",
            field="bootstrap_room",
        )
    if counts == [1]:
        return list(requests)
    samples = [
        _sample(request, index, sum(counts))
        for request, n in zip(requests, counts, strict=True)
        for index in range(n)
    ]
    if not has_all_rooms:
        return samples
    return [
        msgspec.structs.replace(sample, bootstrap=room)
        for sample, room in zip(samples, rooms, strict=True)
    ]


def _sample(request: GenerateRequest, index: int, num_outputs: int) -> GenerateRequest:
    if index == 0:
        return msgspec.structs.replace(request, num_outputs=num_outputs)
    params = copy.copy(request.sampling_params)
    if params.sampling_seed is not None:
        params.sampling_seed = (params.sampling_seed + index * _SEED_STEP) & MAX_SEED
    bootstrap = request.bootstrap
    if bootstrap is not None:
        key = bootstrap.room.to_bytes(8, "little") + index.to_bytes(8, "little")
        room = xxhash.xxh3_64_intdigest(key) & MAX_ROOM
        bootstrap = msgspec.structs.replace(bootstrap, room=room)
    return msgspec.structs.replace(
        request,
        rid=f"{request.rid}-{index}",
        sample_of=request.rid,
        sampling_params=params,
        bootstrap=bootstrap,
        num_outputs=num_outputs,
    )
