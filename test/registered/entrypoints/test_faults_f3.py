"""Row F3 on a real server: hostile bytes on every socket are dropped without harm to others."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
import pytest
import zmq

from rigs.servers.keyed_server import USER_KEY, KeyedServer
from rigs.stores.handshake_bombs import ELSEWHERE, tcp_listeners, throw_bombs
from sglang.srt.messages.io_struct import ControlReqOutput, encode
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=26, suite="base-b-test-cpu")


pytestmark = pytest.mark.usefixtures("server_serves_on")


def test_f3_tcp_is_loopback_and_bombs_for_mooncake_do_not_arrive(server: KeyedServer) -> None:
    listeners = [one for member in server.members() for one in tcp_listeners(member.pid)]
    # HTTP, and Mooncake's two. A rank alone opens no gloo.
    assert len(listeners) == 3
    assert {address for address, _ in listeners} == {"127.0.0.1"}
    assert "are open on all addresses" not in server.log()
    assert sum(throw_bombs(member.pid, ELSEWHERE) for member in server.members()) == 0


def test_f3_bombs_for_mooncake_end_its_port_and_no_server(server: KeyedServer) -> None:
    already = len(server.log())
    assert sum(throw_bombs(member.pid, "127.0.0.1") for member in server.members()) > 0
    assert wait_until(lambda: "Mooncake's parser cannot take" in server.log()[already:], 60)
    assert server.ask().status_code == 200


def ipc_sockets(server: KeyedServer) -> dict[str, Path]:
    """File name to path of the Unix sockets that the server's processes listen on."""
    owned = {
        Path(str(connection.laddr))
        for member in server.members()
        for connection in member.net_connections("unix")
        if "sglang-ipc-" in str(connection.laddr)
    }
    return {path.name: path for path in owned if path.exists()}


def nested(depth: int, inside: bytes) -> bytes:
    """`inside` with `depth` msgpack lists around it."""
    return b"\x91" * depth + inside


def hostile_payloads() -> list[bytes]:
    """Bytes that are invalid for all three kinds of messages."""
    answer = msgspec.msgpack.encode({"type": "ControlReqOutput", "req_id": "x", "success": True})
    deep = nested(100_000, b"\xc0")
    return [
        b"",
        b"\x00",
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",  # a pickle
        b"\xff" * 1000,
        b'{"type": "ShutdownReq", "timeout": 0}',
        b"\xdf\xff\xff\xff\xff",  # a map of 2^32 - 1 missing items
        b"\xdd\xff\xff\xff\xff" + b"\xc0" * 1000,
        b"\xa4\xff\xfe\xfd\xfc",  # a string of invalid UTF-8
        deep,
        # All fields have the right types, but a value of any type is nested too deeply.
        bytes([answer[0] + 1]) + answer[1:] + b"\xa4data" + b"\x81\xa1x" + deep,
        msgspec.msgpack.encode({"type": "ShutdownReq", "timeout": "now"}),
        msgspec.msgpack.encode({"type": "BatchTokenIDOutput", "outputs": [{"rid": 1}]}),
        msgspec.msgpack.encode({"type": "BatchStrOutput", "outputs": {}}),
        msgspec.msgpack.encode({"type": "NoSuchMessage"}),
        # Unknown fields are skipped, however deep they are.
        b"\x82\xa4type\xabShutdownReq\xa1x" + deep,
    ]


ZMTP_GREETING: Final = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48
ZMTP_READY: Final = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"


def raw_attacks() -> list[bytes]:
    """Byte streams for a ZMTP socket."""
    huge = b"\x02" + struct.pack(">Q", 1 << 62)
    large = b"\x02" + struct.pack(">Q", 1 << 33)
    return [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 4096,
        bytes(range(256)) * 64,
        ZMTP_GREETING[:20],
        ZMTP_GREETING,
        ZMTP_GREETING + b"\xff" * 512,
        ZMTP_GREETING + ZMTP_READY + huge + b"x" * 100,
        ZMTP_GREETING + ZMTP_READY + large + b"x" * 100,
        ZMTP_GREETING + ZMTP_READY + b"\x04\xff" + b"\x05PONGX" * 40,
    ]


def send_raw(path: Path, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(2.0)
        peer.connect(str(path))
        try:
            peer.sendall(data)
            peer.recv(64)  # the greeting
            peer.sendall(b"\x00" * 64)
        except OSError:
            pass


@pytest.mark.parametrize("name", ["tokenizer", "scheduler_0", "detokenizer"])
def test_f3_hostile_bytes_on_an_ipc_socket_are_dropped_and_counted(
    server: KeyedServer, name: str
) -> None:
    path = ipc_sockets(server)[name]
    assert path.parent.stat().st_mode & 0o077 == 0
    already = len(server.log())
    rss = sum(member.memory_info().rss for member in server.members())
    for data in raw_attacks():
        send_raw(path, data)
    payloads = hostile_payloads() * 5
    with zmq.Context() as context:
        for kind in (zmq.PUSH, zmq.DEALER, zmq.PUB, zmq.REQ):
            with context.socket(kind) as peer:
                peer.setsockopt(zmq.LINGER, 500)
                peer.setsockopt(zmq.SNDTIMEO, 500)
                peer.connect(f"ipc://{path}")
                try:
                    for payload in payloads if kind == zmq.PUSH else payloads[:1]:
                        peer.send(payload)
                except zmq.Again:
                    pass  # A PULL socket accepts nothing from such a peer.
    # 75 payloads were invalid; the log has every power of two.
    assert wait_until(lambda: "(64 so far)" in server.log()[already:], 30), server.log()[already:]
    assert server.ask().status_code == 200
    assert sum(member.memory_info().rss for member in server.members()) - rss < 64 << 20


def test_f3_valid_messages_for_unknown_requests_change_nothing(server: KeyedServer) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
        peer.connect(f"ipc://{ipc_sockets(server)['tokenizer']}")
        peer.send(encode(ControlReqOutput(req_id="nobody", success=True)))
        assert server.ask().status_code == 200


def http_attacks() -> list[bytes]:
    post = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
    key = b"Authorization: Bearer " + USER_KEY.encode() + b"\r\n"
    return [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,  # TLS
        b"\x00" * 10_000,
        bytes(range(256)) * 400,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 50_000,
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1_000_000,
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        post + b"Content-Length: -1\r\n\r\n",
        post + b"Content-Length: 99999999999999999999999999\r\n\r\n",
        post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        post + key + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        post + key + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        post + key + b"Content-Length: 10\r\n\r\nhalf",
        b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 50 + b"garbage\r\n\r\n",
    ]


def test_f3_hostile_bytes_leave_the_http_port_serving(server: KeyedServer) -> None:
    already = len(server.log())
    rss = server.members()[0].memory_info().rss
    for data in http_attacks() * 3:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as peer:
            try:
                peer.sendall(data)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(65536):
                    pass
            except OSError:
                pass
    assert server.ask().status_code == 200
    said = server.log()[already:]
    assert "dropped a bad HTTP request" in said
    assert "Traceback" not in said, said
    assert server.members()[0].memory_info().rss - rss < 64 << 20


def test_f3_garbage_gets_an_ordinary_error(server: KeyedServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as peer:
        peer.sendall(b"nonsense\r\n\r\n")
        answer = b"".join(iter(lambda: peer.recv(65536), b""))
    head, body = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


SLOW_HEAD: Final = b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Long: "
SLOW_BODY: Final = (
    b"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
    + USER_KEY.encode()
    + b"\r\nContent-Length: 1000\r\n\r\n"
)


GIVEN_UP_S: Final = 40.0
"""Much more than the server waits for a request."""


def slow_end(port: int, first: bytes, drip: bytes) -> tuple[float, bytes]:
    """Send `drip` once a second until the server closes. Returns the seconds and the answer."""
    began = time.monotonic()
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=1.0) as peer:
        peer.sendall(first)
        while time.monotonic() - began < GIVEN_UP_S:
            try:
                part = peer.recv(65536)
                if not part:
                    break
                answer += part
            except TimeoutError:
                try:
                    peer.sendall(drip)
                except OSError:
                    break
            except OSError:
                break
    return time.monotonic() - began, answer


def test_f3_slow_clients_are_disconnected_in_time_and_block_no_other(server: KeyedServer) -> None:
    kinds = [(b"", b""), (SLOW_HEAD, b"a"), (SLOW_BODY, b"")] * 32
    ends: list[tuple[float, bytes]] = []
    threads = [
        threading.Thread(target=lambda k=kind: ends.append(slow_end(server.port, *k)))
        for kind in kinds
    ]
    for thread in threads:
        thread.start()
    assert server.ask().status_code == 200
    assert not ends, "it was answered while they waited"
    for thread in threads:
        thread.join()
    assert len(ends) == len(kinds)
    assert max(seconds for seconds, _ in ends) < GIVEN_UP_S
    assert sum(answer.startswith(b"HTTP/1.1 408 ") for _, answer in ends) == 32
