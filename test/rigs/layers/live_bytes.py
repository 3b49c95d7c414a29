"""Most bytes of tensors that were alive at once on this thread, among those made inside a block."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager.

    Attributes:
        most: The bytes, counted after each operation. Tensors that share memory count once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._others: set[int] = set()
        self.most = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        known = self._storages()
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor) and _place(given) not in known:
                self._others.add(_place(given))
        self._made += [weakref.ref(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        live = self._storages()
        self.most = max(self.most, sum(live.values()))
        return out

    def _storages(self) -> dict[int, int]:
        """Bytes of the live tensors' memory by its address."""
        live = [tensor for one in self._made if (tensor := one()) is not None]
        self._made = [weakref.ref(tensor) for tensor in live]
        found = {_place(one): one.untyped_storage().nbytes() for one in live}
        return {place: size for place, size in found.items() if place not in self._others}


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
