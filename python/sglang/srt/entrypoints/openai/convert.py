"""Conversion of OpenAI's fields to the engine's."""

from __future__ import annotations

from typing import Final

import msgspec

from sglang.srt.constrained.constraint import Constraint, constraint_of_response_format
from sglang.srt.entrypoints.http.body import refuse_own_ids
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.entrypoints.http.field_marks import refuse_fields
from sglang.srt.entrypoints.openai.protocol import CommonBody, ResponseFormat
from sglang.srt.sampling.sampling_params import MAX_SEED, SamplingParams

MAX_TEMPERATURE: Final = 2.0
MAX_MODEL_CHARS: Final = 4096
"""Longest model name in characters, enough for a path. It is limited because each event of a stream
repeats the name."""

_SAME_NAME: Final = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_regex", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "n", "json_schema", "regex", "ebnf",
)  # fmt: skip


def check_common(body: CommonBody) -> None:
    """Refuse fields that are not supported, contradict each other or are out of range.

    Raises:
        ApiError: 400 that names the field.
    """
    refuse_fields(body)
    refuse_own_ids(body.rid)
    if body.model is not None and len(body.model) > MAX_MODEL_CHARS:
        raise bad_request(
            f"model has {len(body.model)} characters, at most {MAX_MODEL_CHARS} are allowed",
            "model",
        )
    if body.temperature is not None and not 0 <= body.temperature <= MAX_TEMPERATURE:
        raise bad_request(
            f"temperature={body.temperature} must be from 0 to {MAX_TEMPERATURE:g}", "temperature"
        )
    for name in ("seed", "sampling_seed"):
        seed = getattr(body, name)
        if seed is not None and not -(2**63) <= seed <= MAX_SEED:
            raise bad_request(f"{name}={seed} must be a signed 64-bit integer", name)


def sampling_params(
    body: CommonBody, max_tokens: int | None, field: str, *, least: int = 1
) -> SamplingParams:
    """The engine's parameters for `body`.

    Args:
        max_tokens: Limit of new tokens that the client named, or None.
        field: Name of that field.
        least: Least value of `max_tokens`.

    Raises:
        ApiError: 400 that names the field.
    """
    values = {name: getattr(body, name) for name in _SAME_NAME}
    if max_tokens is not None:
        if max_tokens < least:
            raise bad_request(f"{field}={max_tokens} must be at least {least}", field)
        values["max_new_tokens"] = max_tokens
    elif body.min_tokens is not None:
        # A minimum number of tokens raises the default limit.
        values["max_new_tokens"] = max(SamplingParams().max_new_tokens, body.min_tokens)
    if body.min_tokens is not None:
        if body.min_tokens < 0 or (max_tokens is not None and body.min_tokens > max_tokens):
            raise bad_request(
                f"min_tokens={body.min_tokens} must be from 0 to {field}", "min_tokens"
            )
        values["min_new_tokens"] = body.min_tokens
    if body.response_format is not None:
        constraint = _constraint_of_format(body, body.response_format)
        if constraint is not None:
            values[constraint.kind.value] = constraint.text
    seed = body.seed if body.sampling_seed is None else body.sampling_seed
    if seed is not None:
        # OpenAI's seeds are signed. Without the sign bit two of them are rarely equal.
        values["sampling_seed"] = seed & MAX_SEED
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})


def _constraint_of_format(body: CommonBody, wanted: ResponseFormat) -> Constraint | None:
    """The constraint of the `response_format` of `body`; None: it has none."""
    try:
        constraint = constraint_of_response_format(msgspec.to_builtins(wanted))
    except ValueError as error:
        raise bad_request(str(error), "response_format") from None
    except RecursionError:
        raise bad_request(
            "response_format is nested too deeply: flatten it", "response_format"
        ) from None
    for name in ("json_schema", "regex", "ebnf"):
        if constraint is not None and getattr(body, name) is not None:
            raise bad_request(f"{name} contradicts response_format: keep one", "response_format")
    return constraint
