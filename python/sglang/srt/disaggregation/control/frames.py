"""Frames of control connections, and the handshake that opens one.

    server: Greeting
    client: Proof                    with a secret
    server: Welcome, or Refused      with a secret

A frame is its length, four bytes in network order, and that many bytes. All further frames are
messages of the protocol. A client without a secret sends them without waiting for the greeting.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from sglang.srt.constants import KIB, MIB
from sglang.srt.disaggregation.base.deployment_secret import NONCE_BYTES

VERSION: Final = 1
MAX_PROOF_BYTES: Final = 256
MAX_QUESTION_BYTES: Final = 96 * KIB
"""Most bytes of a frame to the server. The longest question names some thousand rooms, and gives
reasons for 32 of them."""
MAX_ANSWER_BYTES: Final = 64 * MIB
"""Most bytes of a frame to the client; pages of a million tokens have 9 MiB."""
OF_CLIENT: Final = "client of a control connection"
OF_SERVER: Final = "server of a control connection"
"""Purposes of the proofs. Each is about both nonces, the server's first."""
_LENGTH_BYTES: Final = 4

Nonce: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Mac: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]


class Greeting(msgspec.Struct, frozen=True, tag=True):
    version: int
    nonce: Nonce
    wants_proof: bool


class Proof(msgspec.Struct, frozen=True, tag=True):
    nonce: Nonce
    mac: Mac


class Welcome(msgspec.Struct, frozen=True, tag=True):
    mac: Mac


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: Annotated[str, msgspec.Meta(max_length=512)]


PROOF_DECODER: Final = msgspec.msgpack.Decoder(Proof)
OPENING_DECODER: Final = msgspec.msgpack.Decoder(Greeting | Welcome | Refused)


class FrameTooLong(ValueError):
    """A peer has announced a frame with more bytes than it may have."""


def as_frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


def take_frame(received: bytearray, max_bytes: int) -> bytes | None:
    """Take the message of the next frame from the front of `received`; None: the frame is not whole
    yet. Raises FrameTooLong if the message has more than `max_bytes`."""
    if len(received) < _LENGTH_BYTES:
        return None
    length = int.from_bytes(received[:_LENGTH_BYTES], "big")
    if length > max_bytes:
        raise FrameTooLong(f"a frame of {length} bytes; at most {max_bytes} are read")
    end = _LENGTH_BYTES + length
    if len(received) < end:
        return None
    message = bytes(received[_LENGTH_BYTES:end])
    del received[:end]
    return message
