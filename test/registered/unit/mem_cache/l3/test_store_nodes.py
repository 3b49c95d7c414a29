"""Nodes of a store that are gone: said once, by name, for an hour, within bounds."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sglang.srt.mem_cache.l3 import store_nodes
from sglang.srt.mem_cache.l3.store_nodes import StoreNodes
from sglang.srt.mem_cache.tree.hicache_metrics import HiCacheMetrics
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")


def test_a_node_is_gone_after_two_answers_without_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    nodes = StoreNodes()
    nodes.update(["a:1", "b:1"], 0.0)
    nodes.update(["b:1"], 10.0)
    assert nodes.serving() == {"a:1": True, "b:1": True}, "its master may have been restarted"
    for now in (20.0, 30.0):
        nodes.update(["b:1"], now)
        assert nodes.serving() == {"a:1": False, "b:1": True}
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("store node a:1 is gone")
    assert "1 nodes are left" in line
    nodes.update(["a:1", "b:1"], 40.0)
    assert nodes.serving() == {"a:1": True, "b:1": True}
    assert caplog.records[-1].getMessage() == "store node a:1 is back"


def test_a_restarted_master_that_names_no_node_yet_is_no_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = StoreNodes()
    nodes.update(["a:1"], 0.0)
    nodes.update([], 10.0)
    nodes.update(["a:1"], 20.0)
    nodes.update([], 30.0)
    assert nodes.serving() == {"a:1": True}
    assert not caplog.records


def test_another_protocol_is_logged_once_and_again_after_it_was_mended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = StoreNodes()
    for named in (("a:1 (rdma)",), ("a:1 (rdma)",), ("a:1 (rdma)", "b:1 (rdma)")):
        nodes.update_unlike(named)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" has ")[0] for line in lines] == [
        "store node a:1 (rdma)", "store node b:1 (rdma)",
    ]  # fmt: skip
    assert all("the same MOONCAKE_PROTOCOL" in line for line in lines)
    nodes.update_unlike(())
    nodes.update_unlike(("a:1 (rdma)",))
    assert len(caplog.records) == 3
    caplog.clear()
    many = tuple(f"{number}:1 (rdma)" for number in range(2000))
    for _ in range(2):
        nodes.update_unlike(many)
    assert len(caplog.records) == store_nodes._MAX_NODES


def test_what_is_gone_is_forgotten_after_an_hour_and_among_very_many() -> None:
    nodes = StoreNodes()
    nodes.update(["a:1", "b:1"], 0.0)
    for now in (10.0, 20.0, store_nodes._FORGET_S):
        nodes.update(["b:1"], now)
        assert "a:1" in nodes.serving()
    nodes.update(["b:1"], store_nodes._FORGET_S + 1)
    assert nodes.serving() == {"b:1": True}
    for number in range(2000):
        nodes.update([f"{number}:{one}" for one in range(3)], 5000.0 + number)
    assert len(nodes.serving()) == store_nodes._MAX_NODES
    assert nodes.serving()["1999:0"], "those that serve stay"


def test_the_gauge_names_each_node() -> None:
    registry = CollectorRegistry()
    metrics = HiCacheMetrics(registry)
    metrics.set_storage(None, None, {"a:1": True, "b:1": False}, None)
    metrics.set_storage(None, None, {"b:1": False}, None)
    lines = [
        line
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("sglang:hicache_store_node_up{")
    ]
    assert lines == ['sglang:hicache_store_node_up{node="b:1"} 0.0']
