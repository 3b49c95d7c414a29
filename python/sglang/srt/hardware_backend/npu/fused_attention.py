"""Attention by `torch_npu.npu_fused_infer_attention_score`, within its documented limits.

    keys and values in pages     queries of one token; pages of a multiple of 16 tokens, 512 at most
    keys and values in one piece queries of any number of tokens

Both in float16 or bfloat16. It has not run on hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from sglang.srt.hardware_backend.npu.library import load_torch_npu

PAGE_TOKENS: Final = range(16, 513, 16)
"""Pages that the operator reads."""
HEAD_DIMS: Final = range(16, 513, 16)
MAX_GROUP: Final = 64
"""Most query heads of a KV head."""
MAX_TOKEN_ELEMENTS: Final = 65534
"""Most elements of all query heads of a token."""
DTYPES: Final = (torch.float16, torch.bfloat16)

_LAYOUT: Final = "BSND"
_MASK_SIZE: Final = 2048
_CAUSAL: Final = 3
"""`sparse_mode`: the last query sees all keys; each earlier query sees one key less."""
_MAX_ELEMENTS: Final = 2**31 - 1


class FusedAttention:
    """The operator for one model's heads. Only the thread that runs the model uses it."""

    def __init__(self, num_heads: int, num_kv_heads: int, device: torch.device | str) -> None:
        """Raises ValueError if `torch_npu` does not load."""
        self._operator: Any = load_torch_npu(
            "--attention-backend ascend"
        ).npu_fused_infer_attention_score
        self._heads = {"num_heads": num_heads, "num_key_value_heads": num_kv_heads}
        ones = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device)
        self._causal_mask = ones.triu(1)
        """The mask that the operator expects instead of the batch's own; True hides a key."""

    def attend_pages(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        block_table: torch.Tensor,
        seq_lens: Sequence[int],
        scale: float,
    ) -> torch.Tensor:
        """Attend from one token of each request to its context.

        Args:
            q: `[requests, num_heads, head_dim]`, contiguous.
            kv: Keys and values, each `[pages, page_size, num_kv_heads * head_dim]`, contiguous.
            block_table: int32 `[requests, pages of the longest context]` on the device. Entries
                past a context's end are unused.
            seq_lens: Tokens of each context. Together they have at most as many pages as `kv`.

        Returns:
            `[requests, num_heads, head_dim]`.
        """
        k, v = kv
        assert k.numel() <= _MAX_ELEMENTS, f"a layer's {k.numel()} elements exceed int32"
        out, _ = self._operator(
            q.unsqueeze(1),
            k,
            v,
            block_table=block_table,
            actual_seq_lengths_kv=list(seq_lens),
            block_size=k.shape[1],
            input_layout=_LAYOUT,
            scale=scale,
            **self._heads,
        )
        return self._checked(out).squeeze(1)

    def attend_causally(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend causally from the last tokens of one context to all of it.

        Args:
            q: `[new, num_heads, head_dim]`, contiguous.
            k: `[context, num_kv_heads, head_dim]`, contiguous; `v` likewise.

        Returns:
            `[new, num_heads, head_dim]`.
        """
        # A single query sees all keys, and the operator takes no mask for it.
        causal = {"atten_mask": self._causal_mask, "sparse_mode": _CAUSAL} if len(q) > 1 else {}
        out, _ = self._operator(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            input_layout=_LAYOUT,
            scale=scale,
            **causal,
            **self._heads,
        )
        return self._checked(out).squeeze(0)

    @staticmethod
    def _checked(out: Any) -> torch.Tensor:
        assert isinstance(out, torch.Tensor)
        return out
