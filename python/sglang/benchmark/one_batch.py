"""A static batch on one worker: prompts that start and end together, without a scheduler; and the
least time that its steps can take.

It uses the scheduler's requests, batches and slots, but none of its decisions. A step cannot move
bytes faster than a large copy, nor multiply faster than a large product. The ratio to these limits
shows, on any machine, how much faster a step could become.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.sampling_batch_info import SamplingBatchInfo
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
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

_GROUPS: Final = 9
_PER_GROUP: Final = 5
"""Runs between two readings of the clock, so that waiting for the device costs little."""
_MOST_SECONDS: Final = 5.0
"""Slow work is run less often, to take about this long: a large product in bf16 takes seconds on a
CPU that emulates it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates measured on a device."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written by a copy much larger than any cache."""
    product_flop_per_s: float
    """Rate of a large product in the model's dtype; addition and multiplication count as two."""


@dataclass(frozen=True, slots=True)
class StepWork:
    new_tokens: int
    """New tokens of all requests."""
    pairs: float
    """Pairs of a query and a key visible to it, of all requests, for one layer and head."""
    read_kv_bytes: int
    """Bytes of keys and values read in all layers."""
    last_pairs: float
    """Pairs in the last layer, where only tokens with logits need attention."""
    logits: int
    """Tokens that pass the output head, and therefore all of the last layer."""


def measure_limits(device: torch.device | str, dtype: torch.dtype) -> Limits:
    """Measure both rates; takes up to 8 GiB of a GPU's memory for a moment, 0.5 GiB of a CPU's."""
    is_large = device_runtime(device).kind.has_own_memory
    size, width = (1 << 32, 8192) if is_large else (1 << 28, 1024)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_seconds(lambda: target.copy_(source), device)
    # Random values, because a GPU multiplies zeros with less power and thus at a higher clock.
    x, y = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    product_s = _median_seconds(lambda: x @ y, device)
    return Limits(2 * size / copy_s, 2 * width**3 / product_s)


def least_seconds(model: ModelConfig, work: StepWork, limits: Limits) -> float:
    """The larger of the times for arithmetic and for memory at the limits.

    Every weight except the embedding is read once: those of layers in the checkpoint's format,
    without its scales, the head in the model's dtype. In the last layer, tokens without logits need
    only their keys and values.
    """
    attention_width = model.num_attention_heads * model.head_dim
    kv_weights = 2 * model.hidden_size * model.num_key_value_heads * model.head_dim
    other_weights = model.hidden_size * (2 * attention_width + 3 * model.intermediate_size)
    layers = model.num_hidden_layers
    body = layers * (kv_weights + other_weights)
    head = model.vocab_size * model.hidden_size
    flops = 2.0 * (body - other_weights) * work.new_tokens
    flops += 2.0 * (other_weights + head) * work.logits
    flops += 4.0 * attention_width * ((layers - 1) * work.pairs + work.last_pairs)
    size = model.dtype.itemsize
    body_size = size if model.quantization is None else model.quantization.bits / 8
    moved = body_size * body + size * head + work.read_kv_bytes
    return max(flops / limits.product_flop_per_s, moved / limits.copy_bytes_per_s)


def prefill_work(batch_size: int, input_len: int) -> StepWork:
    """The work for `batch_size` prompts of `input_len` tokens, without a cached prefix."""
    return StepWork(
        new_tokens=batch_size * input_len,
        pairs=batch_size * input_len * (input_len + 1) / 2,
        last_pairs=batch_size * input_len,
        read_kv_bytes=0,
        logits=batch_size,
    )


def decode_work(batch_size: int, context_len: int, kv_bytes_per_token: Fraction | int) -> StepWork:
    """The work for one token of each of `batch_size` requests with `context_len` tokens."""
    context = batch_size * context_len
    return StepWork(
        new_tokens=batch_size,
        pairs=context,
        last_pairs=context,
        read_kv_bytes=int(context * kv_bytes_per_token),
        logits=batch_size,
    )


def _median_seconds(work: Callable[[], object], device: torch.device | str) -> float:
    synchronize = device_runtime(device).synchronize

    def seconds_each(runs: int) -> float:
        synchronize()
        begun = time.perf_counter()
        for _ in range(runs):
            work()
        synchronize()
        return (time.perf_counter() - begun) / runs

    work()
    once = seconds_each(1)
    groups = min(_GROUPS, int(_MOST_SECONDS / (once * _PER_GROUP)))
    return statistics.median(seconds_each(_PER_GROUP) for _ in range(groups)) if groups else once


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
        """Compute prompts up to `lens` tokens (None: whole prompts) in one step. Returns the
        sampled tokens, int64 `[bs]` on the device, which are valid for whole prompts."""
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
        own = [req.slots.row for req in self._reqs]
        rows, held, wanted = pools.columns(own, begins, ends)
        last = table.req_to_token[rows, (held - 1).clamp_(min=0)].to(torch.int64)
        slots = pools.allocator.alloc_extend(held, begins, wanted, ends, last, sum(counts))
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
    """Prefill prompts of one length and decode `output_len` tokens of each, step by step. `on_step`
    gets the number of each decode step, from 0, and its seconds."""
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
