"""Models that fill eight GPUs, with fewer experts on fewer GPUs, and a tiny one for a CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmark.prompts import random_prompt
from rigs.bench.multiturn import Conversations
from rigs.models.published_configs import PUBLISHED
from rigs.models.qwen3_8b import DUMMY_FLAGS
from rigs.models.tiny_models import tiny_config
from sglang.benchmark.workload import TraceScale

_NVLINK: Final = {
    "MOONCAKE_PROTOCOL": "nvlink_intra",
    "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model with random weights, and the sizes of its loads. Lengths are tokens."""

    config: Mapping[str, Any]
    """config.json of eight GPUs."""
    experts: str
    """Field with the number of routed experts, which is in proportion to the GPUs."""
    flags: tuple[str, ...]
    """Flags of every server that change sizes."""
    page_size: int = 64
    device: str = "cuda"
    l1: int = 98_304
    """Less than the prompts of one length in `prompts`, more than `decodes` need."""
    l2_gb: float = 24.0
    """Of each rank."""
    store_bytes: int = 64 << 30
    prompts: Mapping[int, int]
    """Length to number of prompts."""
    decodes: tuple[int, ...] = (1, 16, 64)
    decode_input: int = 1024
    decode_output: int = 128
    throughput: tuple[int, int, int] = (64, 8192, 1024)
    """Requests at once, tokens of each prompt and of each answer."""
    unused_requests: int = 96
    talk: Conversations
    trace: TraceScale
    trace_requests: int = 341
    pd_env: Mapping[str, str]
    ticks: int = 2000

    @property
    def vocab_size(self) -> int:
        size: int = self.config["vocab_size"]
        return size

    def prompt(self, seed: int, length: int) -> list[int]:
        return random_prompt(seed, length, 3, self.vocab_size)

    def server_flags(self, l1: int | None = None) -> tuple[str, ...]:
        """Flags of a server with `l1` tokens in L1, by default `self.l1`."""
        sizes = ("--page-size", str(self.page_size), "--max-total-tokens", str(l1 or self.l1))
        return ("--device", self.device, *DUMMY_FLAGS, *self.flags, *sizes)

    @contextmanager
    def model(self, eighths: int, layers: int | None = None) -> Iterator[str]:
        """A directory with the config.json of the model with so many eighths of its experts.

        Args:
            layers: The first so many layers; None: all.
        """
        with tempfile.TemporaryDirectory() as directory:
            config = {**self.config, self.experts: self.config[self.experts] * eighths // 8}
            if layers is not None:
                config["num_hidden_layers"] = layers
            (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            yield directory


_TALK: Final = Conversations(
    clients=20, rounds=10, request_len=2048, output_len=1, parallel=4, fixed_answers=True, seed=5
)
_LARGE: Final[dict[str, Any]] = {
    "prompts": {8192: 13, 32768: 4},
    "talk": _TALK,
    # As in benchmark/results/2026-11-26-gpu-trace.md.
    "trace": TraceScale(length=0.25, output=0.1),
    "pd_env": _NVLINK,
}


def _tiny() -> dict[str, Any]:
    fields = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2176}
    config: dict[str, Any] = tiny_config(
        "deepseek_v32", n_routed_experts=64, max_position_embeddings=2048, **fields
    ).to_dict()
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {
        **config,
        "architectures": ["DeepseekV32ForCausalLM"],
        "dtype": "float32",
        "quantization_config": fp8,
    }


SHAPES: Final = {
    "deepseek_v32": Shape(
        config=PUBLISHED["DeepSeek-V3.2"].config,
        experts="n_routed_experts",
        flags=("--kv-cache-dtype", "fp8_e4m3"),
        **_LARGE,
    ),
    "glm_5": Shape(
        config=PUBLISHED["GLM-5-FP8"].config,
        experts="n_routed_experts",
        flags=("--kv-cache-dtype", "fp8_e4m3"),
        **_LARGE,
    ),
    "qwen3_next": Shape(
        config=PUBLISHED["Qwen3-Next-80B-A3B"].config,
        experts="num_experts",
        flags=("--quantization", "fp8", "--max-mamba-cache-size", "256"),
        **_LARGE,
    ),
    "tiny": Shape(
        config=_tiny(),
        experts="n_routed_experts",
        flags=(),
        page_size=16,
        device="cpu",
        l1=640,
        l2_gb=0.05,
        store_bytes=256 << 20,
        prompts={256: 3, 320: 3},
        decodes=(1, 4),
        decode_input=32,
        decode_output=8,
        throughput=(4, 64, 16),
        unused_requests=4,
        talk=Conversations(
            clients=3, rounds=3, request_len=64, output_len=1, parallel=2, fixed_answers=True
        ),
        trace=TraceScale(length=1 / 512, output=0.01, time=0.01),
        trace_requests=8,
        pd_env={"MOONCAKE_PROTOCOL": "tcp"},
        ticks=25,
    ),
}
"""DeepSeek-V3.2 and GLM-5 have 32 routed experts for each GPU, Qwen3-Next 64: on eight GPUs the
models are whole."""
