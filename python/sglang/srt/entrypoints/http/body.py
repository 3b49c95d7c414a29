"""Request bodies: read within limits, decoded to a struct, with errors that name the field.

Every mistake is an `ApiError` of status 400 that names the field, unless a function says more.
Marks tell fields without effect and refused fields; a field without a mark is acted on.
`docs/api.md` has the table of all fields, which `scripts/update_api.py` writes from the marks.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_args

import msgspec

from sglang.srt.constants import DEFAULT_BOOTSTRAP_PORT, HEALTH_CHECK_RID_PREFIX, MIB
from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.http.request import Request
from sglang.srt.entrypoints.http.server_context import context_of
from sglang.srt.managers.tokenizer.request_limits import MAX_RID_CHARS
from sglang.srt.messages.io_struct import MAX_ROOM, Bootstrap
from sglang.srt.utils.network import canonical_host
from sglang.srt.utils.process import without_collections
from sglang.srt.utils.spelling import did_you_mean

T = TypeVar("T", bound=msgspec.Struct)

MAX_BODY_BYTES: Final = 16 * MIB
"""Most bytes of a body: several times the size that the longest contexts need. It bounds the memory
of a hostile body."""
BODY_SECONDS: Final = 60.0
"""Most time for a whole body to arrive."""
CHUNK_SECONDS: Final = 10.0
"""Most time for the next part of a body to arrive."""
MAX_BODY_VALUES: Final = 1 << 19
"""Most strings in a body, and most lists and objects. Millions of empty ones fit into its bytes,
and would hold up the event loop for a second. Numbers are cheap."""
MAX_BATCH: Final = 1024
"""Most prompts in a body."""
MAX_NAME_CHARS: Final = 64
"""An unknown field's name is cut to this length in errors; known ones are shorter."""
_LARGE_BYTES: Final = MIB
_MOST_SEARCHED: Final = 1 << 15
"""Most lists and objects of a body in which a wrong number is searched, which takes up to 0.1 s."""
_SESSION_FIELD: Final = "session_id"
_SESSION_HEADER: Final = "x-smg-routing-key"

_MESSAGE: Final = re.compile(r"(?P<problem>.*?)(?: - at `(?P<path>[^`]*)`)?", re.DOTALL)
_OUT_OF_RANGE: Final = "Number out of range"
"""Begins msgspec's error for a number that no double holds. Its path ends where types end."""
_NAMED_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413: more than `MAX_BODY_BYTES` are announced or come. 408: they come too slowly.
            The answer ends the connection.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    if not request.more_body:  # Most bodies come with their head.
        return b"".join(request.parts)
    now = asyncio.get_running_loop().time
    end = now() + BODY_SECONDS
    body = bytearray()
    try:
        async with asyncio.timeout_at(now() + CHUNK_SECONDS) as bound:
            while True:
                part = await request.receive()
                if request.gone.done():
                    break
                if len(body) + len(part) > MAX_BODY_BYTES:
                    raise _too_large()
                if not request.more_body:
                    return bytes(body) + part if body else part
                body += part
                bound.reschedule(min(now() + CHUNK_SECONDS, end))
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not come within {CHUNK_SECONDS:g} s for a part and {BODY_SECONDS:g} s "
            "in all: send it faster",
        ) from None
    raise ApiError(499, "the client left before the body was complete")


def decode_body(body: bytes, kind: type[T]) -> T:
    """`body` as a `kind`.

    Raises:
        ApiError: 400 that names the field and the values allowed there. For an unknown field it has
            the remedy in `kind.elsewhere`, if there is one.
    """
    try:
        if len(body) < _LARGE_BYTES:
            return msgspec.json.decode(body, type=kind)
        _check_values(body)
        with without_collections():
            return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        named = _unfit_number(body) if str(error).startswith(_OUT_OF_RANGE) else None
        raise named or describe_mismatch(str(error), kind) from None
    except msgspec.DecodeError as error:
        if (named := _unfit_number(body)) is not None:
            raise named from None
        problem = f"not valid JSON: {error}" if body.strip() else "empty: send a JSON object"
        raise bad_request(f"the body is {problem}") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8: {error.reason}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


async def read_json(request: Request, kind: type[T], *, may_be_empty: bool = False) -> T:
    """The body as a `kind`; an empty one is `{}` if it may be. If it may name a session and does
    not, the header's counts: routers pass that on, and some drop the field. Raises ApiError, as
    `decode_body`; 415: the body is compressed."""
    body = await read_body(request)
    if may_be_empty and not body:
        body = b"{}"
    if len(body) >= _LARGE_BYTES:
        context_of(request).memory.trim_soon()
    try:
        decoded = decode_body(body, kind)
    except ApiError as error:
        raise _coded(request) or error from None
    if getattr(decoded, _SESSION_FIELD, "") is None:
        setattr(decoded, _SESSION_FIELD, _session_of(request))
    return decoded


def _coded(request: Request) -> ApiError | None:
    """The error for a body that cannot be read because it is compressed; None: it is not."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding == "identity":
        return None
    text = f"Content-Encoding {coding[:MAX_NAME_CHARS]!r} is not supported: send the body as it is"
    return ApiError(415, text, param="Content-Encoding")


def _session_of(request: Request) -> str | None:
    name = request.headers.get(_SESSION_HEADER)
    if name is None:
        return None
    raw = name.encode(errors="surrogateescape")
    if not 1 <= len(raw) <= MAX_RID_CHARS:
        raise bad_request(
            "the header X-SMG-Routing-Key names the session where session_id does not: it "
            f"must have 1 to {MAX_RID_CHARS} characters",
            _SESSION_FIELD,
        )
    return raw.decode("latin-1")


def convert(value: object, kind: type[T], field: str) -> T:
    """Convert `value`, which was decoded without a type, to a `kind`; errors name it as part of
    `field`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise describe_mismatch(str(error), kind, field) from None


def describe_mismatch(message: str, kind: type[msgspec.Struct], inside: str = "") -> ApiError:
    """msgspec's error as an `ApiError`: the field first, then the problem, then a remedy."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None, "the pattern matches everything"
    path = (match["path"] or "").removeprefix("$").removeprefix(".")
    field = f"{inside}.{path}" if inside and path else inside or path
    named = _NAMED_FIELD.match(match["problem"])
    if named is None:
        problem = match["problem"].replace("`", "").replace("Expected", "expected")
        return bad_request(f"{field or 'the body'}: {problem}", field or None)
    name = f"{field}.{_shown(named[2])}" if field else _shown(named[2])
    if named[1] == "missing required":
        return bad_request(f"{name}: this field is required", name)
    return bad_request(f"{name}: unknown field{_suggestion(named[2], kind, path)}", name)


def refuse_own_ids(rid: str | list[str] | None) -> None:
    """Refuse ids like those of the server's own probes, which logs and metrics leave out."""
    for one in rid if isinstance(rid, list) else [rid or ""]:
        if one.startswith(HEALTH_CHECK_RID_PREFIX):
            raise bad_request(
                f"rid begins with {HEALTH_CHECK_RID_PREFIX}, as the server's own: choose another",
                "rid",
            )


def spread(field: str, value: Any, count: int, is_batch: bool) -> list[Any]:
    """One value for each of `count` prompts; a list needs a batch, and that length."""
    if not isinstance(value, list):
        return [value] * count
    if not is_batch:
        raise bad_request(f"{field}: a list needs a batch of prompts; give one value", field)
    if len(value) != count:
        raise bad_request(f"{field} has {len(value)} values for {count} prompts", field)
    return value


def _check_values(body: bytes) -> None:
    """Refuse a body of too many values before it is decoded; looks only at its bytes.

    Raises:
        msgspec.DecodeError: It is no JSON.
    """
    # Once escapes are removed, the text between two quotes is a string.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    strings = plain.count(b'"') // 2
    most = max(strings, plain.count(b"[") + plain.count(b"{"))
    if most > MAX_BODY_VALUES >= strings:
        outside = plain.split(b'"')[::2]
        most = sum(part.count(b"[") + part.count(b"{") for part in outside)
    if most <= MAX_BODY_VALUES:
        return
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return  # No object: decoding will refuse it at its first byte.
    field = _shown(max(fields, key=lambda name: len(bytes(fields[name])), default=""))
    raise bad_request(
        f"{field}: more than {MAX_BODY_VALUES} strings, or lists and objects, in one request: "
        "split it",
        field,
    )


class _Unfit(str):
    """A number, as the client wrote it, that no double holds or that JSON does not have."""

    __slots__ = ()


def _unfit_number(body: bytes) -> ApiError | None:
    """The error that names the first such number in `body`; None: it has none, or has another
    mistake, or is large, since this takes longer than decoding."""
    if len(body) >= _LARGE_BYTES or body.count(b"[") + body.count(b"{") > _MOST_SEARCHED:
        return None

    def number(text: str) -> object:
        return 0 if math.isfinite(float(text)) else _Unfit(text)

    try:
        with without_collections():
            decoded = json.loads(body, parse_float=number, parse_constant=_Unfit)
    except (ValueError, RecursionError):
        return None
    # The last is read next. Each has its parent's entry, and its name or number there.
    waiting: list[tuple[Any, object, object]] = [(None, None, decoded)]
    while waiting:
        entry = waiting.pop()
        value = entry[2]
        if isinstance(value, _Unfit):
            return _refused_number(entry, value)
        items: Iterable[tuple[object, object]] = ()
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
        found = [(entry, *item) for item in items if isinstance(item[1], dict | list | _Unfit)]
        waiting += reversed(found)
    return None


def _refused_number(entry: tuple[Any, object, object], number: str) -> ApiError:
    path = ""
    while entry[0] is not None:
        name = entry[1]
        path = (f".{_shown(name)}" if isinstance(name, str) else f"[{name}]") + path
        entry = entry[0]
    field = _shown(path.removeprefix(".")) if path else ""
    why = "is out of range" if number.lstrip("-")[:1].isdigit() else "is not valid JSON"
    text = f"{field or 'the body'}: {_shown(number)} {why}: send a finite number, or leave it out"
    return bad_request(text, field or None)


def _shown(name: str) -> str:
    """A field's name as the client wrote it, cut where it is long; `''` where it is empty."""
    return f"{name[:MAX_NAME_CHARS]}..." if len(name) > MAX_NAME_CHARS else name or "''"


def _suggestion(name: str, kind: type[msgspec.Struct], path: str) -> str:
    if path:
        return ""
    elsewhere: Mapping[str, str] = getattr(kind, "elsewhere", {})
    if name in elsewhere:
        return f"; {elsewhere[name]}"
    if len(name) > MAX_NAME_CHARS:
        return "; leave it out"
    near = did_you_mean(name, (f.encode_name for f in msgspec.structs.fields(kind)))
    return near or "; leave it out"


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the body has more than {MAX_BODY_BYTES} bytes, the most that one request may have: "
        "split it",
    )


NOTHING: Final[tuple[Any, ...]] = (None, False, "", [], {})
"""Values that ask for nothing, in any field."""

TEXT_ALONE: Final = "this server serves text alone"
"""Remedy for images, videos and audio, which are refused for every model."""
LORA: Final = "SGLang has LoRA, this engine does not"
BOOKKEEPING: Final = "bookkeeping of clients and routers"
IMAGES_ALONE: Final = "shapes images and videos, which are refused"
WHOLE_PROMPT: Final = "send the whole prompt, its cached prefix is reused"
EQUAL_PREFIXES: Final = "equal prefixes share the cache without it"


@dataclass(frozen=True, slots=True)
class Ignored:
    """The field is accepted, and has no effect on the answer."""

    why: str
    """Why ignoring it cannot change the answer."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The field is refused by name, unless its value asks for nothing."""

    remedy: str
    """The remedy for the client; it may begin with the reason."""
    neutral: tuple[Any, ...] = NOTHING
    """Values that are accepted; also a list of them, one for each prompt."""


class SharedFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of `/generate` and of OpenAI's completions. `null` means absent."""

    priority: int | None = None
    session_id: str | None = None
    """The cache keeps the prefix for a while: this session will come back to it."""
    stream: bool | None = None
    no_stop_trim: bool | None = None
    return_cache_report: bool | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    routed_dp_rank: int | None = None
    """The DP group for the body's prompts."""
    data_parallel_rank: int | None = None
    """Its earlier name."""

    routing_key: Annotated[str | None, Ignored("routers read it")] = None
    log_metrics: Annotated[bool | None, Ignored(BOOKKEEPING)] = None
    no_logs: Annotated[bool | None, Ignored(BOOKKEEPING)] = None
    custom_labels: Annotated[dict[str, str] | None, Ignored(BOOKKEEPING)] = None
    disagg_prefill_dp_rank: Annotated[Any, Ignored("decode servers find the group")] = None

    lora_path: Annotated[Any, Refused(LORA)] = None
    session_params: Annotated[Any, Refused(WHOLE_PROMPT)] = None
    custom_logit_processor: Annotated[Any, Refused("use logit_bias")] = None
    return_hidden_states: Annotated[Any, Refused("leave it out")] = None
    return_routed_experts: Annotated[Any, Refused("leave it out")] = None
    return_prompt_token_ids: Annotated[Any, Refused("ask /v1/tokenize for them")] = None


@cache
def marks_of(kind: type[msgspec.Struct]) -> dict[str, Ignored | Refused]:
    return {
        field.encode_name: mark
        for field in msgspec.structs.fields(kind)
        for mark in get_args(field.type)
        if isinstance(mark, Ignored | Refused)
    }


@cache
def _refused_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, Refused], ...]:
    marks = marks_of(kind).items()
    return tuple((field, mark) for field, mark in marks if isinstance(mark, Refused))


def refuse_fields(obj: msgspec.Struct) -> None:
    """Refuse the marked fields of `obj` that ask for something."""
    for field, mark in _refused_of(type(obj)):
        value = getattr(obj, field)
        if value is not None and not is_neutral(value, mark.neutral):
            raise bad_request(f"{field} is not supported: {mark.remedy}", field)


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """True if `value` equals one of `neutral` and has its type, or is a list of such values, one
    for each prompt."""
    if isinstance(value, list) and 1 <= len(value) <= MAX_BATCH:
        return all(_is_one_of(item, neutral) for item in value) or _is_one_of(value, neutral)
    return _is_one_of(value, neutral)


def _is_one_of(value: object, words: tuple[Any, ...]) -> bool:
    return any(value == word and type(value) is type(word) for word in words)


def dp_rank_of(body: SharedFields) -> int | None:
    """The DP group that a body names, which `check_request` compares with the server's; None: the
    server chooses."""
    found: int | None = None
    for field in ("routed_dp_rank", "data_parallel_rank"):
        value = getattr(body, field)
        if value is None:
            continue
        if type(value) is not int:
            raise bad_request(f"{field} must be a number, the group's", field)
        if found not in (None, value):
            raise bad_request(
                "routed_dp_rank and data_parallel_rank name the same, and differ: give one of them",
                field,
            )
        found = value
    return found


MAX_HOST_CHARS: Final = 255
"""Longest host name in characters; DNS allows fewer."""


def rooms_of(body: SharedFields, count: int, *, is_batch: bool) -> list[Bootstrap | None]:
    """The rooms of `count` prompts, at least one; all None if the body names none.

    Host and port may be one value for all prompts; a port that is null or absent is
    `DEFAULT_BOOTSTRAP_PORT`. Only a batch may have lists, with a value for each prompt.
    """
    given = {
        "bootstrap_host": body.bootstrap_host,
        "bootstrap_port": body.bootstrap_port,
        "bootstrap_room": body.bootstrap_room,
    }
    if not any(value is not None for value in given.values()):
        return [None] * count
    hosts, ports, rooms = (spread(field, value, count, is_batch) for field, value in given.items())
    for index, (host, port, room) in enumerate(zip(hosts, ports, rooms, strict=True)):
        for field, value in (("bootstrap_host", host), ("bootstrap_room", room)):
            if value is None:
                raise bad_request(
                    f"{field} is missing: a request for a prefill or decode server has "
                    "bootstrap_host and bootstrap_room, and may have bootstrap_port",
                    field,
                )
        place = f"[{index}]" if is_batch else ""
        if not (1 <= len(host) <= MAX_HOST_CHARS and host.isprintable() and " " not in host):
            raise bad_request(
                f"bootstrap_host{place} must be a name or an address, of 1 to {MAX_HOST_CHARS} "
                "printable characters without spaces",
                "bootstrap_host",
            )
        if port is not None and not 1 <= port <= 65535:
            raise bad_request(
                f"bootstrap_port{place}={str(port)[:32]} must be from 1 to 65535", "bootstrap_port"
            )
        if not 0 <= room <= MAX_ROOM:
            raise bad_request(
                f"bootstrap_room{place}={str(room)[:32]} must be from 0 to 2^63 - 1",
                "bootstrap_room",
            )
    if len(set(rooms)) < count:
        raise bad_request(
            "bootstrap_room: two prompts have the same room: give each one of its own, in a list",
            "bootstrap_room",
        )
    return [
        Bootstrap(canonical_host(host), DEFAULT_BOOTSTRAP_PORT if port is None else port, room)
        for host, port, room in zip(hosts, ports, rooms, strict=True)
    ]
