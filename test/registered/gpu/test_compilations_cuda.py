"""No kernel is compiled in service: servers with an empty cache of kernels, under mixed traffic."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from benchmark.gpu_hybrid.families import STATEFUL, model_of
from rigs.models.qwen3_8b import DUMMY_FLAGS, dummy_model
from rigs.servers.engine_server import EngineServer
from sglang.serve_pd import count_gpus
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.attention.flashmla_library import LIBRARIES
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=650, suite="base-b-test-1-gpu-large")
register_cuda_ci(est_time=650, suite="base-b-test-2-gpu-large")

pytestmark = pytest.mark.skipif(detect_device() != "cuda", reason="needs a GPU")

START_S: Final = 500.0
"""All kernels of a group's servers are compiled at the same time."""
IDS: Final = 100_000
LENGTHS: Final = (1, 2, 5, 17, 33, 64, 100, 129, 257, 300, 511, 700, 1030, 2048, 4097)
TIERS: Final = ("--enable-hierarchical-cache", "--hicache-ratio", "4")
FP8_STATE: Final = ("--kv-cache-dtype", "fp8_e4m3")
DRAFTS: Final = ("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2")
FLASHMLA: Final = ("--attention-backend", "flashmla")
LAYERS: Final = {
    "qwen3": 4, "qwen3_next": 4, "kimi_linear": 5, "deepseek_v32": 2, "nemotron_h": 7,
    "deepseek_v4": 4,
}  # fmt: skip
"""Few, because the servers of a group share a GPU: one of each kind of layer."""
SERVERS: Final[dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    "dense": ("qwen3", {}, TIERS),
    "dense, fp8 weights": ("qwen3", {"weights": "fp8"}, ()),
    "hybrid": ("qwen3_next", {}, TIERS),
    "hybrid, drafts": ("qwen3_next", {"drafts": True}, (*TIERS, *DRAFTS)),
    "mamba": ("nemotron_h", {}, TIERS),
    "hybrid, latent": ("kimi_linear", {}, TIERS),
    "compressed": ("deepseek_v4", {}, (*TIERS, "--page-size", "256")),
    "latent": ("deepseek_v32", {}, TIERS),
    "latent, fp8 state": ("deepseek_v32", {"weights": "fp8"}, (*TIERS, *FP8_STATE)),
    "latent, drafts": ("deepseek_v32", {"drafts": True}, (*TIERS, *DRAFTS)),
}
"""Family, arguments of its checkpoint, flags."""
RANKS: Final[dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    "dense, two ranks": ("qwen3", {}, ("--tp-size", "2", *TIERS)),
    "latent, two ranks": ("deepseek_v32", {}, ("--tp-size", "2", *TIERS)),
}
BY_FLASHMLA: Final[dict[str, tuple[str, dict[str, Any], tuple[str, ...]]]] = {
    "compressed, FlashMLA": ("deepseek_v4", {}, ("--page-size", "256", *FLASHMLA)),
}
HAS_FLASHMLA: Final = any(importlib.util.find_spec(one.package) for one in LIBRARIES)
SERVED: Final = (
    SERVERS | (BY_FLASHMLA if HAS_FLASHMLA else {}) | (RANKS if count_gpus() > 1 else {})
)
GROUPS: Final = [list(SERVED)[nth : nth + 4] for nth in range(0, len(SERVED), 4)]
"""Servers that run at the same time. All of them need more than 140 GB."""


@pytest.fixture(scope="module")
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, EngineServer]]:
    with ExitStack() as stack:
        made = {}
        for name in request.param:
            family, checkpoint, flags = SERVED[name]
            make = dummy_model if family == "qwen3" else partial(model_of, family)
            model = stack.enter_context(make(layers=LAYERS[family], **checkpoint))
            # Grammars need a token that ends them.
            (Path(model) / "generation_config.json").write_text('{"eos_token_id": 7}')
            states = ("--max-mamba-cache-size", "64") if family in STATEFUL else ()
            made[name] = EngineServer(
                "--device", "cuda", *DUMMY_FLAGS, "--page-size", "64",
                "--max-total-tokens", "20480", "--max-running-requests", "32",
                "--mem-fraction-static", "0.9", *flags, *states,
                env={"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("kernels"))},
                model=model,
            )  # fmt: skip
            stack.callback(made[name].kill)
        with ThreadPoolExecutor(len(made)) as pool:
            list(pool.map(lambda server: server.start(START_S), made.values()))
        yield made


def send_mixed_traffic(server: EngineServer) -> None:
    """Prompts of many lengths, alone and together, cold and cached, sampled in all ways."""
    rng = random.Random(1)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(IDS) for _ in range(length)]

    alone = [prompt(length) for length in LENGTHS]
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.05},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_new_tokens": 4},
        {"regex": "[0-9]{6}"},
    ]
    for ids in (*alone, *alone[-4:]):
        server.generate(ids, 6, {"ignore_eos": True})
    for way in ways:
        server.generate(prompt(200), 6, way)
    server.generate(prompt(90), 6, return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
    for together in (2, 7, 16, 32):
        prompts = [prompt(rng.choice(LENGTHS[:13])) for _ in range(together)]
        with ThreadPoolExecutor(together) as pool:
            for turn in range(2):
                more = [ids + prompt(turn * 30) for ids in prompts]
                list(pool.map(lambda ids: server.generate(ids, 24, rng.choice(ways[:4])), more))
    for ids in (prompt(8192), prompt(8192), prompt(8192), *alone[-4:]):
        server.generate(ids, 3, {"ignore_eos": True})


@pytest.mark.timeout(800)
@pytest.mark.parametrize("servers", GROUPS, indirect=True, ids=lambda names: names[0])
def test_no_kernel_is_compiled_in_service(servers: dict[str, EngineServer]) -> None:
    """One test for a group: its servers start once."""
    late = []
    for name, server in servers.items():
        send_mixed_traffic(server)
        log = Path(server.process.log_path).read_text(encoding="utf-8", errors="replace")
        late += [
            f"{name}: {line}" for line in log.splitlines() if "was compiled in service" in line
        ]
    assert not late, "\n".join(late)
