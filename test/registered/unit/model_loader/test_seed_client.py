"""Asking a seed: what else may listen there, and how long it may take."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang.srt.model_loader.seed_client import SeedClient
from sglang.srt.model_loader.weight_source import SeedAddress
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

DIGEST = {"identity": "1" * 32, "checksums": {"w": ["2" * 32]}}


def answer(digest: object = None, **fields: object) -> dict[str, Any]:
    weights = {
        "config": {"a": "1"},
        "protocol": "tcp",
        "ranks": 1,
        "tensors": {"w": {"dtype": "float32", "shape": [2]}},
        "digest": digest,
    }
    info = ["10.0.0.1:15000", {"w": [4096, 2, 4]}]
    body = {"rank": 3, "remote_instance_transfer_engine_info": info, "weights": weights}
    return {**body, **fields}


@contextmanager
def serving(status: int, *bodies: object) -> Iterator[tuple[int, list[str]]]:
    """The port of a server that answers with `bodies` in turn, the last for ever; and what it was
    asked, each with its key."""
    asked: list[str] = []
    left = list(bodies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Authorization')}")
            body = left.pop(0) if len(left) > 1 else left[0]
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1], asked
    server.shutdown()
    thread.join()
    server.server_close()


def client(port: int, timeout: float = 10.0, key: str | None = None) -> SeedClient:
    seed = SeedAddress(host="127.0.0.1", port=port, api_key=key)
    return SeedClient(seed, answer_timeout=timeout)


def test_an_answer_is_read_and_the_key_is_sent() -> None:
    with serving(200, answer()) as (port, asked):
        got = client(port, key="secret").ask(3)
        assert client(port).ask(3) == got
    assert (got.rank, got.session_id, got.places) == (3, "10.0.0.1:15000", {"w": (4096, 2, 4)})
    assert got.weights.digest is None
    path = "/remote_instance_transfer_engine_info?rank=3"
    assert asked == [f"{path} Bearer secret", f"{path} None"]
    assert "secret" not in repr(SeedAddress(host="h", port=1, api_key="secret"))


def test_a_digest_is_asked_for_until_it_is_there() -> None:
    with serving(200, answer(), answer(), answer(DIGEST)) as (port, asked):
        (digest,) = client(port).await_digests(1, time.monotonic() + 10)
        assert digest.checksums == DIGEST["checksums"]
        assert len(asked) == 3
    with (
        serving(200, answer()) as (port, asked),
        pytest.raises(ValueError, match="has not computed the checksums of its weights in time"),
    ):
        client(port).await_digests(1, time.monotonic() + 0.2)


def of_rank(rank: int, ranks: int, digest: object = None) -> dict[str, Any]:
    told = answer(digest, rank=rank)
    return {**told, "weights": {**told["weights"], "ranks": ranks}}


def test_all_ranks_are_asked() -> None:
    with serving(200, *(of_rank(rank, 3) for rank in range(3))) as (port, asked):
        assert [one.rank for one in client(port).ask_all()] == [0, 1, 2]
        assert [line.split()[0][-1] for line in asked] == ["0", "1", "2"]
    digests = [of_rank(rank, 2, {**DIGEST, "identity": str(rank)}) for rank in range(2)]
    with serving(200, of_rank(0, 2), *digests) as (port, asked):
        got = client(port).await_digests(2, time.monotonic() + 10)
        assert [digest.identity for digest in got] == ["0", "1"]
        assert [line.split()[0][-1] for line in asked] == ["0", "0", "1"]


@pytest.mark.parametrize("second", [of_rank(1, 1), of_rank(0, 2), of_rank(1, 4)])
def test_a_seed_replaced_between_questions_is_refused(second: dict[str, Any]) -> None:
    with (
        serving(200, of_rank(0, 2), second) as (port, _),
        pytest.raises(ValueError, match=r"asked for rank 1 of 2, it answers as rank . of .: it"),
    ):
        client(port).ask_all()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {}, r"refuses this server's key \(status 401\): .* the seed's --api-key"),
        (403, {}, "refuses this server's key"),
        (404, {}, "it has no /remote_instance_transfer_engine_info: it is another program"),
        (400, {"error": {"message": "start it\nwith X"}}, "with status 400: start it with X"),
        (500, b"\xff", "with status 500: no reason that this server understands"),
        (400, ["a"], "with status 400: no reason"),
        (200, b"<html>", "its answer is not understood"),
        (200, b"\xff\xfe", "its answer is not understood"),
        (200, [1], "its answer is not understood .*start both with the same release"),
        (200, answer(weights={}), "its answer is not understood .*config"),
        (200, answer(remote_instance_transfer_engine_info=["s"]), "is not understood"),
    ],
)
def test_what_else_answers_is_refused(status: int, body: object, message: str) -> None:
    with (
        serving(status, body) as (port, _),
        pytest.raises(ValueError, match=message) as caught,
    ):
        client(port).ask(3)
    assert "\n" not in str(caught.value)


def test_a_missing_seed_is_named() -> None:
    with pytest.raises(ValueError, match=r"it does not answer \(.*refused\): check that it runs"):
        client(get_free_port()).ask(3)


Behaviour = Callable[[socket.socket, threading.Event], None]


def hang(connection: socket.socket, done: threading.Event) -> None:
    done.wait(30)


def dribble(connection: socket.socket, done: threading.Event) -> None:
    """A byte now and then, each in time."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while not done.wait(0.05):
        connection.sendall(b" ")


def babble(connection: socket.socket, done: threading.Event) -> None:
    connection.sendall(b"220 mail.example ESMTP\r\n")


@pytest.mark.parametrize(
    ("behave", "timeout", "message"),
    [
        (hang, 0.3, "it has not answered for 0.3 s: it is stopped or overl"),
        (dribble, 0.3, "it has not answered for 0.3 s"),
        (babble, 10.0, r"does not speak HTTP \(BadStatusLine\): give the port of its HTTP server"),
    ],
)
def test_silence_is_named(behave: Behaviour, timeout: float, message: str) -> None:
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                behave(connection, done)

        thread = threading.Thread(target=run)
        thread.start()
        with pytest.raises(ValueError, match=message):
            client(listener.getsockname()[1], timeout=timeout).ask(3)
        done.set()
        thread.join()
