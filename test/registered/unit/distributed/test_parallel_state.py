"""A world of one rank: made once, without a port that others reach, and left in silence."""

from __future__ import annotations

import atexit
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed as dist

from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import init_distributed_environment
from sglang.srt.distributed.rendezvous import Rendezvous
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_kinds import DEVICE_KINDS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")


def run(code: str) -> list[str]:
    """Lines printed by a new process, which must write nothing to stderr."""
    start = (
        "import psutil, torch, torch.distributed as dist\n"
        "from sglang.srt.distributed.parallel_state import init_distributed_environment\n"
    )
    command = [sys.executable, "-c", start + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_process_alone_is_a_world_that_listens_on_loopback_and_ends_in_silence() -> None:
    lines = run(
        "init_distributed_environment('gloo')\n"
        "ones = torch.ones(2); dist.all_reduce(ones)\n"
        "print(dist.get_backend(), dist.get_world_size(), dist.get_rank(), ones.tolist())\n"
        "for c in psutil.Process().net_connections('tcp'):\n"
        "    print(c.laddr.ip) if c.status == psutil.CONN_LISTEN else None\n"
    )
    assert lines[0] == "gloo 1 0 [1.0, 1.0]"
    assert set(lines[1:]) <= {"127.0.0.1"}


def test_a_world_that_is_there_is_left_alone() -> None:
    lines = run(
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "world = dist.group.WORLD\n"
        "init_distributed_environment('nccl')\n"
        "print(dist.group.WORLD is world, dist.get_backend())\n"
        "dist.destroy_process_group()\n"
    )
    assert lines == ["True gloo"]


@pytest.mark.parametrize("chosen", [None, "eth7"])
def test_each_kind_of_device_names_its_backend(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    calls: list[tuple[str, int, int, str | None]] = []

    def record(backend: str, *, store: Any, rank: int, world_size: int, timeout: Any) -> None:
        assert type(store).__name__ == "HashStore"
        calls.append((backend, rank, world_size, envs.GLOO_SOCKET_IFNAME.get()))

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", record)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    for kind in DEVICE_KINDS.values():
        init_distributed_environment(kind.process_group)
    interface = chosen or "lo"
    assert calls == [(name, 0, 1, interface) for name in ("nccl", "hccl", "gloo")]
    assert envs.GLOO_SOCKET_IFNAME.get() == chosen


@pytest.mark.parametrize(
    ("host", "chosen", "expected"),
    [
        (None, None, "=lo"),
        ("127.0.0.1", None, "=lo"),
        ("localhost", None, "=lo"),
        ("10.0.0.1", None, "=eth7"),
        ("127.0.0.1", "^docker", "^docker"),
        ("10.0.0.1", "ib0", "ib0"),
    ],
)
def test_nccl_is_steered_before_there_is_a_group_unless_the_user_has_steered_it(
    monkeypatch: pytest.MonkeyPatch, host: str | None, chosen: str | None, expected: str
) -> None:
    set_at_init: list[str | None] = []
    towards = {"10.0.0.1": "eth7"}
    # Set first, so that the test's end restores what `init_distributed_environment` sets.
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen or "")
    if chosen is None:
        envs.NCCL_SOCKET_IFNAME.clear()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(parallel_state, "_rendezvous_host", "127.0.0.1")
    monkeypatch.setattr(parallel_state, "interface_towards", lambda host: towards[host])
    monkeypatch.setattr(parallel_state, "make_store", lambda _: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *_, **__: set_at_init.append(envs.NCCL_SOCKET_IFNAME.get()),
    )
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    meeting = None if host is None else Rendezvous(rank=0, size=2, host=host, port=20_000)
    init_distributed_environment("nccl", meeting)
    assert set_at_init == [expected]
    assert envs.NCCL_SOCKET_IFNAME.get() == expected, "communicators are made later"
