"""A TCP address that leads to another one, which can be changed: for peers that are replaced."""

from __future__ import annotations

import contextlib
import socket
import threading


class TcpForwarder:
    """Context manager: connections to `address` go to `target`, a settable `HOST:PORT`.

    A thread accepts, and two carry each connection's bytes; all end with it.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, name="forwarder", daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """`HOST:PORT` of this forwarder."""
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> TcpForwarder:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            ended, self._open = {self._server, *self._open}, set()
        for sock in ended:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(30)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                host, _, port = self.target.rpartition(":")
                try:
                    server = socket.create_connection((host, int(port)), timeout=30)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                with self._lock:
                    self._open |= {client, server}
                for source, sink in ((client, server), (server, client)):
                    thread = threading.Thread(
                        target=_carry, args=(source, sink), name="forwarder", daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()


def _carry(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
