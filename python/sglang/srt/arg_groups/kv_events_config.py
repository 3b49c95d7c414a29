"""`--kv-events-config`: where events of KV blocks are published, as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

FLAG: Final = "--kv-events-config"
_MOST: Final = 10_000_000
_FORMAT: Final = "sglang"

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

    def describe(self, block_size: int) -> dict[str, Any]:
        """Addresses, topic and block size under SGLang's names, for routers. Host and port of a
        path are None."""
        host, port = _host_and_port(self.endpoint)
        return {
            "publisher": self.publisher,
            "endpoint_host": host,
            "endpoint_port_base": port,
            "topic": self.topic,
            "block_size": block_size,
            "dp_size": 1,
            "replay_endpoint_port_base": _host_and_port(self.replay_endpoint or "")[1],
        }


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
