"""Cache reports and traces of prefill and decode servers, asked directly and behind the router.

Flags choose the transport and check every page, in place of the variables of other tests.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from rigs.disaggregation.pd_servers import decode_server, prefill_server, router
from rigs.servers.engine_server import EngineServer
from rigs.servers.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from sglang.srt.constants import BUILTIN_MODEL_NAME
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-b-test-cpu")

TEXT = "The code of heron is 7391. The code of otter is 0042. The code of badger is 5127. "
BODY = {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
SPAN = "b7ad6b7169203331"


class Pair:
    """A prefill server and a decode server that export traces, and the router before them."""

    def __init__(self, stack: ExitStack) -> None:
        self.receiver: OtlpReceiver = stack.enter_context(otlp_receiver())
        env = {
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
            "SGLANG_DISAGGREGATION_SECRET": secrets.token_hex(32),
        }
        flags = (
            *("--disaggregation-transfer-backend", "mooncake_tcp", "--enable-metrics"),
            *("--enable-trace", "--otlp-traces-endpoint", self.receiver.url),
            "--disaggregation-enable-kv-checksum",
        )
        prefill, self.bootstrap_port = prefill_server(*flags, env=env)
        self.prefill: EngineServer = stack.enter_context(prefill)
        self.decode: EngineServer = stack.enter_context(decode_server(*flags, env=env))
        self.url = stack.enter_context(router([(self.prefill, self.bootstrap_port)], [self.decode]))

    def direct(self, path: str, body: dict[str, Any], trace: str) -> Any:
        """The decode server's answer to a request that both servers get, as a router sends it."""
        shared = {
            **body,
            "bootstrap_host": urlsplit(self.prefill.url).hostname,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": secrets.randbits(63),
        }
        with ThreadPoolExecutor() as pool:
            asked = [
                pool.submit(post, server.url, path, shared, trace)
                for server in (self.prefill, self.decode)
            ]
            return [one.result() for one in asked][-1]

    def spans_of(self, trace: str, count: int) -> dict[str, set[str]]:
        """The names of a trace's spans by service, once there are `count`."""

        def spans() -> list[ReceivedSpan]:
            return [span for span in self.receiver.spans if span.trace_id == trace]

        assert wait_until(lambda: len(spans()) >= count, 30), spans()
        names: dict[str, set[str]] = {}
        for span in spans():
            names.setdefault(span.service, set()).add(span.name)
        return names


@pytest.fixture(scope="module", name="pair")
def start_pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def post(url: str, path: str, body: dict[str, Any], trace: str) -> Any:
    headers = {"traceparent": f"00-{trace}-{SPAN}-01"}
    response = httpx.post(url + path, json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_decode_server_answers_with_the_prefill_servers_report(pair: Pair) -> None:
    for reason in ("no_page", "partial_page"):
        trace = secrets.token_hex(16)
        answer = pair.direct("/generate", {**BODY, "return_cache_report": True}, trace)
        meta = answer["meta_info"]
        report = meta["cache_report"]
        at = 0 if reason == "no_page" else meta["prompt_tokens"] // 16 * 16
        assert report["prompt_tokens"] == meta["prompt_tokens"]
        assert report["used"]["device"] == meta["cached_tokens"] == at
        assert [(cut["at"], cut["reason"]) for cut in report["cuts"]] == [(at, reason)]
    assert "cache_report" not in pair.direct("/generate", BODY, trace)["meta_info"]


def test_the_router_passes_the_field_of_completions_on(pair: Pair) -> None:
    """`sglang_router` loses that of `/generate` and of chats (docs/pd.md)."""
    body = {
        "model": BUILTIN_MODEL_NAME,
        "prompt": TEXT,
        "max_tokens": 4,
        "return_cache_report": True,
    }
    answer = post(pair.url, "/v1/completions", body, secrets.token_hex(16))
    assert answer["sglext"]["cache_report"]["cuts"][-1]["reason"] == "partial_page"


@pytest.mark.parametrize("way", ["direct", "router"])
def test_both_servers_record_spans_of_one_trace(pair: Pair, way: str) -> None:
    trace = secrets.token_hex(16)
    if way == "direct":
        pair.direct("/generate", BODY, trace)
    else:
        post(pair.url, "/generate", BODY, trace)
    # Each server has the spans of HTTP, the request, queue and transfer.
    names = pair.spans_of(trace, 11)
    assert names == {
        "sglang-prefill": {
            "POST /generate", "request", "queue", "match", "prefill", "transfer",
        },
        "sglang-decode": {"POST /generate", "request", "queue", "transfer", "decode"},
    }  # fmt: skip


def test_without_a_clients_trace_both_servers_share_that_of_the_room(pair: Pair) -> None:
    before = len(pair.receiver.spans)
    assert httpx.post(f"{pair.url}/generate", json=BODY, timeout=60).status_code == 200
    assert wait_until(lambda: len(pair.receiver.spans) >= before + 11, 30)
    spans = [span for span in pair.receiver.spans[before:] if span.name != "POST /generate"]
    assert {span.service for span in spans} == {"sglang-prefill", "sglang-decode"}
    assert len({span.trace_id for span in spans}) == 1


def test_every_page_is_compared_with_its_checksum(pair: Pair) -> None:
    name = 'sglang:kv_transfer_checked_pages_total{outcome="intact"}'
    before = pair.decode.metrics().get(name, 0.0)
    text = f"{secrets.token_hex(64)} {TEXT}"
    meta = pair.direct("/generate", {**BODY, "text": text}, secrets.token_hex(16))["meta_info"]
    pages = -(-meta["prompt_tokens"] // 16)
    assert pages > 4
    assert pair.decode.metrics()[name] - before == pages
