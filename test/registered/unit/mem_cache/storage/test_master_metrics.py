"""Usage of a Mooncake store from its master's metrics, also of a master that is not one."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from sglang.srt.mem_cache.hicache_storage import StorageUnavailable, StorageUsage
from sglang.srt.mem_cache.storage.mooncake_store.master_metrics import read_usage
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

TEXT = b"""# HELP master_allocated_bytes Bytes
# TYPE master_allocated_bytes gauge
master_allocated_bytes 1.5e+09
# TYPE master_total_capacity_bytes gauge
master_total_capacity_bytes 4000000000
# TYPE master_key_count gauge
master_key_count 12
# TYPE master_evicted_key_count counter
master_evicted_key_count 3
# TYPE segment_allocated_bytes gauge
segment_allocated_bytes{segment="master_key_count"} 7
# TYPE segment_total_capacity_bytes gauge
segment_total_capacity_bytes{segment="10.0.0.2:5"} 100
segment_total_capacity_bytes{segment="10.0.0.1:5"} 100
"""


DETAIL = b"""{"total_segments": 3, "segments": [
    {"segment_name": "10.0.0.1:5", "protocol": "tcp", "size_bytes": 1},
    {"segment_name": "10.0.0.2:5", "protocol": "rdma"},
    {"segment_name": "10.0.0.3:5"}]}"""


class Master(http.server.BaseHTTPRequestHandler):
    """Answers with `text`, and with `detail` on its segments."""

    text = TEXT
    detail = DETAIL

    def do_GET(self) -> None:
        texts = {"/metrics": self.text, "/get_segments_detail": self.detail}
        self.send_response(200 if self.path in texts else 404)
        self.end_headers()
        self.wfile.write(texts.get(self.path, b""))

    def log_message(self, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Master)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_usage_is_read_from_the_masters_metrics(port: int) -> None:
    assert read_usage("127.0.0.1", port) == StorageUsage(
        1_500_000_000,
        4_000_000_000,
        num_objects=12,
        num_evicted=3,
        nodes=("10.0.0.1:5", "10.0.0.2:5"),
    )


def test_nodes_with_another_protocol_are_named(port: int) -> None:
    for own, unlike in (("tcp", ("10.0.0.2:5 (rdma)",)), ("rdma", ("10.0.0.1:5 (tcp)",))):
        assert read_usage("127.0.0.1", port, own).unlike_nodes == unlike


@pytest.mark.parametrize("detail", [b"", b"<html>", b"{}", b'{"segments": [1]}', b"\xff"])
def test_a_master_that_does_not_tell_its_segments_costs_nothing(
    port: int, detail: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Master, "detail", detail)
    found = read_usage("127.0.0.1", port, "tcp")
    assert found == read_usage("127.0.0.1", port)
    assert found.nodes == ("10.0.0.1:5", "10.0.0.2:5")


@pytest.mark.parametrize("text", [b"", b"<html>", b"\xff\xfe", b"master_key_count 1\n"])
def test_another_server_is_named(port: int, text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Master, "text", text)
    with pytest.raises(StorageUnavailable, match=f"http://127.0.0.1:{port}/metrics"):
        read_usage("127.0.0.1", port)


def test_nobody_there_names_the_remedy() -> None:
    with pytest.raises(StorageUnavailable, match="MOONCAKE_MASTER_METRICS_PORT"):
        read_usage("127.0.0.1", get_free_port())
