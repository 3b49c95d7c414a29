"""Qwen3-8B's shape on a GPU, through ModelRunner: batches of one step, and runs of decode steps."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import torch

from rigs.models.qwen3_8b import VOCAB_SIZE, dummy_model
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.forward_batch_info import (
    ForwardBatch,
    ForwardMode,
    compute_extend_positions,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig

POOL_TOKENS = 163_840


class GpuModel:
    """A runner whose pages are allocated once, and batches over them."""

    def __init__(
        self, page_size: int, pool_tokens: int, weights: str = "bf16", **config: Any
    ) -> None:
        begun = time.monotonic()
        with dummy_model(weights) as directory:
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
        # Pages are in random order, as in a server that has run for a while.
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
