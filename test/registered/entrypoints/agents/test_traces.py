"""Traces and JSON logs of a whole server: every stage has its span, every line is an object."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import pytest

from rigs.servers.engine_server import EXACT
from rigs.servers.forked_servers import ForkedServer
from rigs.servers.otlp_receiver import otlp_receiver
from sglang.launch_server import main
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-b-test-cpu")

TEXT = "The code of heron is 7391. The code of otter is 0042. The code of badger is 5127. "
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_spans_of_every_stage_and_json_logs(tmp_path: Path) -> None:
    body = {
        "text": TEXT * 3,
        "rid": "mine",
        "sampling_params": {"temperature": 0, "max_new_tokens": 6},
        "return_cache_report": True,
    }
    with (
        otlp_receiver() as receiver,
        ForkedServer(
            *("--page-size", "16", *EXACT, "--enable-hierarchical-cache"),
            *("--hicache-storage-backend", "file", "--log-format", "json", "--log-requests"),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-storage-backend-extra-config", '{"prefetch_threshold": 16}'),
            *("--enable-trace", "--otlp-traces-endpoint", receiver.url),
            *("--chunked-prefill-size", "64", "--api-key", "hush-hush"),
            env={"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)},
        ) as server,
    ):
        client = httpx.Client(
            base_url=server.url, headers={"Authorization": "Bearer hush-hush"}, timeout=60
        )
        assert client.post("/generate", json=body).status_code == 200
        # The span of the HTTP request ends last.
        assert wait_until(lambda: "POST /generate" in receiver.names(), 30)
        assert set(receiver.names()) == {
            "POST /generate", "request", "queue", "match", "prefill", "decode",
        }  # fmt: skip
        assert receiver.names().count("prefill") > 1, "the prompt is computed in parts"
        server.flush()
        assert wait_until(lambda: "POST /flush_cache" in receiver.names(), 30)
        receiver.spans.clear()
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        answer = client.post("/generate", json=body, headers=headers).json()
        assert answer["meta_info"]["cache_report"]["used"]["storage"] > 64
        spans = {span.name: span for span in receiver.wait(8)}
        log = server.process.log_path.read_text()
    assert set(spans) == {
        "POST /generate", "request", "queue", "match", "l3_read", "load", "prefill", "decode",
    }  # fmt: skip
    assert {span.trace_id for span in spans.values()} == {TRACE}
    request = spans["request"]
    assert all(
        span.parent_id == request.span_id
        for name, span in spans.items()
        if name not in ("POST /generate", "request")
    )
    assert all(
        request.begin <= span.begin <= span.end <= request.end + 10**6
        for name, span in spans.items()
        if name != "POST /generate"
    )
    lines = [json.loads(line) for line in log.splitlines()]
    assert {line["process"] for line in lines} >= {"server", "scheduler 0"}
    (logged, _) = [line for line in lines if line.get("rid") == "mine"]
    assert logged["cached_tokens"] == {"device": 0, "host": 0, "storage": 0}
    assert "hush" not in log
    assert "heron" not in log


def test_mistakes_at_the_start_are_objects_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert main(["--log-format", "json", "--page-size", "0", "--nonsense"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["critical", "critical"]
    assert "--nonsense" in lines[0]["message"]
    assert "--page-size" in lines[1]["message"]
