"""Fields of request bodies: marks of those without effect and of refused ones, and the rooms.

A field without a mark is acted on. `docs/api.md` has the table of all fields, which
`scripts/update_api.py` writes from the marks. A router adds the fields of rooms when it sends one
body to a prefill and to a decode server.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Final, get_args

import msgspec

from sglang.srt.constants import DEFAULT_BOOTSTRAP_PORT
from sglang.srt.entrypoints.http.body import MAX_BATCH, spread
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.managers.messages.io_struct import MAX_ROOM, Bootstrap

NOTHING: Final[tuple[Any, ...]] = (None, False, "", [], {})
"""Values that ask for nothing, in any field."""

TEXT_ALONE: Final = "this server serves text alone"
"""Remedy for images, videos and audio, which are refused for every model."""
LORA: Final = "SGLang has LoRA, this engine does not"
ONE_RANK: Final = "SGLang has data parallelism, this engine does not"
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
    stream: bool | None = None
    no_stop_trim: bool | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None

    routing_key: Annotated[str | None, Ignored("routers read it")] = None
    log_metrics: Annotated[bool | None, Ignored(BOOKKEEPING)] = None
    no_logs: Annotated[bool | None, Ignored(BOOKKEEPING)] = None
    custom_labels: Annotated[dict[str, str] | None, Ignored(BOOKKEEPING)] = None

    lora_path: Annotated[Any, Refused(LORA)] = None
    session_params: Annotated[Any, Refused(WHOLE_PROMPT)] = None
    custom_logit_processor: Annotated[Any, Refused("use logit_bias")] = None
    return_hidden_states: Annotated[Any, Refused("leave it out")] = None
    return_routed_experts: Annotated[Any, Refused("leave it out")] = None
    return_prompt_token_ids: Annotated[Any, Refused("ask /v1/tokenize for them")] = None
    data_parallel_rank: Annotated[Any, Refused(ONE_RANK, (*NOTHING, 0))] = None
    routed_dp_rank: Annotated[Any, Refused(ONE_RANK, (*NOTHING, 0))] = None
    disagg_prefill_dp_rank: Annotated[Any, Refused(ONE_RANK, (*NOTHING, 0))] = None


@cache
def marks_of(kind: type[msgspec.Struct]) -> dict[str, Ignored | Refused]:
    """The marked fields of `kind`."""
    return {
        field.encode_name: mark
        for field in msgspec.structs.fields(kind)
        for mark in get_args(field.type)
        if isinstance(mark, Ignored | Refused)
    }


def refuse_fields(obj: msgspec.Struct) -> None:
    """Refuse the marked fields of `obj` that ask for something.

    Raises:
        ApiError: 400 that names the first such field.
    """
    for field, mark in marks_of(type(obj)).items():
        if not isinstance(mark, Refused):
            continue
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


MAX_HOST_CHARS: Final = 255
"""Longest host name in characters; DNS allows fewer."""


def rooms_of(body: SharedFields, count: int, *, is_batch: bool) -> list[Bootstrap | None]:
    """The rooms of `count` prompts; all None if the body names none.

    Host and port may be one value for all prompts; a port that is null or absent is
    `DEFAULT_BOOTSTRAP_PORT`.

    Args:
        body: Each of these three fields is one value, or a list with a value for each prompt.
        count: Number of prompts, at least 1.
        is_batch: Whether the body may have lists.

    Raises:
        ApiError: 400 that names the field.
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
        Bootstrap(host=host, port=DEFAULT_BOOTSTRAP_PORT if port is None else port, room=room)
        for host, port, room in zip(hosts, ports, rooms, strict=True)
    ]
