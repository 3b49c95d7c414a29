"""Servers on a GPU that start with the weights of a running one: TCP, and NVLink within a node."""

from __future__ import annotations

import pytest

from rigs.servers.engine_server import EngineServer
from rigs.servers.seed_servers import remote_flags, weight_digest
from sglang.srt.arg_groups.remote_weights import START_SEED
from sglang.srt.distributed.device_communicators.mooncake_protocol import wheel_protocols
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=120, suite="base-b-test-1-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

# Two servers share the GPU.
FLAGS = ("--mem-fraction-static", "0.3")
PROMPT = "The code of heron is 7391. What is the code of heron?"


@pytest.mark.parametrize("protocol", ["tcp", "nvlink_intra"])
def test_weights_are_read_between_device_memories(protocol: str) -> None:
    if protocol not in wheel_protocols():
        pytest.skip(f"the installed mooncake wheel was built without {protocol}")
    env = {"MOONCAKE_PROTOCOL": protocol}
    with (
        EngineServer(START_SEED, *FLAGS, env=env) as seed,
        EngineServer(*remote_flags(seed), *FLAGS, env=env) as reader,
    ):
        info = reader.request("GET", "/server_info").body
        assert info["device"].startswith("cuda")
        assert info["transfer_engine"]["protocol"] == protocol
        assert weight_digest(reader) == weight_digest(seed)
        want = seed.generate(PROMPT, max_new_tokens=12)
        assert reader.generate(PROMPT, max_new_tokens=12).output_ids == want.output_ids
