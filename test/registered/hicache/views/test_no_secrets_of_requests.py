"""Secrets in every field and header of requests are in nothing that a server tells others than its
client: log, metrics, views, traces, KV events of salted prompts, lines about a crash."""

from __future__ import annotations

import copy
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import zmq

from rigs.servers.engine_server import ADMIN_KEY
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.otlp_receiver import otlp_receiver
from sglang import hicache_top
from sglang.srt.environ import envs
from sglang.srt.utils.network import get_free_ports, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-b-test-cpu")

MARK: Final = "q8zv"
"""Begins all secrets, and is in no word of the engine's."""
API_KEY: Final = f"{MARK}-api-key"
HEADERS: Final = {
    name: f"{MARK}-{name.lower()}"
    for name in ("Cookie", "X-Api-Key", "User-Agent", "Referer", "baggage", "X-Custom")
} | {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": f"{MARK} is no list of pairs",
}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "title": f"{MARK}-title",
    "properties": {f"{MARK}-property": {"type": "string", "enum": [f"{MARK}-value"]}},
    "required": [f"{MARK}-property"],
}
LOOSE: Final = {
    "type": "object",
    "properties": {f"{MARK}-loose": {"type": "array", "uniqueItems": True, "contains": {}}},
}
"""Has keywords that no grammar holds."""
KEYED: Final = {
    "cache_salt": f"{MARK}-salt",
    "extra_key": f"{MARK}-extra",
    "session_id": f"{MARK}-session",
}
OPENAI: Final[dict[str, Any]] = {
    **KEYED, "max_tokens": 3, "user": f"{MARK}-user", "metadata": {f"{MARK}-meta": f"{MARK}-data"},
    "model": f"{MARK}-model", "stop": [f"{MARK}-stop"], "stop_regex": [f"{MARK}-[a-z]{{9}}"],
    "prompt_cache_key": f"{MARK}-cache-key", "safety_identifier": f"{MARK}-safety",
}  # fmt: skip
TEXT: Final = f"{MARK}-prompt says that the code of heron is 7391. "
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": f"{MARK}_tool", "description": f"{MARK}-description", "parameters": parameters,
        },
    }
    for parameters in (SCHEMA, LOOSE)
]  # fmt: skip
BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/generate", {"text": TEXT * 8, **KEYED, "return_logprob": True, "logprob_start_len": 0,
                   "return_text_in_logprobs": True, "top_logprobs_num": 2,
                   "return_cache_report": True,
                   "sampling_params": {"max_new_tokens": 3, "n": 2, "stop": [f"{MARK}-stop"]}}),
    *(
        ("/generate", {"text": TEXT, **KEYED, "sampling_params": {"max_new_tokens": 3, **one}})
        for one in (
            {"json_schema": json.dumps(SCHEMA)}, {"json_schema": json.dumps(LOOSE)},
            {"json_schema": f"{MARK} is no JSON"}, {"regex": f"{MARK}-regex"},
            {"regex": f"{MARK}-(((["}, {"ebnf": f'root ::= "{MARK}-ebnf"'},
            {"ebnf": f"root ::= {MARK}_unknown"},
            {"structural_tag": json.dumps({
                "type": "structural_tag", "triggers": [f"<{MARK}"],
                "structures": [{"begin": f"<{MARK}>", "schema": SCHEMA, "end": f"</{MARK}>"}]})},
            {"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": MARK}})},
        )
    ),
    ("/v1/completions", {"prompt": [TEXT, TEXT * 2], "echo": True, "logprobs": 2, **OPENAI}),
    ("/v1/chat/completions", {
        "messages": [
            {"role": "system", "content": TEXT},
            {"role": "user", "content": TEXT, "name": f"{MARK}-name"},
            {"role": "assistant", "reasoning_content": f"{MARK}-reasoning", "tool_calls": [
                {"id": f"{MARK}-call", "type": "function", "function": {
                    "name": f"{MARK}_tool", "arguments": f'{{"{MARK}": "{MARK}"}}'}}]},
            {"role": "tool", "content": f"{MARK}-result", "tool_call_id": f"{MARK}-call"},
        ],
        "chat_template_kwargs": {f"{MARK}_variable": f"{MARK}-variable"}, **OPENAI}),
    *(
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}],
                                  "tools": [tool], "tool_choice": choice, **OPENAI})
        for tool in TOOLS for choice in ("auto", "required", {
            "type": "function", "function": {"name": f"{MARK}_tool"}})
    ),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": TEXT}], **OPENAI, "response_format": {
            "type": "json_schema", "json_schema": {"name": f"{MARK}-format", "schema": SCHEMA}}}),
    ("/v1/responses", {"input": TEXT, "instructions": TEXT, "max_output_tokens": 3, **KEYED,
                       "metadata": {f"{MARK}-meta": f"{MARK}-data"}, "user": f"{MARK}-user"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "system": TEXT,
                      "max_tokens": 3, "metadata": {"user_id": f"{MARK}-user"}, **KEYED}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": TEXT}]}),
    ("/v1/tokenize", {"prompt": TEXT}),
    ("/v1/tokenize", {"messages": [{"role": "user", "content": TEXT}], "tools": TOOLS}),
    ("/open_session", {"capacity_of_str_len": 1000, "session_id": f"{MARK}-session"}),
    ("/close_session", {"session_id": f"{MARK}-session"}),
)  # fmt: skip
"""A path and a body with a secret wherever a client may write a text."""


def variants(body: dict[str, Any]) -> Iterator[bytes]:
    """The body, streamed, with a field too many, with each field of a wrong type, and torn."""
    yield json.dumps(body).encode()
    yield json.dumps({**body, "stream": True}).encode()
    yield json.dumps({**body, f"{MARK}_field": f"{MARK}-of-field"}).encode()
    for name in body:
        wrong = copy.deepcopy(body)
        wrong[name] = [{f"{MARK}-wrong": f"{MARK}-value"}]
        yield json.dumps(wrong).encode()
    yield json.dumps(body).encode()[:-1]


def events_of(endpoint: str) -> str:
    """All KV events so far, as sent."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.linger, asker.rcvtimeo = 0, 30_000
        asker.connect(endpoint)
        asker.send_multipart((b"", bytes(8)))
        found = []
        while (parts := asker.recv_multipart())[2]:
            found.append(parts[2])
    assert found, "the prompt without keys is told"
    return b"".join(found).decode("latin-1")


def test_what_clients_send_is_told_to_nobody_else(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    published, replayed = (f"tcp://127.0.0.1:{port}" for port in get_free_ports(2))
    with (
        otlp_receiver() as receiver,
        ForkedServer(
            "--enable-metrics", "--log-requests", "--log-level", "debug",
            "--record-trace", str(trace), "--api-key", API_KEY,
            "--kv-events-config", json.dumps({"endpoint": published, "replay_endpoint": replayed}),
            "--enable-trace", "--otlp-traces-endpoint", receiver.url,
            "--enable-hierarchical-cache", "--max-total-tokens", "2048", "--page-size", "16",
            "--hicache-storage-backend", "file", "--tool-call-parser", "qwen25",
            env={envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: str(tmp_path / "l3")},
        ) as server,
        httpx.Client(
            base_url=server.url, headers={**HEADERS, "Authorization": f"Bearer {API_KEY}"},
            timeout=120,
        ) as client,
    ):  # fmt: skip
        statuses: dict[str, set[int]] = {}
        for path, body in BODIES:
            for raw in variants(body):
                answer = client.post(path, content=raw)
                assert answer.status_code in (200, 400), answer.text
                statuses.setdefault(path, set()).add(answer.status_code)
        assert all(200 in found for found in statuses.values()), statuses
        assert client.get(f"/health?api_key={MARK}").status_code == 200
        client.post(f"/v1/tokenize?api_key={MARK}", json={"prompt": TEXT})
        other = {"Authorization": f"Bearer {MARK}-wrong-key"}
        assert client.get("/server_info", headers=other).status_code == 401
        assert client.post("/generate", json={"text": TEXT * 4}).status_code == 200
        # Spans of all of it have arrived with the last one.
        client.post("/v1/tokenize", json={"prompt": "the last"})
        sent = sum(1 for _path, body in BODIES for _raw in variants(body))
        assert wait_until(lambda: len(receiver.spans) > sent, 60)
        shown = {
            "metrics": client.get("/metrics").text,
            "view": json.dumps(hicache_top.ask(server.url, ADMIN_KEY)),
            "trace": trace.read_text(),
            "events": events_of(replayed),
        }
        (scheduler,) = (
            child
            for child in psutil.Process(server.process.pid).children(recursive=True)
            if "sglang::scheduler" in " ".join(child.cmdline())
        )
        body = {"text": TEXT, "stream": True, "sampling_params": {"max_new_tokens": 1500}, **KEYED}
        with client.stream("POST", "/generate", json=body) as stream:
            next(stream.iter_lines())
            scheduler.send_signal(signal.SIGABRT)
            server.process.wait(60)
        shown["spans"] = b"".join(receiver.raw).decode("latin-1")
        shown["log"] = server.process.log_path.read_text(errors="replace")
    assert "the server ends" in shown["log"] and "prompt tokens" in shown["log"]
    for what, text in shown.items():
        found = {told[0][:120] for told in re.finditer(f".*{MARK}.*", text, re.IGNORECASE)}
        assert not found, f"{what} has {found}"
