"""Message of a child process to its parent, sent once, when it can serve or cannot start.

JSON over a `multiprocessing` connection with `send_bytes`: the connection's own `send` pickles.
"""

from __future__ import annotations

import contextlib
import json
from multiprocessing.connection import Connection
from typing import Any, Final

LOST_A_RANK: Final = 71
"""Exit status of a rank that ends because another rank has ended, and so is not the cause."""


def send_ready(pipe: Connection, details: dict[str, Any]) -> None:
    """Tell the parent that the process serves; `details` are plain JSON values."""
    _send(pipe, {"status": "ready", **details})


def send_error(pipe: Connection, message: str) -> None:
    """Tell the parent in one line why the process cannot start."""
    _send(pipe, {"status": "error", "message": " ".join(message.split())})


def receive_ready(pipe: Connection) -> dict[str, Any]:
    """The child's message: `status` is `ready`, or `error` with a `message`.

    Raises:
        EOFError: The child ended without a message.
    """
    message = json.loads(pipe.recv_bytes())
    assert isinstance(message, dict), "children send JSON objects"
    return message


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    # A dead parent needs no message; the parent watch ends the child.
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(json.dumps(message).encode())
    pipe.close()
