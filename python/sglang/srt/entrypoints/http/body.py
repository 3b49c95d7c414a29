"""Request bodies: read within limits, decoded to a struct, with errors that name the field."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import gc
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX, MIB
from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.http.server_context import context_of

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

_MESSAGE: Final = re.compile(r"(?P<problem>.*?)(?: - at `(?P<path>[^`]*)`)?", re.DOTALL)
_NAMED_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413: more than `limit` bytes are announced or come. 408: they come too slowly.
            The answer ends the connection.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced[:20]) > limit:
        raise _too_large(limit)
    now = asyncio.get_running_loop().time
    end = now() + BODY_SECONDS
    body = bytearray()
    try:
        async with asyncio.timeout_at(now() + CHUNK_SECONDS) as bound:
            part = await request.receive()
            while part["type"] != "http.disconnect":
                data: bytes = part.get("body", b"")
                if len(body) + len(data) > limit:
                    raise _too_large(limit)
                if not part.get("more_body"):
                    return bytes(body) + data if body else data
                body += data
                bound.reschedule(min(now() + CHUNK_SECONDS, end))
                part = await request.receive()
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
        with _without_collections():
            return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise describe_mismatch(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8: {error.reason}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


async def read_json(request: Request, kind: type[T]) -> T:
    """Read and decode the body; raises as `read_body` and `decode_body` do."""
    body = await read_body(request)
    if len(body) >= _LARGE_BYTES:
        context_of(request).memory.trim_soon()
    return decode_body(body, kind)


def convert(value: object, kind: type[T], field: str) -> T:
    """Convert `value`, which was decoded without a type, to a `kind`; errors name it as part of
    `field`.

    Raises:
        ApiError: 400 as `decode_body`.
    """
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
    """Refuse ids like those of the server's own probes, which logs and metrics leave out.

    Raises:
        ApiError: 400 that names `rid`.
    """
    for one in rid if isinstance(rid, list) else [rid or ""]:
        if one.startswith(HEALTH_CHECK_RID_PREFIX):
            raise bad_request(
                f"rid begins with {HEALTH_CHECK_RID_PREFIX}, as the server's own: choose another",
                "rid",
            )


def spread(field: str, value: Any, count: int, is_batch: bool) -> list[Any]:
    """One value for each of `count` prompts.

    Raises:
        ApiError: 400: `value` is a list without a batch, or of another length.
    """
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
        ApiError: 400 that names the largest field.
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


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pause garbage collection while a large body is decoded.

    A hostile body decodes to hundreds of thousands of lists. Collections among them take ten times
    as long as decoding, and hold up the event loop.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    close = difflib.get_close_matches(
        name, [f.encode_name for f in msgspec.structs.fields(kind)], 1
    )
    return f"; did you mean {close[0]}?" if close else "; leave it out"


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the body has more than {limit} bytes, the most that one request may have: split it"
    )
