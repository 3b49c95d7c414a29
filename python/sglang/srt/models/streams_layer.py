"""A decoder layer whose residual has several streams, with hyper-connections around its blocks."""

from __future__ import annotations

from abc import abstractmethod

import torch

from sglang.srt.distributed.tensor_group import ToAdd
from sglang.srt.layers.compressed.hyper_connection import HyperConnection, Streams
from sglang.srt.layers.radix_attention import LayerStep
from sglang.srt.models.llama import ResidualLayer


class StreamsLayer(ResidualLayer):
    """Attention and a feed-forward part. The model calls `run`.

    The blocks return what `RowParallelLinear.forward` returns; None in place of the residual: they
    did not use it.
    """

    attn_mix: HyperConnection
    mlp_mix: HyperConnection

    @abstractmethod
    def attend(
        self, x: torch.Tensor, zeros: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor | None]:
        """The first block.

        Args:
            x: `[num_tokens, hidden_size]`, normalised.
            zeros: A residual of zeros; as `x`, or `[bs, hidden_size]` with `LayerStep.rows`.
        """

    @abstractmethod
    def feed(
        self, x: torch.Tensor, zeros: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[ToAdd, torch.Tensor | None]:
        """The second block.

        Args:
            x: `[n, hidden_size]`, normalised; `zeros` likewise.
            tokens: int64 `[n]`: tokens of the vocabulary.
        """

    def run(self, streams: Streams, step: LayerStep) -> Streams:
        """Run the layer; with `LayerStep.rows`, its second block runs for these tokens alone."""
        rows, tokens = step.rows, step.batch.input_ids
        x, zeros, streams = self.attn_mix.enter(streams)
        if rows is not None:
            streams, zeros = streams.of(rows), zeros[: len(rows)]
            tokens = tokens.index_select(0, rows)
        streams = streams.behind(*self.attend(x, zeros, step))
        x, zeros, streams = self.mlp_mix.enter(streams)
        return streams.behind(*self.feed(x, zeros, tokens))

    def forward(
        self, x: ToAdd, residual: torch.Tensor, step: LayerStep
    ) -> tuple[ToAdd, torch.Tensor]:
        """See `ResidualLayer`; the residual is `[num_tokens, streams, hidden_size]`, with nothing
        to add."""
        assert x is None, "streams have weights of their own"
        return None, self.run(Streams(residual), step).joined()
