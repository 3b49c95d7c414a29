"""NIXL's library: what is missing is named, its settings, and agents over a library of a test."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, Final

import pytest

from sglang.srt.distributed.device_communicators import nixl_library
from sglang.srt.distributed.device_communicators.nixl_library import (
    NixlAgent,
    RemoteFailed,
    UnknownRemoteRange,
    export_ucx_settings,
    load_nixl,
)
from sglang.srt.distributed.device_communicators.transfer_types import Request
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

HERE: Final = 0x1000
THERE: Final = 0x9000


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        logging.raiseExceptions = False
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ValueError, match=r"transfer-backend nixl: .*'nixl_cu13'.*extra nixl"):
        load_nixl()
    assert logging.raiseExceptions, "NIXL unsets it for the whole process"


@pytest.mark.parametrize(("plugins", "said"), [(["POSIX"], "has POSIX"), ([], "has none")])
def test_a_missing_plugin_is_named(
    monkeypatch: pytest.MonkeyPatch, plugins: list[str], said: str
) -> None:
    def nixl_agent(name: str, config: object) -> object:
        if not plugins:
            raise RuntimeError("No plugins available for NIXL, cannot start transfers!")
        return types.SimpleNamespace(get_plugin_list=lambda: plugins)

    with pytest.raises(ValueError, match=f"plugin UCX is missing, it {said}: .*NIXL_PLUGIN_DIR"):
        NixlAgent(library_of(nixl_agent, monkeypatch), "agent")


def library_of(
    nixl_agent: Callable[[str, object], object], monkeypatch: pytest.MonkeyPatch
) -> types.ModuleType:
    """NIXL with these agents."""
    library = types.ModuleType("some_nixl")
    library.__dict__.update(
        nixl_agent=nixl_agent,
        nixl_agent_config=lambda **_: None,
        nixl_thread_sync_t=types.SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1),
    )
    library.__path__ = []
    monkeypatch.setitem(sys.modules, "some_nixl", library)
    bindings = types.ModuleType("some_nixl._bindings")
    bindings.__dict__["nixlNotFoundError"] = nixlNotFoundError
    monkeypatch.setitem(sys.modules, "some_nixl._bindings", bindings)
    return library


class nixlInvalidParamError(Exception):
    pass


class nixlNotFoundError(Exception):
    pass


class Handle:
    """A read."""

    def __init__(self, addresses: list[int]) -> None:
        self.addresses = addresses
        self.num_released = 0
        self._agent: object = self

    def release(self) -> None:
        assert self._agent is self, "NIXL asks the agent"
        self.num_released += 1


def test_an_agent_lets_go_of_its_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[Handle] = []
    states = iter(["PROC", "DONE", "ERR"])
    done: list[object] = []

    def initialize_xfer(kind: str, own: list[int], theirs: list[int], peer: str) -> Handle:
        if peer != "there":
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        handles.append(Handle([*own, *theirs]))
        return handles[-1]

    raw = types.SimpleNamespace(
        agent=object(),
        get_plugin_list=lambda: ["UCX"],
        create_backend=lambda name, settings: None,
        get_xfer_descs=lambda rows, kind: rows[:, 0].tolist(),
        initialize_xfer=initialize_xfer,
        transfer=done.append,
        check_xfer_state=lambda handle: next(states),
        get_new_notifs=lambda: done.append("progress"),
    )
    agent = NixlAgent(library_of(lambda name, config: raw, monkeypatch), "agent")
    requests = [Request(HERE, THERE, 16, 0, 1)]
    first, second = (agent.begin_read("there", requests) for _ in range(2))
    assert [one.addresses for one in handles] == [[HERE, THERE]] * 2 and done == handles
    assert not agent.is_read(first) and agent.is_read(first)
    assert [one.num_released for one in handles] == [1, 0]
    with pytest.raises(RemoteFailed, match="the read failed"):
        agent.is_read(second)
    with pytest.raises(UnknownRemoteRange, match="NOT_FOUND"):
        agent.begin_read("nowhere", requests)
    agent.progress()
    assert done[2:] == ["progress"]
    agent.end()
    assert [one.num_released for one in handles] == [1, 1]
    assert raw.agent is handles[1]._agent is None, "a traceback may hold them"


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (nixlInvalidParamError("NIXL_ERR_BACKEND"), RuntimeError, r"start \(NIXL_ERR.*DEVICES=lo"),
        (OSError("no memory"), OSError, "^no memory$"),
    ],
)
def test_a_transport_that_does_not_start_names_its_settings(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], words: str
) -> None:
    def create_backend(name: str, settings: object) -> None:
        raise error

    agent = types.SimpleNamespace(get_plugin_list=lambda: ["UCX"], create_backend=create_backend)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with pytest.raises(raised, match=words):
        NixlAgent(library_of(lambda name, config: agent, monkeypatch), "agent")


def test_memory_that_nixl_refuses_in_part_is_not_registered() -> None:
    known: set[int] = set()

    def register_memory(rows: list[tuple[int, int, int, str]], kind: str) -> int:
        ((address, *_),) = rows
        if address == THERE:
            raise nixlInvalidParamError("NIXL_ERR_INVALID_PARAM")
        known.add(address)
        return address

    agent = NixlAgent.__new__(NixlAgent)
    agent._registered = {}
    agent._raw = types.SimpleNamespace(
        register_memory=register_memory, deregister_memory=known.remove
    )
    with pytest.raises(RuntimeError, match=r"refused to register 8 bytes \(NIXL_ERR_INVALID"):
        agent.register({HERE: 16, THERE: 8})
    assert not known and not agent._registered


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in (
        envs.UCX_NET_DEVICES,
        envs.UCX_MODULES,
        envs.UCX_PROTO_EMULATION_ENABLE,
        envs.UCX_LOG_LEVEL,
    ):
        monkeypatch.setenv(field.name, "")
        monkeypatch.delenv(field.name)


@pytest.mark.usefixtures("unset")
def test_ucx_listens_at_one_address_and_emulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [types.SimpleNamespace(name="mlx5_0"), types.SimpleNamespace(name="mlx5_1")]
    monkeypatch.setattr(nixl_library, "list_rdma_devices", list)
    export_ucx_settings("127.0.0.1", None)
    assert envs.UCX_NET_DEVICES.get() == "lo"
    assert envs.UCX_PROTO_EMULATION_ENABLE.get() == "n"
    assert envs.UCX_MODULES.get() == "^ib,rdmacm"
    monkeypatch.delenv("UCX_NET_DEVICES")
    monkeypatch.delenv("UCX_MODULES")
    monkeypatch.setattr(nixl_library, "list_rdma_devices", lambda: devices)
    export_ucx_settings("127.0.0.1", None)
    assert envs.UCX_NET_DEVICES.get() == "lo,mlx5_0:1,mlx5_1:1"
    assert not envs.UCX_MODULES.is_set()
    export_ucx_settings("127.0.0.1", "mlx5_1")
    assert envs.UCX_NET_DEVICES.get() == "lo,mlx5_0:1,mlx5_1:1", "an operator's choice stays"
    monkeypatch.delenv("UCX_NET_DEVICES")
    export_ucx_settings("127.0.0.1", "mlx5_1")
    assert envs.UCX_NET_DEVICES.get() == "lo,mlx5_1:1"
    with pytest.raises(ValueError, match="--disaggregation-ib-device has devices by GPU"):
        export_ucx_settings("127.0.0.1", '{"0": "mlx5_1"}')
