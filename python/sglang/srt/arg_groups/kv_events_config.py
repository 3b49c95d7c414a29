"""`--kv-events-config`: where events of KV blocks are published, as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

FLAG: Final = "--kv-events-config"
_MOST: Final = 10_000_000
_FORMAT: Final = "sglang"
_LAST_PORT: Final = 65535

_Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
_Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(tcp|ipc)://.")]


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the publisher; names and defaults are SGLang's, but the endpoint's host."""

    publisher: Literal["zmq", "null"] = "zmq"
    """"null": events are not even noted."""
    endpoint: _Endpoint = "tcp://127.0.0.1:5557"
    """Address of a PUB socket: bound if it is this machine's (see `endpoints_to_bind`), else
    connected to."""
    replay_endpoint: _Endpoint | None = None
    """Address of a ROUTER socket that sends old batches again; None: there is none."""
    buffer_steps: _Count = 10_000
    """Batches that are kept for that, in at most 128 MiB."""
    hwm: _Count = 100_000
    """Batches that ZMQ keeps for a slow subscriber. Later ones are not sent to it."""
    max_queue_size: _Count = 100_000
    """Batches that wait for the publisher's thread. Later ones are lost: a gap in the numbers."""
    topic: Annotated[str, msgspec.Meta(max_length=256)] = ""
    announce_keyed: bool = False
    """True: blocks of prompts with an `extra_key` or a `cache_salt` are published too, with
    these."""
    format: str = _FORMAT
    """Form of the events; there is one."""

    def describe(self, block_size: int, dp_size: int = 1) -> dict[str, Any]:
        """Addresses, topic and block size under SGLang's names, for routers. Host and port of a
        path are None. Ports are those of the first of `dp_size` DP groups."""
        host, port = _host_and_port(self.endpoint)
        return {
            "publisher": self.publisher,
            "endpoint_host": host,
            "endpoint_port_base": port,
            "topic": self.topic,
            "block_size": block_size,
            "dp_size": dp_size,
            "replay_endpoint_port_base": _host_and_port(self.replay_endpoint or "")[1],
        }

    def check_groups(self, dp_size: int) -> None:
        """Raise ValueError if `dp_size` DP groups cannot have ports of their own."""
        self.of_dp_rank(dp_size - 1)
        ports = _host_and_port(self.endpoint)[1], _host_and_port(self.replay_endpoint or "")[1]
        first, second = (port or 0 for port in ports)
        if 0 < abs(first - second) < dp_size and first and second:
            raise ValueError(
                f"{FLAG}: each of the {dp_size} groups of --attn-dp-size has the next port after "
                f"endpoint and replay_endpoint: put these at least {dp_size} apart"
            )

    def of_dp_rank(self, dp_rank: int) -> KVEventsConfig:
        """The settings of a DP group. Its number is added to the ports, and to the names of paths
        unless it is 0. Raises ValueError: there is no such port."""
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=_offset("endpoint", self.endpoint, dp_rank),
            replay_endpoint=None if replay is None else _offset("replay_endpoint", replay, dp_rank),
        )


def _offset(field: str, endpoint: str, dp_rank: int) -> str:
    if not dp_rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{dp_rank}"
    place, _, text = endpoint.rpartition(":")
    port = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= port <= _LAST_PORT - dp_rank:
        raise ValueError(
            f"{FLAG}: {field} {endpoint!r}: the groups of --attn-dp-size have the ports after it: "
            f"name a port from 1 to {_LAST_PORT - dp_rank}"
        )
    return f"{place}:{port + dp_rank}"


def _host_and_port(endpoint: str) -> tuple[str | None, int | None]:
    """Host and port of a `tcp` endpoint; an IPv6 address without brackets."""
    if not endpoint.startswith("tcp://"):
        return None, None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    number = int(port) if port.isascii() and port.isdecimal() else None
    return host.removeprefix("[").removesuffix("]"), number


_DECODER: Final = msgspec.json.Decoder(KVEventsConfig)


def parse_kv_events_config(text: str) -> KVEventsConfig:
    """Parse the flag's value. Raises ValueError: one line with the field and the remedy."""
    try:
        config = _DECODER.decode(text)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        names = ", ".join(KVEventsConfig.__struct_fields__)
        raise ValueError(
            f"{FLAG}: {error}: give a JSON object with some of {names}, such as "
            '\'{"endpoint": "tcp://*:5557"}\''
        ) from None
    if config.format != _FORMAT:
        raise ValueError(
            f"{FLAG}: format {config.format[:40]!r} is not supported: events have the form "
            f'"{_FORMAT}"; leave the field out'
        )
    return config
