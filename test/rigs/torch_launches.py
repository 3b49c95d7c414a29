"""Operations of torch that are launches on a device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class TorchLaunches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager: notes the operations inside that make no view.

    Attributes:
        names: Their names in order, such as `cat`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
