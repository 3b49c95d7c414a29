"""The treatment of flags that SGLang or vLLM has and this engine lacks, as tables.

A user who brings such a command line learns at once which features are missing, which flags have
another name here, and which may stay. `docs/flags.md` is made from the
table of flags.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Treatment(StrEnum):
    """The treatment of a flag that this engine lacks."""

    IGNORED = "ignored"
    """Accepted, because the flag cannot change an answer. One warning names all such flags."""
    OFF = "accepted"
    """Accepted, because the flag turns off what this engine lacks, or restates a default."""
    NOT_YET = "refused for now"
    NEVER = "refused"


@dataclass(frozen=True, slots=True)
class ForeignFlags:
    """Flags of SGLang for one feature.

    Attributes:
        feature: Name of the feature; ends a refusal.
        patterns: Patterns of field names (`--dp-size` is `dp_size`), each with the values at which
            the flag asks for nothing.
    """

    treatment: Treatment
    feature: str
    patterns: Mapping[str, tuple[str, ...]]

    def is_neutral(self, field_name: str, value: object) -> bool:
        """True if the flag asks for nothing with `value`."""
        if value is None or value is False:
            return True
        pattern = self.pattern(field_name)
        return pattern is not None and any(_means(value, one) for one in self.patterns[pattern])

    def pattern(self, field_name: str) -> str | None:
        """The pattern that the flag `field_name` matches; None: it belongs to another row."""
        return next((one for one in self.patterns if fnmatch.fnmatchcase(field_name, one)), None)


def _means(value: object, text: str) -> bool:
    """True if a flag's value, from a command line or a program, is that of `text` (1 is 1.0)."""
    if str(value) == text:
        return True
    try:
        return float(str(value)) == float(text)
    except ValueError:
        return False


def _row(treatment: Treatment, feature: str, names: str) -> ForeignFlags:
    """A row of the table; `names` are patterns between blanks, `dp_size=1` with a value at which
    the flag asks for nothing (several: `a=1|2`)."""
    split = (word.partition("=") for word in names.split())
    return ForeignFlags(
        treatment, feature, {name: tuple(values.split("|")) for name, _, values in split}
    )


_IGNORED, _OFF = Treatment.IGNORED, Treatment.OFF
_NOT_YET, _NEVER = Treatment.NOT_YET, Treatment.NEVER

SGLANG_FLAGS: Final = (
    # The first row that matches counts.
    _row(_OFF, "the LM head of each group of --attn-dp-size (it has one)", "enable_dp_lm_head"),
    _row(_NEVER, "data-parallel attention in other ways", "enable_dp_attention_* dwdp_size=1"),
    _row(_NEVER, "context parallelism of decoding", "dcp_size=1 dcp_*"),
    _row(_NEVER, "context parallelism by interleaving (--cp-strategy zigzag is there)",
        "cp_strategy=zigzag"),
    _row(_NEVER, "pipeline parallelism", "pp_size=1 pp=1 pipeline_parallel_size=1 pp_*"),
    _row(_IGNORED, "kernels of experts", """moe_runner_backend enable_flashinfer_cutlass_moe
        enable_flashinfer_cutedsl_moe enable_flashinfer_trtllm_moe enable_flashinfer_mxfp4_moe
        enable_triton_kernel_moe enforce_shared_experts_fusion
        enable_fused_moe_sum_all_reduce"""),
    _row(_IGNORED, "layers divided over ranks in other ways", """moe_dp_size=1
        moe_data_parallel_size=1 moe_dense_tp_size shared_experts_tp_size
        enable_shared_experts_attn_tp enable_dense_mlp_attn_tp enable_cp_decode_attn_tp
        enable_layernorm_sp enable_megamoe_for_layernorm_sp enable_tp_lm_head_all_to_all
        enable_dsa_cache_layer_split enable_kv_cache_sharding"""),
    _row(_NEVER, "expert parallelism in other ways than --ep-size", """enable_ep_moe
        moe_a2a_backend=none elastic_ep_backend=none max_ep_size=1 fuseep_mode=2 enable_waterfill
        init_expert_location=trivial ep_num_redundant_experts=0 ep_dispatch_* moe_*
        enable_eplb eplb_* enable_expert_* expert_* deepep_* enable_deepep_* elastic_ep_*
        enable_elastic_*
        enable_fused_grouped_gemm_combine mooncake_ib_device"""),
    _row(_NEVER, "quantization at load", """quantization_* torchao_config modelopt_*
        quantize_and_serve rl_quant_profile enable_quant_communications
        flashinfer_mxfp4_moe_precision=default"""),
    _row(_NEVER, "layers or kernels of another precision", """enable_fp32_lm_head
        enable_tf32_matmul qsa_indexer_dtype=auto|bfloat16 enable_deepseek_v4_fp4_indexer
        prefill_kv_cache_dequant_dtype=auto enable_w4a4_mxfp4_megamoe
        speculative_enable_w4a4_mxfp4_megamoe"""),
    _row(_NEVER, "recurrent states of other precisions than --mamba-ssm-dtype has", """
        enable_int8_mamba_checkpoint int8_mamba_ckpt_size enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds=0"""),
    _row(_NEVER, "LoRA", """lora_* enable_lora* max_lora* max_loras_per_batch
        max_loaded_loras experts_shared_outer_loras"""),
    _row(_NEVER, "speculative decoding other than by the checkpoint's own layer",
        """speculative_accept_threshold_single=1.0 speculative_accept_threshold_acc=1.0
        speculative_accept_* speculative_adaptive* speculative_attention_* speculative_dflash_*
        speculative_draft_* speculative_moe_* speculative_ngram_* speculative_token_*
        speculative_domino_candidate_pool_size=2048 speculative_domino_* speculative_dspark_*
        decoupled_spec_role=null decoupled_spec_* uno_lora_path enable_multi_layer_eagle"""),
    _row(_IGNORED, "how drafts are verified (answers are as without drafts)", """
        speculative_use_rejection_sampling speculative_use_block_verification
        speculative_dsa_topk_backend=sgl-kernel"""),
    _row(_OFF, "prefixes that sessions keep (--keep-session-share is there)",
        "enable_session_radix_cache"),
    _row(_NEVER, "sessions that grow on the server",
        "enable_streaming_session session_* enable_session_*"),
    _row(_NEVER, "weight updates", """custom_weight_loader enable_weights_*
        enable_draft_weights_* checkpoint_engine_*"""),
    _row(_NEVER, "checksums of a checkpoint's files", "model_checksum"),
    _row(_NEVER, "encrypted checkpoints", "decrypted_*"),
    _row(_NEVER, "releasing device memory at run time", "enable_memory_saver"),
    _row(_OFF, "parts of multimodal models", """disable_fast_image_processor
        language_model_only"""),
    _row(_NEVER, "multimodal models", """enable_multimodal mm_* limit_mm_* keep_mm_*
        enable_broadcast_mm_* enable_mm_* enable_prefix_mm_cache encoder_* language_only
        enable_precise_embedding_interpolation enable_adaptive_dispatch_to_encoder
        allowed_media_domains media_url_max_file_size_mb=64 trust_mm_content_hashes
        image_processor_backend=auto asr_max_buffer_seconds=60
        asr_max_concurrent_sessions=32"""),
    _row(_NEVER, "embedding and reward models", """is_embedding enable_score* enable_mis
        multi_item_scoring_*"""),
    _row(_NEVER, "diffusion models", "dllm_* model_type=auto|llm"),
    _row(_NEVER, "offloading weights", """cpu_offload_gb=0 offload_mode=cpu
        offload_group_size=-1 offload_num_in_group=1 offload_prefetch_step=1 offload_* kt_*
        enable_paged_experts paged_experts_* ple_offload_backend=pinned ple_offload_*"""),
    _row(_NEVER, "GGUF and other checkpoint formats", "gguf_* model_config_parser=auto"),
    _row(_NEVER, "settings of other loaders of weights", "model_loader_extra_config={}"),
    _row(_NEVER, "a process that keeps weights for later servers", """weight_cache_mode=off
        weight_cache_timeout=1800 weight_cache_*"""),
    _row(_NEVER, "Apple's MLX", "mlx_*"),
    _row(_NEVER, "Ray (start the command on each machine, with --nnodes)", "use_ray"),
    _row(_NEVER, "starts that wait for a signal", "gated_launch_port"),
    _row(_NEVER, "sidecars (start them beside the server)", "sidecar sidecar_args"),
    _row(_NEVER, "HTTP/2 (put a proxy in front)", """enable_http2
        http2_max_concurrent_streams=200 http2_initial_connection_window_size=1048576"""),
    _row(_NEVER, "stored responses (a client sends the whole conversation)",
        "enable_response_store"),
    _row(_NEVER, "watermarks in answers", "enable_watermark watermark_config"),
    _row(_NEVER, "other implementations of a model", "model_impl=auto|sglang"),
    _row(_NEVER, "a gRPC front", "grpc_* smg_*"),
    _row(_NEVER, "certificates of clients, and certificates that change while the server runs (put "
        "a proxy in front)", "ssl_ca_certs enable_ssl_refresh"),
    _row(_NEVER, "a server without a tokenizer (requests may always have input_ids, and answers "
        "have output_ids)", "skip_tokenizer_init"),
    _row(_NEVER, "a choice between tokenizers of one model", "tokenizer_mode=auto"),
    _row(_NEVER, "HiSparse, LMCache, FlexKV and linkers (--hicache-storage-backend is there)", """
        enable_hisparse hisparse_* hierarchical_sparse_* enable_lmcache lmcache_* enable_flexkv
        flexkv_* enable_unified_cache_external_linker enable_linker_mla_dedup
        unified_cache_external_linker_backend=mooncake unified_cache_external_linker_*"""),
    _row(_NEVER, "a switch for deterministic kernels (sampling is always batch-invariant)",
        "enable_deterministic_inference rl_on_policy_target"),
    _row(_NEVER, "priority scheduling", """enable_priority_scheduling priority_* abort_on_*
        schedule_low_priority_* default_priority_value retraction_policy=length"""),
    _row(_NEVER, "servers that announce themselves to a router (name them to sglang_router with "
        "--prefill and --decode)", "pdlb_url"),
    _row(_NEVER, "a transport by flag (set MOONCAKE_PROTOCOL)", "disaggregation_transport"),
    _row(_NEVER, "loading weights from another server other than through the Transfer Engine",
        "remote_instance_weight_loader_send_weights_group_ports modelexpress_config"),
    _row(_NOT_YET, "placement of ranks beyond --base-gpu-id", "gpu_id_step=1 attn_tp_size"),
    _row(_NOT_YET, "tool servers", "tool_server"),
    _row(_NOT_YET, "a whitespace pattern for constrained JSON (there is "
        "--constrained-json-disable-any-whitespace)",
        "constrained_json_whitespace_pattern constrained_json_max_whitespace_cnt"),
    _row(_NOT_YET, "rules for the text of reasoning", "enable_strict_thinking"),
    _row(_NOT_YET, "other shapes of streams", """incremental_streaming_output stream_output
        stream_response_default_include_usage"""),
    _row(_NOT_YET, "token ids in answers by flag (those of /generate have output_ids)",
        "return_input_ids return_output_ids"),
    _row(_NOT_YET, "what answers would need of the model besides logprobs", """
        enable_custom_logit_processor enable_return_hidden_states enable_return_routed_experts
        return_hidden_states_mode enable_return_aux_hidden_states
        return_aux_hidden_state_layer_ids enable_return_indexer_topk
        sampling_mask_max_tokens=4096"""),
    _row(_NOT_YET, "templates and sampling values by flag", """hf_chat_template_name
        completion_template preferred_sampling_params default_chat_template_kwargs"""),
    _row(_NEVER, "templates in requests (--chat-template is there)",
        "trust_request_chat_template"),
    _row(_NOT_YET, "cutting prompts that are too long", "allow_auto_truncate"),
    _row(_NOT_YET, "names for versions of the weights", "weight_version=default"),
    _row(_NOT_YET, "paths behind a prefix (let the proxy remove it)", "fastapi_root_path"),
    _row(_NOT_YET, "hooks, dumps and checks for debugging", """hooks forward_hooks debug_*
        msprobe_dump_config enable_nan_detection crash_on_nan custom_sigquit_handler
        kv_canary=none kv_canary_sweep_interval=0"""),
    _row(_NEVER, "other radix caches by flag", "prefix_cache_*"),
    _row(_OFF, "what this engine does not have", """disable_custom_all_reduce
        disable_cuda_graph_padding disable_piecewise_cuda_graph disable_flashinfer_*
        flashinfer_mla_disable_ragged disable_shared_experts_fusion disable_chunked_prefix_cache
        disable_outlines_disk_cache disable_tokenizer_batch_decode disable_hybrid_swa_memory
        weight_loader_disable_mmap disable_priority_preemption disable_attn_tp_gather
        enforce_disable_flashinfer_allreduce_fusion disable_aiter_allreduce_fusion_*"""),
    _row(_IGNORED, "logs, traces and metrics", """log_level_http log_requests_level
        log_requests_format log_requests_target uvicorn_access_log_* show_time_cost
        decode_log_interval enable_request_time_stats_logging gc_* enable_metrics_for_all_schedulers
        enable_mfu_metrics tokenizer_metrics_* bucket_* collect_tokens_histogram
        prompt_tokens_buckets generation_tokens_buckets export_metrics_* crash_dump_folder
        tensorboard_* enable_layerwise_nvtx_marker soft_watchdog_timeout load_watch_interval
        load_snapshot_publish_interval load_publish_endpoint extra_metric_labels
        enable_forward_pass_metrics forward_pass_metrics_* trace_modules otlp_service_name
        spec_trace_dir"""),
    _row(_IGNORED, "warming up", "skip_server_warmup warmups"),
    _row(_IGNORED, "loading a checkpoint", """weight_loader_prefetch_* delete_ckpt_after_loading
        file_storage_path startup_weight_load_mode=serial weight_loader_drop_cache_after_load"""),
    _row(_IGNORED, "processes and their sockets", """tokenizer_worker_num detokenizer_worker_num
        nccl_port dist_timeout numa_node sleep_on_idle scheduler_recv_interval
        engine_info_bootstrap_port enable_http_worker_reuseport batch_notify_size"""),
    _row(_IGNORED, "how prompts are tokenized", """tokenizer_backend enable_tokenizer_batch_encode
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_*"""),
    _row(_IGNORED, "CUDA graphs and compiled code (--cuda-graph-max-bs bounds the graphs)", """
        cuda_graph_bs cuda_graph_bs_* cuda_graph_config cuda_graph_backend_* cuda_graph_prefill_*
        cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph
        enable_profile_cuda_graph enable_cudagraph_gc enable_torch_compile
        enable_torch_compile_debug_mode torch_compile_* enable_piecewise_cuda_graph
        enforce_piecewise_cuda_graph piecewise_cuda_graph_*"""),
    _row(_IGNORED, "sums over ranks", """enable_p2p_check enable_nccl_nvls enable_symm_mem
        enable_torch_symm_mem enable_mscclpp enable_flashinfer_allreduce_fusion
        enable_aiter_allreduce_fusion enable_attn_tp_input_scattered boundary_reduction
        enable_scattered_sconv pre_warm_nccl"""),
    _row(_IGNORED, "kernels (--attention-backend is there)", """prefill_attention_backend
        decode_attention_backend sampling_backend fp8_gemm_* fp4_gemm_* mamba_backend nsa_* dsa_*
        flashinfer_* enable_flashinfer_* enable_flashmla triton_attention_*
        enable_fused_qk_norm_rope bf16_gemm_* dsv4_* enable_dsa_fused_indexer
        enable_lean_attention enable_nvidia_megakernel enable_amd_monokernel linear_attn_*
        linear_replayssm_* enable_linear_replayssm*"""),
    _row(_IGNORED, "batches and their overlap (--target-inter-token-latency divides the time "
        "between prefill and decode)", """enable_mixed_chunk enable_two_batch_overlap
        enable_single_batch_overlap tbo_* num_continuous_decode_steps prefill_max_requests
        enable_dynamic_chunking enable_prefill_delayer prefill_delayer_* enable_pdmux pdmux_*
        sm_group_num prefill_decode_interval* min_free_slots_delay"""),
    _row(_IGNORED, "what the caches keep, and where", """swa_full_tokens_ratio hybrid_kvcache_ratio
        enable_hicache_prealloc strip_thinking_cache swa_prefix_tails
        enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay c128_page_size
        radix_eviction_policy_config enable_page_major_kv_layout enable_unified_memory
        prefill_only_disable_kv_cache"""),
    _row(_IGNORED, "prefill and decode on different servers", """num_reserved_decode_tokens
        disaggregation_decode_polling_interval disaggregation_decode_tp disaggregation_decode_dp
        disaggregation_prefill_pp prefill_round_robin_balance disaggregation_decode_allocation_*
        disaggregation_decode_extra_slots
        disaggregation_decode_host_receive_threshold optimistic_prefill_attempts=0"""),
)  # fmt: skip

_HARMLESS_KEYS: Final = {"model_loader_extra_config": {"enable_multithread_load", "num_threads"}}
"""Flags whose value is a JSON object, and the keys of it that cannot change an answer."""

_SETTINGS: Final = {("cuda_graph_backend_decode", "disabled"): ("disable_cuda_graph", True)}
"""Values of SGLang's flags, and the field and value that say the same here."""

SAME_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"bf16": "bfloat16"},
    "mamba_scheduler_strategy": {"extra_buffer_lazy": "extra_buffer"},
}
"""For a field, SGLang's other names of its values, and those that it has here."""

_OTHER_NAMES: Final[Mapping[str, str]] = {
    # vLLM's name (underscores): the remedy.
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

_AUTO: Final = "use auto, which goes by the chat template"

_OTHER_CHOICES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    # Field: SGLang's values that this engine lacks, and the remedy.
    "hicache_storage_backend": (
        ("hf3fs", "nixl", "aibrix", "eic", "simm"),
        "use mooncake or file, or dynamic with a class of your own",
    ),
    "hicache_mem_layout": (("page_head",), "use auto"),
    "grammar_backend": (("outlines", "llguidance", "none"), "use xgrammar"),
    "attention_backend": (
        ("fa3", "fa4", "flex_attention", "cutlass_mla", "trtllm_mla", "trtllm_mha",
            "cutedsl_mla", "aiter", "wave", "intel_amx", "intel_xpu", "dual_chunk_flash_attn",
            "nsa", "dsa"),
        "leave the flag out, or use flashinfer on a GPU",
    ),
    "schedule_policy": (
        ("random", "lof", "dfs-weight", "priority", "routing-key"), "use fcfs or lpm"
    ),
    "load_format": (
        ("npcache", "gguf", "bitsandbytes", "layered", "mistral", "sharded_state", "remote",
            "flash_rl", "runai_streamer", "fastsafetensors", "private"),
        "use a checkpoint in safetensors",
    ),
    "speculative_algorithm": (
        ("EAGLE3", "STANDALONE", "NGRAM", "DFLASH", "DSPARK"),
        "use NEXTN, whose drafts come from the checkpoint's own layer",
    ),
    "quantization": (
        ("bitsandbytes", "gguf", "modelopt", "modelopt_fp8", "modelopt_fp4", "moe_wna16", "mxfp4",
            "w8a8_fp8", "w8a8_int8", "quark", "quark_mxfp4", "auto-round", "petit_nvfp4", "marlin",
            "mxfp8", "qoq", "w4afp8", "modelslim", "quark_int4fp8_moe"),
        "leave the flag out: config.json names the format, and docs/models.md those that are here",
    ),
    "kv_cache_dtype": (
        ("fp8_e5m2", "fp4_e2m1", "nvfp4", "fp4_mx_block16"), "use bfloat16 or fp8_e4m3"
    ),
    "disaggregation_transfer_backend": (("mori", "ascend"), "use mooncake"),
    "load_balance_method": (
        ("shortest_queue", "minimum_tokens"), "use total_requests or total_tokens"
    ),
    "device": (("xpu", "hpu"), "use cuda, npu or cpu"),
    "tool_call_parser": (
        ("llama4", "pythonic", "step3", "gigachat3", "kimi_k3", "lfm2", "poolside_v1"),
        f"{_AUTO}, or leave the flag out: calls then stay text",
    ),
    "reasoning_parser": (
        ("kimi", "kimi_k3", "poolside_v1"),
        f"{_AUTO}, or leave the flag out: reasoning is then part of the text",
    ),
    "remote_instance_weight_loader_backend": (("nccl", "modelexpress"), "use transfer_engine"),
}  # fmt: skip


def foreign_flags(field_name: str) -> ForeignFlags | None:
    """The row of SGLang's flag `field_name` (underscores); None: SGLang has no such flag."""
    return next((row for row in SGLANG_FLAGS if row.pattern(field_name) is not None), None)


def settings(given: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The fields, with their values, that flags of SGLang's set here under another name."""
    asked = (_SETTINGS.get((name, str(value))) for name, value in given)
    return dict(one for one in asked if one is not None)


def _treatment(row: ForeignFlags, name: str, value: object) -> Treatment:
    """The treatment of one of the row's flags with this value."""
    if row.is_neutral(name, value) or (name, str(value)) in _SETTINGS:
        return _OFF
    if name in _HARMLESS_KEYS and _keys(value) <= _HARMLESS_KEYS[name]:
        return _IGNORED
    return row.treatment


def _keys(value: object) -> set[str]:
    """The keys of a JSON object; of anything else a key that is not known."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = None
    return set(parsed) if isinstance(parsed, Mapping) else {""}


def refusals(given: Sequence[tuple[str, Any]]) -> Iterator[str]:
    """A line for each feature that the flags ask for and this engine lacks. `given` has field names
    with their values; flags that SGLang lacks too are passed over."""
    by_row: dict[str, list[str]] = {}
    rows = {row.feature: row for row in SGLANG_FLAGS}
    for name, value in given:
        row = foreign_flags(name)
        if row is None or _treatment(row, name, value) in (_IGNORED, _OFF):
            continue
        flags = by_row.setdefault(row.feature, [])
        if _flag(name) not in flags:
            flags.append(_flag(name))
    for feature, flags in by_row.items():
        lacks = _lacks(rows[feature].treatment, len(flags))
        remedy = "remove the flag" if len(flags) == 1 else "remove the flags"
        yield f"{', '.join(flags)}: {lacks}: {feature}; {remedy}"


def ignored(given: Sequence[tuple[str, Any]]) -> list[str]:
    """The flags of SGLang's, of those given, that have no effect here and none on answers."""
    found = []
    for name, value in given:
        row = foreign_flags(name)
        if row is not None and _treatment(row, name, value) is _IGNORED:
            found.append(_flag(name))
    return list(dict.fromkeys(found))


def other_name(field_name: str) -> str | None:
    """Message about the replacement of vLLM's flag `field_name` (underscores); None: unknown."""
    remedy = _OTHER_NAMES.get(field_name)
    return None if remedy is None else f"unknown flag {_flag(field_name)}: {remedy}"


def refused_choice(field_name: str, value: str) -> str | None:
    """Why this engine lacks SGLang's `value` of the flag of `field_name`; None if it is unknown."""
    values, remedy = _OTHER_CHOICES.get(field_name, ((), ""))
    return (
        f"{_flag(field_name)} {value}: {_lacks(_NEVER, 1)}: {remedy}" if value in values else None
    )


def _flag(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _lacks(treatment: Treatment, count: int) -> str:
    them = "it" if count == 1 else "them"
    return f"SGLang has {them}, this engine does not{' yet' if treatment is _NOT_YET else ''}"
