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
    drafts: int
    """Tokens of each pass of the draft layer before it; 0: it verifies no drafts."""


class GroupedModelRunner(ModelRunner):
    """Runs this group's part of steps whose experts take the tokens of all groups.

    Warm-up and captures run the same steps on all ranks, so the groups have equally many tokens.
    """

    def plan(self, forward_batch: ForwardBatch) -> GroupPlan:
        """The numbers of a step that the other groups need before it runs."""
        # A verification has no tokens yet but the newest.
        tokens, requests = len(forward_batch.out_cache_loc), forward_batch.batch_size
        # The draft layer reads hidden states of all tokens.
        needs_all = forward_batch.needs_all_rows or self.model.draft_layer is not None
        verifies = forward_batch.forward_mode is ForwardMode.TARGET_VERIFY
        if verifies:
            fits_graph = self.verifications is not None and self.verifications.can_run(requests)
        else:
            fits_graph = any(graphs.can_run(forward_batch) for graphs in self._graphs)
        return GroupPlan(
            tokens=tokens,
            rows=tokens if needs_all else requests,
            requests=requests,
            fits_graph=fits_graph,
            drafts=requests if verifies else 0,
        )

    @torch.inference_mode()
    def run_idle(self, step: GroupStep) -> None:
        """Take part in a step for which this group has no work."""
        if step.graph_rows is None:
            self._draft_idly(step)
            self._exchange_for(step)
            _run_idle(self._blocks)
        elif step.drafts:
            assert self.verifications is not None, "all groups have captured the same steps"
            self.verifications.verify(self._no_requests(step))
        else:
            self._exchange_for(step)
            self._decoding.replay(self._no_requests(step), step.graph_rows)

    def _draft_idly(self, step: GroupStep) -> None:
        """Take part in the drafts of other groups."""
        if not step.drafts:
            return
        self._exchange_for(_draft_step(step))
        for _ in range(self.config.num_draft_tokens - 1):
            _run_idle(self._draft_blocks)

    def forward_draft(self, forward_batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        step = forward_batch.groups
        self._exchange_for(None if step is None else _draft_step(step))
        return super().forward_draft(forward_batch, hidden)

    def _forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        step = forward_batch.groups
        if step is not None and forward_batch.forward_mode is not ForwardMode.TARGET_VERIFY:
            self._draft_idly(step)
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

    @property
    def _blocks(self) -> list[SparseMoeBlock]:
        """The model's sparse blocks, in the order of its layers."""
        own = self._draft_blocks
        return [block for block in _sparse_blocks(self.model) if block not in own]

    @property
    def _draft_blocks(self) -> list[SparseMoeBlock]:
        """The sparse blocks of the draft layer, if there is one."""
        layer = self.model.draft_layer
        return [] if layer is None else _sparse_blocks(layer)

    def _no_requests(self, step: GroupStep) -> ForwardBatch:
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
            groups=step,
        )

    def _capture_prefills(self) -> None:
        logger.info("Prefills run without CUDA graphs: their experts take tokens of all DP groups")


def _sparse_blocks(module: torch.nn.Module) -> list[SparseMoeBlock]:
    return [part for part in module.modules() if isinstance(part, SparseMoeBlock)]


def _run_idle(blocks: list[SparseMoeBlock]) -> None:
    for block in blocks:
        block.run_idle()


def _draft_step(step: GroupStep) -> GroupStep:
    """A pass of the draft layer, which has a token of each request that drafts."""
    return GroupStep(tokens=step.drafts, rows=step.drafts)
