"""The server's end of control connections: bounded in number, bytes, silence and rate."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from sglang.srt.constants import KIB
from sglang.srt.disaggregation.base.deployment_secret import NONCE_BYTES, SOURCES, DeploymentSecret
from sglang.srt.disaggregation.control.frames import (
    MAX_PROOF_BYTES,
    MAX_QUESTION_BYTES,
    OF_CLIENT,
    OF_SERVER,
    PROOF_DECODER,
    VERSION,
    FrameTooLong,
    Greeting,
    Refused,
    Welcome,
    as_frame,
    take_frame,
)
from sglang.srt.utils.bad_messages import MALFORMED, BadMessages
from sglang.srt.utils.bounded_listener import Listener, OpenConnections, most_connections
from sglang.srt.utils.network import listening_sockets

logger = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 16_384
"""Most connections, if half of the files that the process may open are enough."""
MAX_UNKEPT: Final = 1024
"""Most connections that are not kept; a further one takes the place of the longest silent one."""
FRAMES_A_SECOND: Final = 256
"""Most frames of a kept connection that are taken in a second."""
FRAMES_AT_ONCE: Final = 512
"""Frames that it may send at once after a while, as readers of packed pages do."""
UNKEPT_FRAMES_A_SECOND: Final = 64
UNKEPT_FRAMES_AT_ONCE: Final = 32
"""The same of a connection that is not kept. A decode server sends one or two a second until its
room is there."""
_READ_BYTES: Final = 16 * KIB
_BACKLOG: Final = 1024
_SWEEP_S: Final = 1.0
_LINGER_POLL_S: Final = 0.01


class ControlPeer(asyncio.BufferedProtocol):
    """A client's connection. Event loop thread only.

    Each frame waits until the listener's user takes it. Until then the connection is not read.
    """

    transport: asyncio.Transport

    def __init__(self, listener: ControlListener) -> None:
        self._listener = listener
        self.loop = asyncio.get_running_loop()
        self.last_sweep = listener.num_sweeps
        """The listener's sweeps when its last frame was taken, or it connected."""
        self._is_open = listener.secret is None
        """True if its frames are messages: it has proved the secret."""
        self._received = bytearray()
        self._message: bytes | None = None
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._is_kept = False
        self._due = 0.0
        """Time before which its next frame is not taken."""

    def send(self, message: bytes) -> None:
        """Send a message. It is dropped if the client is gone, or has not read the last one."""
        if not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self.transport.write(as_frame(message))

    def keep(self) -> None:
        """Keep the connection until it is silent, however many others come. Idempotent."""
        if not self._is_kept:
            self._is_kept = True
            self._listener.unkept.remove_idle(self)

    def take(self) -> bytes | None:
        """Take the message that was announced; None: the client is gone."""
        message, self._message = self._message, None
        if self.transport.is_closing():
            return None
        self.last_sweep = self._listener.num_sweeps
        if not self._is_kept:
            self._listener.unkept.add_idle(self)
        self._look()
        return message

    # -- asyncio's side --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._listener.peers.add(self)
        self._listener.unkept.add_idle(self)
        self.send(msgspec.msgpack.encode(Greeting(VERSION, self._nonce, not self._is_open)))

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.peers.discard(self)
        self._listener.unkept.remove_idle(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._listener.scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._received += self._listener.scratch[:nbytes]
        self._look()

    def _look(self) -> None:
        """Announce the next frame if it is whole, else go on reading."""
        try:
            while True:
                most = MAX_QUESTION_BYTES if self._is_open else MAX_PROOF_BYTES
                message = take_frame(self._received, most)
                if message is None:
                    break
                if self._is_open:
                    self._message = message
                    self.transport.pause_reading()
                    self._announce()
                    return
                if (refusal := self._refusal(message)) is not None:
                    self._refuse(refusal)
                    return
        except FrameTooLong as error:
            self._listener.bad.add(error)
            self.transport.abort()
            return
        self.transport.resume_reading()

    def _announce(self) -> None:
        now = self.loop.time()
        rate, at_once = UNKEPT_FRAMES_A_SECOND, UNKEPT_FRAMES_AT_ONCE
        if self._is_kept:
            rate, at_once = FRAMES_A_SECOND, FRAMES_AT_ONCE
        self._due = max(self._due + 1 / rate, now - (at_once - 1) / rate)
        if self._due <= now:
            self._listener.announce(self)
        else:
            self.loop.call_at(self._due, self._listener.announce, self)

    def _refusal(self, frame: bytes) -> str | None:
        """Why the client of this first frame is refused; None: it was welcomed."""
        secret = self._listener.secret
        assert secret is not None, "without a secret connections are open at once"
        try:
            proof = PROOF_DECODER.decode(frame)
        except MALFORMED:
            return "has no secret"
        if not secret.is_proof(proof.mac, OF_CLIENT, self._nonce, proof.nonce):
            return "has another secret"
        self._is_open = True
        self.keep()
        mac = secret.proof(OF_SERVER, self._nonce, proof.nonce)
        self.send(msgspec.msgpack.encode(Welcome(mac)))
        return None

    def _refuse(self, why: str) -> None:
        why = f"{why}: give both servers the same {SOURCES}"
        host, *_ = self.transport.get_extra_info("peername") or ("its client",)
        self._listener.bad.add(f"{host} {why}")
        self.send(msgspec.msgpack.encode(Refused(why)))
        self.transport.close()


class ControlListener:
    """Accepts connections from `start` on, and collects their frames until `close`. Any thread
    makes it; then it is for the event loop's thread only.

    Args:
        host: Address to listen on, at a free port.
        secret: The secret that clients have to prove; None: all who connect may ask.
        silent_s: Seconds after which a connection without a whole frame is closed.
        on_frames: Called when there are frames to take.

    Attributes:
        port: The port that it listens on.
        unkept: Connections that are not kept.
        bad: Counts connections that were refused.
        ready: Connections with a frame to take, each once, the longest waiting first.
        num_sweeps: Looks for silent connections so far.
        scratch: Memory for the bytes of the next read of any connection.
    """

    def __init__(
        self,
        host: str,
        *,
        secret: DeploymentSecret | None,
        silent_s: float,
        on_frames: Callable[[], None],
    ) -> None:
        """Raises ValueError if the host is not an address of this machine."""
        # The route has one port. Clients try all addresses of a name.
        self._socket, *others = listening_sockets(host, 0, _BACKLOG)
        for other in others:
            other.close()
        self.port = int(self._socket.getsockname()[1])
        self.secret = secret
        self.peers: set[ControlPeer] = set()
        self.unkept = OpenConnections(MAX_UNKEPT)
        self.bad = BadMessages(logger, "control connection")
        self.num_sweeps = 0
        self.scratch = memoryview(bytearray(_READ_BYTES))
        self._silent_s = silent_s
        self._on_frames = on_frames
        self.ready: deque[ControlPeer] = deque()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = Listener(
            [self._socket],
            lambda: ControlPeer(self),
            count=lambda: len(self.peers),
            connections=self.unkept,
            most=min(MAX_CONNECTIONS, most_connections() // 2),
        )
        self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)

    async def close(self, linger_s: float) -> None:
        """Close all connections, after at most `linger_s` seconds for messages to leave."""
        self._listener.close()
        self._sweeping.cancel()
        for peer in self.peers:
            peer.transport.close()
        end = self._loop.time() + linger_s
        while self.peers and self._loop.time() < end:
            await asyncio.sleep(_LINGER_POLL_S)
        for peer in self.peers:
            peer.transport.abort()

    def announce(self, peer: ControlPeer) -> None:
        self.ready.append(peer)
        self._on_frames()

    def _sweep(self) -> None:
        """Drop the connections that are silent, and those that do not read the last message.

        Silence is counted in sweeps: a process that stood still drops nobody.
        """
        self.num_sweeps += 1
        since = self.num_sweeps - 1 - self._silent_s / _SWEEP_S
        for peer in self.peers:
            if peer.last_sweep <= since or peer.transport.is_closing():
                peer.transport.abort()
        self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)
