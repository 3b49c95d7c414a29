"""Which ranks share the routed experts of a model, and how."""

from __future__ import annotations

from sglang.srt.distributed.parallel_state import get_across_dp_group, get_world_group
from sglang.srt.layers.placement import ExpertRanks
from sglang.srt.layers.token_exchange import TokenExchange
from sglang.srt.model_executor.runner_config import ModelRunnerConfig


def expert_ranks(config: ModelRunnerConfig) -> ExpertRanks | None:
    """How the ranks of this process's world share the experts; None: they split them like other
    layers, or the model has none."""
    exchanges = config.attn_dp_size > 1
    if not config.model_config.has_experts or not (exchanges or config.ep_size > 1):
        return None
    return ExpertRanks(
        group=get_world_group(),
        is_whole=config.ep_size > 1,
        exchange=TokenExchange(get_across_dp_group()) if exchanges else None,
    )
