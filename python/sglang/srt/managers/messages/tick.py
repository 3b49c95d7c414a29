"""The tick: what rank 0 tells every rank at the begin of a step.

Whatever ranks could see differently without being agreed on otherwise (the cache's ballot, the
votes of a half) is here: which messages have come, what time it is, which grammars are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sglang.srt.managers.messages.io_struct import ToScheduler, encode, unpack_tokens


class GrammarResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The grammar of a request is no longer compiling."""

    rid: str
    failure: str | None = None
    """Why there is none, for the client; None: it is ready."""


class Tick(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of all ranks at the begin of a step."""

    now: float
    """`time.monotonic()` of rank 0."""
    messages: Sequence[ToScheduler] = ()
    grammars: Sequence[GrammarResult] = ()
    """Grammars of requests that wait or are among the messages."""
    is_idle: bool = False
    """Nothing has happened for a while: the time to check the books."""


_decoder = msgspec.msgpack.Decoder(Tick, dec_hook=unpack_tokens)


def encode_tick(tick: Tick) -> bytes:
    """Encode a tick for the other ranks."""
    return encode(tick)


def decode_tick(payload: bytes) -> Tick:
    """Decode the output of `encode_tick`. Raises `msgspec.DecodeError` on anything else."""
    return _decoder.decode(payload)
