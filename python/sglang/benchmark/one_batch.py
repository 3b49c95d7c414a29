"""A static batch on one worker: prompts that start and end together, without a scheduler.

It uses the scheduler's requests, batches and slots, but none of its decisions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
from sglang.srt.managers.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler.batch import (
    BatchPools,
    DecodeBatch,
    PrefillWork,
    make_prefill_batch,
)
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.managers.scheduler.requests.req import Req
from sglang.srt.managers.scheduler.requests.request_queues import RequestQueues
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.sampling.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Times in seconds; the device is idle before and after each measurement."""

    batch_size: int
    input_len: int
    output_len: int
    prefill: float
    decode_steps: list[float]
    """One for each token except the first, which the prefill gives."""

    def figures(self) -> dict[str, Any]:
        """The figures under their usual names. Without decode steps, the figures of decoding are
        None."""
        median = statistics.median(self.decode_steps) if self.decode_steps else None
        total = self.prefill + sum(self.decode_steps)
        tokens = self.batch_size * (self.input_len + self.output_len)
        return {
            "batch_size": self.batch_size,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "prefill_latency": self.prefill,
            "prefill_throughput": self.batch_size * self.input_len / self.prefill,
            "median_decode_latency": median,
            "median_decode_throughput": None if median is None else self.batch_size / median,
            "total_latency": total,
            "overall_throughput": tokens / total,
        }


class StaticBatch:
    """Prompts on a worker, continued greedily. `release` frees the worker for another batch.

    Single-threaded; no other code may use the worker meanwhile.
    """

    def __init__(
        self, worker: TpModelWorker, prompts: Sequence[Sequence[int]], device: torch.device | str
    ) -> None:
        """Args:
        prompts: Token ids of each prompt, at least one.
        device: Device of the worker.
        """
        self._worker = worker
        self._pools = BatchPools(
            req_to_token_pool=worker.req_to_token_pool,
            allocator=worker.token_to_kv_pool_allocator,
            token_to_kv_pool=worker.token_to_kv_pool,
            device=torch.device(device),
        )
        self._reqs = [
            Req(
                TokenizedGenerateReqInput(
                    rid=str(number),
                    input_ids=token_array(prompt),
                    sampling_params=GREEDY,
                    seed=0,
                ),
                max_new_tokens=worker.context_len - len(prompt),
            )
            for number, prompt in enumerate(prompts)
        ]
        rows = worker.req_to_token_pool.alloc([req.slots for req in self._reqs])
        assert rows is not None, "the pools have a row for each request"
        self._sampling = SamplingBatchInfo.from_reqs(
            [GREEDY] * len(self._reqs), worker.vocab_size, device
        )
        self._decoding = DecodeBatch(self._pools)

    def prefill(self, lens: Sequence[int] | None = None) -> torch.Tensor:
        """Compute prompts up to `lens` tokens (None: whole prompts) in one step.

        Returns:
            int64 `[bs]` on the device: the sampled tokens, which are valid for whole prompts.
        """
        ends = [req.progress.num_tokens for req in self._reqs] if lens is None else list(lens)
        begins = [req.progress.kv_committed_len for req in self._reqs]
        counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
        slots = torch.split(self._allocate(ends, counts), counts)
        works = [PrefillWork(*work) for work in zip(self._reqs, counts, slots, strict=True)]
        batch = make_prefill_batch(works, self._pools, self._sampling, -1)
        _, token_ids = self._worker.forward_batch_generation(batch)
        for req, end in zip(self._reqs, ends, strict=True):
            req.progress.kv_committed_len = end
        return token_ids

    def begin_decoding(self, first_tokens: Sequence[int]) -> None:
        """Append the first output token to each prompt, and prepare decoding."""
        for req, token in zip(self._reqs, first_tokens, strict=True):
            req.progress.output_ids.append(token)
        queues = RequestQueues()
        for req in self._reqs:
            queues.arrive(req)
            queues.admit(req)
            queues.join(req)
        self._decoding.update(queues, in_flight=False)

    def decode(self) -> torch.Tensor:
        """Run one decode step. Returns the next tokens, int64 `[bs]` on the device."""
        is_prepared = self._decoding.prepare()
        assert is_prepared, "the pools have slots for all tokens"
        batch = self._decoding.worker_batch(self._sampling)
        _, token_ids = self._worker.forward_batch_generation(batch)
        self._decoding.advance(token_ids)
        return token_ids

    def release(self) -> None:
        """Free all rows and slots of the worker."""
        self._pools.req_to_token_pool.clear()
        self._pools.allocator.clear()

    def _allocate(self, ends: list[int], counts: list[int]) -> torch.Tensor:
        """Allocate slots for the next `counts` tokens of each request; write them to its row."""
        pools = self._pools
        table = pools.req_to_token_pool
        begins = [req.progress.kv_committed_len for req in self._reqs]
        rows = pools.int64([req.slots.row for req in self._reqs])
        last = table.req_to_token[rows, (pools.int64(begins) - 1).clamp_(min=0)]
        slots = pools.allocator.alloc_extend(
            pools.int64(begins), begins, pools.int64(ends), ends, last.to(torch.int64), sum(counts)
        )
        assert slots is not None, "the pools have slots for all tokens"
        pieces = torch.split(slots, counts)
        for req, begin, end, piece in zip(self._reqs, begins, ends, pieces, strict=True):
            table.write((req.slots.row, slice(begin, end)), piece)
        return slots


def time_batch(
    worker: TpModelWorker,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    device: torch.device | str,
    on_step: Callable[[int, float], None] | None = None,
) -> BatchTimes:
    """Prefill prompts of one length and decode `output_len` tokens of each, step by step.

    Args:
        on_step: Called with the number of each decode step, from 0, and its seconds.
    """
    synchronize = device_runtime(device).synchronize
    batch = StaticBatch(worker, prompts, device)
    try:
        synchronize()
        begun = time.perf_counter()
        token_ids = batch.prefill()
        synchronize()
        prefill_s = time.perf_counter() - begun
        batch.begin_decoding(token_ids.tolist())
        steps = []
        for number in range(output_len - 1):
            synchronize()
            begun = time.perf_counter()
            batch.decode()
            synchronize()
            steps.append(time.perf_counter() - begun)
            if on_step is not None:
                on_step(number, steps[-1])
    finally:
        batch.release()
    return BatchTimes(len(prompts), len(prompts[0]), output_len, prefill_s, steps)


def continue_greedily(
    worker: TpModelWorker,
    prompts: Sequence[Sequence[int]],
    output_len: int,
    device: torch.device | str,
) -> list[list[int]]:
    """The next `output_len` tokens of each prompt by greedy decoding.

    Prompts are computed in two steps, to include attention over a prefix. End-of-sequence tokens
    do not end an output.
    """
    batch = StaticBatch(worker, prompts, device)
    try:
        if all(len(prompt) > 1 for prompt in prompts):
            batch.prefill([len(prompt) // 2 for prompt in prompts])
        outputs = [batch.prefill()]
        batch.begin_decoding(outputs[0].tolist())
        outputs += [batch.decode() for _ in range(output_len - 1)]
    finally:
        batch.release()
    found: list[list[int]] = torch.stack(outputs, dim=1).tolist()
    return found
