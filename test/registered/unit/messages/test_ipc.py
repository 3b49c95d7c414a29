"""The directory of a server's sockets, and their addresses."""

from __future__ import annotations

import os
import stat

from sglang.srt.messages.ipc import IpcAddresses, make_ipc_directory
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def test_addresses_are_private_and_removable() -> None:
    directory, other = make_ipc_directory(), make_ipc_directory()
    ipc, others = IpcAddresses(directory.path), IpcAddresses(other.path)
    try:
        endpoints = {ipc.server_input, ipc.detokenizer_input}
        endpoints |= {ipc.scheduler_input(), ipc.scheduler_input(1)}
        assert len(endpoints | {others.scheduler_input()}) == 5
        assert all(len(e) < 107 for e in endpoints)  # a Unix socket's path is short
        assert stat.S_IMODE(os.stat(directory.path).st_mode) == 0o700
    finally:
        directory.remove()
        other.remove()
    assert not os.path.exists(directory.path)
    directory.remove()
