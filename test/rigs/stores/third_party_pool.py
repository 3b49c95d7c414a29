"""A host pool with the interface that SGLang's backends are given, and nothing more."""

from __future__ import annotations

import torch

PAGE = 4


class ThirdPartyPool:
    """Keys and values of `num_pages` pages of four tokens, 3 layers, random bits.

    Args:
        num_pages: Pages.
        page_kib: KiB of the keys of a page, and of its values.
        seed: Seed of the bits.
    """

    def __init__(self, num_pages: int, *, page_kib: int = 1, seed: int = 0) -> None:
        self.page_size = PAGE
        self.layout = "page_first"
        generator = torch.Generator().manual_seed(seed)
        shape = (2, num_pages * PAGE, page_kib * 1024 // PAGE)
        self.kv_buffer = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Address and bytes of the keys, then of the values, page by page."""
        keys, values = self.kv_buffer
        token = keys[0].nbytes
        ptrs = [
            part.data_ptr() + slot * token
            for slot in indices.tolist()[:: self.page_size]
            for part in (keys, values)
        ]
        return ptrs, [token * self.page_size] * len(ptrs)

    def page(self, index: int) -> torch.Tensor:
        """The bytes of a page, a view."""
        return self.kv_buffer[:, index * PAGE : (index + 1) * PAGE]
