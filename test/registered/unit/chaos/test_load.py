"""A client under chaos: questions of a seed, and how each kind of answer is judged."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang.srt.utils.network import get_free_port
from sglang.test.chaos.agenda import Outcome, Tiers
from sglang.test.chaos.load import Question, ask, message_of, question
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

ASKED = Question("What is the code of heron?", "7391")


class Canned(HTTPServer):
    """Answers each request with the same bytes, then closes the connection."""

    reply = b""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Canned)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.wfile.write(self.server.reply)


@pytest.fixture(scope="module")
def server() -> Iterator[Canned]:
    with Canned(("127.0.0.1", 0), Handler) as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def judged(server: Canned, status: str, body: str, streams: bool = False) -> Outcome:
    server.reply = f"HTTP/1.1 {status}\r\n\r\n{body}".encode()
    reply = ask(f"http://127.0.0.1:{server.server_port}", ASKED, streams)
    assert bool(reply.detail) == (reply.outcome != Outcome.RIGHT)
    return reply.outcome


def whole(text: str) -> str:
    return json.dumps({"choices": [{"message": {"content": text}}]})


def events(*texts: str, last: str = "[DONE]") -> str:
    chunks = [json.dumps({"choices": [{"delta": {"content": text}}]}) for text in texts]
    return "".join(f"data: {one}\n\n" for one in (*chunks, last))


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        ("200 OK", whole("7391"), Outcome.RIGHT),
        ("200 OK", whole("7392"), Outcome.WRONG),
        ("200 OK", "{}", Outcome.UNNAMED),
        ("503 no", '{"error": {"message": "the server is ending"}}', Outcome.REFUSED),
        ("502 no", '{"message": "it broke"}', Outcome.REFUSED),
        ("503 no", "", Outcome.UNNAMED),
        ("500 no", '{"message": "it broke"}', Outcome.UNNAMED),
    ],
)
def test_whole_answers_are_judged(server: Canned, status: str, body: str, outcome: Outcome) -> None:
    assert judged(server, status, body) == outcome


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (events("73", "91"), Outcome.RIGHT),
        (events("73", "91", "ok"), Outcome.RIGHT),
        (events("73", "92"), Outcome.WRONG),
        (events("73", last='{"error": {"message": "lost"}}'), Outcome.CUT),
        (events("73", last='{"error": {}}'), Outcome.UNNAMED),
        (events("73", last=""), Outcome.CUT),
        ('data: {"cho', Outcome.CUT),
        ("data: nonsense\n\n", Outcome.UNNAMED),
    ],
)
def test_streams_are_judged(server: Canned, body: str, outcome: Outcome) -> None:
    assert judged(server, "200 OK", body, streams=True) == outcome


def test_a_connection_that_closes_without_an_answer_is_cut(server: Canned) -> None:
    server.reply = b""
    reply = ask(f"http://127.0.0.1:{server.server_port}", ASKED, False)
    assert reply.outcome == Outcome.CUT


@pytest.mark.parametrize(("on_arrival", "asks"), [(44, True), (45, False)])
def test_an_answer_tells_whether_l3_was_asked_and_how_long_it_was_waited_for(
    server: Canned, on_arrival: int, asks: bool
) -> None:
    told = {
        "cache_report": {"prompt_tokens": 300, "on_arrival": on_arrival},
        "stages": {"queue": 3.0, "l3_wait": 2.5},
    }
    plain = json.loads(whole("7391")) | {"sglext": told}
    chunk = {"choices": [{"delta": {}}], "sglext": told}
    streamed = events("7391", last=f"{json.dumps(chunk)}\n\ndata: [DONE]")
    for body, streams in ((json.dumps(plain), False), (streamed, True)):
        server.reply = f"HTTP/1.1 200 OK\r\n\r\n{body}\n\n".encode()
        reply = ask(f"http://127.0.0.1:{server.server_port}", ASKED, streams)
        assert (reply.tiers.asks_l3, reply.tiers.l3_wait) == (asks, 2.5)
        assert (reply.tiers.first is not None) == streams


def test_an_answer_through_a_router_tells_nothing_of_l3(server: Canned) -> None:
    server.reply = f"HTTP/1.1 200 OK\r\n\r\n{whole('7391')}".encode()
    reply = ask(f"http://127.0.0.1:{server.server_port}", ASKED, False)
    assert reply.tiers == Tiers()


def test_a_missing_listener_counts_as_refused() -> None:
    reply = ask(f"http://127.0.0.1:{get_free_port()}", ASKED, False)
    assert reply.outcome == Outcome.REFUSED


def test_errors_of_engines_and_routers_have_a_message() -> None:
    assert message_of(b'{"error": {"code": 503, "message": "full"}}') == "full"
    assert message_of(b'{"error": "full"}') == "full"
    assert message_of(b'{"object": "error", "message": "full"}') == "full"
    assert message_of(b'{"error": {}}') == message_of(b"<html>") == ""


def test_questions_of_a_book_share_its_facts_and_ask_for_a_code_in_it() -> None:
    one, other = (question(1, 5, random.Random(seed)) for seed in (1, 2))
    assert one == question(1, 5, random.Random(1))
    assert one != other
    facts = one.prompt.partition(" What is")[0]
    assert other.prompt.startswith(facts)
    name = one.prompt.split()[-1].rstrip("?")
    assert f"The code of {name} is {one.answer}." in facts
    assert question(1, 6, random.Random(1)).prompt[:60] != one.prompt[:60]
