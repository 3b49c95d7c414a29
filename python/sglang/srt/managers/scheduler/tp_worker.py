"""The model worker of a scheduler: runs a batch and samples its next tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from sglang.srt.layers.sampler import Sampler

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.device.memory_pool import KVCache, ReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner


class ModelWorker(Protocol):
    """Interface of a worker to the scheduler."""

    @property
    def req_to_token_pool(self) -> ReqToTokenPool: ...
    @property
    def token_to_kv_pool(self) -> KVCache: ...
    @property
    def token_to_kv_pool_allocator(self) -> BaseTokenToKVPoolAllocator: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_len(self) -> int:
        """Tokens of one request, prompt and output together."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def forward_batch_generation(
        self, batch: ModelWorkerBatch
    ) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """Run one step. The second result is each request's next token, int64 `[bs]` on the
        device."""


class TpModelWorker:
    """One rank's `ModelRunner` with its pools, and the sampler. One thread uses it."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._runner = model_runner
        self._sampler = Sampler()
        self.req_to_token_pool: ReqToTokenPool = model_runner.req_to_token_pool
        self.token_to_kv_pool: KVCache = model_runner.token_to_kv_pool
        self.token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator = (
            model_runner.token_to_kv_pool_allocator
        )
        self.vocab_size = model_runner.model_config.vocab_size
        self.context_len = model_runner.model_config.context_len
        self.eos_token_ids = model_runner.model_config.eos_token_ids

    def forward_batch_generation(
        self, batch: ModelWorkerBatch
    ) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """See `ModelWorker`."""
        counter = self.token_to_kv_pool.layer_transfer_counter
        if counter is not None:
            counter.set_consumer(batch.hicache_consumer_index)
        output = self._runner.forward(batch.forward)
        token_ids = self._sampler(
            output,
            batch.sampling_info,
            batch.seeds,
            batch.steps,
            batch.forward.return_logprob,
            batch.forward.top_logprobs_nums,
        )
        return output, token_ids
