"""The device comes before what needs a device context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.distributed import device_context
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_context import (
    mark_device_set,
    require_device_set,
)
from sglang.srt.hardware_backend import device_runtime
from sglang.srt.mem_cache.storage.mooncake_store import base_store
from sglang.srt.mem_cache.storage.mooncake_store.config import MooncakeStoreConfig
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has set no device, on a host with an NPU."""
    monkeypatch.setattr(device_context, "_device", None)
    monkeypatch.setattr(device_runtime, "detect_device", lambda: "npu")


class RecordingDevice:
    """A device module that notes when it was made current."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def set_device(self, device: str) -> None:
        self._calls.append(f"set_device {device}")
        mark_device_set(device)


def test_what_comes_before_the_device_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"The engine was started before .*107002"):
        require_device_set("The engine")


def test_a_host_with_only_a_cpu_needs_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runtime, "detect_device", lambda: "cpu")
    assert require_device_set("The engine") == "cpu"
    mark_device_set("cuda:1")
    assert require_device_set("The engine") == "cuda:1"


def test_what_comes_after_it_gets_it() -> None:
    calls: list[str] = []
    RecordingDevice(calls).set_device("npu:3")
    assert require_device_set("The engine") == "npu:3"
    assert calls == ["set_device npu:3"]


def test_marking_again_changes_nothing_and_another_device_is_refused() -> None:
    mark_device_set("cuda:1")
    mark_device_set("cuda:1")
    with pytest.raises(RuntimeError, match="is cuda:1 already; it cannot become cuda:0"):
        mark_device_set("cuda:0")
    assert require_device_set("x") == "cuda:1"


def test_a_cpu_takes_no_device_away_and_gives_way_to_one() -> None:
    for device in ("cpu", "npu:3", "cpu"):
        mark_device_set(device)
    assert require_device_set("x") == "npu:3"
    with pytest.raises(ValueError, match="device 'tpu' is not supported"):
        mark_device_set("tpu")


def test_the_engine_and_the_store_do_nothing_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: object, **kwargs: object) -> Any:
        raise AssertionError("the library was reached before the device was set")

    monkeypatch.setattr(base_store, "settle_protocol", touched)
    monkeypatch.setattr(base_store, "MooncakeClient", touched)
    config = MooncakeStoreConfig.load_from_extra_config(
        {"master_server_address": "127.0.0.1:1", "protocol": "tcp"}
    )
    starts: tuple[Callable[[], object], ...] = (
        lambda: base_store.MooncakeBaseStore(config),
        lambda: MooncakeTransferEngine("127.0.0.1", new_engine=touched),
    )
    for start in starts:
        with pytest.raises(RuntimeError, match="before a device was set"):
            start()
