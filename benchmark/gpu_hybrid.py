"""Models with more state than KV on a GPU: steps against the limits, and what an L2 hit saves.

    python benchmark/gpu_hybrid.py [steps] [server] [experts] [transformers] [unused]
        [--families qwen3_next deepseek_v32] [--json FILE]

Random weights. Shapes are those of Qwen3-Next-80B-A3B with 12 of 48 layers, and of DeepSeek-V3.2
with 6 of 61 layers (1 dense) and 64 of 256 experts. `steps`: a prefill of 8,192 tokens, and decode
steps in graphs and without, through ModelRunner; the limit of a decode step of one request is
reading its active weights once, at the speed of a large copy in the same run (target: at most 1.5
times that). With graphs also the same step again and again (`replayed`), its kernels by time, and
prefills of 64 tokens after 8,192.
`experts`: a layer's experts of 1 to 64 tokens, in kernels for few tokens and in grouped products.
`transformers`: a prefill and decode steps of the same shape by transformers' own model.
`server`: TTFT of 8,192 tokens over HTTP, cold and from L2 (target: a fifth).
`unused`: the load of `gpu_hicache.py unused`, which no cache can help, to servers with and without
L2 (target: at most 2% less).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
import transformers
from gpu_hicache import compare_unused, start
from gpu_server import Emit, ask
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV32Config, Qwen3NextConfig

from rigs.models.qwen3_8b import DUMMY_FLAGS
from rigs.models.tiny_models import StepDriver
from rigs.servers.engine_server import EngineServer
from sglang.benchmark.device_limits import measure_limits
from sglang.benchmark.report import emit, provenance
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.moe.sparse_moe import SparseMoeBlock
from sglang.srt.model_executor.graph_capture import GraphCapture

LENGTH: Final = 8192
STEPS: Final = 32
SHORT: Final = 64
VOCABULARY: Final = 129_280
SHAPES: Final[dict[str, tuple[Any, str, dict[str, Any]]]] = {
    "qwen3_next": (
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        {
            "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 12,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
    "deepseek_v32": (
        DeepseekV32Config,
        "DeepseekV32ForCausalLM",
        {
            "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 6,
            "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "head_dim": 64, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128,
            "index_topk": 2048, "n_routed_experts": 64, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8,
            "topk_group": 4, "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip
SMALL_L2: Final = ("--enable-hierarchical-cache", "--hicache-size", "12")
EXPECTED: Final = {
    ("qwen3_next", "graph ms"): 0.8,
    ("qwen3_next", "L2 ratio"): 0.2,
    ("deepseek_v32", "L2 ratio"): 0.15,
}


@contextmanager
def model_of(family: str) -> Iterator[str]:
    """A temporary directory with only the configuration."""
    config_class, architecture, shape = SHAPES[family]
    with tempfile.TemporaryDirectory() as directory:
        config = config_class(vocab_size=VOCABULARY, max_position_embeddings=40960, **shape)
        config.architectures = [architecture]
        config.dtype = "bfloat16"
        config.save_pretrained(directory)
        yield directory


def prompt(seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return ids


def active_bytes(driver: StepDriver, shape: dict[str, Any], but: tuple[str, ...] = ()) -> float:
    """Bytes of the weights that a step of one token reads, but for some."""
    experts = shape.get("num_experts") or shape["n_routed_experts"]
    share = shape["num_experts_per_tok"] / experts
    total = 0.0
    for name, slot in driver.runner.model.weight_slots():
        if not any(part in name for part in ("embed_tokens", *but)):
            total += slot.dest.nbytes * (share if ".mlp.experts." in name else 1.0)
    return total


def device_ms(run: Callable[[], object], times: int) -> float:
    """Milliseconds of the device for each of `times` runs, queued one after the other."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run()
    begun.record()
    for _ in range(times):
        run()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / times


def kernels_of(run: Callable[[], object], runs: int = 4) -> list[dict[str, Any]]:
    """The kernels of a run, most time first: microseconds and launches of one run."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in profile.events():
        if event.device_time_total > 0 and "graph" not in event.name.lower():
            total[event.name[:70]] += event.device_time_total
            count[event.name[:70]] += 1
    return [
        {"kernel": name, "us": round(us / runs, 1), "launches": count[name] / runs}
        for name, us in total.most_common(24)
    ]


def measure_replays(family: str, driver: StepDriver, least_ms: float, out: Emit) -> None:
    """One decode step again and again, and a short prefill: the device's time, not the driver's."""
    forward = driver.runner.forward
    batches: list[ForwardBatch] = []

    def keep(batch: ForwardBatch) -> object:
        batches.append(batch)
        return forward(batch)

    with mock.patch.object(driver.runner, "forward", keep):
        driver.decode([(0, 7)])
        driver.extend([(1, prompt(5, SHORT))])
    step, short = batches
    step_ms = device_ms(lambda: forward(step), 64)
    begun = time.perf_counter()
    forward(short)
    launched_ms = (time.perf_counter() - begun) * 1e3
    out(
        {
            "what": f"replays of {family}", "decode_ms": round(step_ms, 4),
            "times_the_limit": round(step_ms / least_ms, 2), "target": 1.5,
            "expected_ms": EXPECTED.get((family, "graph ms")),
            "prefill_64_ms": round(device_ms(lambda: forward(short), 8), 3),
            "prefill_64_launch_ms": round(launched_ms, 3),
        }
    )  # fmt: skip
    out(
        {
            "what": f"kernels of a decode step, {family}",
            "kernels": kernels_of(lambda: forward(step)),
        }
    )
    out({"what": f"kernels of 64 tokens, {family}", "kernels": kernels_of(lambda: forward(short))})


def measure_experts(family: str, model: str, out: Emit) -> None:
    """One layer's experts, in a graph."""
    driver = StepDriver(
        model, page_size=64, pool_tokens=1024, max_requests=2, device="cuda", load_format="dummy",
        disable_cuda_graph=True,
    )  # fmt: skip
    assert isinstance(driver.runner.model, torch.nn.Module)
    modules = driver.runner.model.modules()
    blocks = [module for module in modules if isinstance(module, SparseMoeBlock)]
    hidden = SHAPES[family][2]["hidden_size"]
    for count in (1, 2, 4, 8, 16, 32, 64):
        x = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
        found: dict[str, float] = {}
        for name in ("few", "grouped"):
            # All layers, so that no cache holds the weights.
            kept = [block._few for block in blocks]

            def run(x: torch.Tensor = x) -> None:
                for block in blocks:
                    block.forward(x, torch.zeros_like(x))

            for block in blocks:
                block._few = block._few if name == "few" else None
            with torch.inference_mode(), mock.patch("sglang.srt.layers.moe.experts.FEW", 64):
                graph = GraphCapture().capture(run)
            found[name] = device_ms(graph.replay, 20) / len(blocks) * 1e3
            for block, few in zip(blocks, kept, strict=True):
                block._few = few
        out({"what": f"experts of {count} tokens, {family}", "layer_us": {
            name: round(us, 1) for name, us in found.items()}})  # fmt: skip
    del driver
    torch.cuda.empty_cache()


def measure_steps(family: str, model: str, out: Emit) -> None:
    shape = SHAPES[family][2]
    for disable_graphs in (False, True):
        driver = StepDriver(
            model,
            page_size=64,
            pool_tokens=2 * LENGTH + 1024,
            max_requests=8,
            device="cuda",
            load_format="dummy",
            disable_cuda_graph=disable_graphs,
            cuda_graph_max_bs=2,
        )
        wait = device_runtime("cuda").synchronize
        seconds = []
        for row in range(2):
            wait()
            begun = time.perf_counter()
            driver.extend([(row, prompt(row, LENGTH))])
            wait()
            seconds.append(time.perf_counter() - begun)
        for nth in range(STEPS + 4):
            if nth == 4:
                wait()
                begun = time.perf_counter()
            driver.decode([(0, 7)])
        wait()
        step_ms = (time.perf_counter() - begun) / STEPS * 1e3
        limits = measure_limits("cuda", torch.bfloat16)
        # A copy reads and writes: half of its bytes would be a lower limit than reading reaches.
        least_ms = active_bytes(driver, shape) / limits.copy_bytes_per_s * 1e3
        # Two operations for each weight of two bytes; attention comes on top.
        least_s = active_bytes(driver, shape, ("lm_head",)) * LENGTH / limits.product_flop_per_s
        out(
            {
                "what": f"steps of {family}", "graphs": len(driver.runner._graphs),
                "prefill_8192_s": round(seconds[1], 4), "prefill_limit_s": round(least_s, 4),
                "decode_ms": round(step_ms, 3),
                "active_gb": round(active_bytes(driver, shape) / 1e9, 3),
                "decode_limit_ms": round(least_ms, 3),
                "times_the_limit": round(step_ms / least_ms, 2), "target": 1.5,
                "expected_ms": EXPECTED.get((family, "graph ms")),
            }
        )  # fmt: skip
        if not disable_graphs:
            measure_replays(family, driver, least_ms, out)
        del driver
        torch.cuda.empty_cache()


def measure_transformers(family: str, model: str, out: Emit, device: str = "cuda") -> None:
    """As `measure_steps`, without graphs, as transformers runs its models."""
    runtime = device_runtime(device)
    with torch.device(device):
        peer = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.from_pretrained(model), dtype=torch.bfloat16
        )
    peer.eval()
    prefills: list[float] = []
    steps: list[float] = []

    def timed(seconds: list[float], ids: list[int], cache: Any) -> Any:
        runtime.synchronize()
        begun = time.perf_counter()
        output = peer(
            torch.tensor([ids], device=device), past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        runtime.synchronize()
        seconds.append(time.perf_counter() - begun)
        return output.past_key_values

    try:
        with torch.inference_mode():
            for seed in range(2):
                cache = timed(prefills, prompt(seed, LENGTH), None)
            for _ in range(STEPS):
                cache = timed(steps, [7], cache)
    except torch.OutOfMemoryError as error:
        out({"what": f"{family} in transformers", "failed": str(error).splitlines()[0]})
        return
    out(
        {
            "what": f"{family} in transformers", "transformers": transformers.__version__,
            "prefill_8192_s": round(prefills[1], 4),
            "decode_ms": round(statistics.median(steps[4:]) * 1e3, 3),
        }
    )  # fmt: skip


def measure_server(family: str, model: str, out: Emit) -> None:
    flags = ["--max-total-tokens", "18432", "--enable-hierarchical-cache", "--page-size", "64",
             "--hicache-ratio", "4", "--max-running-requests", "8"]  # fmt: skip
    if family == "qwen3_next":
        flags += ["--max-mamba-cache-size", "32"]
    medians: dict[str, float] = {}
    with EngineServer("--device", "cuda", *DUMMY_FLAGS, *flags, model=model) as server:
        out(
            {
                "what": f"tiers of {family}",
                "tiers": server.request("GET", "/server_info").body["tiers"],
            }
        )
        asyncio.run(ask(server.url, [prompt(seed, 2048) for seed in (1, 2, 1)], 4))
        prompts = [prompt(100 + i, LENGTH) for i in range(4)]
        for source in ("cold", "L2", "L2 again"):
            results = asyncio.run(ask(server.url, prompts, 2))
            assert all(result.success for result in results), results
            medians[source] = statistics.median(result.ttft for result in results)
            out(
                {
                    "what": f"TTFT of {LENGTH} tokens, {family}, {source}",
                    "ms": round(medians[source] * 1e3, 1),
                    "all_ms": [round(result.ttft * 1e3, 1) for result in results],
                    "cached": results[-1].cached_details,
                    "of_cold": round(medians[source] / medians["cold"], 3), "target": 0.2,
                    "expected": EXPECTED.get((family, "L2 ratio")),
                }
            )  # fmt: skip
            time.sleep(0.5)  # The copies to L2 land meanwhile.
        (decoded,) = asyncio.run(ask(server.url, [prompt(7, 1024)], 129))
        out({"what": f"decode of one over HTTP, {family}", "ms": (decoded.tpot or 0.0) * 1e3})


def measure_unused(family: str, model: str, out: Emit) -> None:
    states = ("--max-mamba-cache-size", "160") if family == "qwen3_next" else ()
    plain = (
        "--max-total-tokens", "98304", "--page-size", "64", "--max-running-requests", "32", *states
    )  # fmt: skip
    names = "GPU only", f"+ L2, {family}"
    flags = dict(zip(names, (plain, (*plain, *SMALL_L2)), strict=True))
    with ExitStack() as stack:
        servers = start(model, flags, {}, stack, out)
        compare_unused(servers, {names[1]: 0.99}, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["steps", "server"])
    parser.add_argument("--families", nargs="+", default=list(SHAPES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def out(record: dict[str, Any]) -> None:
        emit(record, args.json)

    out({**provenance(), "shapes": {name: SHAPES[name][2] for name in args.families}})
    for family in args.families:
        with model_of(family) as model:
            if "server" in args.parts:
                measure_server(family, model, out)
            if "unused" in args.parts:
                measure_unused(family, model, out)
            if "transformers" in args.parts:
                measure_transformers(family, model, out)
                torch.cuda.empty_cache()
            if "experts" in args.parts:
                measure_experts(family, model, out)
            if "steps" in args.parts:
                measure_steps(family, model, out)


if __name__ == "__main__":
    main()
