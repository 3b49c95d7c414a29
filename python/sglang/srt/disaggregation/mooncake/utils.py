"""Re-exports the memory pools of Mooncake's transports at SGLang's path."""

from sglang.srt.distributed.device_communicators.mooncake_mem_pool import (
    check_mooncake_custom_mem_pool_enabled,
    init_mooncake_custom_mem_pool,
)

__all__ = ["check_mooncake_custom_mem_pool_enabled", "init_mooncake_custom_mem_pool"]
