"""Flags that SGLang has and this engine does not: refused by name, with the reason.

Telling them from a typo is the point: someone who moves a command line over learns in one
line which feature they would have lost.
"""

from __future__ import annotations

import fnmatch
from typing import Final

NOT_YET: Final = "not yet"
NEVER: Final = "out of scope"

_REFUSED: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    # (when, feature, patterns of field names)
    (NEVER, "data-parallel attention", ("dp_size", "data_parallel_size", "dp", "enable_dp_*",
        "load_balance_method", "dist_timeout", "enable_prefill_delayer")),
    (NEVER, "pipeline parallelism", ("pp_size", "pp", "pipeline_parallel_size", "pp_*")),
    (NEVER, "expert parallelism", ("ep_size", "ep", "expert_parallel_size", "ep_*", "moe_*",
        "enable_eplb", "eplb_*", "enable_expert_*", "expert_*", "deepep_*", "enable_deepep_*",
        "elastic_ep_*", "init_expert_location")),
    (NEVER, "quantization", ("quantization", "quantization_*", "torchao_config", "modelopt_*",
        "fp8_gemm_*", "fp4_gemm_*", "quantize_and_serve", "enable_fp32_lm_head")),
    (NEVER, "LoRA", ("lora_*", "enable_lora*", "max_lora*", "max_loras_per_batch")),
    (NEVER, "speculative decoding", ("speculative_*",)),
    (NEVER, "sessions", ("enable_streaming_session", "session_*", "enable_session_*")),
    (NEVER, "weight updates", ("custom_weight_loader", "weight_loader_*", "enable_weights_*",
        "model_checksum", "enable_memory_saver", "checkpoint_engine_*")),
    (NEVER, "multimodal models", ("enable_multimodal", "mm_*", "limit_mm_*", "keep_mm_*",
        "disable_fast_image_processor", "encoder_*", "language_only")),
    (NEVER, "embedding and reward models", ("is_embedding", "enable_score*")),
    (NEVER, "offloading weights", ("cpu_offload_gb", "offload_*")),
    (NEVER, "GGUF and other checkpoint formats", ("gguf_*", "model_loader_extra_config",
        "model_impl", "download_dir", "revision")),
    (NEVER, "a gRPC front", ("grpc_*", "smg_*")),
    (NEVER, "TLS in the server (put a proxy in front)", ("ssl_*", "enable_ssl_*")),
    (NEVER, "request tracing", ("enable_trace", "otlp_*", "crash_dump_folder", "export_metrics_*")),
    (NEVER, "a configuration file for flags", ("config",)),
    (NEVER, "several tokenizer workers", ("tokenizer_worker_num", "detokenizer_worker_num",
        "skip_tokenizer_init", "tokenizer_mode", "enable_tokenizer_batch_encode",
        "enable_dynamic_batch_tokenizer", "dynamic_batch_tokenizer_*")),
    (NEVER, "sliding-window pools", ("swa_*", "disable_hybrid_swa_memory")),
    (NEVER, "HiSparse and LMCache", ("enable_hisparse", "hisparse_*", "enable_lmcache")),
    (NEVER, "deterministic kernels as a switch (sampling is batch-invariant as it is)",
        ("enable_deterministic_inference", "rl_on_policy_target")),
    (NEVER, "priority scheduling", ("enable_priority_scheduling", "priority_*", "abort_on_*",
        "schedule_low_priority_*")),
    (NOT_YET, "multi-GPU and multi-node placement", ("node_rank", "dist_init_addr", "base_gpu_id",
        "gpu_id_step", "attn_tp_size", "enable_nsa_prefill_context_parallel",
        "enable_prefill_context_parallel", "nccl_*", "enable_nccl_nvls",
        "disable_custom_all_reduce",
        "enable_symm_mem", "enable_mscclpp", "numa_node")),
    (NOT_YET, "tuning of CUDA graphs beyond their largest batch", ("disable_cuda_graph_padding",
        "cuda_graph_bs", "enable_cudagraph_gc", "enable_profile_cuda_graph", "enable_torch_compile",
        "torch_compile_*",
        "enable_piecewise_cuda_graph", "piecewise_cuda_graph_*")),
    (NOT_YET, "batches in halves or several steps long",
        ("enable_two_batch_overlap", "enable_single_batch_overlap",
        "num_continuous_decode_steps")),
    (NOT_YET, "prefill and decode in one batch (--target-inter-token-latency divides the time "
        "between them)", ("enable_mixed_chunk",)),
    (NOT_YET, "other backends for prefill, decode or sampling alone, and their tuning",
        ("prefill_attention_backend",
        "decode_attention_backend", "sampling_backend", "mm_attention_backend", "nsa_*", "dsa_*",
        "flashinfer_*", "triton_attention_*", "disable_flashinfer_*", "enable_flashinfer_*")),
    (NOT_YET, "hybrid recurrent models", ("max_mamba_cache_size", "mamba_*")),
    (NOT_YET, "tool servers and whitespace patterns of constrained JSON", ("tool_server",
        "constrained_json_whitespace_pattern", "strip_thinking_cache")),
    (NOT_YET, "prefill and decode on different servers", ("disaggregation_*",
        "num_reserved_decode_tokens", "pdlb_url")),
    (NOT_YET, "loading weights from another server", ("remote_instance_*",)),
    (NOT_YET, "KV cache events", ("kv_events_config",)),
    (NOT_YET, "this knob of upstream's", ("skip_server_warmup", "warmups", "decode_log_interval",
        "log_level_http", "log_requests_*", "log_requests_format", "show_time_cost",
        "bucket_*", "collect_tokens_histogram", "prompt_tokens_buckets",
        "generation_tokens_buckets",
        "prefill_max_requests", "soft_watchdog_timeout",
        "sleep_on_idle", "file_storage_path", "completion_template", "hf_chat_template_name",
        "allow_auto_truncate", "json_model_override_args", "preferred_sampling_params",
        "sampling_defaults", "weight_version", "enable_custom_logit_processor",
        "enable_return_hidden_states", "stream_output", "incremental_streaming_output",
        "fastapi_root_path", "delete_ckpt_after_loading", "enable_metrics_for_all_schedulers",
        "gc_warning_threshold_secs", "gc_threshold", "debug_*", "hooks", "forward_hooks",
        "enable_p2p_check", "scheduler_recv_interval", "enable_nan_detection",
        "radix_cache_backend", "disable_outlines_disk_cache", "disable_chunked_prefix_cache",
        "enable_request_time_stats_logging", "tensorboard_*", "prefix_cache_*")),
)  # fmt: skip


def refusal(field_name: str) -> str | None:
    """One line on why SGLang's flag `field_name` (underscores) is not here; None if unknown."""
    for when, feature, patterns in _REFUSED:
        if any(fnmatch.fnmatchcase(field_name, pattern) for pattern in patterns):
            name = "--" + field_name.replace("_", "-")
            does_not = "does not yet" if when == NOT_YET else "does not"
            return f"{name}: SGLang has it, this engine {does_not}: {feature}; remove the flag"
    return None
