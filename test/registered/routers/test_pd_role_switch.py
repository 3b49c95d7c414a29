"""Two real servers behind the real router swap their roles, and answer as before."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from rigs.disaggregation.pd_servers import TCP, decode_server, prefill_server, router
from rigs.servers.engine_server import EngineServer
from sglang.srt.environ import envs
from sglang.srt.utils.network import get_free_port, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-b-test-cpu")

TEXT = "The code of heron is 7391. The code of otter is 0042. " * 8
FLAGS = ("--enable-pd-role-switch", "--enable-metrics", "--enable-hierarchical-cache",
         "--hicache-ratio", "2")  # fmt: skip


@dataclass
class Worker:
    server: EngineServer
    bootstrap_port: int
    role: str

    def switch(self, role: str) -> None:
        reply = self.server.request("POST", "/pd_role_switch", {"new_role": role}, admin=True)
        assert reply.status == 200, reply.body
        assert reply.body["seconds"] < 2
        self.role = role


@dataclass
class Deployment:
    """A router and its workers."""

    url: str
    workers: list[Worker]

    def generate(self, **fields: Any) -> Any:
        params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        body = {"text": TEXT, "sampling_params": params, **fields}
        reply = httpx.post(f"{self.url}/generate", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def known(self) -> list[Any]:
        return list(httpx.get(f"{self.url}/workers", timeout=20).json()["workers"])

    def swap(self) -> None:
        """Change all roles, as docs/pd.md says it."""
        for one in self.known():
            httpx.delete(f"{self.url}/workers/{one['id']}", timeout=20).raise_for_status()
        assert wait_until(lambda: not self.known(), 30)
        for worker in self.workers:
            worker.switch("decode" if worker.role == "prefill" else "prefill")
            body: dict[str, Any] = {"url": worker.server.url, "worker_type": worker.role}
            if worker.role == "prefill":
                body |= {"bootstrap_port": worker.bootstrap_port}
            httpx.post(f"{self.url}/workers", json=body, timeout=20).raise_for_status()
        assert wait_until(lambda: sum(one["is_healthy"] for one in self.known()) == 2, 60)


def settings(worker: Worker) -> dict[str, Any]:
    """Arguments and limits of a server."""
    info = worker.server.request("GET", "/server_info").body
    changing = ("internal_states", "sums", "routes", "transfer_engine")
    return {name: value for name, value in info.items() if name not in changing}


@pytest.fixture(params=[1, 2], ids=["TP1", "TP2"])
def deployment(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    env = {**TCP, envs.SGLANG_DISAGGREGATION_SECRET.name: secrets.token_hex(32)}
    flags: Sequence[str] = (*FLAGS, "--tp-size", str(request.param))
    prefill, port = prefill_server(*flags, env=env)
    other = get_free_port()
    decode = decode_server(*flags, "--disaggregation-bootstrap-port", str(other), env=env)
    with ExitStack() as stack:
        for server in (prefill, decode):
            stack.enter_context(server)
        url = stack.enter_context(router([(prefill, port)], [decode]))
        workers = [Worker(prefill, port, "prefill"), Worker(decode, other, "decode")]
        yield Deployment(url, workers)


def test_a_pair_swaps_its_roles(deployment: Deployment) -> None:
    before = [settings(worker) for worker in deployment.workers]
    first = deployment.generate()
    assert first["meta_info"]["cached_tokens"] == 0
    for _ in range(2):
        deployment.swap()
        again = deployment.generate()
        assert again["output_ids"] == first["output_ids"]
        # Its caches came along: the decode server of before had read the prompt.
        assert again["meta_info"]["cached_tokens"] > 100
        for worker in deployment.workers:
            state = worker.server.request("GET", "/server_info").body
            assert state["disaggregation_mode"] == worker.role
            assert state["internal_states"][0]["server_args"]["disaggregation_mode"] == worker.role
            roles = {"prefill": 0.0, "decode": 0.0, worker.role: 1.0}
            metrics = worker.server.metrics()
            assert metrics[f'sglang:pd_role{{role="{worker.role}"}}'] == roles[worker.role]
            view = httpx.get(
                f"{worker.server.url}/hicache",
                headers={"Accept": "application/json", "Authorization": "Bearer test-admin-key"},
            ).json()
            assert view["disaggregation_mode"] == worker.role
    # All else is as it was: the parsers that fit the chat template, for one.
    assert [settings(worker) for worker in deployment.workers] == before
    for worker in deployment.workers:
        log = worker.server.process.log_path.read_text()
        assert "graphs of both roles: none" in log
        assert "this is a decode server now, and was a prefill server" in log
