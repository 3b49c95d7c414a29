"""The model worker, a launched step and its results, and the error for a step without memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from sglang.srt.hardware_backend.device_runtime import Event, device_runtime
from sglang.srt.layers.sampler import Sampler
from sglang.srt.speculative.eagle_worker import EAGLEWorker

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import InputLogprobs, LogitsProcessorOutput
    from sglang.srt.managers.scheduler.batch import ModelWorkerBatch, PrefillWork
    from sglang.srt.managers.scheduler.requests.req import Req
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.device.memory_pool import KVCache, ReqToTokenPool
    from sglang.srt.messages.io_struct import TopLogprobs
    from sglang.srt.model_executor.model_runner import ModelRunner


class TpModelWorker:
    """One rank's `ModelRunner` with its pools, and the sampler. One thread uses it."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._runner = model_runner
        self._sampler = Sampler()
        self._speculation: EAGLEWorker | None = None
        if model_runner.config.num_draft_tokens > 1:
            self._speculation = EAGLEWorker(model_runner, model_runner.config.num_draft_tokens)
        self.req_to_token_pool: ReqToTokenPool = model_runner.req_to_token_pool
        self.token_to_kv_pool: KVCache = model_runner.token_to_kv_pool
        self.token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator = (
            model_runner.token_to_kv_pool_allocator
        )
        self.vocab_size = model_runner.model_config.vocab_size
        self.context_len = model_runner.model_config.context_len
        """Tokens of one request, prompt and output together."""
        self.eos_token_ids = model_runner.model_config.eos_token_ids
        self.num_draft_tokens = model_runner.config.num_draft_tokens
        """Tokens of a decode step for each request."""

    def verifies_ahead(self, batch_size: int) -> bool:
        """True if a verification of `batch_size` requests can be launched before the results of the
        step before it are known: the CPU plans nothing by their lengths."""
        speculation = self._speculation
        return speculation is not None and speculation.graphs_of(batch_size) is not None

    def forward_batch_generation(
        self, batch: ModelWorkerBatch
    ) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """Run one step. The second result is each request's next token, int64 `[bs]` on the
        device; of a verification the token after each of its tokens."""
        if batch.verified is not None:
            batch.take_up()
        counter = self.token_to_kv_pool.layer_transfer_counter
        if counter is not None:
            counter.set_consumer(batch.hicache_consumer_index)
        forward, drafts = batch.forward, None
        if self._speculation is not None:
            drafts, output = self._speculation.forward(forward)
        else:
            output = self._runner.forward(forward)
        token_ids = self._sampler(
            output,
            batch.sampling_info,
            batch.seeds,
            batch.steps,
            forward.return_logprob,
            forward.top_logprobs_nums,
        )
        if self._speculation is None:
            return output, token_ids
        if output.split_hidden is not None:
            self._speculation.follow_split(forward, output.split_hidden)
            return output, token_ids
        snapshots = None
        if batch.verified is not None:
            assert drafts is not None, "the step is a verification"
            output.accepted = self._speculation.accept(drafts, token_ids, batch.verified.most)
            snapshots = batch.verified.snapshots
        self._speculation.follow(forward, output.hidden_states, output.accepted, snapshots)
        return output, token_ids


_NO_CPU_MEMORY: Final = "can't allocate memory"
"""Part of the message of the RuntimeError that torch raises if the CPU's memory is short."""


class StepResult:
    """Next tokens, int64 `[rows]`, and their logprobs, copied to the CPU while the device goes on.
    The next step may overwrite the worker's tensors, so they are read in order with the current
    stream."""

    def __init__(self, output: LogitsProcessorOutput, token_ids: torch.Tensor) -> None:
        self.input_logprobs: InputLogprobs | None = output.input_logprobs
        self._copies = device_runtime(token_ids.device).copy_to_host(
            [
                token_ids,
                output.next_token_logprobs,
                output.next_token_top_logprobs_val,
                output.next_token_top_logprobs_idx,
                output.accepted,
            ]
        )
        self.token_ids: list[int] = []
        self.accepted: list[int] = []
        """Accepted drafts of each request; empty: the step verified none."""
        self._logprobs: list[float] = []
        self._top_values: list[list[float]] = []
        self._top_ids: list[list[int]] = []

    def wait(self) -> None:
        """Block until the copies have ended. Before that the results are empty."""
        values = [None if tensor is None else tensor.tolist() for tensor in self._copies.wait()]
        self.token_ids = values[0] or []
        self._logprobs, self._top_values, self._top_ids, self.accepted = (
            value or [] for value in values[1:]
        )

    def logprob(self, row: int) -> float:
        """Logprob of the row's token. Only of a step that computes logprobs."""
        return self._logprobs[row]

    def top_logprobs(self, row: int, count: int) -> TopLogprobs:
        """(logprob, token) of the row's `count` most likely tokens, descending."""
        return list(zip(self._top_values[row][:count], self._top_ids[row][:count], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A batch that was launched on the device. Exactly one of `works` and `reqs` is not empty."""

    result: StepResult
    launched: float
    """`time.monotonic()` seconds."""
    works: list[PrefillWork] = field(default_factory=list)
    """The rows of a prefill batch; empty for a decode step."""
    mostly_done: Event | None = None
    """Event of a prefill batch; it comes when little of the batch's work is left. See
    `Scheduler._launch_prefill`."""
    reqs: list[Req] = field(default_factory=list)
    """The rows of a decode step; empty for a prefill batch."""
    width: int = 1
    """Tokens of each request in a decode step; above 1, it verified drafts."""
    has_joined: bool = False
    """True if requests may have joined since the decode step before."""
    load: int = -1
    """The load from L2 that a prefill batch waits for; -1: none."""


class StepOutOfMemory(RuntimeError):
    """The device has no memory for a step. The message names the settings.

    The memory of a step is set aside at the start (`model_executor/pool_sizing.py`). The other
    ranks are inside the same step and may wait for this rank's part, so the ranks cannot agree on a
    remedy: the error ends this rank, and the server with it.
    """


@contextmanager
def explaining_out_of_memory() -> Iterator[None]:
    """Context for work on the device: turns a shortage of its memory into `StepOutOfMemory`."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and _NO_CPU_MEMORY not in str(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise StepOutOfMemory(
            "the device has no memory left for a step; lower --mem-fraction-static, "
            f"--max-prefill-tokens or --chunked-prefill-size: {first_line}"
        ) from error
