"""Host-memory layouts of KV pages: which exist, where each works, and what order its bytes have.

Pure tables and functions: no I/O, no allocation, any thread. The single source for
`--hicache-mem-layout` and `--hicache-io-backend`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

AUTO: Final = "auto"


class HostLayout(StrEnum):
    """Shape of a host pool's buffers, `H` heads of `D` elements, `T` tokens in `P` pages of `S`."""

    LAYER_FIRST = "layer_first"
    """`(2, layer, T, H, D)`: copies from the device are long runs; a page is scattered."""
    PAGE_FIRST = "page_first"
    """`(2, T, layer, H, D)`: a page's K (and V) is one run, token-major."""
    PAGE_FIRST_DIRECT = "page_first_direct"
    """`(2, P, layer, S, H, D)`: a page's K (and V) is one run, layer-major."""
    PAGE_FIRST_KV_SPLIT = "page_first_kv_split"
    """Two buffers `(P, layer, S, H, D)`, one for K and one for V."""


class IoBackend(StrEnum):
    """How bytes move between device and host pools."""

    DIRECT = "direct"
    """Plain copies by torch."""
    KERNEL = "kernel"
    """A CUDA kernel that gathers pages through mapped pinned memory."""
    KERNEL_ASCEND = "kernel_ascend"
    """Its counterpart on Ascend NPUs."""


class PageByteOrder(StrEnum):
    """Order of a page's bytes in L3; part of the namespace, since it decides their meaning."""

    TOKEN_MAJOR = "token_major"
    """K `[token, layer, head, dim]`, then V."""
    LAYER_MAJOR = "layer_major"
    """K `[layer, token, head, dim]`, then V."""


_BYTE_ORDER: Final[dict[HostLayout, PageByteOrder]] = {
    # layer_first travels through a staging page, which is written layer by layer.
    HostLayout.LAYER_FIRST: PageByteOrder.LAYER_MAJOR,
    HostLayout.PAGE_FIRST: PageByteOrder.TOKEN_MAJOR,
    HostLayout.PAGE_FIRST_DIRECT: PageByteOrder.LAYER_MAJOR,
    HostLayout.PAGE_FIRST_KV_SPLIT: PageByteOrder.LAYER_MAJOR,
}

_LAYOUTS_FOR: Final[dict[str, dict[IoBackend, tuple[HostLayout, ...]]]] = {
    "cpu": {IoBackend.DIRECT: tuple(HostLayout)},
    "cuda": {
        IoBackend.KERNEL: (HostLayout.LAYER_FIRST, HostLayout.PAGE_FIRST),
        IoBackend.DIRECT: (HostLayout.LAYER_FIRST, HostLayout.PAGE_FIRST_DIRECT),
    },
    "npu": {
        IoBackend.KERNEL_ASCEND: (
            HostLayout.PAGE_FIRST_DIRECT,
            HostLayout.PAGE_FIRST_KV_SPLIT,
        )
    },
}

# The order in which auto tries layouts, with an L3 and without one.
_PREFERENCE: Final[dict[tuple[str, bool], tuple[HostLayout, ...]]] = {
    ("cpu", True): (HostLayout.PAGE_FIRST_DIRECT,),
    ("cpu", False): (HostLayout.LAYER_FIRST,),
    ("cuda", True): (HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT),
    ("cuda", False): (HostLayout.LAYER_FIRST,),
    ("npu", True): (HostLayout.PAGE_FIRST_KV_SPLIT,),
    ("npu", False): (HostLayout.PAGE_FIRST_KV_SPLIT,),
}


def parse_layout(name: str) -> HostLayout:
    """The layout called `name`. Raises ValueError that lists the known ones."""
    try:
        return HostLayout(name)
    except ValueError:
        known = ", ".join(layout.value for layout in HostLayout)
        raise ValueError(
            f"--hicache-mem-layout: unknown layout {name!r}; use {AUTO} or one of: {known}"
        ) from None


def page_byte_order(layout: str) -> str:
    """The order of a page's bytes in L3. Layouts with the same order can share a namespace."""
    return _BYTE_ORDER[parse_layout(layout)].value


def is_zero_copy(layout: str) -> bool:
    """Whether a page is one run of bytes per K and V, so that L3 reads and writes it in place."""
    return parse_layout(layout) is not HostLayout.LAYER_FIRST


def resolve_layout_and_io(
    device: str, io_backend: str, layout: str, has_storage: bool
) -> tuple[str, str]:
    """Turn the user's two settings, either of which may be `auto`, into a pair that works.

    Args:
        device: `cpu`, `cuda` or `npu`, with or without an index (`cuda:1`).
        io_backend: `--hicache-io-backend`.
        layout: `--hicache-mem-layout`.
        has_storage: Whether an L3 backend is configured.

    Returns:
        `(io_backend, layout)`. What was named explicitly comes back unchanged.

    Raises:
        ValueError: The device or a name is unknown, or the combination cannot work. The message
            names what can.
    """
    kind = device.split(":", 1)[0]
    backends = _LAYOUTS_FOR.get(kind)
    if backends is None:
        raise ValueError(f"--device {device}: host cache pools work on {', '.join(_LAYOUTS_FOR)}")
    wanted_io = None if io_backend == AUTO else _parse_io(io_backend)
    wanted_layout = None if layout == AUTO else parse_layout(layout)
    if wanted_io is not None and wanted_io not in backends:
        raise ValueError(
            f"--hicache-io-backend {io_backend} does not work on {kind}; {_what_can(kind)}"
        )
    for io, layouts in backends.items():
        if wanted_io not in (None, io):
            continue
        if wanted_layout is None:
            preferred = (one for one in _PREFERENCE[kind, has_storage] if one in layouts)
            return io.value, next(preferred, layouts[0]).value
        if wanted_layout in layouts:
            return io.value, wanted_layout.value
    raise ValueError(
        f"--hicache-mem-layout {layout} does not work on {kind} with "
        f"--hicache-io-backend {io_backend}; {_what_can(kind)}"
    )


def _parse_io(name: str) -> IoBackend:
    try:
        return IoBackend(name)
    except ValueError:
        known = ", ".join(io.value for io in IoBackend)
        raise ValueError(
            f"--hicache-io-backend: unknown backend {name!r}; use {AUTO} or one of: {known}"
        ) from None


def _what_can(kind: str) -> str:
    pairs = (
        f"{io.value} with {'|'.join(one.value for one in layouts)}"
        for io, layouts in _LAYOUTS_FOR[kind].items()
    )
    return f"on {kind} use " + ", or ".join(pairs)
