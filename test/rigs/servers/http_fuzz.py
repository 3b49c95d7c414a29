"""Nearly valid request bodies, for fuzzing a server (row F1 of docs/faults.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
from hypothesis import strategies as st

from rigs.servers.engine_server import ADMIN_KEY
from sglang.srt.entrypoints.anthropic.protocol import MessagesBody
from sglang.srt.entrypoints.native_protocol import SAMPLING_MARKS, GenerateBody
from sglang.srt.entrypoints.openai.protocol import ChatBody, ChatMessage, CompletionBody
from sglang.srt.entrypoints.openai.responses_protocol import ResponsesBody
from sglang.srt.sampling.sampling_params import SamplingParams

VALID: Final[dict[str, dict[str, Any]]] = {
    "/generate": {
        "text": "name code",
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "top_k": 3, "stop": ["x"]},
        "return_logprob": True,
        "top_logprobs_num": 1,
    },
    "/v1/completions": {"prompt": "name code", "max_tokens": 1, "temperature": 0.5, "logprobs": 1},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "name code"}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 1,
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "name code"}]}],
        "max_output_tokens": 1,
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "name code"}]}],
        "system": "be brief",
        "max_tokens": 1,
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "name code"}]},
    "/v1/tokenize": {"prompt": ["name", "code"]},
    "/v1/detokenize": {"tokens": [[300, 301], [302]]},
    "/abort_request": {"rid": "nobody"},
}
"""Path to a valid body, whose answer takes at most one token."""

_FIELDS: Final = sorted(
    {
        field.encode_name
        for kind in (
            GenerateBody,
            CompletionBody,
            ChatBody,
            ChatMessage,
            SamplingParams,
            ResponsesBody,
            MessagesBody,
        )
        for field in msgspec.structs.fields(kind)
    }
    | SAMPLING_MARKS.keys()
    | {"nonsense"}
)
"""Names of all fields that bodies may have, at any place."""

# Keys of `logit_bias` that look like token ids: valid, too large, oddly written.
_NUMERALS: Final = ("0", "5", "05", "-1", "+1", "1_0", "²", "٣", "9" * 30, "0" * 20 + "99999")

# Only extreme numbers: others might request thousands of tokens.
_LEAVES: Final = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-(2**70), -(2**63), -1, 0, 1, 2, 2**31, 2**32, 2**63, 2**64, 10**40]),
    st.sampled_from([0.0, -0.5, 0.5, 1.5, 1e308, 1e-320, float("nan"), float("inf")]),
    st.text(max_size=8),
    st.sampled_from(["", "\x00", "\ud800", "\u202e", "\U0001d518", "a" * 5000]),
)
VALUES: Final = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=5) | st.sampled_from(_FIELDS), inner, max_size=3),
        st.dictionaries(st.sampled_from(_NUMERALS), st.sampled_from([0, 1, -1.5]), max_size=2),
    ),
    max_leaves=5,
)


@dataclass(frozen=True)
class FuzzedRequest:
    """One body and its path."""

    path: str
    body: bytes


@st.composite
def fuzzed_requests(draw: st.DrawFn) -> FuzzedRequest:
    """A valid body with some values replaced, added or removed, and perhaps torn bytes."""
    path = draw(st.sampled_from(sorted(VALID)))
    body = json.loads(json.dumps(VALID[path]))
    for _ in range(draw(st.integers(0, 3))):
        _change(draw, body)
    raw = json.dumps(body).encode("utf-8", errors="surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=4)) + raw[at + draw(st.integers(0, 4)) :]
    return FuzzedRequest(path, raw)


def _change(draw: st.DrawFn, body: dict[str, Any]) -> None:
    """Replace, add or remove one field, at the top level or one level below."""
    inner = [value for value in body.values() if isinstance(value, dict)]
    target = draw(st.sampled_from([body, *inner]))
    name = draw(st.sampled_from([*target, *_FIELDS]))
    if draw(st.integers(0, 5)) == 0:
        target.pop(name, None)
    elif name not in ("max_new_tokens", "max_tokens", "max_output_tokens"):
        target[name] = draw(VALUES)


def judge(client: httpx.Client, url: str, request: FuzzedRequest) -> None:
    """Send `request` to the server at `url` and assert a valid answer or a well-formed refusal."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    response = client.post(url + request.path, content=request.body, headers=headers)
    assert response.status_code in (200, 400), (request, response.text[:300])
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["message"], request
        assert error["type"] == "invalid_request_error"
        if response.json().get("type") == "error":
            return  # Anthropic's form has no field.
        # Errors of the JSON itself have no field; all others have one.
        assert error["param"] or error["message"].startswith("the body"), (request, error)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert "server_error" not in response.text, (request, response.text[:300])
        assert "api_error" not in response.text, (request, response.text[:300])
