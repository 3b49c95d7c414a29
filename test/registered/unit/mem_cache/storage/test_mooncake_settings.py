"""Mooncake's tenants, tags, groups and folders on disk, without a master."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rigs.stores.host_pools import storage_config
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.arg_groups.extra_config import check_extra_config_keys
from sglang.srt.mem_cache.hicache_storage import StorageUnreachable
from sglang.srt.mem_cache.storage.mooncake_store.config import check_reachable
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import (
    MooncakeStore,
    MooncakeStoreConfig,
)
from sglang.srt.mem_cache.storage.mooncake_store.offload_folder import claim_folder
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")
pytestmark = pytest.mark.usefixtures("clean_environment")


def test_tenants_tags_and_groups_have_defaults_and_follow_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "h:1")
    plain = MooncakeStoreConfig.load_from_env()
    assert (plain.tenant_id, plain.extra_backend_tag) == ("default", "")
    assert plain.enable_group_semantics and not plain.enable_ssd_offload and not plain.has_tenant
    monkeypatch.setenv("MOONCAKE_TENANT_ID", "alice")
    extra: dict[str, object] = {"extra_backend_tag": "blue", "enable_group_semantics": False}
    check_extra_config_keys("mooncake", extra | {"tenant_id": "", "ssd_offload_path": "/x"})
    config = MooncakeStoreConfig.load_from_extra_config(extra)
    assert (config.tenant_id, config.extra_backend_tag) == ("alice", "blue")
    assert config.has_tenant and not config.enable_group_semantics
    own = MooncakeStoreConfig.load_from_extra_config({"tenant_id": "bob"})
    assert own.tenant_id == "bob"


@pytest.mark.parametrize(("segment", "refused"), [("4gb", True), ("0", False)])
def test_only_memory_that_an_engine_lends_may_not_go_to_disk(
    monkeypatch: pytest.MonkeyPatch, segment: str, refused: bool
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    monkeypatch.setenv("MOONCAKE_ENABLE_SSD_OFFLOAD", "1")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "/ssd")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", segment)
    config = MooncakeStoreConfig.load_from_env()
    assert config.offloads is refused
    wanted = "enable_ssd_offload .*only store nodes" if refused else "no mooncake_master"
    with pytest.raises((ValueError, StorageUnreachable), match=wanted):
        MooncakeStore(storage_config())
    attached = dataclasses.replace(
        config, standalone_storage=True, client_server_address="127.0.0.1:2"
    )
    assert not attached.offloads


def test_each_client_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    parent = tmp_path / "ssd"
    script = (
        "import sys\n"
        "from sglang.srt.mem_cache.storage.mooncake_store.offload_folder import claim_folder\n"
        "print(claim_folder(sys.argv[1]).name, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(parent)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "client_0\n"
        assert [claim_folder(str(parent)).name for _ in range(2)] == ["client_1", "client_2"]
        other.communicate("")
    assert claim_folder(str(parent)).name == "client_0"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"ssd_offload_path .*: cannot use .*: Not a directory"):
        claim_folder(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("server", "addresses"),
    [
        ("P2PHANDSHAKE", []),
        ("http://10.0.0.1:8080/metadata", [("10.0.0.1", 8080)]),
        ("http://meta/metadata", [("meta", 80)]),
        ("etcd://a:1,b;[::1]:3", [("a", 1), ("b", 2379), ("::1", 3)]),
        ("redis://[::1]", [("::1", 6379)]),
        ("10.0.0.1:2379", [("10.0.0.1", 2379)]),
    ],
)
def test_metadata_servers_have_addresses(
    monkeypatch: pytest.MonkeyPatch, server: str, addresses: list[tuple[str, int]]
) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "h:1")
    config = MooncakeStoreConfig.load_from_extra_config({"metadata_server": server})
    assert config.metadata_host_ports() == addresses
    attached = dataclasses.replace(config, standalone_storage=True, client_server_address="h:2")
    assert attached.metadata_host_ports() == []


def test_a_metadata_server_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "h:1")
    for wrong in ("P2PHANDSHAK", "http://:80/metadata", "http://h:x", ""):
        with pytest.raises(ValueError, match=r"^MOONCAKE_TE_META_DATA_SERVER \(metadata_server\)"):
            MooncakeStoreConfig.load_from_extra_config({"metadata_server": wrong})


def test_a_metadata_server_out_of_reach_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake tries for eleven seconds, and its error has a number alone."""
    with socket.create_server((LOOPBACK, 0)) as master:
        monkeypatch.setenv("MOONCAKE_MASTER", f"{LOOPBACK}:{master.getsockname()[1]}")
        monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
        closed = f"{LOOPBACK}:{get_free_port()}"
        monkeypatch.setenv("MOONCAKE_TE_META_DATA_SERVER", f"http://{closed}/metadata")
        named = rf"MOONCAKE_TE_META_DATA_SERVER \(metadata_server\)=http://{closed}/metadata: start"
        with pytest.raises(StorageUnreachable, match=named):
            MooncakeStore(storage_config())
        config = MooncakeStoreConfig.load_from_env()
        open_too = f"etcd://{closed},{LOOPBACK}:{master.getsockname()[1]}"
        check_reachable(dataclasses.replace(config, metadata_server=open_too))
