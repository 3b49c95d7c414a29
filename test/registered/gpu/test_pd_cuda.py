"""Prefill and decode servers on GPUs: the words of one server, over TCP and over NVLink.

The tests over NVLink send metadata as messages, or keep it in rows on the GPUs and send no message.
Each server has its own GPU if there are two; else they share one. The requests go to both servers,
as the router sends them.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch

from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer
from sglang.serve_pd import count_gpus
from sglang.srt.disaggregation.common.metadata_reader import BadRow
from sglang.srt.disaggregation.utils import MetadataBuffers
from sglang.srt.distributed.device_communicators.mooncake_protocol import wheel_protocols
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.messages.first_token import FirstToken
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=120, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

INTRA_NODE: Final = "INTRA_NODE_NVLINK"
FLAGS: Final = (
    "--device", "cuda", "--mem-fraction-static", "0.2", "--page-size", "16", "--dtype", "float32",
    "--enable-metrics", "--chunked-prefill-size", "256", "--max-total-tokens", "16384",
)  # fmt: skip
LENGTHS: Final = (5, 16, 700, 1500, 40, 260, 900, 64)
rooms = itertools.count(1)


def body(seed: int, length: int, wanted: int) -> dict[str, Any]:
    return {
        "input_ids": prompt(seed, length, 2000),
        "sampling_params": {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True},
    }


def through_both(
    prefill: EngineServer, port: int, decode: EngineServer, request: dict[str, Any]
) -> list[int]:
    """The words that the decode server answers."""
    met = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": next(rooms)}
    with ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(server.request, "POST", "/generate", request | met)
            for server in (prefill, decode)
        ]
        assert [answer.result().status for answer in answers] == [200, 200]
        ids: list[int] = answers[1].result().body["output_ids"]
    return ids


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with EngineServer(*FLAGS) as server:
        return [
            server.request("POST", "/generate", body(seed, length, 24)).body["output_ids"]
            for seed, length in enumerate(LENGTHS)
        ]


def metadata_bytes(decode: EngineServer, way: str) -> float:
    """`control`: inline; `transport`: moved as pages are."""
    return decode.metrics()[f'sglang:kv_transfer_metadata_bytes_total{{way="{way}"}}']


@pytest.mark.parametrize(
    ("protocol", "memory"), [("tcp", ""), ("nvlink_intra", ""), ("nvlink_intra", INTRA_NODE)]
)
def test_words_are_one_servers(protocol: str, memory: str, expected: list[list[int]]) -> None:
    if protocol not in wheel_protocols():
        pytest.skip(f"the installed mooncake wheel was built without {protocol}")
    env = {
        "MOONCAKE_PROTOCOL": protocol,
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": memory,
    }
    port = get_free_port()
    mode = "--disaggregation-mode"
    other = str(int(count_gpus() > 1))
    prefill = EngineServer(
        *FLAGS, mode, "prefill", "--disaggregation-bootstrap-port", str(port),
        "--enable-hierarchical-cache", env=env,
    )  # fmt: skip
    decode = EngineServer(*FLAGS, mode, "decode", "--base-gpu-id", other, env=env)
    with prefill, decode, ThreadPoolExecutor(len(LENGTHS)) as pool:
        for _ in range(2):  # Cold; then prefixes are on both.
            requests = [body(seed, length, 24) for seed, length in enumerate(LENGTHS)]
            found = list(pool.map(lambda one: through_both(prefill, port, decode, one), requests))
            assert found == expected
        used, unused = ("transport", "control") if memory else ("control", "transport")
        assert metadata_bytes(decode, used) > 0
        assert metadata_bytes(decode, unused) == 0
        for server in (prefill, decode):
            server.flush()  # checks page ownership, too


@pytest.mark.parametrize("protocol", ["tcp", "nvlink_intra"])
def test_servers_that_swap_their_roles_give_the_same_words(
    protocol: str, expected: list[list[int]]
) -> None:
    """The other role needs no further graph and no further kernel."""
    if protocol not in wheel_protocols():
        pytest.skip(f"the installed mooncake wheel was built without {protocol}")
    env = {"MOONCAKE_PROTOCOL": protocol, "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1"}
    ports = [get_free_port(), get_free_port()]
    gpus = ["0", str(int(count_gpus() > 1))]
    roles = ["prefill", "decode"]
    servers = [
        EngineServer(
            *FLAGS, "--disaggregation-mode", role, "--disaggregation-bootstrap-port", str(port),
            "--base-gpu-id", gpu, "--enable-pd-role-switch", "--enable-hierarchical-cache", env=env,
        )
        for role, port, gpu in zip(roles, ports, gpus, strict=True)
    ]  # fmt: skip
    compiled = "sglang:kernel_compilations_total"
    with servers[0], servers[1]:
        for turn in range(3):
            (prefill, port), (decode, _) = zip(servers, ports, strict=True)
            if turn:
                before = [server.metrics()[compiled] for server in (prefill, decode)]
            found = [
                through_both(prefill, port, decode, body(seed, length, 24))
                for seed, length in enumerate(LENGTHS)
            ]
            assert found == expected
            if turn:
                assert [server.metrics()[compiled] for server in (prefill, decode)] == before
            for server, role in zip((prefill, decode), ("decode", "prefill"), strict=True):
                change = {"new_role": role}
                reply = server.request("POST", "/pd_role_switch", change, admin=True)
                assert reply.status == 200 and reply.body["seconds"] < 2, reply.body
            servers.reverse()
            ports.reverse()


def test_rows_on_a_gpu_are_read_by_other_threads() -> None:
    """One thread reads what another one wrote, in whatever order rows are used."""
    rows = MetadataBuffers(8, torch.device("cuda"))
    words = [FirstToken(token_id=n, prompt_len=9, prompt_digest="d" * n) for n in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda n: rows.set_buf(n, 100 + n, words[n]), range(8)))
        assert list(pool.map(lambda n: rows.get_buf(n, 100 + n), range(8))) == words
        pool.submit(rows.clear, 3).result()
        with pytest.raises(BadRow, match="empty"):
            rows.get_buf(3, 103)
        assert rows.get_buf(4, 104) == words[4]
    ((address, size),) = rows.allocations().items()
    assert address <= rows.address(0) and rows.address(8) <= address + size
