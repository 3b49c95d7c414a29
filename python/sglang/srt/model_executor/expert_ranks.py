"""Which ranks share the routed experts of a model, and how."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import get_across_dp_group, get_world_group
from sglang.srt.distributed.tensor_group import TensorGroup
from sglang.srt.layers.placement import ExpertRanks
from sglang.srt.layers.token_exchange import TokenExchange
from sglang.srt.model_executor.runner_config import ModelRunnerConfig


def expert_ranks(config: ModelRunnerConfig) -> ExpertRanks | None:
    """`ranks_of_experts` of this process's world."""
    return ranks_of_experts(
        config.model_config,
        attn_dp_size=config.attn_dp_size,
        ep_size=config.ep_size,
        world=get_world_group,
        across_dp=get_across_dp_group,
    )


def ranks_of_experts(
    config: ModelConfig,
    *,
    attn_dp_size: int,
    ep_size: int,
    world: Callable[[], TensorGroup],
    across_dp: Callable[[], TensorGroup],
) -> ExpertRanks | None:
    """How the ranks of a server share the experts; None: they split them like other layers, or the
    model has none. `world` and `across_dp` are called for groups that are needed."""
    exchanges = attn_dp_size > 1
    if not config.has_experts or not (exchanges or ep_size > 1):
        return None
    return ExpertRanks(
        group=world(),
        is_whole=ep_size > 1,
        exchange=TokenExchange(across_dp()) if exchanges else None,
    )
