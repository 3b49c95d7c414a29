"""Many plain copies in one call of the CUDA driver, done by the device's copy engines.

The driver is called through ctypes with the addresses as arrays. Its Python bindings take lists
and convert them element by element: measured 0.15 ms against 0.11 ms for 256 copies, besides
making the lists.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sglang.srt.mem_cache.host.copy_runs import CopyGrids, CopyRuns

_IN_STREAM_ORDER: Final = 1
_PREFER_OVERLAP_WITH_COMPUTE: Final = 1
_MAX_COPIES_A_CALL: Final = 4096
_UNIFIED: Final = 4
"""`CU_MEMORYTYPE_UNIFIED`: an address says by itself where it is."""


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`. Location hints matter only for managed memory."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_hint_type", ctypes.c_uint),
        ("source_hint_id", ctypes.c_int),
        ("destination_hint_type", ctypes.c_uint),
        ("destination_hint_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class _Side(ctypes.Structure):
    """Half of `CUDA_MEMCPY2D`."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("memory_type", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("address", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _Grid(ctypes.Structure):
    """`CUDA_MEMCPY2D`."""

    _fields_ = (
        ("source", _Side),
        ("destination", _Side),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class CopyEngine:
    """Issues lists of copies into streams. Any thread with a current CUDA context.

    Raises:
        ValueError: There is no CUDA driver.
    """

    def __init__(self) -> None:
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ValueError(
                f"--hicache-io-backend direct needs the CUDA driver: {error}"
            ) from None
        self._batch = getattr(self._driver, "cuMemcpyBatchAsync_v2", None)
        self._attributes = _Attributes(
            source_access_order=_IN_STREAM_ORDER, flags=_PREFER_OVERLAP_WITH_COMPUTE
        )
        self._first_of_attributes = ctypes.c_size_t(0)
        # Types known beforehand let calls take plain integers, which is faster.
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        if self._batch is not None:
            self._batch.argtypes = (
                pointer, pointer, pointer, size, pointer, pointer, size, pointer,
            )  # fmt: skip
        self._driver.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, size, pointer)
        self._driver.cuMemcpy2DAsync_v2.argtypes = (pointer, pointer)

    def copy(self, runs: CopyRuns, stream: int) -> None:
        """Issue `runs` into `stream` (a handle; not the default stream). Does not wait.

        The order of the copies among themselves is open; they must not overlap.
        """
        if not stream:
            raise ValueError("batched copies need a stream other than the default one")
        if self._batch is None:
            for run in zip(
                runs.destinations.tolist(), runs.sources.tolist(), runs.sizes.tolist(), strict=True
            ):
                _check(self._driver.cuMemcpyAsync(*run, stream), "cuMemcpyAsync")
            return
        for start in range(0, len(runs), _MAX_COPIES_A_CALL):
            part = slice(start, start + _MAX_COPIES_A_CALL)
            sizes = runs.sizes[part]
            code = self._batch(
                _address(runs.destinations[part]),
                _address(runs.sources[part]),
                _address(sizes),
                len(sizes),
                ctypes.addressof(self._attributes),
                ctypes.addressof(self._first_of_attributes),
                1,
                stream,
            )
            _check(code, "cuMemcpyBatchAsync")

    def copy_grids(self, grids: CopyGrids, stream: int) -> None:
        """Issue `grids` into `stream` (a handle), a copy each. Does not wait.

        Many times faster to issue than their runs: measured 0.7 against 3.8 ms for 256 grids of 36
        runs of 128 KB, which the engine then moves at 53 GB/s instead of 50.
        """
        grid = _Grid(
            source=_Side(memory_type=_UNIFIED, pitch=grids.source_stride),
            destination=_Side(memory_type=_UNIFIED, pitch=grids.destination_stride),
            width=grids.run_bytes,
            height=grids.runs,
        )
        source, destination = grid.source, grid.destination
        where, copy = ctypes.addressof(grid), self._driver.cuMemcpy2DAsync_v2
        pairs = zip(grids.sources.tolist(), grids.destinations.tolist(), strict=True)
        for source.address, destination.address in pairs:
            _check(copy(where, stream), "cuMemcpy2DAsync")


def _address(array: npt.NDArray[np.uint64]) -> int:
    assert array.flags.c_contiguous, "the driver would read other numbers"
    address: int = array.__array_interface__["data"][0]  # Faster than `array.ctypes`.
    return address


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA driver error {code}")
