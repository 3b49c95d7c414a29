"""The indexer of DSA over groups of tokens: it makes one key of the keys of a group.

A token gives a key and, for each of its elements, a gate. The key of a group is the average of its
tokens' keys, element by element, weighted by the softmax of gates; a token's place in the group
adds to its gates. Nothing is rotated. Later steps read the tokens of an open group from a pool of
running requests.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang.srt.configs.mla_config import PooledIndexerConfig
from sglang.srt.layers.compressed.group_plan import groups_of
from sglang.srt.layers.forward_batch_info import ForwardBatch, IndexQuery
from sglang.srt.layers.fused_kernels import fused_kernels
from sglang.srt.layers.linear import MergedColumnParallelLinear, apply_linear
from sglang.srt.layers.linear_attention.extend_plan import token_bounds_of
from sglang.srt.layers.mla.latent_attention import INDEXER_NORM_EPS
from sglang.srt.layers.placement import (
    NamedSlots,
    Share,
    TensorPlacement,
    WeightedLayer,
    WeightSlot,
)
from sglang.srt.layers.triton_ops.arguments import OpenedGroups, PooledKeyWeights
from sglang.srt.mem_cache.device.nsa_pool import NSAIndexerPool, NSATokenToKVPool
from sglang.srt.mem_cache.device.state_spec import PoolName


class PooledIndexer(WeightedLayer):
    """The indexer of one layer; the same on every rank. Scores are those of `Indexer`."""

    def __init__(
        self,
        config: PooledIndexerConfig,
        q_lora_rank: int,
        hidden_size: int,
        layer_id: int,
        *,
        placement: TensorPlacement,
    ) -> None:
        super().__init__(placement)
        self.config, self.layer_id = config, layer_id
        self._kernels = fused_kernels(placement.device)
        dim, heads = config.head_dim, config.num_heads

        def product(name: str, outputs: int, inputs: int) -> MergedColumnParallelLinear:
            share = Share(0, outputs, outputs)
            return MergedColumnParallelLinear(
                inputs, [(name, share)], bias=False, placement=placement
            )

        self.to_queries = product("wq_b", heads * dim, q_lora_rank)
        self.to_keys = product("wk", dim, hidden_size)
        self.norm_weight, self.norm_bias = placement.empty(dim), placement.empty(dim)
        self.gate_weight = placement.empty(dim, hidden_size)
        # fp32, because they decide the ranking of groups.
        exact = replace(placement, dtype=torch.float32)
        self.heads_weight = exact.empty(heads, hidden_size)
        self.position = exact.empty(config.ratio, dim)

    def queries(self, hidden: torch.Tensor, q_latent: torch.Tensor) -> IndexQuery:
        """Queries of tokens, and the weights of their heads.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            q_latent: `[num_tokens, q_lora_rank]`, normalised.
        """
        q = self.to_queries.forward(q_latent).view(len(hidden), -1, self.config.head_dim)
        weights = apply_linear(hidden, self.heads_weight)
        return IndexQuery(q, weights, self.config.topk)

    def store_keys(self, hidden: torch.Tensor, forward_batch: ForwardBatch) -> None:
        """Store the keys of the groups that a step finishes, and what later steps need of its
        tokens `[num_tokens, hidden_size]`."""
        pools, rows = forward_batch.pools, forward_batch.req_pool_indices
        assert pools is not None, "the runner sets it before the model runs"
        pool = pools[PoolName.OPEN_GROUP]
        opened = pool.parts[0][pool.wait_for_layer(self.layer_id)]
        k, gates = self.to_keys.forward(hidden), apply_linear(hidden, self.gate_weight)
        if self._kernels is not None:
            self._store_fused(k, gates, OpenedGroups(opened, rows), forward_batch)
            return
        plan = groups_of(forward_batch, self.config.ratio)
        k = F.layer_norm(k, k.shape[-1:], self.norm_weight, self.norm_bias, INDEXER_NORM_EPS)
        tokens = torch.cat([k, gates], dim=1)
        found = opened[rows[plan.open_requests], plan.open_places]
        keys, gates = torch.cat([tokens, found])[plan.current].chunk(2, dim=2)
        weights = F.softmax(gates.float() + self.position, dim=1).to(keys.dtype)
        kept = rows[plan.kept_requests], plan.kept_places
        opened.index_put_(kept, tokens.index_select(0, plan.kept_tokens))
        items = forward_batch.out_cache_loc[plan.current[:, -1]] // plan.ratio
        index_pool = self._index_pool(forward_batch)
        index_pool.set_index_k_buffer(self.layer_id, items, (weights * keys).sum(dim=1))

    def _store_fused(
        self,
        keys: torch.Tensor,
        gates: torch.Tensor,
        opened: OpenedGroups,
        forward_batch: ForwardBatch,
    ) -> None:
        """The rest of `store_keys` by a kernel, from keys and gates `[num_tokens, head_dim]`."""
        assert self._kernels is not None
        bounds: torch.Tensor | None = None
        if forward_batch.forward_mode.is_extend():
            bounds = token_bounds_of(forward_batch)
        weights = self.norm_weight, self.norm_bias, INDEXER_NORM_EPS, self.position
        pool = self._index_pool(forward_batch)
        self._kernels.store_pooled_keys(
            keys,
            gates,
            PooledKeyWeights(*weights),
            opened,
            forward_batch.positions,
            forward_batch.out_cache_loc,
            bounds,
            forward_batch.most_new_tokens,
            pool.index_k_buffer[pool.place_to_write(self.layer_id)],
        )

    @staticmethod
    def _index_pool(forward_batch: ForwardBatch) -> NSAIndexerPool:
        pool = forward_batch.token_to_kv_pool
        assert isinstance(pool, NSATokenToKVPool)
        return pool.index_pool

    def weight_slots(self) -> NamedSlots:
        for name, weight in (
            ("k_norm.weight", self.norm_weight),
            ("k_norm.bias", self.norm_bias),
            ("weights_proj.weight", self.heads_weight),
            ("index_kpool_compress_gate", self.gate_weight),
            ("index_kpool_compress_ape", self.position),
        ):
            yield f"{self.prefix}.{name}", WeightSlot.of(weight)
