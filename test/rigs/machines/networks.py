"""Hosts with networks of their own, on one machine: namespaces, joined by links that a test cuts.

The kernel removes a host once its `Host` is closed and its last process has ended. Needs Linux,
root, and the programs `ip`, `nsenter` and `tc`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Final

_NEW_NETWORK: Final = 0x40000000
"""CLONE_NEWNET of sched.h. `os.unshare` and `os.setns` came with Python 3.12."""
_HERE: Final = "/proc/thread-self/ns/net"
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def why_no_hosts() -> str | None:
    """Why this machine cannot have such hosts; None: it can."""
    for program in ("ip", "nsenter", "tc"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    try:
        one, other = Host(), Host()
    except OSError as error:
        return f"no network namespace can be made: {error}"
    with one, other:
        try:
            Network(one, "10.213.255").join(other, "probe", 1)
        except subprocess.CalledProcessError as error:
            return f"no bridge or link can be made: {error.stderr.decode().strip()}"
    return None


def enter(namespace: str) -> None:
    """Move the calling thread, and what it starts from now on, into a network namespace."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_LIBC.setns(fd, _NEW_NETWORK))
    finally:
        os.close(fd)


class Host:
    """A network namespace with its loopback interface up. Context manager that closes it.

    Attributes:
        namespace: Path for `enter`, valid while this process has the host open.

    Raises:
        OSError: No namespace can be made.
    """

    def __init__(self) -> None:
        made: list[int | OSError] = []

        def make() -> None:
            try:
                _checked(_LIBC.unshare(_NEW_NETWORK))
                made.append(os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                made.append(error)

        # Only the thread moves, and ends.
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        (fd,) = made
        if isinstance(fd, OSError):
            raise fd
        self._fd = fd
        self.namespace = f"/proc/{os.getpid()}/fd/{fd}"
        self.run("ip", "link", "set", "lo", "up")

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    def run(self, *command: str) -> None:
        """Run a command on the host."""
        inside = ["nsenter", f"--net={self.namespace}", "--"]
        subprocess.run([*inside, *command], check=True, capture_output=True, timeout=30)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context in which this thread, and threads and processes that it starts, are on the
        host."""
        back = os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(self.namespace)
            try:
                yield
            finally:
                _checked(_LIBC.setns(back, _NEW_NETWORK))
        finally:
            os.close(back)


class Link:
    """The cable between a host and a network."""

    def __init__(self, switch: Host, port: str) -> None:
        self._switch = switch
        self._port = port

    def cut(self) -> None:
        """Drop all packets from now on. The host does not notice: its interface stays up."""
        self._switch.run("ip", "link", "set", self._port, "nomaster")

    def restore(self) -> None:
        self._switch.run("ip", "link", "set", self._port, "master", "bridge")

    def slow(self, rate: str) -> None:
        """Limit what comes to the host, e.g. to `20mbit`."""
        shaped = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        self._switch.run("tc", "qdisc", "replace", "dev", self._port, "root", *shaped)

    def unslow(self) -> None:
        self._switch.run("tc", "qdisc", "del", "dev", self._port, "root")


class Network:
    """A network of hosts.

    Args:
        switch: A host of its own, which is nothing but the network's bridge.
        prefix: The first three numbers of its addresses.
    """

    def __init__(self, switch: Host, prefix: str) -> None:
        self._switch = switch
        self._prefix = prefix
        switch.run("ip", "link", "add", "bridge", "type", "bridge")
        switch.run("ip", "link", "set", "bridge", "up")

    def join(self, host: Host, interface: str, number: int) -> Link:
        """Connect a host by a new interface, at `address(number)`."""
        port = f"port{number}"
        ends = ("type", "veth", "peer", "name", interface, "netns", host.namespace)
        self._switch.run("ip", "link", "add", port, *ends)
        host.run("ip", "address", "add", f"{self.address(number)}/24", "dev", interface)
        host.run("ip", "link", "set", interface, "up")
        self._switch.run("ip", "link", "set", port, "master", "bridge", "up")
        return Link(self._switch, port)

    def address(self, number: int) -> str:
        return f"{self._prefix}.{number}"


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
