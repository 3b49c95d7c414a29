"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, cast

from sglang.srt.entrypoints.http.body import MAX_BATCH, dp_rank_of, read_json, rooms_of
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.entrypoints.http.request import Request, Response
from sglang.srt.entrypoints.http.server_context import ServerContext, context_of
from sglang.srt.entrypoints.openai.answers import (
    Answers,
    CompletionLogprobs,
    TokenFormatter,
    finish_reason,
    matched_stop,
    respond,
)
from sglang.srt.entrypoints.openai.protocol import (
    NO_FORMAT,
    CompletionBody,
    check_common,
    naming_format,
    sampling_params,
)
from sglang.srt.managers.tokenizer.generate_request import (
    GenerateRequest,
    expand_samples,
    new_rid,
    prompt_ids,
)
from sglang.srt.managers.tokenizer.request_state import OutputCursor, RequestState
from sglang.srt.mem_cache.tree.radix_key import TokenArray
from sglang.srt.sampling.sampling_params import NO_DEFAULTS

DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's default of `max_tokens`."""
MAX_LOGPROBS: Final = 5


async def completions(request: Request) -> Response:
    """Continue one text or several, streaming or not."""
    context = context_of(request)
    body = await read_json(request, CompletionBody)
    requests = to_requests(body, context.sampling_defaults.values)
    with NO_FORMAT if body.response_format is None else naming_format():
        return await respond(
            request, context.manager, requests, lambda: CompletionAnswers(body, context, requests)
        )


def to_requests(
    body: CompletionBody, defaults: Mapping[str, float] = NO_DEFAULTS
) -> list[GenerateRequest]:
    """The engine's requests, one for each sample of each prompt; `defaults` as `sampling_params`
    takes them."""
    check_common(body)
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise bad_request(f"logprobs={body.logprobs} must be from 0 to {MAX_LOGPROBS}", "logprobs")
    prompts = _prompts(body.prompt)
    is_batch = not isinstance(body.prompt, str) and not isinstance(body.prompt[0], int)
    rooms = rooms_of(body, len(prompts), is_batch=is_batch)
    if rooms[0] is not None and body.echo and body.logprobs is not None:
        raise bad_request(
            "echo with logprobs: the decode server has no logprobs of the prompt: leave one of "
            "them out, or ask /generate with logprob_start_len",
            "echo",
        )
    has_one = len(prompts) == 1
    rid = new_rid() if body.rid is None else body.rid
    requests = [
        GenerateRequest(
            rid=rid if has_one else f"{rid}-{index}",
            text=prompt if isinstance(prompt, str) else None,
            input_ids=None if isinstance(prompt, str) else prompt,
            sampling_params=sampling_params(body, body.max_tokens, "max_tokens", defaults, least=0),
            default_max_new_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else None,
            max_tokens_field="max_tokens",
            prompt_field="prompt" if has_one else f"prompt[{index}]",
            stream=bool(body.stream),
            return_logprob=body.logprobs is not None,
            top_logprobs_num=body.logprobs or 0,
            logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
            no_stop_trim=bool(body.no_stop_trim),
            return_cache_report=bool(body.return_cache_report),
            bootstrap=rooms[index],
            extra_key=body.extra_key,
            cache_salt=body.cache_salt,
            session_id=body.session_id,
            dp_rank=dp_rank_of(body),
            priority=body.priority or 0,
        )
        for index, prompt in enumerate(prompts)
    ]
    return expand_samples(requests)


def _prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | TokenArray]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is empty: give text or token ids", "prompt")
    mixed = bad_request("prompt: token ids and texts are mixed; send one kind", "prompt")
    if isinstance(prompt[0], int):
        try:
            return [prompt_ids(cast(list[int], prompt), "prompt")]
        except TypeError:
            raise mixed from None
    if len(prompt) > MAX_BATCH:
        raise bad_request(f"prompt has {len(prompt)} prompts, at most {MAX_BATCH}", "prompt")
    prompts: list[str | TokenArray] = []
    for index, item in enumerate(prompt):
        if isinstance(item, int):
            raise mixed
        field = "prompt" if len(prompt) == 1 else f"prompt[{index}]"
        prompts.append(item if isinstance(item, str) else prompt_ids(item, field))
    return prompts


class CompletionAnswers(Answers):
    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, body: CompletionBody, context: ServerContext, requests: Sequence[GenerateRequest]
    ) -> None:
        super().__init__(body, context)
        self._requests = requests
        self._echoes = bool(body.echo)
        self._tokenizer = context.manager.tokenizer
        self._formatter = TokenFormatter(self._tokenizer) if body.logprobs is not None else None

    async def _choice(self, index: int, state: RequestState) -> dict[str, Any]:
        echo = self._echo(index)
        writer = self._logprobs(index, state, echo)
        return {
            "index": index,
            "text": (echo or "") + state.text,
            "logprobs": None if writer is None else await writer.fresh(),
            "finish_reason": finish_reason(state),
            "matched_stop": matched_stop(state),
        }

    async def _chunks(
        self, index: int, state: RequestState
    ) -> AsyncGenerator[dict[str, Any], None]:
        cursor = OutputCursor(state)
        echo = self._echo(index)
        writer = self._logprobs(index, state, echo)
        has_ended = False
        while not has_ended:
            has_ended = await state.wait_for_output()
            text, echo = (echo or "") + cursor.advance(), None
            logprobs = None if writer is None else await writer.fresh()
            if not (text or has_ended or writer is not None):
                continue
            choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs}
            choice["finish_reason"] = finish_reason(state) if has_ended else None
            if has_ended:
                choice["matched_stop"] = matched_stop(state)
            yield self._chunk(state, choice, ended=has_ended)

    def _echo(self, index: int) -> str | None:
        """The prompt's text if the answer repeats it."""
        if not self._echoes:
            return None
        request = self._requests[index]
        if request.text is not None:
            return request.text
        ids = [] if request.input_ids is None else request.input_ids.tolist()
        text = self._tokenizer.decode(ids)
        assert isinstance(text, str)
        return text

    def _logprobs(
        self, index: int, state: RequestState, echo: str | None
    ) -> CompletionLogprobs | None:
        if self._formatter is None:
            return None
        params = self._requests[index].sampling_params
        return CompletionLogprobs(
            state, self._formatter, skip_special_tokens=params.skip_special_tokens, echo=echo
        )
