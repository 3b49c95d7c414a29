"""The rows of docs/pd.md's table of routers, each as a check of a running router."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Thread
from typing import Final

from rigs.disaggregation.router_probe import (
    BODIES,
    HEADERS,
    Probe,
    RouterFacts,
    leave_stream,
    lost_fields,
)
from sglang.srt.utils.network import wait_until

_SAMPLING: Final = ("stop_regex", "logit_bias", "structural_tag")
_LOST_SAMPLING: Final = frozenset(f"sampling_params.{name}" for name in _SAMPLING)

SGLANG_ROUTER: Final = RouterFacts(
    name="sglang_router",
    command=(sys.executable, "-m", "sglang_router.launch_router"),
    lost={
        "/v1/chat/completions": frozenset(
            {"session_id", "priority", "extra_key", "cache_salt", "user", "rid", "stop_regex"}
            | {"return_cache_report", "return_cached_tokens_details", "json_schema"}
        ),
        "/generate": _LOST_SAMPLING
        | {"session_id", "cache_salt", "user", "return_cache_report"}
        | {"return_cached_tokens_details", "min_tokens"},
        "/v1/responses": frozenset({"session_id", "cache_salt"}),
    },
    refused={
        ("/v1/responses", True): 501,
        ("/v1/messages", True): 404,
        ("/v1/messages", False): 404,
    },
    closes_other_half=False,
    closed_when_client_leaves=frozenset({"prefill", "decode"}),
    without_model={"/v1/chat/completions": 200, "/v1/completions": 422, "/generate": 200},
    unknown_model={True: 200, False: 200},
    server_settings="metadata",
)
SMG: Final = RouterFacts(
    name="smg",
    command=(sys.executable, "-m", "smg.launch_router"),
    lost={"/generate": _LOST_SAMPLING},
    # This router refuses the session_id.
    refused={("/v1/responses", True): 400, ("/v1/responses", False): 400},
    closes_other_half=True,
    closed_when_client_leaves=frozenset({"decode"}),
    without_model={"/v1/chat/completions": 400, "/v1/completions": 400, "/generate": 200},
    unknown_model={True: 503, False: 404},
    server_settings="labels",
)
ROUTERS: Final = {facts.name: facts for facts in (SGLANG_ROUTER, SMG)}
"""The routers, by package."""
_PASSED: Final = frozenset(
    {"Authorization", "X-Request-Id", "X-Correlation-Id", "X-SMG-Routing-Key"}
    | {"traceparent", "tracestate"}
)
"""Headers that both routers pass on."""
_TRIES: Final = 5


def _fields(facts: RouterFacts, probe: Probe) -> None:
    for path, body in BODIES.items():
        probe.forget()
        status = probe.post(path).status_code
        assert status == facts.refused.get((path, probe.is_pair), 200), path
        for worker in probe.workers if status == 200 else ():
            ((_, came),) = worker.seen
            assert lost_fields(body, came) == facts.lost.get(path, frozenset()), path


def _models(facts: RouterFacts, probe: Probe) -> None:
    probe.forget()
    for path, status in facts.without_model.items():
        body = {name: value for name, value in BODIES[path].items() if name != "model"}
        assert probe.client.post(probe.url + path, json=body).status_code == status, path
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert probe.post(path, model="other").status_code == facts.unknown_model[probe.is_pair]


def _headers(facts: RouterFacts, probe: Probe) -> None:
    probe.forget()
    assert probe.post("/v1/chat/completions").status_code == 200
    for worker in probe.workers:
        ((headers, _),) = worker.seen
        passed = {name for name, value in HEADERS.items() if headers.get(name) == value}
        assert passed == _PASSED


def _refusals(facts: RouterFacts, probe: Probe) -> None:
    """Statuses, repetitions and Retry-After."""
    for status in (429, 503):
        probe.forget()
        probe.workers[0].status = status
        answer = probe.post("/generate")
        seen = answer.status_code, answer.headers.get("retry-after")
        if probe.is_pair:
            assert seen == (500 if status == 429 else 503, None)
            rooms = {body["bootstrap_room"] for _, body in probe.workers[0].seen}
            assert len(rooms) == _TRIES, "a room for each try"
        else:
            assert seen == (status, "7")
        assert len(probe.workers[0].seen) == _TRIES


def _other_half(facts: RouterFacts, probe: Probe) -> None:
    """Prefill refuses at once: does decode's connection stay?"""
    if not probe.is_pair:
        return
    probe.forget()
    prefill, decode = probe.workers
    prefill.status, decode.hangs = 503, True
    answer: list[int] = []
    asking = Thread(target=lambda: answer.append(probe.post("/generate").status_code))
    asking.start()
    if not facts.closes_other_half:
        assert wait_until(lambda: bool(prefill.seen and decode.seen), 20)
        assert not answer, "it waits for the end on decode, which knows no end"
        decode.hangs = False
    asking.join(30)
    assert answer == [503]
    hung = len(decode.seen) if facts.closes_other_half else 0
    assert wait_until(lambda: decode.left == hung, 20)


def _leaving(facts: RouterFacts, probe: Probe) -> None:
    if not probe.is_pair:
        return
    probe.forget()
    for worker in probe.workers:
        worker.hangs = True
    leave_stream(probe, "/v1/chat/completions")
    by_name = dict(zip(("prefill", "decode"), probe.workers, strict=True))
    gone = facts.closed_when_client_leaves
    assert wait_until(lambda: all(by_name[name].left for name in gone), 20)
    assert {name for name, worker in by_name.items() if worker.left} == gone


def _settings(facts: RouterFacts, probe: Probe) -> None:
    if not probe.is_pair:
        return
    servers = probe.client.get(f"{probe.url}/workers").json()["workers"]
    modes = {one["url"]: one[facts.server_settings]["disaggregation_mode"] for one in servers}
    prefill, decode = probe.workers
    assert modes == {prefill.url: "prefill", decode.url: "decode"}


ROWS: Final[dict[str, Callable[[RouterFacts, Probe], None]]] = {
    "fields": _fields,
    "models": _models,
    "headers": _headers,
    "refusals": _refusals,
    "the other half of a refused request": _other_half,
    "a client that leaves": _leaving,
    "settings of servers": _settings,
}
