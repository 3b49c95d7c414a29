"""Log, metrics, views and traces have no text of a prompt and no key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from rigs.servers.engine_server import ADMIN_KEY
from rigs.servers.forked_servers import ForkedServer
from sglang import hicache_top
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-b-test-cpu")

TEXT: Final = "swordfish"
SALT: Final = "saltmine"
EXTRA: Final = "quarry"
LABEL_KEY: Final = "labelsmith"


def test_no_view_has_a_text_or_a_key(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with ForkedServer(
        "--enable-metrics", "--log-requests", "--log-level", "debug", "--record-trace", str(trace),
        "--enable-hierarchical-cache", "--max-total-tokens", "1024", "--page-size", "16",
        "--hicache-storage-backend", "file",
        env={
            "SGLANG_TENANT_LABEL_KEY": LABEL_KEY,
            envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.name: str(tmp_path / "l3"),
        },
    ) as server:  # fmt: skip
        for number in range(6):
            for path, body in (
                ("/generate", {"text": TEXT * 40 + str(number), "cache_salt": SALT + str(number),
                               "sampling_params": {"max_new_tokens": 2}}),
                ("/v1/completions", {"prompt": TEXT * 40, "extra_key": EXTRA, "max_tokens": 2}),
                ("/v1/messages", {"messages": [{"role": "user", "content": TEXT * 40}],
                                  "max_tokens": 2, "cache_salt": SALT}),
            ):  # fmt: skip
                assert server.request("POST", path, body).status == 200
        view = hicache_top.ask(server.url, ADMIN_KEY)
        shown = {
            "metrics": str(server.request("GET", "/metrics").body),
            "view": json.dumps(view),
            "log": server.process.log_tail(100_000),
        }
    shown["trace"] = trace.read_text()
    notes = list((tmp_path / "l3" / ".notes").iterdir())
    shown["notes"] = repr([(note.name, note.read_bytes()) for note in notes])
    assert notes, "it tells others that it is there"
    assert "sglang:tenant_requests_total" in shown["metrics"]
    assert len(view["tenants"]) >= 3 and view["decisions"]
    assert "prompt tokens" in shown["log"] and shown["trace"].count("\n") == 18
    for what, text in shown.items():
        found = [one for one in (TEXT, SALT, EXTRA, LABEL_KEY, ADMIN_KEY) if one in text]
        assert not found, f"{what} has {found}"
