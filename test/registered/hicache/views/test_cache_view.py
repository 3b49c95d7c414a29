"""Operators' views of a server with all tiers: `/hicache`, `hicache_top`, docs/monitoring."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from rigs.servers.engine_server import ADMIN_KEY, EngineServer
from rigs.servers.forked_servers import ForkedServer
from sglang import hicache_top
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.environ import child_environment, envs
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics, StateMetrics
from sglang.srt.observability.engine_metrics import SchedulerLoad, SchedulerMetrics
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-b-test-cpu")

PAGE: Final = 64
MONITORING: Final = Path(__file__).resolve().parents[4] / "docs" / "monitoring"


def prompt(seed: int, pages: int = 8) -> list[int]:
    return [300 + (seed * 37 + i) % 1000 for i in range(pages * PAGE)]


def await_stored(server: EngineServer, tokens: int) -> None:
    """Wait until L3 has got `tokens` tokens since the start."""
    stored = "sglang:backuped_tokens_total"
    assert wait_until(lambda: server.metrics()[stored] >= tokens, 60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A server after requests that were evicted, read back and repeated."""
    folder: Path = tmp_path_factory.mktemp("store")
    with ForkedServer(
        "--enable-metrics", "--hicache-storage-backend", "file", "--page-size", str(PAGE),
        "--max-total-tokens", str(24 * PAGE), "--hicache-ratio", "1.5",
        "--hicache-storage-prefetch-policy", "wait_complete",
        env={envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: str(folder)},
    ) as running:  # fmt: skip
        for seed in range(6):
            running.generate(prompt(seed), max_new_tokens=2)
            # L2 keeps a prompt until L3 has it, and may have no room for another until then.
            await_stored(running, (seed + 1) * 8 * PAGE)
        for seed in (5, 5, 0):
            running.generate(prompt(seed), max_new_tokens=2)
        running.request("POST", "/generate", {
            "input_ids": prompt(9), "stream": True, "sampling_params": {"max_new_tokens": 3},
        })  # fmt: skip
        running.metrics()  # Asks the store how full it is.
        yield running


def view(server: EngineServer) -> dict[str, Any]:
    headers = {"Accept": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
    answer = httpx.get(f"{server.url}/hicache", headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_parts_of_tiers_add_up_while_requests_run(server: EngineServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(server.generate, prompt(20 + i), 8) for i in range(4)]
        views = [view(server)]
        while not all(one.done() for one in running):
            views.append(view(server))
    for one in views:
        l1, l2, l3 = one["tiers"]
        assert (l1["name"], l2["name"], l3["name"]) == ("L1", "L2", "L3")
        assert l1["total"] == 24 * PAGE
        assert l2["total"] == 36 * PAGE
        for tier in (l1, l2):
            assert sum(tier["parts"].values()) == tier["total"]
            assert min(tier["parts"].values()) >= 0
    assert l3["parts"]["used"] > 0


def test_the_view_and_the_metrics_agree_and_no_prompt_is_shown(server: EngineServer) -> None:
    for _ in range(3):
        server.generate(prompt(5), max_new_tokens=1)
    flows = {
        "loaded": "load_back_tokens_total", "stored": "backuped_tokens_total",
        "read": "prefetched_tokens_total", "written": "hicache_host_written_tokens_total",
        "evicted_host": 'evicted_tokens_total{tier="host"}',
    }  # fmt: skip
    seen: dict[str, Any] = {}

    def agree() -> bool:
        seen.update(view(server))
        counts, samples = seen["history"][-1]["counts"], server.metrics()
        return all(counts[flow] == samples[f"sglang:{name}"] for flow, name in flows.items())

    assert wait_until(agree, 60), "an answer is a second old at most"
    counts, samples = seen["history"][-1]["counts"], server.metrics()
    assert all(counts[flow] > 0 for flow in flows), counts
    assert counts["hit_device"] >= 2 * 8 * PAGE - 2
    assert seen["store"]["is_available"]
    assert seen["store"]["reads"]["landed"] >= 1
    assert f'namespace="{seen["store"]["namespace"]}"' in "".join(samples)
    busiest = seen["prefixes"][0]
    assert busiest["tokens"] == 8 * PAGE
    assert busiest["uses"] >= 3
    assert re.fullmatch("[0-9a-f]{16}", busiest["hash"])
    reasons = {one["what"] for one in seen["decisions"]}
    assert {"evicted from L1", "evicted from L2"} <= reasons
    assert not set(map(str, prompt(5)[:64])) <= set(re.findall(r"\d+", json.dumps(seen)))


def test_hicache_top_shows_it_once(server: EngineServer, tmp_path: Path) -> None:
    def top(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sglang.hicache_top", server.url, "--once", *args],
            capture_output=True, text=True, timeout=120, env=child_environment({"COLUMNS": "120"}),
        )  # fmt: skip

    refused = top()
    assert refused.returncode == 1
    assert "--admin-api-key-file" in refused.stderr
    key = tmp_path / "key"
    key.write_text(ADMIN_KEY)
    key.chmod(0o600)
    shown = top("--admin-api-key-file", str(key))
    assert shown.returncode == 0, shown.stderr
    seen = view(server)
    for text in (
        "L1 device memory, 1,536 tokens", "L2 host memory", "L3 store (file)", "evicted from L1",
        seen["prefixes"][0]["hash"], seen["store"]["namespace"], f"page size {PAGE}",
    ):  # fmt: skip
        assert text in shown.stdout


def drawn(seen: dict[str, Any]) -> str:
    """The text that `hicache_top` draws for a view, with runs of spaces collapsed."""
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(hicache_top.draw(seen, 120))
    return re.sub(" +", " ", console.export_text())


def test_hicache_top_says_what_a_router_lacks(server: EngineServer) -> None:
    with pytest.raises(hicache_top.NoAnswer, match=r"refuses \(404\): .* not of a router$"):
        hicache_top.ask(f"{server.url}/router", ADMIN_KEY)


def test_hicache_top_says_that_decode_servers_compute_no_prompts(server: EngineServer) -> None:
    note = '"computed": by prefill servers'
    seen = view(server)
    assert note not in drawn({**seen, "disaggregation_mode": "prefill"})
    assert note in drawn({**seen, "disaggregation_mode": "decode"})


def test_hicache_top_shows_drafts_if_there_are_any(server: EngineServer) -> None:
    seen = view(server)
    assert seen["speculation"] is None
    assert "drafts" not in drawn(seen)
    policy = {"num_drafts": 3, "always": False, "largest_batch": 64, "sizes": []}
    tiers = {"none": {"count": 10, "accepted": 15}, "storage": {"count": 0, "accepted": 0}}
    text = drawn({**seen, "speculation": {**policy, "tiers": tiers}})
    assert "no tier 10 50% 2.50" in text
    assert "no step has been measured yet" in text
    size = {"first": 16, "last": 31, "verifies": False}
    figures = {"verification_ms": 16.257, "tokens": 2.69, "plain_ms": 5.26}
    policy["sizes"] = [
        {**size, "first": 1, "last": 1, "verifies": True, **figures, "plain_ms": None},
        {**size, **figures},
    ]
    text = drawn({**seen, "speculation": {**policy, "tiers": tiers}})
    assert "\n 1 on 16.26 2.69" in text
    assert "16 to 31 off 16.26 2.69 5.26" in text
    text = drawn({**seen, "speculation": {**policy, "tiers": tiers, "always": True}})
    assert "up to 64 requests always" in text


def test_hicache_top_lives_until_it_is_interrupted(server: EngineServer) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang.hicache_top", server.url, "--interval", "0.2"],
        stdout=subprocess.PIPE, env=child_environment(
            {envs.SGLANG_ADMIN_API_KEY.name: ADMIN_KEY, "COLUMNS": "100", "TERM": "xterm",
             "FORCE_COLOR": "1"}
        ),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        text = b""
        while text.count(b"Prefix cache") < 3:
            new = os.read(process.stdout.fileno(), 1 << 16)
            assert new, f"it has ended: {text!r}"
            text += new
        process.send_signal(2)
        process.stdout.read()
        assert process.wait(30) == 0
    finally:
        process.kill()


# ---- docs/monitoring -----------------------------------------------------------------------------

_SELECTOR = re.compile(r"(sglang:\w+|up)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"""(\w+)\s*(?:=~|!~|!=|=)\s*["'][^"']*["']""")
_GROUPING = re.compile(r"\b(?:by|on|without|group_left)\s*\(([^)]*)\)")
_SCRAPED: Final = {"job", "instance"}
"""Labels that Prometheus adds."""


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return board


def queries() -> list[str]:
    """All expressions of the alerts and the dashboard."""
    board = dashboard()
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    variables = [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    found = [rule["expr"] for rule in rules()] + [one["expr"] for one in targets] + variables
    assert len(found) > 30
    return found


def test_every_query_finds_its_metric_with_its_labels(server: EngineServer) -> None:
    idle = SchedulerLoad(
        num_running=0, num_queued=0, pool_tokens=1, free_tokens=1, evictable_tokens=0
    )
    # A decode server of a hybrid that drafts, with a store of several nodes, exports extra series.
    other = SchedulerMetrics({"model_name": "other"}, num_drafts=3)
    names = "num_decode_transfer_queue_reqs", "num_decode_lingering_reqs"
    other.of_role(DisaggregationMode.DECODE, dict.fromkeys(names, int))
    other.of_reads(("transport",))
    HiCacheMetrics(other.registry).set_storage(None, None, {"node": True}, None)
    states = StateMetrics(other.registry)
    states.evicted.labels("device")
    states.snapshots.labels("prefill", "taken")
    text = str(server.request("GET", "/metrics").body) + other.render(idle)
    labels: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for query in queries():
        selectors = _SELECTOR.findall(query)
        assert selectors, f"no metric of this engine: {query}"
        known: set[str] = set(_SCRAPED)
        for name, matchers in selectors:
            assert name in labels, f"{name} is no metric of a server: {query}"
            known |= labels[name]
            for label in _MATCHER.findall(matchers):
                assert label in labels[name] | _SCRAPED, f"{name} has no label {label}: {query}"
        for group in _GROUPING.findall(query):
            for label in filter(None, map(str.strip, group.split(","))):
                assert label in known, f"no metric has label {label}: {query}"


def test_alerts_say_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), rule
        assert {"summary", "description"} <= set(rule["annotations"]), rule
        assert "docs/" in rule["annotations"]["description"], rule


def test_panels_do_not_overlap_and_have_units() -> None:
    places: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard()["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & places, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        places |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
