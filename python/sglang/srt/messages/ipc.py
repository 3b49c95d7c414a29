"""Sockets between the processes of one server, and the start message of a child process: it tells
the parent once that the child can serve, or why it cannot start.

Every socket carries `io_struct` messages as msgpack; PULL sides bind, PUSH sides connect:

    server    PUSH -> scheduler_input    PULL scheduler, rank 0   requests and control
    scheduler PUSH -> detokenizer_input  PULL detokenizer         token ids
    scheduler PUSH -> server_input       PULL server              answers, and pages of DP groups
    detokenizer PUSH -> server_input                              text

With data-parallel attention, the first rank of each DP group is a "rank 0" here, and the server has
a socket to each. No socket has a high-water mark, so a send never waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

import zmq

from sglang.srt.utils.owned_directory import OwnedDirectory, remove_orphans

logger = logging.getLogger(__name__)

_PREFIX: Final = "sglang-ipc-"


def make_ipc_directory() -> OwnedDirectory:
    """A fresh directory (mode 0700) for the sockets of one server.

    Removes the directories of engines that were killed with all their processes.
    """
    for path in remove_orphans(_PREFIX):
        logger.info("removed %s, left behind by a killed engine", path)
    return OwnedDirectory(_PREFIX)


@dataclass(frozen=True, slots=True)
class IpcAddresses:
    """ZMQ endpoints (`ipc://` paths) in the directory that `make_ipc_directory` has made."""

    directory: str

    def scheduler_input(self, dp_rank: int = 0) -> str:
        """Input of the scheduler of a DP group."""
        return f"ipc://{self.directory}/scheduler_{dp_rank}"

    @property
    def detokenizer_input(self) -> str:
        return f"ipc://{self.directory}/detokenizer"

    @property
    def server_input(self) -> str:
        return f"ipc://{self.directory}/tokenizer"

    def exit_as_orphan(self) -> None:
        """End this child process. Its parent has died, and cannot remove the sockets."""
        shutil.rmtree(self.directory, ignore_errors=True)
        os._exit(1)


def pull_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    socket.bind(address)
    return socket


def push_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A socket that sends to `address`, where the receiver may listen later."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.connect(address)
    return socket


LOST_A_RANK: Final = 71
"""Exit status of a rank that ends because another rank has ended, and so is not the cause."""


def send_ready(pipe: Connection, details: dict[str, Any]) -> None:
    """Tell the parent that the process serves; `details` are plain JSON values. JSON over
    `send_bytes`: the connection's own `send` pickles."""
    _send(pipe, {"status": "ready", **details})


def send_error(pipe: Connection, message: str) -> None:
    """Tell the parent in one line why the process cannot start."""
    _send(pipe, {"status": "error", "message": " ".join(message.split())})


def receive_ready(pipe: Connection) -> dict[str, Any]:
    """The child's message: `status` is `ready`, or `error` with a `message`. Raises EOFError if the
    child ended without one."""
    message = json.loads(pipe.recv_bytes())
    assert isinstance(message, dict), "children send JSON objects"
    return message


def _send(pipe: Connection, message: dict[str, Any]) -> None:
    # A dead parent needs no message; the parent watch ends the child.
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(json.dumps(message).encode())
    pipe.close()
