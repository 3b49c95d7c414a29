"""`POST /generate`: its body, and the requests made from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from sglang.srt.entrypoints.http.body import (
    BOOKKEEPING,
    IMAGES_ALONE,
    LORA,
    MAX_BATCH,
    NOTHING,
    TEXT_ALONE,
    WHOLE_PROMPT,
    Ignored,
    Refused,
    SharedFields,
    convert,
    dp_rank_of,
    is_neutral,
    refuse_fields,
    refuse_own_ids,
    rooms_of,
    spread,
)
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.managers.tokenizer.generate_request import (
    GenerateRequest,
    expand_samples,
    new_rid,
    prompt_ids,
)
from sglang.srt.mem_cache.tree.radix_key import TokenArray
from sglang.srt.sampling.sampling_params import NO_DEFAULTS, SamplingParams

MAX_BODY_PATTERNS: Final = 64
"""Most different `stop_regex` patterns in one body: all are compiled before any prompt is
answered."""

WAIT_FOR_PAGES: Final = (
    "start the server with --hicache-storage-prefetch-retry-max-attempts, by which a prompt waits "
    "for pages that are being written"
)

_DEFAULT_NEW_TOKENS: Final = SamplingParams().max_new_tokens


SAMPLING_MARKS: Final[dict[str, Refused]] = {
    "spaces_between_special_tokens": Refused("leave it out", (True,)),
    "custom_params": Refused("use logit_bias"),
    "stream_interval": Refused("start the server with --stream-interval"),
    "reasoning": Refused("send a chat, or constrain the output with a structural_tag"),
}
"""Refused fields of `sampling_params`. The accepted ones are the others of `SamplingParams` and
`no_stop_trim`."""


class GenerateBody(SharedFields, kw_only=True):
    """The body as clients send it: one prompt or a batch. `null` means absent."""

    elsewhere: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            set(SamplingParams.__struct_fields__) - SAMPLING_MARKS.keys(),
            "put it into sampling_params",
        ),
        "max_tokens": "put max_new_tokens into sampling_params",
        "max_completion_tokens": "put max_new_tokens into sampling_params",
        "prompt": "the prompt's field is text",
        "messages": "send conversations to /v1/chat/completions",
    }

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | list[str | None] | None = None

    stream_options: Annotated[
        dict[str, Any] | None, Ignored("`meta_info` of every answer has the counts")
    ] = None
    model: Annotated[str | None, Ignored("there is one model")] = None
    external_trace_header: Annotated[dict[str, str] | None, Ignored(BOOKKEEPING)] = None
    max_dynamic_patch: Annotated[int | None, Ignored(IMAGES_ALONE)] = None
    min_dynamic_patch: Annotated[int | None, Ignored(IMAGES_ALONE)] = None
    image_max_dynamic_patch: Annotated[int | None, Ignored(IMAGES_ALONE)] = None
    video_max_dynamic_patch: Annotated[int | None, Ignored(IMAGES_ALONE)] = None

    input_embeds: Annotated[Any, Refused("send text or input_ids")] = None
    image_data: Annotated[Any, Refused(TEXT_ALONE)] = None
    video_data: Annotated[Any, Refused(TEXT_ALONE)] = None
    audio_data: Annotated[Any, Refused(TEXT_ALONE)] = None
    modalities: Annotated[Any, Refused(TEXT_ALONE, (*NOTHING, "text"))] = None
    use_audio_in_video: Annotated[Any, Refused(TEXT_ALONE)] = None
    token_ids_logprob: Annotated[Any, Refused("ask for top_logprobs_num")] = None
    return_entropy: Annotated[Any, Refused("leave it out")] = None
    routed_experts_start_len: Annotated[Any, Refused("leave it out", (*NOTHING, 0))] = None
    return_bytes: Annotated[Any, Refused("output_ids has every byte")] = None
    require_reasoning: Annotated[
        Any, Refused("constrain the output with a structural_tag, which leaves reasoning free")
    ] = None
    conversation_id: Annotated[Any, Refused(WHOLE_PROMPT)] = None
    background: Annotated[Any, Refused("keep the connection open")] = None
    lora_id: Annotated[Any, Refused(LORA)] = None
    bootstrap_pair_key: Annotated[Any, Refused("bootstrap_room alone names the pair")] = None
    storage_checkpoint: Annotated[Any, Refused(WAIT_FOR_PAGES)] = None
    storage_checkpoint_dependency: Annotated[Any, Refused(WAIT_FOR_PAGES)] = None


def to_requests(
    body: GenerateBody, defaults: Mapping[str, float] = NO_DEFAULTS
) -> tuple[list[GenerateRequest], bool]:
    """The requests of `body`, and whether it is a batch (whose answer is a list). `defaults` are
    fields of `SamplingParams` for what the client does not name.

    With `return_logprob: false` the other logprob fields have no effect; without `return_logprob`
    they are refused as a mistake. The samples of one prompt are consecutive; more than one output
    makes a batch.
    """
    refuse_fields(body)
    refuse_own_ids(body.rid)
    if body.return_logprob is None:
        _refuse_logprob_fields(body)
    prompts, is_batch = _prompts(body)
    count = len(prompts)
    columns = {
        name: spread(name, getattr(body, name), count, is_batch)
        for name in (
            "rid", "sampling_params", "return_logprob", "top_logprobs_num",
            "logprob_start_len", "extra_key", "cache_salt",
        )
    }  # fmt: skip
    rooms, dp_rank = rooms_of(body, count, is_batch=is_batch), dp_rank_of(body)
    if is_batch and isinstance(body.rid, str):
        columns["rid"] = [f"{body.rid}-{index}" for index in range(count)]
    has_own_sampling = isinstance(body.sampling_params, list)
    requests = []
    for index, prompt in enumerate(prompts):
        field = "text" if isinstance(prompt, str) else "input_ids"
        place = f"[{index}]" if is_batch else ""
        sampling_field = f"sampling_params[{index}]" if has_own_sampling else "sampling_params"
        params, default, keeps_stop = _sampling(
            columns["sampling_params"][index], sampling_field, defaults
        )
        return_logprob = bool(columns["return_logprob"][index])
        start = columns["logprob_start_len"][index] if return_logprob else None
        requests.append(
            GenerateRequest(
                rid=columns["rid"][index] if columns["rid"][index] is not None else new_rid(),
                text=prompt if isinstance(prompt, str) else None,
                input_ids=None if isinstance(prompt, str) else prompt,
                sampling_params=params,
                default_max_new_tokens=default,
                prompt_field=field + place,
                sampling_place=f"{sampling_field}." if has_own_sampling else "",
                stream=bool(body.stream),
                return_logprob=return_logprob,
                top_logprobs_num=(columns["top_logprobs_num"][index] or 0) * return_logprob,
                logprob_start_len=-1 if start is None else start,
                no_stop_trim=bool(body.no_stop_trim) or keeps_stop,
                return_cache_report=bool(body.return_cache_report),
                bootstrap=rooms[index],
                extra_key=columns["extra_key"][index],
                cache_salt=columns["cache_salt"][index],
                session_id=body.session_id,
                dp_rank=dp_rank,
                priority=body.priority or 0,
            )
        )
    if any(request.sampling_params.stop_regex for request in requests):
        _refuse_many_patterns(requests)
    outputs = expand_samples(requests)
    is_list = is_batch or len(outputs) > 1
    if rooms[0] is not None and any(one.logprob_start_len != -1 for one in outputs):
        _refuse_lost_logprobs(outputs, is_list)
    return outputs, is_list


def _refuse_logprob_fields(body: GenerateBody) -> None:
    for field, neutral in (
        ("top_logprobs_num", (None, 0)),
        ("logprob_start_len", (None, -1)),
        ("return_text_in_logprobs", (None, False)),
    ):
        value = getattr(body, field)
        if any(one not in neutral for one in (value if isinstance(value, list) else [value])):
            raise bad_request(f"{field} needs return_logprob: true", field)


def _refuse_lost_logprobs(outputs: list[GenerateRequest], is_list: bool) -> None:
    """Refuse prompt logprobs that would not reach the client: the prefill server has them, and a
    router adds them to the decode server's answer only if that is one JSON object."""
    for wrong, what in (
        (outputs[0].stream, "a stream"),
        (is_list, "several outputs in one body"),
        (any(one.top_logprobs_num for one in outputs), "top_logprobs_num"),
    ):
        if wrong:
            raise bad_request(
                f"logprob_start_len with {what}: a prefill and a decode server together have the "
                "logprobs of a prompt only for one output, without a stream and without "
                "top_logprobs_num; leave logprob_start_len out",
                "logprob_start_len",
            )


def _refuse_many_patterns(requests: list[GenerateRequest]) -> None:
    patterns = {pattern for one in requests for pattern in one.sampling_params.stop_patterns}
    if len(patterns) > MAX_BODY_PATTERNS:
        raise bad_request(
            f"stop_regex: the prompts have {len(patterns)} different patterns, at most "
            f"{MAX_BODY_PATTERNS} are allowed in one body: split it",
            "stop_regex",
        )


def _prompts(body: GenerateBody) -> tuple[list[str | TokenArray], bool]:
    if (body.text is None) == (body.input_ids is None):
        raise bad_request("text, input_ids: give exactly one of them", "text")
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is not None:
        return list(_batch("text", body.text)), True
    assert body.input_ids is not None
    if not body.input_ids or isinstance(body.input_ids[0], int):
        return [_flat_ids("input_ids", body.input_ids)], False
    return [
        _flat_ids(f"input_ids[{i}]", row)
        for i, row in enumerate(_batch("input_ids", body.input_ids))
    ], True


def _batch(field: str, values: list[Any]) -> list[Any]:
    if not 1 <= len(values) <= MAX_BATCH:
        raise bad_request(f"{field} has {len(values)} prompts, 1 to {MAX_BATCH} are allowed", field)
    return values


def _flat_ids(field: str, values: int | list[Any]) -> TokenArray:
    if not isinstance(values, list):
        raise bad_request(f"{field}: expected a list of token ids, as in the first prompt", field)
    try:
        return prompt_ids(values, field)
    except TypeError:
        raise bad_request(f"{field}: expected token ids, got a list among them", field) from None


def _sampling(
    values: dict[str, Any] | None, field: str, defaults: Mapping[str, float]
) -> tuple[SamplingParams, int | None, bool]:
    """The parameters, the default number of tokens if the client named none, and `no_stop_trim`."""
    given = {name: value for name, value in (values or {}).items() if value is not None}
    keeps_stop = given.pop("no_stop_trim", False)
    if not isinstance(keeps_stop, bool):
        name = f"{field}.no_stop_trim"
        raise bad_request(f"{name}: expected bool, got {type(keeps_stop).__name__}", name)
    for name in given.keys() & SAMPLING_MARKS.keys():
        mark = SAMPLING_MARKS[name]
        if not is_neutral(given.pop(name), mark.neutral):
            raise bad_request(f"{field}.{name} is not supported: {mark.remedy}", f"{field}.{name}")
    params = convert({**defaults, **given}, SamplingParams, field)
    if "max_new_tokens" in given:
        return params, None, keeps_stop
    # A minimum number of tokens raises the default limit.
    params.max_new_tokens = max(_DEFAULT_NEW_TOKENS, params.min_new_tokens)
    return params, _DEFAULT_NEW_TOKENS, keeps_stop
