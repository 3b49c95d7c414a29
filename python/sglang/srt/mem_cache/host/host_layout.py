"""Host-memory layouts of KV pages: which exist, where each works, and what order its bytes have.

Pure tables and functions: no I/O, no allocation, any thread. The single source for
`--hicache-mem-layout` and `--hicache-io-backend`.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import Final, TypeVar

from sglang.srt.constants import KIB
from sglang.srt.utils.spelling import did_you_mean

AUTO: Final = "auto"
S = TypeVar("S", bound=StrEnum)


class HostLayout(StrEnum):
    """Shape of a host pool's buffers, `H` heads of `D` elements, `T` tokens in `P` pages of `S`."""

    LAYER_FIRST = "layer_first"
    """`(2, layer, T, H, D)`: copies from the device are long runs; a page is scattered."""
    PAGE_FIRST = "page_first"
    """`(2, T, layer, H, D)`: a page's K (and V) is one run, token-major."""
    PAGE_FIRST_DIRECT = "page_first_direct"
    """`(2, P, layer, S, H, D)`: a page's K (and V) is one run, layer-major."""
    PAGE_FIRST_KV_SPLIT = "page_first_kv_split"
    """A buffer `(P, layer, S, ...)` for each part of a page: K and V, or the latent vectors and the
    rotated parts of MLA's rows. A page of indexer keys has one part."""


class IoBackend(StrEnum):
    """How bytes move between device and host pools."""

    DIRECT = "direct"
    """Plain copies: by the CPU on a CPU, by copy engines on CUDA."""
    KERNEL = "kernel"
    """Long pages as with `direct`; short ones by a kernel that accesses host memory."""
    KERNEL_ASCEND = "kernel_ascend"
    """Plain copies of whole pages, and torch's indexed copies on the device; for Ascend NPUs."""


class PageByteOrder(StrEnum):
    """Order of a page's bytes in L3; part of the namespace, since it decides their meaning."""

    TOKEN_MAJOR = "token_major"
    """K `[token, layer, head, dim]`, then V."""
    LAYER_MAJOR = "layer_major"
    """K `[layer, token, head, dim]`, then V."""
    LAYER_MAJOR_SPLIT = "layer_major_split"
    """MLA's rows cut in two: latent vectors `[layer, token, kv_lora_rank]`, then rotated parts."""


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
            HostLayout.PAGE_FIRST_KV_SPLIT,
            HostLayout.PAGE_FIRST_DIRECT,
        )
    },
}

LONG_PAGE_BYTES: Final = 256 * KIB
"""Copy engines are faster for pages with at least so many bytes of K (or V) over all layers."""

_LONG_PAGE_BYTES_BESIDE_STATES: Final = 192 * KIB
"""The same for models that also keep recurrent states, whose runs are long. No shorter pages were
measured. Without any hit, `layer_first` with the kernel cost 2.3% of the throughput, and copy
engines cost nothing (benchmark/results/2026-11-23-gpu-hybrid.md)."""

_Pair = tuple[IoBackend, HostLayout]
_ENGINES: Final = (IoBackend.DIRECT, HostLayout.PAGE_FIRST_DIRECT)
_KERNEL_WITH_L3: Final = (IoBackend.KERNEL, HostLayout.PAGE_FIRST)
_KERNEL: Final = (IoBackend.KERNEL, HostLayout.LAYER_FIRST)

# Choices of `auto`, by (device, pages are long, there is an L3): the first pair that agrees with
# the settings given. On one H200, parts of the speed of one large copy (load, backup; Qwen3-8B,
# whose tokens have 72 KB of K; benchmark/results/2026-11-21-hicache-transfer.md):
#
#     page of  page_first_direct, direct  layer_first, kernel  page_first, kernel
#     64       0.95-0.97  0.93-0.97       0.93  0.92           0.89-0.91  0.95-0.97
#     16       0.97       0.93-0.95       0.90  0.92-0.94      0.91       0.95-0.96
#     4        0.96       0.88
#     1        0.74-0.92  0.76-0.79       0.90  0.92-0.94      0.89-0.91  0.92
#
# With an L3 a page has to be one run of host memory.
_PREFERENCE: Final[dict[tuple[str, bool, bool], tuple[_Pair, ...]]] = {
    ("cpu", True, True): ((IoBackend.DIRECT, HostLayout.PAGE_FIRST_DIRECT),),
    ("cpu", True, False): ((IoBackend.DIRECT, HostLayout.LAYER_FIRST),),
    ("cpu", False, True): ((IoBackend.DIRECT, HostLayout.PAGE_FIRST_DIRECT),),
    ("cpu", False, False): ((IoBackend.DIRECT, HostLayout.LAYER_FIRST),),
    ("cuda", True, True): (_ENGINES, _KERNEL_WITH_L3),
    ("cuda", True, False): (_ENGINES, _KERNEL),
    ("cuda", False, True): (_KERNEL_WITH_L3, _KERNEL, _ENGINES),
    ("cuda", False, False): (_KERNEL, _ENGINES),
}


def parse_layout(name: str) -> HostLayout:
    """The layout called `name`. Raises ValueError that lists the known ones."""
    return _parse(HostLayout, name, "--hicache-mem-layout", "layout")


def check_layout_of_kind(layout: str, known: tuple[HostLayout, ...], kind: str) -> None:
    """Raise ValueError unless `layout` is one of a kind of state's, `known`; names them."""
    if layout not in known:
        raise ValueError(
            f"--hicache-mem-layout {layout} is not for {kind}; use one of: {', '.join(known)}"
        )


def page_byte_order(layout: str) -> str:
    """The order of a page's bytes in L3, where the layout does not cut rows in two."""
    return _BYTE_ORDER[parse_layout(layout)].value


def is_zero_copy(layout: str) -> bool:
    """True if each part of a page is one run of bytes, so that L3 reads and writes it in place."""
    return parse_layout(layout) is not HostLayout.LAYER_FIRST


def suits_copy_engines(page_bytes: int) -> bool:
    """True if pages with this many bytes of K (or V) over all layers are long enough for copy
    engines."""
    return page_bytes >= LONG_PAGE_BYTES


def resolve_layout_and_io(
    device: str,
    io_backend: str,
    layout: str,
    has_storage: bool,
    page_bytes: int,
    *,
    has_states: bool = False,
    is_shared_by_sizes: bool = False,
    known: Collection[HostLayout] = tuple(HostLayout),
) -> tuple[str, str]:
    """Turn the user's two settings, either of which may be `auto`, into a pair that works.

    Args:
        device: `cpu`, `cuda` or `npu`, with or without an index (`cuda:1`).
        io_backend: `--hicache-io-backend`.
        layout: `--hicache-mem-layout`.
        has_storage: True if an L3 backend is configured.
        page_bytes: Bytes of the shorter of K and V of a page, over all layers.
        has_states: True if the model keeps recurrent states beside pages.
        is_shared_by_sizes: True if servers of other tensor-parallel sizes share the L3. Their ranks
            have pages of other lengths, so that `auto` takes a layout of one byte order, whatever
            the length.
        known: The layouts that every kind of state of the model has: `auto` takes one of them.

    Returns:
        `(io_backend, layout)`. Values that were named explicitly do not change.

    Raises:
        ValueError: The device or a name is unknown, or the combination cannot work. The message
            names what can.
    """
    kind, works = _what_works(device, io_backend, layout)
    if layout == AUTO:
        works = [(io, one) for io, one in works if one in known] or works
    long_bytes = _LONG_PAGE_BYTES_BESIDE_STATES if has_states else LONG_PAGE_BYTES
    preferred = _PREFERENCE.get((kind, page_bytes >= long_bytes, has_storage), ())
    if is_shared_by_sizes:
        in_order = PageByteOrder.LAYER_MAJOR
        preferred = tuple(pair for pair in preferred if _BYTE_ORDER[pair[1]] is in_order)
    return next((io.value, one.value) for io, one in (*preferred, *works) if (io, one) in works)


def check_layout_and_io(device: str, io_backend: str, layout: str) -> None:
    """Refuse the settings that `resolve_layout_and_io` refuses, which depends on these three alone.

    For the start of a server, which does not know its model's pages yet. Imports no torch.
    """
    _what_works(device, io_backend, layout)


def _what_works(device: str, io_backend: str, layout: str) -> tuple[str, list[_Pair]]:
    """The kind of device, and the pairs that work there and agree with the settings given."""
    kind = device.split(":", 1)[0]
    backends = _LAYOUTS_FOR.get(kind)
    if backends is None:
        raise ValueError(f"--device {device}: host cache pools work on {', '.join(_LAYOUTS_FOR)}")
    wanted_io = (
        None
        if io_backend == AUTO
        else _parse(IoBackend, io_backend, "--hicache-io-backend", "backend")
    )
    wanted_layout = None if layout == AUTO else parse_layout(layout)
    if wanted_io is not None and wanted_io not in backends:
        raise ValueError(
            f"--hicache-io-backend {io_backend} does not work on {kind}; {_what_can(kind)}"
        )
    works = [
        (io, one)
        for io, layouts in backends.items()
        for one in layouts
        if wanted_io in (None, io) and wanted_layout in (None, one)
    ]
    if not works:
        raise ValueError(
            f"--hicache-mem-layout {layout} does not work on {kind} with "
            f"--hicache-io-backend {io_backend}; {_what_can(kind)}"
        )
    return kind, works


def _parse(kind: type[S], name: str, flag: str, what: str) -> S:
    try:
        return kind(name)
    except ValueError:
        known = [one.value for one in kind]
        raise ValueError(
            f"{flag}: unknown {what} {name!r}; use {AUTO} or one of: "
            f"{', '.join(known)}{did_you_mean(name, known)}"
        ) from None


def _what_can(kind: str) -> str:
    pairs = (
        f"{io.value} with {'|'.join(one.value for one in layouts)}"
        for io, layouts in _LAYOUTS_FOR[kind].items()
    )
    return f"on {kind} use " + ", or ".join(pairs)
