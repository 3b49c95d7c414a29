"""Flags of other engines that this engine lacks, each with a line that says what to do.

A user who moves a command line from SGLang or vLLM learns which feature is missing, or which flag
replaces it; without this table such a flag would look like a typo.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Final

NOT_YET: Final = "not yet"
NEVER: Final = "out of scope"

_REFUSED: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    # (when, feature, patterns of field names)
    (NEVER, "data-parallel attention", ("dp_size", "data_parallel_size", "dp", "enable_dp_*",
        "load_balance_method", "enable_prefill_delayer")),
    (NEVER, "pipeline parallelism", ("pp_size", "pp", "pipeline_parallel_size", "pp_*")),
    (NEVER, "expert parallelism", ("ep_size", "ep", "expert_parallel_size", "ep_*", "moe_*",
        "enable_eplb", "eplb_*", "enable_expert_*", "expert_*", "deepep_*", "enable_deepep_*",
        "elastic_ep_*", "init_expert_location")),
    (NEVER, "quantization", ("quantization", "quantization_*", "torchao_config", "modelopt_*",
        "fp8_gemm_*", "fp4_gemm_*", "quantize_and_serve")),
    (NEVER, "an output head of another precision", ("enable_fp32_lm_head",)),
    (NEVER, "LoRA", ("lora_*", "enable_lora*", "max_lora*", "max_loras_per_batch")),
    (NEVER, "speculative decoding", ("speculative_*",)),
    (NEVER, "sessions", ("enable_streaming_session", "session_*", "enable_session_*")),
    (NEVER, "weight updates", ("custom_weight_loader", "weight_loader_*", "enable_weights_*",
        "checkpoint_engine_*")),
    (NEVER, "checksums of a checkpoint's files", ("model_checksum",)),
    (NEVER, "releasing device memory at run time", ("enable_memory_saver",)),
    (NEVER, "multimodal models", ("enable_multimodal", "mm_*", "limit_mm_*", "keep_mm_*",
        "disable_fast_image_processor", "encoder_*", "language_only")),
    (NEVER, "embedding and reward models", ("is_embedding", "enable_score*")),
    (NEVER, "offloading weights", ("cpu_offload_gb", "offload_*")),
    (NEVER, "GGUF and other checkpoint formats", ("gguf_*", "model_loader_extra_config")),
    (NEVER, "other implementations of a model", ("model_impl",)),
    (NEVER, "downloads (download the revision, and give its directory as --model-path)",
        ("revision", "download_dir")),
    (NEVER, "a gRPC front", ("grpc_*", "smg_*")),
    (NEVER, "TLS in the server (put a proxy in front)", ("ssl_*", "enable_ssl_*")),
    (NEVER, "request tracing", ("enable_trace", "otlp_*")),
    (NEVER, "dumps of requests and of their metrics", ("crash_dump_folder", "export_metrics_*")),
    (NEVER, "a configuration file for flags", ("config",)),
    (NEVER, "several tokenizer workers", ("tokenizer_worker_num", "detokenizer_worker_num")),
    (NEVER, "a server without a tokenizer (requests may always have input_ids, and answers have "
        "output_ids)", ("skip_tokenizer_init",)),
    (NEVER, "a choice between tokenizers of one model", ("tokenizer_mode",)),
    (NEVER, "tokenizing several prompts at once", ("enable_tokenizer_batch_encode",
        "enable_dynamic_batch_tokenizer", "dynamic_batch_tokenizer_*")),
    (NEVER, "sliding-window pools", ("swa_*", "disable_hybrid_swa_memory")),
    (NEVER, "HiSparse and LMCache", ("enable_hisparse", "hisparse_*", "enable_lmcache")),
    (NEVER, "a switch for deterministic kernels (sampling is always batch-invariant)",
        ("enable_deterministic_inference", "rl_on_policy_target")),
    (NEVER, "priority scheduling", ("enable_priority_scheduling", "priority_*", "abort_on_*",
        "schedule_low_priority_*")),
    (NOT_YET, "multi-GPU and multi-node placement beyond --base-gpu-id", ("dist_timeout",
        "gpu_id_step", "attn_tp_size", "nccl_*", "enable_nccl_nvls",
        "disable_custom_all_reduce",
        "enable_symm_mem", "enable_mscclpp", "numa_node")),
    (NOT_YET, "tuning of CUDA graphs beyond their largest batch", ("disable_cuda_graph_padding",
        "cuda_graph_bs", "enable_cudagraph_gc", "enable_profile_cuda_graph", "enable_torch_compile",
        "torch_compile_*",
        "enable_piecewise_cuda_graph", "piecewise_cuda_graph_*")),
    (NOT_YET, "overlapping half batches, and several decode steps at a time",
        ("enable_two_batch_overlap", "enable_single_batch_overlap",
        "num_continuous_decode_steps")),
    (NOT_YET, "prefill and decode in one batch (--target-inter-token-latency divides the time "
        "between them)", ("enable_mixed_chunk",)),
    (NOT_YET, "separate backends for prefill, decode and sampling, and their tuning",
        ("prefill_attention_backend",
        "decode_attention_backend", "sampling_backend", "mm_attention_backend", "nsa_*", "dsa_*",
        "flashinfer_*", "triton_attention_*", "disable_flashinfer_*", "enable_flashinfer_*")),
    (NEVER, "a choice of kernels for linear attention", ("mamba_backend",)),
    (NOT_YET, "tool servers", ("tool_server",)),
    (NOT_YET, "a whitespace pattern for constrained JSON (there is "
        "--constrained-json-disable-any-whitespace)", ("constrained_json_whitespace_pattern",)),
    (NOT_YET, "excluding reasoning from the cache", ("strip_thinking_cache",)),
    (NOT_YET, "prefill and decode on different servers beyond --disaggregation-mode and its ports",
        ("disaggregation_decode_tp", "disaggregation_decode_dp",
        "disaggregation_decode_polling_interval", "disaggregation_prefill_pp",
        "num_reserved_decode_tokens")),
    (NEVER, "servers that announce themselves to a router (name them to sglang_router with "
        "--prefill and --decode)", ("pdlb_url",)),
    (NEVER, "loading weights from another server other than through the Transfer Engine",
        ("remote_instance_weight_loader_send_weights_group_ports",)),
    (NOT_YET, "KV cache events", ("kv_events_config",)),
    (NOT_YET, "this setting", ("skip_server_warmup", "warmups", "decode_log_interval",
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


_OTHER_NAMES: Final[Mapping[str, str]] = {
    # vLLM's name (underscores): what to do here.
    "max_model_len": "use --context-length",
    "max_num_seqs": "use --max-running-requests",
    "gpu_memory_utilization": "use --mem-fraction-static, the share for weights and KV",
    "max_num_batched_tokens": "use --max-prefill-tokens for a batch of prompts, "
    "--chunked-prefill-size for one pass",
    "num_gpu_blocks_override": "use --max-total-tokens, in tokens",
    "block_size": "use --page-size",
    "seed": "use --random-seed",
    "tokenizer": "use --tokenizer-path",
    "enable_prefix_caching": "prefixes are reused unless --disable-radix-cache is given; "
    "remove the flag",
    "no_enable_prefix_caching": "use --disable-radix-cache",
    "enable_chunked_prefill": "long prompts are always computed in chunks of "
    "--chunked-prefill-size tokens; remove the flag",
    "no_enable_chunked_prefill": "use --chunked-prefill-size -1",
    "swap_space": "use --enable-hierarchical-cache, and --hicache-size for GB of host memory",
    "kv_offloading_size": "use --enable-hierarchical-cache, and --hicache-size for GB",
    "kv_offloading_backend": "use --enable-hierarchical-cache",
    "kv_transfer_config": "use --hicache-storage-backend for a store of KV, and "
    "--disaggregation-mode for prefill and decode on different servers",
    "enforce_eager": "use --disable-cuda-graph",
    "max_cudagraph_capture_size": "use --cuda-graph-max-bs",
    "guided_decoding_backend": "use --grammar-backend",
    "scheduling_policy": "use --schedule-policy",
    "enable_auto_tool_choice": "--tool-call-parser is enough; remove the flag",
    "enable_reasoning": "--reasoning-parser is enough; remove the flag",
    "enable_prompt_tokens_details": "use --enable-cache-report",
    "enable_log_requests": "use --log-requests",
    "disable_log_requests": "requests are not logged unless --log-requests is given; remove the "
    "flag",
    "uvicorn_log_level": "use --log-level",
    "distributed_executor_backend": "one process runs the model; remove the flag",
}

_OTHER_CHOICES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    # Field: SGLang's values that this engine lacks, and what to do here.
    "hicache_storage_backend": (
        ("hf3fs", "nixl", "aibrix", "eic", "simm"),
        "use mooncake or file, or dynamic with a class of your own",
    ),
    "grammar_backend": (("outlines", "llguidance", "none"), "use xgrammar"),
    "attention_backend": (
        ("fa3", "fa4", "flashmla", "flex_attention", "cutlass_mla", "trtllm_mla", "trtllm_mha",
            "aiter", "wave", "intel_amx", "intel_xpu", "dual_chunk_flash_attn", "nsa"),
        "leave the flag out, or use flashinfer on a GPU",
    ),
    "schedule_policy": (
        ("random", "lof", "dfs-weight", "routing-key"), "use fcfs or lpm"
    ),
    "load_format": (
        ("npcache", "gguf", "bitsandbytes", "layered", "mistral", "sharded_state", "remote",
            "flash_rl", "runai_streamer"),
        "use a checkpoint in safetensors",
    ),
    "disaggregation_transfer_backend": (("nixl", "mori", "ascend", "fake"), "use mooncake"),
    "remote_instance_weight_loader_backend": (("nccl", "modelexpress"), "use transfer_engine"),
}  # fmt: skip


def refusal(field_name: str) -> str | None:
    """Why this engine lacks SGLang's flag `field_name` (underscores); None if it is unknown."""
    for when, feature, patterns in _REFUSED:
        if any(fnmatch.fnmatchcase(field_name, pattern) for pattern in patterns):
            return f"{_flag(field_name)}: {_lacks(when)}: {feature}; remove the flag"
    return None


def other_name(field_name: str) -> str | None:
    """Message about the replacement of vLLM's flag `field_name` (underscores); None: unknown."""
    remedy = _OTHER_NAMES.get(field_name)
    return None if remedy is None else f"unknown flag {_flag(field_name)}: {remedy}"


def refused_choice(field_name: str, value: str) -> str | None:
    """Why this engine lacks SGLang's `value` of the flag of `field_name`; None if it is unknown."""
    values, remedy = _OTHER_CHOICES.get(field_name, ((), ""))
    return f"{_flag(field_name)} {value}: {_lacks(NEVER)}: {remedy}" if value in values else None


def _flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _lacks(when: str) -> str:
    return f"SGLang has it, this engine does not{' yet' if when == NOT_YET else ''}"
