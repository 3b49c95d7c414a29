"""Prefill and decode servers on GPUs: the words of one server, over TCP and over NVLink.

With two GPUs each server has one; else they share it. The requests go to both as the router sends
them.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from sglang.serve_pd import count_gpus
from sglang.srt.distributed.device_communicators.mooncake_protocol import wheel_protocols
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.schedulers.scheduler_rig import prompt
from sglang.test.servers.engine_server import EngineServer

register_cuda_ci(est_time=90, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

FLAGS: Final = (
    "--device", "cuda", "--mem-fraction-static", "0.2", "--page-size", "16", "--dtype", "float32",
    "--chunked-prefill-size", "256", "--max-total-tokens", "16384",
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


@pytest.mark.parametrize("protocol", ["tcp", "nvlink_intra"])
def test_the_words_of_one_server(protocol: str, expected: list[list[int]]) -> None:
    if protocol not in wheel_protocols():
        pytest.skip(f"the installed mooncake wheel was built without {protocol}")
    env = {"MOONCAKE_PROTOCOL": protocol, "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1"}
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
        for server in (prefill, decode):
            server.flush()  # checks the books, too


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
