"""`run_eval` over HTTP: its requests, their order, its counts, and its failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rigs.recall.recall_task import heldout_conversation
from rigs.recall.run_eval import EvalArgs, main, run_eval
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

EXAMPLES, QUESTIONS, TOKENS = 3, 2, 120


class RecallServer(ThreadingHTTPServer):
    """Answers the first held-out conversations from a table, and records its requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.change: Callable[[str], str] = lambda answer: answer
        self.status = 200
        self.answers: dict[str, str] = {}
        for seed in range(EXAMPLES):
            conversation = heldout_conversation(seed, TOKENS, QUESTIONS)
            for turn in range(conversation.first_tail_turn, len(conversation.turns)):
                key = json.dumps(conversation.messages_before(turn))
                self.answers[key] = conversation.turns[turn].answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: RecallServer

    def do_GET(self) -> None:
        self._send({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        answer = self.server.answers.get(json.dumps(body["messages"]), "not asked for")
        usage = {
            "prompt_tokens": 100,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 64},
        }
        reply = {
            "choices": [{"message": {"content": self.server.change(answer)}}],
            "usage": usage,
            "sglext": {"cached_tokens_details": {"device": 60, "host": 4, "storage_backend": "x"}},
        }
        self._send(reply)

    def _send(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing; the tests read `requests`."""


@pytest.fixture
def server() -> Iterator[RecallServer]:
    with RecallServer() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), name="recall-server")
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def _args(server: RecallServer, **changes: Any) -> EvalArgs:
    sizes = {"num_examples": EXAMPLES, "num_questions": QUESTIONS, "context_tokens": TOKENS}
    return EvalArgs(base_url=server.url, **{**sizes, **changes})


def test_right_answers_score_one(server: RecallServer) -> None:
    result = run_eval(_args(server, cached_tokens_details=True))
    assert result["score"] == 1
    assert result["num_questions"] == 6
    assert result["prompt_tokens"] == 600
    assert result["completion_tokens"] == 30
    assert result["cached_tokens"] == 384
    assert result["cached_tokens_details"] == {"device": 360, "host": 24}
    assert all(request["temperature"] == 0 for request in server.requests)
    assert all(request["model"] == "tiny" for request in server.requests)
    assert all(request["return_cached_tokens_details"] is True for request in server.requests)


def test_round_order_finishes_a_round_before_the_next(server: RecallServer) -> None:
    run_eval(_args(server, order="round", num_threads=1))
    firsts = [json.dumps(request["messages"][:1]) for request in server.requests]
    assert firsts[:EXAMPLES] == firsts[EXAMPLES:]
    assert len(set(firsts)) == EXAMPLES
    assert "return_cached_tokens_details" not in server.requests[0]


def test_wrong_answers_stay_in_the_conversation_and_are_counted(server: RecallServer) -> None:
    server.change = lambda answer: "0" + answer
    result = run_eval(_args(server, num_threads=1))
    assert result["score"] == 0
    assert result["wrong"][0].startswith("seed 0, question 0: '0")
    second = server.requests[1]["messages"]
    assert second[-2]["role"] == "assistant"
    assert second[-2]["content"].startswith("0")


def test_exit_codes_tell_errors(server: RecallServer, capsys: pytest.CaptureFixture[str]) -> None:
    port = str(server.server_address[1])
    sizes = ["--num-examples", "3", "--num-questions", "2", "--context-tokens", "120"]
    assert main(["--eval-name", "recall", "--port", port, *sizes, "--min-score", "1"]) == 0
    assert "score 1.0000 (6 of 6 right)" in capsys.readouterr().out
    server.change = lambda answer: answer + "x"
    assert main(["--port", port, *sizes, "--min-score", "0.5"]) == 1
    server.status = 503
    assert main(["--port", port, *sizes]) == 2
    assert "/v1/models answered 503" in capsys.readouterr().err


def test_a_missing_server_is_an_os_error() -> None:
    with RecallServer() as closed:
        url = closed.url
    with pytest.raises(OSError):
        run_eval(EvalArgs(base_url=url, timeout=5))
