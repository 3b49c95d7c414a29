"""The forward pass of Qwen3-8B's shape on a GPU, through ModelRunner, against the limits.

    python benchmark/gpu_forward.py [--attention-backend NAME] [--json FILE] [--profile DIR]

Weights are dummies (`--load-format dummy`), prompts and contexts random. Each figure is printed
with its share of the limits, measured in the same run: the rate of a large matrix product and the
speed of a large copy. Decoding is greedy.

A prompt is measured back to back, where the chip's power limits its clock, and rested, after a
second without work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from rigs.models.qwen3_8b import VOCAB_SIZE, dummy_model
from sglang.benchmark.device_limits import (
    StepWork,
    decode_work,
    least_seconds,
    measure_limits,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    compute_extend_positions,
)
from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerConfig

REST_S = 1.0


class Rig:
    """A runner whose pages are allocated once, and batches over them."""

    def __init__(self, page_size: int, pool_tokens: int, **config: Any) -> None:
        begun = time.monotonic()
        with dummy_model() as directory:
            self.runner = ModelRunner(
                ModelRunnerConfig(
                    model_config=ModelConfig.from_path(directory),
                    device="cuda",
                    load_format="dummy",
                    page_size=page_size,
                    show_progress=False,
                    **config,
                )
            )
        torch.cuda.synchronize()
        self.load_s = time.monotonic() - begun
        begun = time.monotonic()
        self.runner.init_memory_pool(pool_tokens, 256)
        torch.cuda.synchronize()
        self.init_s = time.monotonic() - begun
        pool = self.runner.token_to_kv_pool
        for buffer in chain.from_iterable(pool.parts):
            values = torch.randn(buffer.shape, dtype=torch.bfloat16, device="cuda")
            buffer.view(pool.dtype).copy_(values)
        held = self.runner.token_to_kv_pool_allocator.alloc(pool_tokens)
        assert held is not None
        pages = held.view(-1, page_size)
        # In random order, as in a server that has run for a while.
        order = torch.randperm(len(pages), device="cuda")
        self.slots = pages[order].view(-1)

    def lay_out(self, count: int, context: int) -> None:
        """Give rows 0 to `count` their contexts, of at most `context` tokens."""
        page = self.runner.config.page_size
        room = -(-context // page) * page
        table = self.runner.req_to_token_pool.req_to_token
        table[:count, :room] = self.slots[: count * room].view(count, room).to(torch.int32)

    def extend(self, prefix: int, new: int) -> ForwardBatch:
        """One request: `new` tokens after `prefix`."""
        table = self.runner.req_to_token_pool.req_to_token
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=torch.randint(0, VOCAB_SIZE, (new,), device="cuda"),
            positions=compute_extend_positions([prefix], [new], "cuda"),
            req_pool_indices=torch.tensor([0], device="cuda"),
            req_pool_indices_cpu=[0],
            seq_lens=torch.tensor([prefix + new], device="cuda"),
            seq_lens_cpu=[prefix + new],
            out_cache_loc=table[0, prefix : prefix + new].long(),
            req_to_token_pool=self.runner.req_to_token_pool,
            token_to_kv_pool=self.runner.token_to_kv_pool,
            extend_prefix_lens_cpu=[prefix],
            extend_seq_lens_cpu=[new],
        )

    def seconds(self, batch: ForwardBatch) -> float:
        """Seconds of one step, alone on the device."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self.runner.forward(batch)
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    def decode_steps(self, count: int, context: int, steps: int) -> tuple[float, float]:
        """Milliseconds per step from `context` tokens on: in total, and of the CPU."""
        table = self.runner.req_to_token_pool.req_to_token
        rows = torch.arange(count, device="cuda")
        tokens = torch.randint(0, VOCAB_SIZE, (count,), device="cuda")
        lens = torch.full((count,), context, device="cuda")

        def step(length: int) -> None:
            lens.add_(1)
            batch = ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                input_ids=tokens,
                positions=lens - 1,
                req_pool_indices=rows,
                seq_lens=lens,
                seq_lens_cpu=[length] * count,
                out_cache_loc=table[:count, length - 1].long(),
                req_to_token_pool=self.runner.req_to_token_pool,
                token_to_kv_pool=self.runner.token_to_kv_pool,
            )
            output = self.runner.forward(batch)
            tokens.copy_(output.logits.argmax())

        for _ in range(3):
            step(context + 1)
        lens.fill_(context)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        on_cpu = 0.0
        for i in range(steps):
            before = time.perf_counter()
            step(context + 1 + i)
            on_cpu += time.perf_counter() - before
            if i % 4 == 3:  # Otherwise the queue fills up, and launching waits.
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / steps * 1e3, on_cpu / steps * 1e3


def profiled(name: str, work: Callable[[], object], directory: Path | None) -> None:
    """Write a profile of the GPU's time to a file."""
    if directory is None:
        return
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        work()
        torch.cuda.synchronize()
    table = profile.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60
    )
    (directory / f"{name}.txt").write_text(table, encoding="utf-8")


def report(rows: list[dict[str, Any]], what: str, **figures: float) -> None:
    row = {"what": what, **{key: round(value, 4) for key, value in figures.items()}}
    rows.append(row)
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--attention-backend")
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    limits = measure_limits("cuda", torch.bfloat16)
    report(
        rows, "limits", copy_tb_s=limits.copy_bytes_per_s / 1e12,
        matmul_tflop_s=limits.product_flop_per_s / 1e12,
    )  # fmt: skip
    rig = Rig(
        args.page_size,
        163840,
        disable_cuda_graph=args.disable_cuda_graph,
        kv_cache_dtype=args.kv_cache_dtype,
        attention_backend=args.attention_backend,
    )
    model = rig.runner.model_config
    kv_bytes = rig.runner.kv_bytes_per_token()
    free, total = device_runtime("cuda").memory()
    report(
        rows, "start", load_s=rig.load_s, pools_and_graphs_s=rig.init_s,
        free_gib=free / 2**30, total_gib=total / 2**30,
    )  # fmt: skip
    expected = {(0, 8192): 0.20, (0, 32768): 1.25, (24576, 8192): 0.39, (8192, 64): 0.010}
    for prefix, new in (
        (0, 8192), (0, 32768), (24576, 8192), (8192, 64), (32000, 64), (0, 512), (0, 7777),
        (1500, 6000),
    ):  # fmt: skip
        rig.lay_out(1, prefix + new)
        batch = rig.extend(prefix, new)
        seconds = [rig.seconds(batch) for _ in range(4)]
        rested = []
        for _ in range(3 if not prefix and new >= 8192 else 0):
            time.sleep(REST_S)
            rested.append(rig.seconds(batch))
        pairs = new * prefix + new * (new + 1) / 2
        work = StepWork(
            new_tokens=new, pairs=pairs, last_pairs=prefix + new,
            read_kv_bytes=prefix * kv_bytes, logits=1,
        )  # fmt: skip
        least = least_seconds(model, work, limits)
        report(
            rows, f"prefill {new} after {prefix}", first_s=seconds[0], s=sorted(seconds[1:])[1],
            **({"rested_s": sorted(rested)[1]} if rested else {}),
            target_or_expected_s=expected.get((prefix, new), 0.0), limit_s=least,
            of_limit=least / sorted(seconds[1:])[1],
        )  # fmt: skip
        profiled(f"prefill_{new}_after_{prefix}", partial(rig.runner.forward, batch), args.profile)
    wanted = {(1, 1024): 4.88, (64, 2048): 10.0, (256, 256): 11.5}
    for count, context in wanted:
        rig.lay_out(count, context + args.steps)
        step_ms, cpu_ms = rig.decode_steps(count, context, args.steps)
        work = decode_work(count, context + args.steps // 2, kv_bytes)
        least = least_seconds(model, work, limits) * 1e3
        report(
            rows, f"decode {count} x {context}", ms=step_ms, cpu_ms=cpu_ms,
            target_ms=wanted[count, context], limit_ms=least, of_limit=least / step_ms,
            tokens_per_s=count / step_ms * 1e3,
        )  # fmt: skip
        profiled(
            f"decode_{count}_x_{context}",
            partial(rig.decode_steps, count, context, 4),
            args.profile,
        )
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
