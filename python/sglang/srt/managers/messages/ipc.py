"""Addresses at which the processes of one server listen for each other.

Every socket carries `io_struct` messages as msgpack; PULL sides bind, PUSH sides connect:

    server    PUSH -> scheduler_input    PULL scheduler, rank 0   requests and control
    scheduler PUSH -> detokenizer_input  PULL detokenizer         token ids
    scheduler PUSH -> server_input       PULL server              answers to control requests
    detokenizer PUSH -> server_input                              text
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.utils.network import remove_ipc_directory

if TYPE_CHECKING:
    from sglang.srt.utils.network import IpcNames


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcAddresses:
    """ZMQ endpoints (`ipc://` paths in a directory that only the user may enter)."""

    scheduler_input: str
    detokenizer_input: str
    server_input: str

    @classmethod
    def from_names(cls, names: IpcNames) -> IpcAddresses:
        """The endpoints that `IpcNames.create` named."""
        return cls(
            scheduler_input=names.scheduler,
            detokenizer_input=names.detokenizer,
            server_input=names.tokenizer,
        )

    def leave_as_orphan(self) -> None:
        """End this child process, whose parent has gone and cannot remove the sockets any more."""
        remove_ipc_directory(str(Path(self.server_input.removeprefix("ipc://")).parent))
        os._exit(1)
