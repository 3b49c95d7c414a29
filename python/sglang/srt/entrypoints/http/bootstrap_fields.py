"""Fields `bootstrap_host`, `bootstrap_port`, `bootstrap_room`: the room of each prompt of a body.

A router adds them when it sends one body to a prefill and to a decode server.
"""

from __future__ import annotations

from typing import Final

from sglang.srt.constants import DEFAULT_BOOTSTRAP_PORT
from sglang.srt.entrypoints.http.body import spread
from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.entrypoints.http.field_marks import SharedFields
from sglang.srt.managers.messages.io_struct import MAX_ROOM, Bootstrap

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
