"""Exchange of tokens between DP groups, whose ranks share the experts: *dispatch* brings the tokens
of all groups to every rank, *combine* brings the sums of their experts back."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from sglang.srt.distributed.tensor_group import TensorGroup
from sglang.srt.layers.forward_batch_info import GroupStep


class Dispatched(NamedTuple):
    """The tokens of all DP groups, in their order."""

    x: torch.Tensor
    """`[num_tokens, size]`."""
    weights: torch.Tensor
    """fp32 `[num_tokens, top_k]`."""
    ids: torch.Tensor
    """int32 `[num_tokens, top_k]`."""


_USE_BYTES: Final = torch.float32.itemsize + torch.int32.itemsize
"""Bytes of the weight and the id of an expert that a token uses."""


def exchange_bytes(num_groups: int, size: int, top_k: int, dtype: torch.dtype) -> int:
    """Most bytes that an exchange has in memory at once, for each token of a group's step, where
    every group has as many. `dispatch` gathers all rows and takes them apart; `combine` pads the
    sums of all tokens and receives its own.

    Args:
        size: Features of a token.
        top_k: Experts of a token.
    """
    row = size * dtype.itemsize
    dispatched = 2 * num_groups * (row + top_k * _USE_BYTES)
    return max(dispatched, (2 * num_groups + 1) * row)


class TokenExchange:
    """Gives all ranks all tokens, then each group its sums: one collective each. All ranks make the
    same calls in the same order, on the thread that runs the model.

    A gathering and a scattering have parts as large as the largest group's. If groups are so unlike
    that most of that would be padding, both are sums over the ranks instead, without padding.

    Args:
        group: The ranks at this one's place in each of the DP groups.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self._step: GroupStep | None = None

    def begin(self, step: GroupStep | None) -> None:
        """Before a step. None: all groups have as many tokens as this one."""
        self._step = step

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, is_last: bool
    ) -> Dispatched:
        """Tokens of all groups.

        Args:
            x: `[n, size]`: this group's tokens; the same on all of its ranks.
            weights: fp32 `[n, top_k]`, of any stride between tokens.
            ids: `[n, top_k]`, any integer dtype.
            is_last: True in the model's last layer, which computes `GroupStep.rows` alone.
        """
        counts = self._counts(len(x), is_last)
        fields = [x.view(torch.uint8), *(_bytes_of(one) for one in (weights, ids.to(torch.int32)))]
        widths = [field.shape[1] for field in fields]
        if _is_mostly_padding(counts):
            rows = fields[0].new_zeros((sum(counts), sum(widths)))
            torch.cat(fields, dim=1, out=rows[self._own_rows(counts)])
            del fields
            rows = self.group.all_reduce(rows)  # A row is zero on all ranks but one.
        else:
            packed = fields[0].new_empty((max(counts), sum(widths)))
            torch.cat(fields, dim=1, out=packed[: len(x)])
            gathered = self.group.all_gather(packed)
            del fields, packed  # Their memory serves what follows, see `exchange_bytes`.
            if min(counts) == max(counts):
                rows = gathered.flatten(0, 1)
            else:
                rows = torch.cat([one[:count] for one, count in zip(gathered, counts, strict=True)])
            del gathered
        parts = [part.contiguous() for part in torch.split(rows, widths, dim=1)]
        return Dispatched(
            parts[0].view(x.dtype), parts[1].view(torch.float32), parts[2].view(torch.int32)
        )

    def combine(self, out: torch.Tensor, num_tokens: int, *, is_last: bool) -> torch.Tensor:
        """This group's rows of the sum over the ranks of the exchange, `[n, size]`.

        Args:
            out: `[num_tokens of all groups, size]`: what this rank's experts say of `dispatch`ed
                tokens.
            num_tokens: n, this group's tokens.
        """
        counts = self._counts(num_tokens, is_last)
        if _is_mostly_padding(counts):
            return self.group.all_reduce(out)[self._own_rows(counts)]
        most = max(counts)
        if min(counts) == most:
            parts = out.view(len(counts), most, -1)
        else:
            parts = out.new_empty((len(counts), most, out.shape[1]))
            for part, of_group in zip(parts, torch.split(out, counts), strict=True):
                part[: len(of_group)].copy_(of_group)
        return self.group.reduce_scatter(parts)[:num_tokens]

    def _own_rows(self, counts: list[int]) -> slice:
        begin = sum(counts[: self.group.rank])
        return slice(begin, begin + counts[self.group.rank])

    def _counts(self, own: int, is_last: bool) -> list[int]:
        """Tokens of each group in a layer."""
        step = self._step
        if step is None:
            return [own] * self.group.size
        counts = list(step.rows if is_last else step.tokens)
        assert counts[self.group.rank] == own, (counts, self.group.rank, own)
        return counts


def _is_mostly_padding(counts: list[int]) -> bool:
    """True if a sum of all tokens, which passes each twice, moves less than padded parts."""
    return len(counts) * max(counts) > 2 * sum(counts)


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
