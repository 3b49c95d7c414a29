"""Mooncake without a master: settings, protocol, return codes, the factory."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs.stores.host_pools import make_device_pool, make_host_pool, storage_config
from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    SUPPORTED_PROTOCOLS,
    RdmaDevice,
    choose_devices,
    list_rdma_devices,
    protocols_without_class,
    resolve_mooncake_protocol,
    wheel_protocols,
)
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    CacheOutcome,
    HiCacheFile,
    HiCacheStorage,
    StorageUnavailable,
    StorageUnreachable,
)
from sglang.srt.mem_cache.l3.store_connection import demands_on_host_pools
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.storage.mooncake_store import base_store
from sglang.srt.mem_cache.storage.mooncake_store import config as config_checks
from sglang.srt.mem_cache.storage.mooncake_store.client import get_outcome, set_outcome
from sglang.srt.mem_cache.storage.mooncake_store.config import settle_protocol
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import (
    MooncakeHostTensorAllocator,
    MooncakeStore,
    MooncakeStoreConfig,
)
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
pytestmark = pytest.mark.usefixtures("clean_environment")


# -- settings ------------------------------------------------------------------------------------


def test_extra_config_wins_over_file_and_file_over_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"protocol": "efa", "device_name": "file", "typo": 1}))
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(path))
    monkeypatch.setenv("MOONCAKE_MASTER", "env:1")
    monkeypatch.setenv("MOONCAKE_DEVICE", "env")
    extra = {"protocol": "tcp", "global_segment_size": "512mb", "prefetch_threshold": 64}
    config = MooncakeStoreConfig.load_from_extra_config(extra)
    assert (config.protocol, config.device_name) == ("tcp", "file")
    assert config.master_host_port() == ("env", 1)
    assert config.global_segment_size == 512 << 20
    assert MooncakeStoreConfig.from_file().protocol == "efa"
    alone = MooncakeStoreConfig.load_from_env()
    assert (alone.protocol, alone.device_name, alone.global_segment_size) == (
        "rdma",
        "env",
        4 << 30,
    )


def test_the_address_of_a_client_selects_stand_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for none in (demands_on_host_pools(None, None), demands_on_host_pools("file", "{}")):
        assert none == ("default", False)
    monkeypatch.setenv("MOONCAKE_MASTER", "h:1")
    assert demands_on_host_pools("mooncake", None) == ("default", False)
    monkeypatch.setenv("MOONCAKE_CLIENT", "h:2")
    config = MooncakeStoreConfig.load_from_env()
    assert config.standalone_storage and config.client_host_port() == ("h", 2)
    assert demands_on_host_pools("mooncake", None) == ("mooncake", False)
    assert demands_on_host_pools("mooncake", '{"standalone_storage": false}') == ("default", False)
    monkeypatch.setenv("MOONCAKE_STANDALONE_STORAGE", "0")
    assert demands_on_host_pools("mooncake", None) == ("default", False)
    assert demands_on_host_pools("mooncake", '{"standalone_storage": true}') == ("mooncake", False)
    monkeypatch.setenv("MOONCAKE_STANDALONE_STORAGE", "1")
    assert demands_on_host_pools("mooncake", None) == ("mooncake", False)
    monkeypatch.delenv("MOONCAKE_CLIENT")
    with pytest.raises(ValueError, match="no mooncake_client to attach to; set MOONCAKE_CLIENT"):
        MooncakeStoreConfig.load_from_env()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"master_server_address": ""}, "MOONCAKE_MASTER=host:port"),
        ({"master_server_address": "host"}, "must be host:port"),
        ({"master_server_address": "host:99999"}, "must be host:port"),
        ({"global_segment_size": "many"}, "global_segment_size"),
        ({"global_segment_size": -1}, "global_segment_size"),
        ({"global_segment_size": True}, "global_segment_size"),
        ({"global_segment_size": 1}, "MOONCAKE_GLOBAL_SEGMENT_SIZE .*16777216 bytes, not 1: give"),
        ({"global_segment_size": (16 << 20) - 1}, "not 16777215: give 16mb or more, or 0 where"),
        ({"check_server": "yes"}, "check_server"),
        ({"protocol": 3}, "protocol"),
        ({"master_metrics_port": "x"}, "master_metrics_port"),
        ({"standalone_storage": True}, "standalone_storage.*MOONCAKE_CLIENT=host:port"),
        ({"client_server_address": "here"}, "MOONCAKE_CLIENT.*'here'.*must be host:port"),
        ({"enable_ssd_offload": True}, "enable_ssd_offload: set ssd_offload_path .MOONCAKE_OFF"),
        ({"enable_group_semantics": 1}, "enable_group_semantics: true or false, not 1"),
        ({"tenant_id": "a/b"}, "tenant_id: 'a/b' is not 1 to 64 letters"),
        ({"extra_backend_tag": "x" * 65}, "extra_backend_tag: 'x.*' is not 1 to 64 letters"),
        (
            {"tenant_id": "alice", "client_server_address": "h:2"},
            "tenant_id: a mooncake_client keeps no tenants apart; unset MOONCAKE_CLIENT",
        ),
    ],
)
def test_malformed_settings_are_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MooncakeStoreConfig.load_from_extra_config({"master_server_address": "h:1"} | extra)


@pytest.mark.parametrize(
    "extra",
    [
        {"global_segment_size": 0},
        {"global_segment_size": "16mb"},
        {"global_segment_size": 1, "client_server_address": "h:2"},
    ],
)
def test_segments_that_mooncake_accepts_or_that_are_not_lent_pass(extra: dict[str, Any]) -> None:
    MooncakeStoreConfig.load_from_extra_config({"master_server_address": "h:1"} | extra)


@pytest.mark.parametrize("text", ["[1]", "{", None])
def test_a_bad_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    path = tmp_path / "mooncake.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="SGLANG_HICACHE_MOONCAKE_CONFIG_PATH is not set"):
        MooncakeStoreConfig.from_file()
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(path))
    with pytest.raises(ValueError, match=r"mooncake\.json"):
        MooncakeStoreConfig.from_file()


# -- protocol ------------------------------------------------------------------------------------


MLX, EFA = RdmaDevice("mlx5_0", "mlx5_core"), RdmaDevice("rdmap0s6", "efa")


def resolve(name: str, devices: Sequence[RdmaDevice] = (), **kwargs: Any) -> str:
    defaults: dict[str, Any] = {"allow_tcp_fallback": False}
    return resolve_mooncake_protocol(name, devices=devices, **(defaults | kwargs))


def refused(name: str, devices: Sequence[RdmaDevice] = (), **kwargs: Any) -> str:
    with pytest.raises(ValueError, match=r"^MOONCAKE_PROTOCOL=") as raised:
        resolve(name, devices, **kwargs)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_unknown_protocols_are_refused_with_a_remedy() -> None:
    assert resolve("tcp") == resolve("tcp", [EFA]) == "tcp"
    assert resolve("rdma", allow_tcp_fallback=True) == "tcp"
    assert "set MOONCAKE_PROTOCOL=tcp" in refused("rdma")
    assert "'bogus' is unknown; use one of: rdma, tcp" in refused("bogus", allow_tcp_fallback=True)
    assert refused("rmda").endswith("did you mean rdma?")
    assert "built without it; it has: rdma, tcp" in refused("efa", supported={"tcp", "rdma"})
    for known_to_mooncake in ("cxl", "hip", "ub", "nvmeof", "rdma_twosided"):
        message = refused(known_to_mooncake)
        assert "this engine does not support it; use one of: rdma, tcp" in message
        assert "unknown" not in message


def test_rdma_and_efa_use_different_devices() -> None:
    """Mooncake takes EFA's devices for RDMA devices, and then fails to create a queue pair."""
    assert resolve("rdma", [MLX]) == resolve("rdma", [EFA, MLX]) == "rdma"
    assert resolve("efa", [EFA]) == resolve("efa", [EFA, MLX]) == "efa"
    for fallback in (False, True):
        message = refused("rdma", [EFA], allow_tcp_fallback=fallback)
        assert "rdmap0s6" in message and "set MOONCAKE_PROTOCOL=efa" in message
    assert "no EFA device: set MOONCAKE_PROTOCOL=tcp" in refused("efa")
    assert "set MOONCAKE_PROTOCOL=rdma, which mlx5_0 can do" in refused("efa", [MLX])


def test_devices_of_a_host_are_listed(tmp_path: Path) -> None:
    assert list_rdma_devices(tmp_path / "absent") == []
    for name, driver in (("rdmap0s6", "efa"), ("mlx5_0", "mlx5_core")):
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "class" / name / "device").mkdir(parents=True)
        link = tmp_path / "class" / name / "device" / "driver"
        link.symlink_to(tmp_path / "drivers" / driver)
    (tmp_path / "class" / "rxe0").mkdir()
    found = list_rdma_devices(tmp_path / "class")
    assert found == [MLX, EFA, RdmaDevice("rxe0", "")]


def test_devices_are_chosen_by_name() -> None:
    def chosen(names: str | None, *devices: RdmaDevice) -> list[RdmaDevice]:
        return choose_devices(names, devices, field="MOONCAKE_DEVICE")

    assert chosen(None, MLX, EFA) == chosen("", MLX, EFA) == [MLX, EFA]
    assert chosen("rdmap0s6, mlx5_0", MLX, EFA) == [EFA, MLX]
    for names in ("mlx5_9", "mlx5_0,mlx5_9"):
        wanted = "^MOONCAKE_DEVICE names mlx5_9, which this host does not have; it has: mlx5_0$"
        with pytest.raises(ValueError, match=wanted):
            chosen(names, MLX)
    assert chosen("mlx5_9") == []


def test_a_wheel_is_known_by_its_classes(tmp_path: Path) -> None:
    """Wheels have the names of protocols in their messages, whether they have them or not."""
    wheels = {
        "cpu": {"engine.so": b"barex ascend Set USE BAREX while barex not compiled"},
        "barex": {"engine.so": b"N8mooncake14BarexTransportE"},
        "npu": {"engine.so": b"", "ascend_transport.so": b"N8mooncake21AscendDirectTransportE"},
        "hccl": {"engine.so": b"N8mooncake13HcclTransportE"},
        "none": {},
    }
    lacking: dict[str, set[str]] = {}
    for name, libraries in wheels.items():
        (tmp_path / name).mkdir()
        for library, content in libraries.items():
            (tmp_path / name / library).write_bytes(content)
        lacking[name] = set(protocols_without_class(tmp_path / name))
    both = {"ascend", "barex"}
    assert lacking == {
        "cpu": both,
        "barex": {"ascend"},
        "npu": {"barex"},
        "hccl": {"barex"},
        "none": both,
    }
    assert {"rdma", "tcp"} <= wheel_protocols()
    assert "barex" not in wheel_protocols(), "no published wheel has it"


def test_barex_needs_an_rdma_device() -> None:
    erdma = RdmaDevice("erdma_0", "erdma")
    assert resolve("barex", [MLX]) == resolve("barex", [EFA, erdma]) == "barex"
    assert "no eRDMA or RDMA device: set MOONCAKE_PROTOCOL=tcp" in refused("barex")
    assert "rdmap0s6" in refused("barex", [EFA])
    assert "set MOONCAKE_PROTOCOL=tcp" in refused("barex", allow_tcp_fallback=True)


# -- protocol of a store -------------------------------------------------------------------------


MLX_1 = RdmaDevice("mlx5_1", "mlx5_core")
BY_GPU = '{"0": "mlx5_0", "1": "mlx5_1"}'


@pytest.fixture
def rdma_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two devices, on which a fallback to TCP is allowed."""
    monkeypatch.setattr(config_checks, "list_rdma_devices", lambda: [MLX, MLX_1])
    monkeypatch.setenv("SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK", "1")


def settle(device: str = "cuda:1", *, rank: int | None = None, **extra: Any) -> tuple[str, str]:
    extra = {"master_server_address": "127.0.0.1:1", "protocol": "rdma"} | extra
    return settle_protocol(MooncakeStoreConfig.load_from_extra_config(extra), device, rank)


@pytest.mark.usefixtures("rdma_host")
def test_a_store_uses_the_devices_of_its_gpu(tmp_path: Path) -> None:
    assert settle() == ("rdma", "")
    assert settle("cpu", device_name="mlx5_1, mlx5_0") == ("rdma", "mlx5_1,mlx5_0")
    (tmp_path / "x.json").write_text(BY_GPU)
    for config in (BY_GPU, str(tmp_path / "x.json")):
        assert settle("cuda:0", device_name=config) == ("rdma", "mlx5_0")
        assert settle("cuda:1", device_name=config) == ("rdma", "mlx5_1")
        assert settle("cpu", device_name=config, protocol="tcp") == ("tcp", "")
        with pytest.raises(ValueError, match=r"^MOONCAKE_DEVICE \(device_name\) has no devices"):
            settle("cuda:2", device_name=config)
        with pytest.raises(ValueError, match=r"this process has none: use a list"):
            settle("cpu", device_name=config)


@pytest.mark.usefixtures("rdma_host")
def test_devices_may_be_an_object_and_of_ranks_without_a_gpu() -> None:
    names = json.loads(BY_GPU)
    assert settle("cuda:1", device_name=names) == ("rdma", "mlx5_1")
    assert settle("cuda:1", rank=0, device_name={0: "mlx5_0", 1: "mlx5_1"}) == ("rdma", "mlx5_1")
    assert settle("cpu", rank=1, device_name=names) == ("rdma", "mlx5_1")
    with pytest.raises(ValueError, match=r"^MOONCAKE_DEVICE \(device_name\) .*5 is not a GPU"):
        settle(device_name={"0": 5})


@pytest.mark.usefixtures("rdma_host")
def test_a_store_has_the_devices_of_its_rank() -> None:
    config = storage_config(
        master_server_address="127.0.0.1:1", protocol="rdma", device_name={"0": "mlx5_0"}
    )
    with pytest.raises(StorageUnreachable, match="no mooncake_master answers"):
        MooncakeStore(replace(config, tp_rank=0, tp_size=2))
    with pytest.raises(ValueError, match="has no devices for GPU 1"):
        MooncakeStore(replace(config, tp_rank=1, tp_size=2))


@pytest.mark.usefixtures("rdma_host")
@pytest.mark.parametrize("names", ["mlx5_9", '{"0": "mlx5_0", "1": "mlx5_9"}'])
def test_a_misspelt_device_is_no_missing_one(names: str) -> None:
    with pytest.raises(ValueError, match=r"^MOONCAKE_DEVICE \(device_name\) names mlx5_9, which"):
        settle(device_name=names)


@pytest.mark.usefixtures("rdma_host")
def test_protocols_that_no_store_has_are_settings_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mooncake's own answer, code -1, would pass for a store that is not there."""
    monkeypatch.setattr(config_checks, "wheel_protocols", lambda: frozenset(SUPPORTED_PROTOCOLS))
    for protocol in ("barex", "nvlink", "nvlink_intra"):
        wanted = rf"mooncake cannot use MOONCAKE_PROTOCOL={protocol}: .*set protocol in .*rdma, tcp"
        with pytest.raises(ValueError, match=wanted):
            settle(protocol=protocol)
        attached = settle(protocol=protocol, client_server_address="127.0.0.1:2")
        assert attached == (protocol, ""), "pages reach the client through shared memory"
    with pytest.raises(ValueError, match=r"MOONCAKE_PROTOCOL=ascend connects NPUs.*on cuda:1: set"):
        settle(protocol="ascend")
    assert settle("npu:0", protocol="ascend") == ("ascend", "")


def test_a_store_without_the_wheel_s_transport_is_no_absent_store() -> None:
    """`wait` and `degrade` are for stores that are not there."""
    for protocol in ("ascend", "barex"):
        with pytest.raises(ValueError, match=f"MOONCAKE_PROTOCOL={protocol}") as raised:
            MooncakeStore(storage_config(master_server_address="127.0.0.1:1", protocol=protocol))
        assert not isinstance(raised.value, StorageUnavailable)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("requested", ["rdma", "tcp"])
def test_a_store_tells_its_transport(monkeypatch: pytest.MonkeyPatch, requested: str) -> None:
    monkeypatch.setattr(config_checks, "list_rdma_devices", list)
    monkeypatch.setenv("SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK", "1")
    monkeypatch.setattr(base_store, "MooncakeClient", lambda *args: None)
    store = MooncakeStore(storage_config(master_server_address="127.0.0.1:1", protocol=requested))
    assert store.describe_transport() == {
        "protocol": "tcp",
        "requested_protocol": requested,
        "is_fallback": requested == "rdma",
        "ib_device": "",
    }


def test_an_unreachable_master_is_reported_at_once() -> None:
    address = f"127.0.0.1:{get_free_port()}"
    started = time.monotonic()
    with pytest.raises(StorageUnreachable, match=f"MOONCAKE_MASTER={address}") as refused:
        MooncakeStore(storage_config(master_server_address=address, protocol="tcp"))
    assert time.monotonic() - started < 30, "Mooncake itself would try for longer"
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, StorageUnavailable)


def test_rdma_without_a_device_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_checks, "list_rdma_devices", list)
    with pytest.raises(ValueError, match="set MOONCAKE_PROTOCOL=tcp"):
        MooncakeStore(storage_config(master_server_address="127.0.0.1:1"))


@pytest.mark.parametrize(
    ("code", "get", "put"),
    [
        (100, "landed", "failed"),
        (99, "damaged", "failed"),
        (0, "damaged", "landed"),
        (-600, "damaged", "failed"),
        (-704, "miss", "failed"),
        (-705, "failed", "landed"),
        (-707, "miss", "failed"),
        (-200, "failed", "failed"),
        (-800, "failed", "failed"),
        (-900, "failed", "failed"),
    ],
)
def test_return_codes_become_outcomes(code: int, get: str, put: str) -> None:
    assert get_outcome(code, 100) is CacheOutcome(get)
    assert set_outcome(code) is CacheOutcome(put)


# -- memory --------------------------------------------------------------------------------------


def test_mooncake_memory_lives_as_long_as_its_views() -> None:
    tensor = MooncakeHostTensorAllocator().allocate((3, 5), torch.bfloat16)
    assert envs.MC_LOG_LEVEL.is_set(), "set before Mooncake is loaded"
    view = tensor[1:]
    view.fill_(2)
    del tensor
    assert view.sum() == 20
    with pytest.raises(ValueError, match="host memory only"):
        MooncakeHostTensorAllocator().allocate((1,), torch.uint8, device="cuda")


# -- factory -------------------------------------------------------------------------------------


class Minimal(HiCacheStorage):
    """A third-party backend that stores nothing."""

    def __init__(self, storage_config: object, **kwargs: object) -> None:
        self.kwargs = kwargs

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        return None

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def exists(self, key: str) -> bool:
        return False


def test_backends_are_made_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "l3"))
    host = make_host_pool(make_device_pool(), "page_first")
    store = StorageBackendFactory.create_backend("file", storage_config(), host)
    assert isinstance(store, HiCacheFile)
    assert (tmp_path / "l3").is_dir()
    assert store.pool("kv") is host
    wanted = r"'mooncaek': use one of: file, mooncake.*dynamic; did you mean mooncake\?"
    with pytest.raises(ValueError, match=wanted):
        StorageBackendFactory.create_backend("mooncaek", storage_config(), host)


def dynamic(**extra: Any) -> HiCacheStorage:
    host = make_host_pool(make_device_pool(), "page_first")
    config = storage_config(**extra)
    return StorageBackendFactory.create_backend("dynamic", config, host, depth=2)


def test_dynamic_backends_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(__file__).read_text()
    (tmp_path / "third_party.py").write_text(
        "from typing import Any\n"
        "from sglang.srt.mem_cache.hicache_storage import HiCacheStorage\n"
        + text[text.index("class Minimal") : text.index("def test_backends_are_made_by_name")]
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {"backend_name": "x", "module_path": "third_party", "class_name": "Minimal"}
    backend = dynamic(**names)
    assert type(backend).__name__ == "Minimal"
    assert backend.storage_config is not None
    assert vars(backend)["kwargs"] == {"depth": 2}
    for missing in names:
        with pytest.raises(ValueError, match=f"needs '{missing}'"):
            dynamic(**{name: value for name, value in names.items() if name != missing})
    for wrong in ({"module_path": "no.such"}, {"class_name": "Nope"}, {"class_name": "Any"}):
        with pytest.raises(ValueError, match="--hicache-storage-backend dynamic"):
            dynamic(**(names | wrong))


def test_a_name_is_registered_for_one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = dict(StorageBackendFactory._registry)
    monkeypatch.setattr(StorageBackendFactory, "_registry", registry)
    StorageBackendFactory.register_backend("mine", "my.module", "Mine")
    StorageBackendFactory.register_backend("mine", "my.module", "Mine")
    for name in ("mine", "file", "dynamic"):
        with pytest.raises(ValueError, match="is taken"):
            StorageBackendFactory.register_backend(name, "other.module", "Mine")
