"""The Mooncake cluster that other tests use: real master, real nodes, real client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.embedded_mooncake import ChildStartError, MooncakeMaster
from sglang.srt.environ import envs
from sglang.srt.utils.network import can_connect, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-b-test-cpu")

NODE_BYTES = 64 << 20


@pytest.fixture
def cluster() -> Iterator[MooncakeCluster]:
    with MooncakeCluster(
        num_nodes=2, segment_size="64mb", master_flags={"default_kv_lease_ttl": 500}
    ) as running:
        yield running


@pytest.fixture
def client(cluster: MooncakeCluster) -> Iterator[Any]:
    from mooncake.store import MooncakeDistributedStore

    env = cluster.engine_env()
    store = MooncakeDistributedStore()
    status = store.setup(
        {
            "local_hostname": env["MOONCAKE_LOCAL_HOSTNAME"],
            "metadata_server": env["MOONCAKE_TE_META_DATA_SERVER"],
            "global_segment_size": int(env["MOONCAKE_GLOBAL_SEGMENT_SIZE"]),
            "local_buffer_size": envs.MOONCAKE_LOCAL_BUFFER_SIZE.default,
            "protocol": env["MOONCAKE_PROTOCOL"],
            "rdma_devices": "",
            "master_server_addr": env["MOONCAKE_MASTER"],
        }
    )
    assert status == 0
    yield store
    store.close()


def test_the_nodes_hold_the_objects(cluster: MooncakeCluster, client: Any) -> None:
    assert cluster.capacity_bytes() == 2 * NODE_BYTES
    assert client.put("ns/page/kv", b"x" * 1000) == 0
    assert client.get("ns/page/kv") == b"x" * 1000
    assert cluster.master.keys() == ["ns/page/kv"]


def test_a_restarted_node_is_empty(cluster: MooncakeCluster, client: Any) -> None:
    node = cluster.nodes[0]
    node.stop()
    assert not node.is_running()
    assert wait_until(lambda: cluster.capacity_bytes() == NODE_BYTES, 60)
    node.start()
    assert wait_until(lambda: cluster.capacity_bytes() == 2 * NODE_BYTES, 60)
    assert client.put("after", b"y") == 0


def test_a_restarted_master_has_the_same_address_and_no_objects(
    cluster: MooncakeCluster, client: Any
) -> None:
    assert client.put("gone", b"z") == 0
    address = cluster.master.address
    cluster.master.kill()
    assert not can_connect("127.0.0.1", cluster.master.rpc_port)
    cluster.master.start()
    assert cluster.master.address == address
    assert cluster.master.keys() == []


def test_no_process_or_log_is_left_after_the_block() -> None:
    with MooncakeCluster(num_nodes=1, segment_size="16mb") as cluster:
        processes = [cluster.master, *cluster.nodes]
        log_dir = cluster.log_dir
        cluster.nodes[0].suspend()  # A stopped process must end too.
        assert all(process.is_running() for process in processes)
    assert not any(process.is_running() for process in processes)
    assert not log_dir.exists()


def test_a_failed_start_reports_the_cause_and_leaves_no_process(tmp_path: Path) -> None:
    with MooncakeCluster(num_nodes=0) as cluster:
        second = MooncakeMaster(tmp_path, rpc_port=cluster.master.rpc_port, flags={"bogus": 1})
        with pytest.raises(ChildStartError, match=r"mooncake_master ended .*bogus"):
            second.start()
        assert not second.is_running()
