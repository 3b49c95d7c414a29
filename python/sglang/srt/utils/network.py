"""Ports, addresses and connections of this machine, and warnings about exposed ports."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

ALL_ADDRESSES: Final = frozenset({"0.0.0.0", "::"})
"""Hosts that mean all addresses of the machine to a listener."""
_FIRST_FREE_PORT: Final = 20_000
"""Below it are ports of well-known services, and those that Mooncake draws for itself."""
_MOST_DRAWN: Final = 20
_OUTGOING_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def get_free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free on `host` a moment ago. Other programs may take it: bind soon.

    It is outside the range that the kernel gives to outgoing connections if possible, because such
    a connection could take it before it is bound. No caller in any process of this machine is given
    it again while this process runs, which keeps a file descriptor for it.
    """
    return get_free_ports(1, host)[0]


def get_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` distinct free TCP ports of `host`; see `get_free_port`."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        return [_bind_somewhere(sock, host) for sock in sockets]


def _bind_somewhere(sock: socket.socket, host: str) -> int:
    ports = range(_FIRST_FREE_PORT, _first_outgoing_port())
    drawn = secrets.SystemRandom().sample(ports, min(_MOST_DRAWN, len(ports)))
    for port in drawn:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as name:
            # The kernel gives the name to one process at a time. Nobody can connect to it.
            name.bind(f"\0sglang-port-{port}")
            sock.bind((host, port))
            name.detach()
            return port
    sock.bind((host, 0))
    return int(sock.getsockname()[1])


def _first_outgoing_port() -> int:
    """First port that the kernel gives to outgoing connections; 0: not known."""
    try:
        return int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def base_url(host: str, port: int, *, is_tls: bool = False) -> str:
    """`http://host:port`, or https, with the brackets that an IPv6 address needs."""
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(certfile: str, keyfile: str, password: str | None) -> ssl.SSLContext:
    """The context of a server with this certificate: TLS 1.2 and later.

    Raises:
        ValueError: A file cannot be read, is not PEM, or the key does not fit; names the flags.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"{flag} {path}: cannot be read: {error.strerror}") from None
    try:
        # A password that is missing would be asked for on the terminal.
        context.load_cert_chain(certfile, keyfile, password or "")
    except (ssl.SSLError, ValueError) as error:
        cause = getattr(error, "reason", None) or error
        raise ValueError(
            f"--ssl-certfile {certfile}, --ssl-keyfile {keyfile}: no certificate with its key in "
            f"PEM ({cause}): check the files and --ssl-keyfile-password"
        ) from None
    return context


def is_port_available(host: str, port: int) -> bool:
    """True if a server could listen on `host`:`port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # Servers set this option too. TIME_WAIT connections do not block the port, a listener does.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError:
            return False
        return True


def check_port_available(host: str, port: int, flag: str = "--port") -> None:
    """Check that a server can listen on the port, before the expensive part of a start.

    Args:
        host: Name or address of this machine.
        port: 1 to 65535.
        flag: The flag that set the port, for the error.

    Raises:
        ValueError: The port is in use, or `host` is not an address of this machine.
    """
    if not is_port_available(host, port):
        raise ValueError(
            f"cannot listen on {host}:{port}: the port is in use or the address is not this "
            f"machine's; stop what listens there, or choose another with {flag} or --host"
        )


def listening_sockets(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Sockets that listen on every address of `host`, not blocking. Raises ValueError if one of the
    addresses cannot be listened on."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            sockets.append(socket.create_server(address[:2], family=family, backlog=backlog))
            sockets[-1].setblocking(False)
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return sockets


def is_loopback(host: str) -> bool:
    """True if `host` is `localhost` or a loopback address. Resolves no names."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def canonical_host(host: str) -> str:
    """The canonical spelling of a name or an address: lower case, without brackets or a final dot,
    IPv6 addresses compressed, IPv4 addresses not mapped to IPv6. Resolves no names."""
    plain = host.removeprefix("[").removesuffix("]").lower()
    try:
        address = ipaddress.ip_address(plain)
    except ValueError:
        return plain.removesuffix(".")
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.compressed


def own_addresses(listen_host: str) -> list[str]:
    """Addresses of a server on this machine that listens on `listen_host`. If that means "all
    addresses", they are the addresses of all interfaces."""
    if listen_host not in ALL_ADDRESSES:
        return [listen_host]
    return [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]


def own_addresses_of(host: str) -> list[str]:
    """The addresses of this machine that `host`, an address or a name, stands for; []: it stands
    for another machine, or for none. Looks names up."""
    own = set(map(_without_scope, own_addresses("0.0.0.0")))
    found = []
    for address in addresses_of(host):
        plain = _without_scope(address)
        ip = ipaddress.ip_address(plain)
        if plain in own or ip.is_unspecified or (ip.version == 4 and ip.is_loopback):
            found.append(address)
    return found


def addresses_of(host: str) -> list[str]:
    """The addresses of `host`, an address or a name; []: it is unknown. Looks names up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(_with_scope(*address) for *_, address in found))


def _with_scope(host: str | int, *rest: object) -> str:
    """The address of a socket address, with the interface behind `%` that some IPv6 ones need."""
    scope = rest[2] if len(rest) > 2 else 0
    return (
        f"{host}%{socket.if_indextoname(scope)}" if isinstance(scope, int) and scope else str(host)
    )


def _without_scope(address: str) -> str:
    """The canonical address without the interface that an IPv6 address may name behind `%`."""
    return canonical_host(address.partition("%")[0])


def address_for_peers(listen_host: str) -> str:
    """The address at which other hosts reach a server that listens on `listen_host`.

    If that means "all addresses": the address of the default route, or loopback if there is none.
    """
    if listen_host not in ALL_ADDRESSES:
        return listen_host
    try:
        return _own_address_towards("2001:db8::1" if listen_host == "::" else "192.0.2.1")
    except OSError:
        return "127.0.0.1"


def _own_address_towards(host: str) -> str:
    """The address of this machine on the route to `host`. Sends nothing. Raises OSError if there is
    no route."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


def address_at_home(hostname: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of this machine that other processes mean by `hostname`; None: not certain.

    An address stands for itself and `localhost` for 127.0.0.1. A name stands for the only IPv4
    address that it has; a loopback address does not count, because many machines have one beside
    their own name, where others find another. Looks names up.

    Args:
        hostname: `host`, `host:port`, `[host]:port`, or an IPv6 address without brackets.
    """
    host = hostname
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    if host == "localhost":
        return ipaddress.IPv4Address("127.0.0.1")
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return None if address.is_unspecified else address
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    addresses = {ipaddress.IPv4Address(str(address[0])) for *_, address in found}
    if len(addresses) != 1:
        return None
    (only,) = addresses
    return None if only.is_loopback or only.is_unspecified else only


def interface_towards(host: str) -> str:
    """The network interface through which this machine reaches `host`. Sends nothing. Raises
    ValueError if there is no way to it."""
    try:
        own = _own_address_towards(host)
    except OSError as error:
        raise ValueError(f"no way from this machine to {host}: {error}") from error
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses):
            return name
    raise ValueError(f"no interface of this machine has the address {own}, on the way to {host}")


def can_connect(host: str, port: int, timeout: float = 1.0) -> bool:
    """True if something accepts TCP connections on `host`:`port`, within `timeout` seconds."""
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return True
    except OSError:
        return False


def wait_for_listener_to_end(host: str, port: int) -> None:
    """Block until the process that listens on `host`:`port` ends, even if another takes the port.

    The process must be on this host and must not close idle connections. A stopped process has
    not ended. Polls once a second while the listener's queue of connections is full.
    """
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=1.0)
        except ConnectionRefusedError:
            return
        except OSError:
            time.sleep(1.0)
            continue
        with connection, contextlib.suppress(ConnectionResetError):
            connection.settimeout(None)
            while connection.recv(4096):
                pass
        return


def is_healthy(base_url: str, api_key: str | None = None, path: str = "/health") -> bool:
    """True if `GET` of `path` at the server `base_url` answers 200 within two seconds."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{base_url}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=2) as response:
            return int(response.status) == 200
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], timeout: float, interval: float = 0.05) -> bool:
    """Poll `condition` every `interval` seconds; False if `timeout` seconds pass first."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(interval)
    return True


def ports_on_all_addresses() -> list[int]:
    """Sorted TCP ports that this process listens on at all addresses of the machine."""
    return sorted(
        {
            connection.laddr.port
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.ip in ALL_ADDRESSES
        }
    )


def warn_of_open_server(logger: logging.Logger, host: str, *, has_key: bool) -> None:
    """Warn if the server has no key and `host` is not a loopback address."""
    # A name may resolve to any address.
    if has_key or is_loopback(host):
        return
    logger.warning(
        "--host %s without an API key: all clients that reach it can use the server and read its "
        "answers; set SGLANG_API_KEY or --api-key-file",
        host,
    )
