"""What layers ask of the ranks that share a model: sums and gathered parts of tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class TensorGroup(ABC):
    """Ranks that split layers among them. One thread of each rank, in the same order on all."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This rank's place in the group, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many ranks there are."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks: the same bits on all of them.

        Args:
            x: Of the same shape and dtype on all ranks. Its memory may hold the sum.
        """

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, `[size, *x.shape]`, in the order of ranks.

        Args:
            x: Of the same shape and dtype on all ranks.
        """


class SingleTensorGroup(TensorGroup):
    """One rank, which has everything."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)
