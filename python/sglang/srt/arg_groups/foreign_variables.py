"""The treatment of variables that SGLang has and this engine lacks, and of unknown ones."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Final

from sglang.srt.environ import Envs
from sglang.srt.utils.spelling import did_you_mean

_SGLANG: Final = "SGLANG_"
_MOONCAKE: Final = "MOONCAKE_"
SGLANG_VARIABLES: Final = tuple(
    """
    ALLOW_OVERWRITE_LONGER_CONTEXT_LEN BLACKWELL_OVERLAP_* BLOCK_NONZERO_RANK_CHILDREN CACHE_DIR
    CHUNKED_PREFIX_CACHE_THRESHOLD CLIP_MAX_NEW_TOKENS_ESTIMATION CUSTOM_ALLREDUCE_ALGO CUTLASS_MOE
    DATA_PARALLEL_BUDGET_INTERVAL DEBUG_* DEEPEP_* DETOKENIZER_MAX_STATES DG_*
    DISABLE_CONSECUTIVE_PREFILL_OVERLAP DISABLE_FA4_WARMUP DISABLE_OUTLINES_DISK_CACHE
    DISABLE_REQUEST_LOGGING DISABLE_STATIC_WATERFILL DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL
    DISAGGREGATION_NIXL_* DISAGGREGATION_QUEUE_SIZE DISAGGREGATION_THREAD_POOL_SIZE DISAGG_STAGING_*
    DSA_* ENABLE_FLASHINFER_* ENABLE_HEALTH_ENDPOINT_GENERATION ENABLE_OVERLAP_PLAN_STREAM
    ENABLE_SPEC_V2 ENABLE_TORCH_COMPILE ENABLE_TORCH_INFERENCE_MODE ENABLE_TP_MEMORY_INBALANCE_CHECK
    EPLB_* EXA_* FLASHINFER_* FORCE_FP8_MARLIN FP8_IGNORED_LAYERS FUSED_* HEALTH_CHECK_TIMEOUT
    HICACHE_DECODE_OFFLOAD_STRIDE HICACHE_HF3FS_* HICACHE_L3_STAGING_* HICACHE_NIXL_* HOST_IP
    HUGEPAGE_SIZE INT4_WEIGHT IN_DEEPGEMM_PRECOMPILE_STAGE IS_FIRST_RANK_ON_NODE
    IS_FLASHINFER_AVAILABLE IS_IN_CI IS_IN_CI_AMD JIT_DEEPGEMM_* KERNEL_API_* LOGGING_CONFIG_PATH
    LOG_REQUEST_HEADERS MAMBA_* MAX_KV_CHUNK_CAPACITY MM_* MOE_* MORI_* NCCL_* NSA_* NVFP4_*
    ONE_VISIBLE_DEVICE_PER_PROCESS OPT_* PORT PP_LAYER_PARTITION PREFETCH_BLOCK_SIZE_MB
    PREFILL_DELAYER_* PROFILE_* QUANT_ALLOW_DOWNCASTING QUEUED_TIMEOUT_MS RAY_* RECORD_STEP_TIME
    REQ_RUNNING_TIMEOUT REQ_WAITING_TIMEOUT ROCM_USE_MULTI_STREAM SCHEDULER_* SET_CPU_AFFINITY
    SKIP_* STAGING_USE_TORCH SUPPORT_CUTLASS_* SYMM_MEM_* TEST_REQUEST_TIME_STATS TEST_RETRACT*
    TOOL_STRICT_LEVEL USE_* VLM_* WAIT_WEIGHTS_READY_TIMEOUT
    """.split()
)
"""Patterns of the names, behind the prefix, of variables that SGLang documents and this engine does
not have."""
_READ_BY_MOONCAKE: Final = tuple(
    """
    AWS_* BUCKET_* CLIENT_HTTP_PORT CONFIG_PATH DFS_* DISK_* DISTRIBUTED_* ENABLE_CLIENT_HTTP_SERVER
    ENABLE_DFS EP_* NVME_KV_* OFFLOAD_* OFFSET_* SCANMETA_* SNAPSHOT_LOCAL_PATH STORE_CHECKSUM
    TENANT_ID USE_URING
    """.split()
)
"""The same of variables that Mooncake's library reads itself."""


def warnings_about_variables() -> Iterator[str]:
    """One line for all of SGLang's variables without effect here, and a line for each unknown
    variable."""
    others = Envs.others(_SGLANG)
    foreign = [name for name in others if _is_one_of(name.removeprefix(_SGLANG), SGLANG_VARIABLES)]
    if foreign:
        yield f"no effect here: {', '.join(foreign)}, which SGLang has and this engine does not"
    for name in others:
        if name not in foreign:
            yield _unknown(name, _SGLANG)
    for name in Envs.others(_MOONCAKE):
        if not _is_one_of(name.removeprefix(_MOONCAKE), _READ_BY_MOONCAKE):
            yield _unknown(name, _MOONCAKE)


def _is_one_of(stem: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(stem, pattern) for pattern in patterns)


def _unknown(name: str, prefix: str) -> str:
    # Compare names without their prefix, which would make all names similar.
    stems = {one.removeprefix(prefix) for one in Envs.fields() if one.startswith(prefix)}
    hint = did_you_mean(name.removeprefix(prefix), stems).replace("mean ", f"mean {prefix}")
    return f"{name}: no such variable{hint}"
