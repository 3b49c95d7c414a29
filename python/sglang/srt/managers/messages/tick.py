"""The tick: rank 0's message to every rank at the start of a step.

It has the inputs that ranks could see differently: the messages, the time, and which grammars are
compiled. On other such inputs the ranks agree by the cache's tick sync or the status of transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from sglang.srt.managers.messages.io_struct import ToScheduler, encode, unpack_tokens


class GrammarResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of compiling the grammar of a request."""

    rid: str
    failure: str | None = None
    """Reason for the client why it failed; None: the grammar is ready."""


class Tick(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of all ranks at the start of a step."""

    now: float
    """`time.monotonic()` of rank 0."""
    messages: Sequence[ToScheduler] = ()
    grammars: Sequence[GrammarResult] = ()
    """Grammars of requests that wait or are among the messages."""
    is_idle: bool = False
    """Whether the scheduler has been idle for a while, so that page ownership may be checked."""


encode_tick: Final = encode
decode_tick: Final = msgspec.msgpack.Decoder(Tick, dec_hook=unpack_tokens).decode
"""Decodes the output of `encode_tick`. Raises `msgspec.DecodeError` on anything else."""
