"""The library with FlashMLA's kernel, by release of torch.

It is in the packages `sglang-kernel`, each of whose releases links one release of torch, and
`sgl-flash-mla`, which links torch's stable interface.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

SparsePrefill = Callable[..., Sequence[torch.Tensor]]
"""The operator `sparse_prefill_fwd`."""


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """A library with the operator `sparse_prefill_fwd`.

    Attributes:
        package: Module whose folder has it.
        file: Pattern of its name there.
        namespace: Its operators' in `torch.ops`.
    """

    package: str
    file: str
    namespace: str


MULTIPLE: Final = 128
"""Rows of a token come in multiples of this."""
LIBRARIES: Final = (
    KernelLibrary("sgl_kernel", "flashmla_ops*.so", "sgl_kernel"),
    # The other library there has kernels for Blackwell GPUs alone.
    KernelLibrary("flash_mla", "_C_legacy*.so", "flash_mla_legacy"),
)
"""The first that is installed is loaded."""
_RELEASES: Final = {
    (2, 11): "sglang-kernel==0.4.6",
    (2, 13): "sglang-kernel==0.4.8",
    (2, 14): "sglang-kernel==0.4.10",
    (2, 15): "sgl-flash-mla==1.0.0",
}
"""Requirement with the kernel by release of torch, from the packages' metadata. sglang-kernel
0.4.10 is for torch 2.14.1 alone, sgl-flash-mla for torch 2.14.1 and later. Later releases of torch
take the last."""


def fitting_release(torch_version: str) -> str | None:
    """The requirement that has the kernel for a release of torch; None: none is known."""
    release = tuple(int(part) for part in torch_version.split(".")[:2])
    last = max(_RELEASES)
    return _RELEASES.get((release[0], release[1]), _RELEASES[last] if release > last else None)


def load_kernel() -> SparsePrefill:
    """Load the kernel's library; its operator.

    Raises:
        ValueError: No package is installed, or its library does not fit the installed torch.
    """
    fitting = fitting_release(torch.__version__)
    remedy = f"pip install --no-deps {fitting}, or use triton" if fitting else "use triton"
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library.package)
        folders = [] if spec is None else spec.submodule_search_locations or []
        found = [path for folder in folders for path in sorted(Path(folder).glob(library.file))]
        if found:
            break
    else:
        raise ValueError(
            "attention backend 'flashmla' needs the package sglang-kernel or sgl-flash-mla: for "
            f"torch {torch.__version__} {remedy}"
        )
    try:
        torch.ops.load_library(found[0])  # type: ignore[no-untyped-call]
        kernel: SparsePrefill = getattr(torch.ops, library.namespace).sparse_prefill_fwd
    except (OSError, AttributeError) as error:
        raise ValueError(
            f"attention backend 'flashmla': {found[0]} does not fit torch {torch.__version__} "
            f"({error.__cause__ or error}): {remedy}"
        ) from error
    return kernel


def beside_each_other(*lists: torch.Tensor) -> torch.Tensor:
    """Lists of rows side by side, in the kernel's multiples: int32 `[num_tokens, width]`, -1 is no
    row."""
    missing = -sum(one.shape[1] for one in lists) % MULTIPLE
    if missing:
        lists = (*lists, lists[0].new_full((len(lists[0]), missing), -1))
    return torch.cat(lists, dim=1) if len(lists) > 1 else lists[0]


def refusal_of(device: str, error: RuntimeError) -> ValueError:
    """The error for a GPU that does not run the kernel."""
    return ValueError(
        f"attention backend 'flashmla' does not run on {device!r} ({error}): use triton"
    )
