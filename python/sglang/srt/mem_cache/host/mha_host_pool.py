"""Host pool of keys and values per head, in any of the four layouts."""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.host.paged_host_pool import PagedPoolHost


class MHATokenToKVPoolHost(PagedPoolHost):
    """Mirrors an `MHATokenToKVPool`: a page is its keys, then its values."""

    @property
    def k_buffer(self) -> torch.Tensor:
        """Keys, in the layout's shape without its leading 2."""
        return self._parts[0]

    @property
    def v_buffer(self) -> torch.Tensor:
        """Values, likewise."""
        return self._parts[1]
