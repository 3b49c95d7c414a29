"""A TCP link whose bytes come late."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from sglang.embedded_mooncake import LOOPBACK


class SlowLink:
    """A TCP address that leads to `port` of this machine; each piece of data waits `delay` seconds.

    A thread accepts, and two carry the bytes of each connection; all are daemons.
    """

    def __init__(self, port: int) -> None:
        self.delay = 0.0
        self._target = port
        self._server = socket.create_server((LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, name="link", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                try:
                    server = socket.create_connection((LOOPBACK, self._target))
                except OSError:
                    client.close()
                    continue
                for ends in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._carry, args=ends, name="link", daemon=True
                    ).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
