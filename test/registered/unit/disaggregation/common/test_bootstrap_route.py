"""Finding a prefill server's rank: what each kind of failure says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from sglang.srt.disaggregation.base.bootstrap_route import BootstrapError, Route, find
from sglang.srt.disaggregation.common.bootstrap_server import CommonKVBootstrapServer
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

HOST = "127.0.0.1"
ROUTE = Route(rank=3, endpoint="tcp://a:1", instance_id="i", num_ranks=4, attn_tp_size=2)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s"


@contextlib.contextmanager
def answering(answer: bytes, *, more: bytes = b"") -> Iterator[int]:
    """A server that sends `answer` to its one client, and then `more` again and again."""
    left = threading.Event()
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                peer.recv(4096)
                peer.sendall(answer)
                while more and not left.wait(0.02):
                    peer.sendall(more)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            left.set()
            thread.join()


def asking() -> list[threading.Thread]:
    """Threads that wait for an answer."""
    return [thread for thread in threading.enumerate() if thread.name == "ask-bootstrap"]


def ok(body: bytes) -> bytes:
    return OK % (len(body), body)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-x\r\n", "does not speak HTTP .*--disaggregation-bootstrap-port$"),
        (ok(b"nonsense"), "its answer is not understood"),
        (ok(b'{"rank": 0}'), "its answer is not understood .*endpoint"),
        (
            ok(msgspec.json.encode(ROUTE)),
            "it was asked for rank 0 of dp_rank 0, and answered for rank 3 of dp_rank 0$",
        ),
        (
            ok(msgspec.json.encode({**msgspec.to_builtins(ROUTE), "rank": 0, "num_ranks": 1025})),
            "its answer is not understood .*<= 1024",
        ),
        (
            ok(msgspec.json.encode({**msgspec.to_builtins(ROUTE), "rank": 0, "dp_size": 65})),
            "its answer is not understood .*<= 64",
        ),
        (
            ok(msgspec.json.encode(msgspec.structs.replace(ROUTE, rank=0, dp_rank=1))),
            "it was asked for rank 0 of dp_rank 0, and answered for rank 0 of dp_rank 1$",
        ),
        (
            b'HTTP/1.1 500 No\r\ncontent-length: 29\r\n\r\n{"error":{"message":"a\\n b"}} ',
            "answers with status 500: a b$",
        ),
        (b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", "404: no reason that this server under"),
    ],
)
def test_an_answer_of_another_kind_is_one_line(answer: bytes, message: str) -> None:
    with answering(answer) as port:
        where = f"the bootstrap server at http://{HOST}:{port}: "
        with pytest.raises(BootstrapError, match=f"^{where}.*{message}") as raised:
            find(HOST, port, 0, timeout=20)
    assert "\n" not in str(raised.value)


def test_an_answer_that_does_not_end_is_given_up() -> None:
    message = r"it has not answered for 0\.3 s: it is stopped, or its host is away$"
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(BootstrapError, match=message):
            find(HOST, port, 0, timeout=0.3)
    # Slowly in the head, in a body, and in a body after which the connection ends.
    for head, more in (
        (b"", b"x: y\r\n"),
        (b"content-length: 30000\r\n\r\n", b"x"),
        (b"connection: close\r\n\r\n", b"x"),
    ):
        with answering(b"HTTP/1.1 200 OK\r\n" + head, more=more) as port:
            with pytest.raises(BootstrapError, match=message):
                find(HOST, port, 0, timeout=0.3)
            assert wait_until(lambda: not asking(), 60), "the thread and its socket have ended"


def test_no_server_is_said_with_its_address() -> None:
    port = get_free_port()
    with pytest.raises(BootstrapError, match=f":{port}: it cannot be reached .*refused.*--host"):
        find(HOST, port, 0, timeout=20)
    with pytest.raises(BootstrapError, match="it cannot be reached"):
        find("no-such-host.invalid", port, 0, timeout=20)
    with pytest.raises(BootstrapError, match="it cannot be reached"):
        find("x" * 100, port, 0, timeout=20)


def test_a_missing_rank_is_said() -> None:
    port = get_free_port()
    server = CommonKVBootstrapServer(HOST, port)
    try:
        with pytest.raises(BootstrapError, match="status 404: rank 3 is not registered here"):
            find(HOST, port, 3, timeout=20)
        server.register(ROUTE)
        assert find(HOST, port, 3, timeout=20) == ROUTE
    finally:
        server.close()
