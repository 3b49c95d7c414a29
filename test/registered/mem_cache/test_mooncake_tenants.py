"""Tenants and tags of a Mooncake Store, and nodes that cannot offload, with a real master."""

from __future__ import annotations

from pathlib import Path

import pytest

from rigs.stores.host_pools import (
    page_keys,
    storage_config,
)
from rigs.stores.mooncake_bench import Bench, connect
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    StorageUnreachable,
)
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-b-test-cpu")

LANDED, MISS, FAILED = CacheOutcome.LANDED, CacheOutcome.MISS, CacheOutcome.FAILED
QUOTAS = (
    "version: 1\ntenants:\n- name: alice\n  quota: 33554432\n- name: carol\n  quota: 33554432\n"
)


def test_a_tenant_s_objects_are_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "quotas.yaml").write_text(QUOTAS)
    strict = {
        "enable_multi_tenants": "true",
        "tenant_quota_connector_uri": str(tmp_path / "quotas.yaml"),
    }
    with MooncakeCluster(num_nodes=0, master_flags=strict) as cluster:
        alice = connect(cluster, segment="64mb", tenant_id="alice")
        carol, nobody = connect(cluster, tenant_id="carol"), connect(cluster)
        benches = [Bench(store) for store in (alice, carol, nobody)]
        assert benches[0].put() == [LANDED] * 3
        assert benches[1].get() == [MISS] * 3
        assert benches[1].put() == [LANDED] * 3
        assert benches[1].get() == [LANDED] * 3
        carol.clear()
        assert carol.batch_exists_v2(benches[1].keys).kv_hit_pages == 0
        assert benches[0].get() == [LANDED] * 3
        # The tenant of those that name none is not in the file.
        assert benches[2].put()[0] is FAILED
        assert "does not know tenant default, so nothing is stored" in caplog.text
        with pytest.raises(ValueError, match=r"tenant_id=bob .*does not know this tenant; add it"):
            connect(cluster, tenant_id="bob")
        for store in (alice, carol, nobody):
            store.close()


def test_a_master_that_would_show_a_tenant_s_objects_to_all_is_refused(
    cluster: MooncakeCluster,
) -> None:
    with pytest.raises(ValueError, match=r"keeps no tenants apart .HTTP 409.*--enable_multi_ten"):
        connect(cluster, tenant_id="alice")
    deaf = storage_config(
        master_server_address=cluster.master.address,
        master_metrics_port=get_free_port(),
        protocol="tcp",
        tenant_id="alice",
    )
    with pytest.raises(StorageUnreachable, match="MOONCAKE_MASTER_METRICS_PORT"):
        MooncakeStore(deaf)


def test_servers_with_unequal_tags_share_no_objects(
    cluster: MooncakeCluster, shared: MooncakeStore
) -> None:
    shared.clear()
    tagged = [Bench(connect(cluster, extra_backend_tag=tag)) for tag in ("blue", "blue", "a.b")]
    assert tagged[0].put() == [LANDED] * 3
    assert set(cluster.master.keys()) == {f"blue/{key}/kv" for key in page_keys(3)}
    assert tagged[1].get() == [LANDED] * 3
    assert tagged[2].get() == [MISS] * 3
    assert Bench(shared).get() == [MISS] * 3
    assert Bench(shared).put() == [LANDED] * 3
    tagged[2].store.clear()
    tagged[0].store.clear()
    assert set(cluster.master.keys()) == {f"{key}/kv" for key in page_keys(3)}
    shared.clear()
    for bench in tagged:
        bench.store.close()


def test_a_node_whose_master_does_not_offload_does_not_start(
    cluster: MooncakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_ENABLE_SSD_OFFLOAD", "1")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", str(tmp_path))
    node = cluster.nodes[0]
    other = type(node)(cluster.master, tmp_path, segment_bytes=16 << 20, name="other")
    with pytest.raises(RuntimeError, match="other ended with status 1"):
        other.start()
    assert "start mooncake_master with --enable_offload=true" in other.log_tail()
