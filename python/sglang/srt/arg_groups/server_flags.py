"""All command line settings: names and defaults.

Names of backends and policies are strings here; their users make objects of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.arg_groups.cli import Heading, flag
from sglang.srt.arg_groups.disaggregation import (
    DisaggregationArgs,
)
from sglang.srt.arg_groups.extra_config import parse_extra_config
from sglang.srt.arg_groups.hicache import HiCacheArgs
from sglang.srt.arg_groups.kv_events_config import KVEventsConfig, parse_kv_events_config
from sglang.srt.arg_groups.observability import ObservabilityArgs
from sglang.srt.arg_groups.remote_weights import RemoteWeightsArgs
from sglang.srt.arg_groups.speculative import SpeculativeArgs
from sglang.srt.constants import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    LOAD_BALANCE_METHODS,
    MODEL_SAMPLING,
    OPENAI_SAMPLING,
)
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS
from sglang.srt.hardware_backend.device_kinds import DEVICE_KINDS
from sglang.srt.parser.reasoning_parser import AUTO, REASONING_PARSER_NAMES
from sglang.srt.utils.network import base_url


@dataclasses.dataclass(kw_only=True)
class ServerFlags(
    RemoteWeightsArgs, HiCacheArgs, DisaggregationArgs, ObservabilityArgs, SpeculativeArgs
):
    """The fields of `ServerArgs`: one for each flag."""

    config: str | None = flag(
        None, "YAML file with flags by name; flags on the command line win.", heading=Heading.MODEL
    )

    model_path: str | None = flag(
        None,
        "Directory of a Hugging Face checkpoint, or its name on the hub (OWNER/NAME); absent: the "
        "built-in model.",
        aliases=("--model",),
    )
    revision: str | None = flag(None, "Branch, tag or commit on the hub; absent: main.")
    download_dir: str | None = flag(None, "The hub's cache; absent: HF_HUB_CACHE says.")
    tokenizer_path: str | None = flag(None, "The same for the tokenizer; absent: the model's.")
    served_model_name: str | None = flag(None, "Name in /v1/models; absent: the model path.")
    dtype: str = flag(
        "auto",
        "Dtype of weights and activations; auto: the checkpoint's.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Dtype of keys and values, or latent rows, in every tier; auto: the model's. fp8_e4m3 "
        "needs a GPU, or on a CPU a model with latent attention.",
        choices=("auto", "float32", "bfloat16", "float16", "fp8_e4m3"),
    )
    quantization: str | None = flag(
        None,
        "Weight format of the checkpoint, to be checked; absent: what its config.json says. fp8 "
        "also rounds a plain checkpoint at load.",
        choices=("fp8", "compressed-tensors", "awq", "awq_marlin", "gptq", "gptq_marlin"),
    )
    json_model_override_args: str = flag(
        "{}", "JSON object: fields of config.json to be changed, as for YaRN."
    )
    context_length: int | None = flag(None, "Longest context in tokens; absent: the model's.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the checkpoint.")
    random_seed: int = flag(0, "Seed of random weights.")

    host: str = flag(DEFAULT_HOST, "Address to listen on.", heading=Heading.SERVER)
    port: int = flag(DEFAULT_PORT, "Port to listen on.")
    ssl_certfile: str | None = flag(
        None, "Certificate, with those that sign it (PEM): serve https, needs --ssl-keyfile."
    )
    ssl_keyfile: str | None = flag(None, "Private key of the certificate (PEM).")
    ssl_keyfile_password: str | None = flag(
        None, "Password of that key; better in a --config file.", secret=True
    )
    api_key: str | None = flag(None, "Bearer token that requests must send.", secret=True)
    api_key_file: str | None = flag(
        None, "File with the API key that requests must send; or set SGLANG_API_KEY."
    )
    admin_api_key: str | None = flag(
        None, "Bearer token of the administration endpoints.", secret=True
    )
    admin_api_key_file: str | None = flag(
        None, "File with that token; or set SGLANG_ADMIN_API_KEY."
    )
    stream_interval: int = flag(1, "Tokens between two events of a stream.")
    watchdog_timeout: float = flag(
        300.0,
        "Seconds that one tick of the scheduler, a forward pass among it, may take before the "
        "server ends.",
    )
    drain_seconds: float = flag(
        30.0,
        "Most seconds for requests under way after SIGTERM or Ctrl-C.",
    )
    chat_template: str | None = flag(None, "Jinja file; absent: the tokenizer's own template.")
    sampling_defaults: str = flag(
        MODEL_SAMPLING,
        "Sampling values of requests that name none: model takes temperature, top_p, top_k, min_p "
        "and repetition_penalty from generation_config.json; openai is 1 for temperature and "
        "top_p, and nothing else.",
        choices=(MODEL_SAMPLING, OPENAI_SAMPLING),
    )
    grammar_backend: str = flag(
        "xgrammar", "Library that enforces json_schema, regex and ebnf.", choices=("xgrammar",)
    )
    constrained_json_disable_any_whitespace: bool = flag(
        False, "Write constrained JSON on one line, as json.dumps does, without free whitespace."
    )
    tool_call_parser: str | None = flag(
        None,
        "Format of the model's tool calls; auto: the chat template's; absent: tool_choice auto is "
        "refused.",
        choices=(AUTO, *TOOL_CALL_PARSERS),
    )
    reasoning_parser: str | None = flag(
        None,
        "Format of the model's reasoning; auto: the chat template's; absent: reasoning is part of "
        "the text.",
        choices=(AUTO, *REASONING_PARSER_NAMES),
    )

    device: str = flag(
        "auto",
        "Device of the model; auto: a GPU or an NPU if torch finds one.",
        choices=("auto", *sorted(DEVICE_KINDS)),
        heading=Heading.MEMORY,
    )
    mem_fraction_static: float | None = flag(
        None,
        "Share of device memory for weights and L1; ranks of a CPU share it. Absent: sized from "
        "the machine; on a GPU 0.88 minus the memory of CUDA graphs.",
    )
    max_running_requests: int | None = flag(None, "Requests decoded together; absent: sized.")
    max_queued_requests: int = flag(
        4096, "Requests that may wait to be scheduled; more are refused with 503."
    )
    max_total_tokens: int | None = flag(None, "Tokens in L1; absent: sized from the memory.")
    max_prefill_tokens: int = flag(
        16384, "Most prompt tokens in one prefill batch; at least a page where prompts are cut."
    )
    chunked_prefill_size: int | None = flag(
        None,
        "Most prompt tokens in one pass; -1: whole prompts; absent: about 2048, on a GPU 8192.",
    )
    page_size: int | None = flag(
        None,
        "Tokens a page; absent: 1, 64 with the hierarchical cache or GLM-5.3-Flash, 256 for "
        "DeepSeek-V4.",
    )
    schedule_policy: str = flag(
        "fcfs",
        "Order of waiting requests: fcfs takes the oldest, lpm the longest cached prefix. With lpm "
        "at most 128 later requests overtake a request, and one more for each that was already "
        "waiting.",
        choices=("fcfs", "lpm"),
    )
    schedule_conservativeness: float = flag(
        1.0, "Above 1: admit fewer requests, retract less; below 1: the opposite."
    )
    target_inter_token_latency: float | None = flag(
        None,
        "Average seconds between two tokens of a request while prompts are computed. A smaller "
        "target makes prompts wait longer. Absent: prefills and decode steps alternate.",
    )
    max_mamba_cache_size: int | None = flag(None, "Recurrent states in L1; absent: sized.")
    mamba_full_memory_ratio: float | None = flag(
        None, "Most bytes of recurrent states in L1 for each byte of keys and values; absent: 0.9."
    )
    mamba_ssm_dtype: str = flag(
        "float32", "Dtype of recurrent states.", choices=("float32", "bfloat16", "float16")
    )
    mamba_scheduler_strategy: str = flag(
        "auto",
        "Snapshots of recurrent states: extra_buffer (auto): also while decoding; no_buffer: of "
        "prompts alone.",
        choices=("auto", "no_buffer", "extra_buffer"),
        aliases=("--mamba-radix-cache-strategy",),
    )
    mamba_track_interval: int = flag(
        256, "Tokens between snapshots of a request's recurrent state while it decodes."
    )
    mamba_max_states_per_path: int = flag(
        -1,
        "Newest states of each conversation that leave L1 and L2 in the usual order; older ones "
        "leave before all others, unless prompts branch there. -1: none does.",
    )
    disable_radix_cache: bool = flag(False, "Do not reuse prefixes.")
    radix_eviction_policy: str = flag(
        "lru",
        "Order in which prefixes are evicted.",
        choices=("lru", "lfu", "fifo", "priority", "slru"),
    )
    radix_cache_backend: str | None = flag(
        None,
        "Name of a prefix cache that the program has registered with register_radix_cache_backend; "
        "absent: the engine's own.",
    )
    attention_backend: str | None = flag(
        None,
        "Attention kernels; absent: torch_native on a CPU, triton on a GPU. flashinfer needs the "
        "package flashinfer-python; flashmla, for sparse attention (DSA) and compressed rows, "
        "sglang-kernel or sgl-flash-mla.",
        choices=("torch_native", "triton", "flashinfer", "flashmla", "ascend"),
    )
    disable_overlap_schedule: bool = flag(
        False, "On a GPU, process the tokens of each step before launching the next step."
    )
    disable_cuda_graph: bool = flag(
        False,
        "On a GPU, launch the kernels of decode steps and short prefills one by one.",
        aliases=("--disable-decode-cuda-graph",),
    )
    cuda_graph_max_bs: int | None = flag(
        None,
        "Largest decode batch that is captured as a CUDA graph, in requests; absent: 256.",
        aliases=("--cuda-graph-max-bs-decode",),
    )

    tp_size: int = flag(
        1,
        "Ranks of tensor parallelism.",
        aliases=("--tp", "--tensor-parallel-size"),
        heading=Heading.PARALLELISM,
    )
    attn_cp_size: int = flag(
        1,
        "Ranks of --tp-size over which the tokens of a prefill are split (context parallelism).",
        aliases=("--attention-context-parallel-size",),
    )
    enable_prefill_context_parallel: bool = flag(
        False,
        "Implied by --attn-cp-size above 1, which says over how many ranks.",
        aliases=(
            "--enable-prefill-cp",
            "--enable-nsa-prefill-context-parallel",
            "--enable-dsa-prefill-context-parallel",
        ),
    )
    dp_size: int = flag(
        1,
        "Servers that sglang_router.launch_server starts, with a router; one server has 1. With "
        "--enable-dp-attention: the same as --attn-dp-size.",
        aliases=("--data-parallel-size", "--dp"),
    )
    attn_dp_size: int = flag(
        1,
        "Groups of ranks (docs/parallel.md), each with equally many of --tp-size, and with "
        "requests and a cache of its own.",
        aliases=("--attention-data-parallel-size",),
    )
    enable_dp_attention: bool = flag(False, "Implied by --attn-dp-size above 1.")
    ep_size: int = flag(
        1,
        "Ranks that have some experts whole: all of --tp-size; 1: each has a part of every expert.",
        aliases=("--ep", "--expert-parallel-size"),
    )
    load_balance_method: str = flag(
        "auto",
        "How a group is chosen for a request; auto: by the longest prefix.",
        choices=LOAD_BALANCE_METHODS,
    )
    nnodes: int = flag(1, "Number of machines, each with equally many ranks.")
    node_rank: int = flag(0, "Which of the machines this is; 0 has the HTTP server.")
    dist_init_addr: str | None = flag(
        None,
        "HOST:PORT of the first machine where the ranks meet; absent: a free port of 127.0.0.1.",
        aliases=("--nccl-init-addr",),
    )
    base_gpu_id: int = flag(0, "GPU of this machine's first rank; the others follow it.")
    keep_session_share: float = flag(
        0.25,
        "Part of L1 and of L2 that requests with a session_id may keep; 0: none.",
        heading=Heading.MEMORY,
    )
    keep_session_seconds: float = flag(
        600.0, "Seconds for which the prefix of a session_id is kept after its last request."
    )

    kv_events_config: str | None = flag(
        None,
        'Publish events of KV blocks (docs/hicache.md): a JSON object, e.g. {"endpoint": '
        '"tcp://*:5557", "topic": "kv-events"}. They contain the tokens of prompts.',
        heading=Heading.OBSERVABILITY,
    )

    @property
    def url(self) -> str:
        """`http://host:port`, or https."""
        return base_url(self.host, self.port, is_tls=self.ssl_certfile is not None)

    def extra_config(self) -> dict[str, Any]:
        """`hicache_storage_backend_extra_config` as an object, which may be empty."""
        return parse_extra_config(self.hicache_storage_backend_extra_config)

    def kv_events(self) -> KVEventsConfig | None:
        """`kv_events_config` as an object; None: nothing is published. Raises as
        `parse_kv_events_config`."""
        text = self.kv_events_config
        config = None if text is None else parse_kv_events_config(text)
        return None if config is None or config.publisher == "null" else config
