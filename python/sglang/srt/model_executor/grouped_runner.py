"""The model runner of a rank whose DP group steps together with the others."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode, GroupStep
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.moe.sparse_moe import SparseMoeBlock
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class GroupPlan(NamedTuple):
    """The numbers of a DP group's next step."""

    tokens: int
    rows: int
    """Tokens in the model's last layer."""
    requests: int
    fits_graph: bool
    """True if a captured step can run it."""


class GroupedModelRunner(ModelRunner):
    """Runs this group's part of steps whose experts take the tokens of all groups.

    Warm-up and captures run the same steps on all ranks, so the groups have equally many tokens.
    """

    def plan(self, forward_batch: ForwardBatch) -> GroupPlan:
        """The numbers of a step that the other groups need before it runs."""
        tokens, requests = len(forward_batch.input_ids), forward_batch.batch_size
        return GroupPlan(
            tokens=tokens,
            rows=tokens if forward_batch.needs_all_rows else requests,
            requests=requests,
            fits_graph=any(graphs.can_run(forward_batch) for graphs in self._graphs),
        )

    @torch.inference_mode()
    def run_idle(self, step: GroupStep) -> None:
        """Take part in a step for which this group has no work."""
        self._exchange_for(step)
        if step.graph_rows is not None:
            self._decoding.replay(self._no_requests(), step.graph_rows)
            return
        for part in self.model.modules():
            if isinstance(part, SparseMoeBlock):
                part.run_idle()

    def _forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        step = forward_batch.groups
        self._exchange_for(step)
        if step is not None and step.graph_rows is not None:
            return self._decoding.replay(forward_batch, step.graph_rows)
        self._prepare(forward_batch, self.attn_backends)
        return self.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)

    def _exchange_for(self, step: GroupStep | None) -> None:
        experts = self.experts
        assert experts is not None and experts.exchange is not None, "there are several groups"
        # Captured steps have equally many rows in all groups.
        is_captured = step is not None and step.graph_rows is not None
        experts.exchange.begin(None if is_captured else step)

    @property
    def _decoding(self) -> CudaGraphRunner:
        (graphs,) = self._graphs
        assert isinstance(graphs, CudaGraphRunner)
        return graphs

    def _no_requests(self) -> ForwardBatch:
        nothing = torch.empty(0, dtype=torch.int64, device=self.config.device)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=nothing,
            positions=nothing,
            req_pool_indices=nothing,
            seq_lens=nothing,
            seq_lens_cpu=[],
            out_cache_loc=nothing,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.token_to_kv_pool,
        )

    def _capture_prefills(self) -> None:
        logger.info("Prefills run without CUDA graphs: their experts take tokens of all DP groups")
