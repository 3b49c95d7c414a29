"""All command line settings: names, defaults, and the combinations that are refused.

`ServerArgs` uses neither disk (except an `@file` extra config), network nor hardware. Names of
backends and policies are strings here; their users make objects of them. `None` means "determined
later": by `resolve()` if that needs neither machine nor model, otherwise by the code that sizes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from typing import Any, ClassVar

from sglang.srt.arg_groups.api_keys import resolve_key
from sglang.srt.arg_groups.checks import (
    cache_and_page_size,
    check_device,
    mistakes_of,
    without_effect,
)
from sglang.srt.arg_groups.cli import (
    add_flags,
    explain_foreign,
    field_of,
    flag,
    flag_name,
    raise_errors,
    warn_of_ignored,
)
from sglang.srt.arg_groups.disaggregation import (
    DisaggregationArgs,
    DisaggregationMode,
    read_secret,
)
from sglang.srt.arg_groups.extra_config import parse_extra_config, public_text
from sglang.srt.arg_groups.foreign_flags import SAME_VALUES
from sglang.srt.arg_groups.hicache import HiCacheArgs
from sglang.srt.arg_groups.kv_events_config import KVEventsConfig, parse_kv_events_config
from sglang.srt.arg_groups.observability import ObservabilityArgs
from sglang.srt.arg_groups.remote_weights import REMOTE_INSTANCE
from sglang.srt.arg_groups.speculative import SpeculativeArgs
from sglang.srt.constants import (
    BUILTIN_MODEL_DIR,
    BUILTIN_MODEL_NAME,
    DEFAULT_HOST,
    DEFAULT_PORT,
    MODEL_SAMPLING,
    OPENAI_SAMPLING,
)
from sglang.srt.environ import envs
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS
from sglang.srt.hardware_backend.device_kinds import DEVICE_KINDS, device_kind
from sglang.srt.parser.reasoning_parser import AUTO, REASONING_PARSERS
from sglang.srt.utils.network import base_url

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True)
class ServerArgs(HiCacheArgs, DisaggregationArgs, ObservabilityArgs, SpeculativeArgs):
    """The settings of one engine. `resolve()` returns the copy that the engine uses."""

    grpc_mode: ClassVar[bool] = False
    """True if servers speak gRPC; `sglang_router.launch_server` asks."""

    config: str | None = flag(None, "YAML file with flags by name; flags on the command line win.")

    # Model
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
    load_format: str = flag(
        "auto",
        "Format of the weights; dummy makes random weights, pt reads pickled files, "
        "remote_instance reads them from a running server.",
        choices=("auto", "safetensors", "dummy", "pt", REMOTE_INSTANCE),
    )
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
    remote_instance_weight_loader_seed_instance_ip: str | None = flag(
        None, "Host of the server whose weights remote_instance reads."
    )
    remote_instance_weight_loader_seed_instance_service_port: int | None = flag(
        None, "Port of that server's HTTP."
    )
    remote_instance_weight_loader_backend: str = flag(
        "transfer_engine", "How remote_instance reads them.", choices=("transfer_engine",)
    )
    remote_instance_weight_loader_start_seed_via_transfer_engine: bool = flag(
        False, "Let other servers read the weights, through Mooncake's Transfer Engine."
    )

    # Server
    host: str = flag(DEFAULT_HOST, "Address to listen on.")
    port: int = flag(DEFAULT_PORT, "Port to listen on.")
    ssl_certfile: str | None = flag(
        None, "Certificate, with those that sign it (PEM): serve https, needs --ssl-keyfile."
    )
    ssl_keyfile: str | None = flag(None, "Private key of the certificate (PEM).")
    ssl_keyfile_password: str | None = flag(
        None, "Password of that key; better in a --config file.", secret=True
    )
    api_key: str | None = flag(None, "Bearer token that requests must send.", secret=True)
    api_key_file: str | None = flag(None, "File with that token; or set SGLANG_API_KEY.")
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
        choices=(AUTO, *REASONING_PARSERS),
    )

    # Memory and scheduling
    device: str = flag(
        "auto",
        "Device of the model; auto: a GPU or an NPU if torch finds one.",
        choices=("auto", *sorted(DEVICE_KINDS)),
    )
    mem_fraction_static: float | None = flag(
        None,
        "Share of device memory for weights and L1; absent: sized from the machine; on a GPU 0.88 "
        "minus the memory of CUDA graphs.",
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
    page_size: int | None = flag(None, "Tokens a page; absent: 1, 64 with the hierarchical cache.")
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
        "float32", "Dtype of recurrent states.", choices=("float32", "bfloat16")
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
        "package flashinfer-python; flashmla, for sparse attention (DSA), sglang-kernel.",
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

    # Parallelism
    tp_size: int = flag(
        1, "Ranks of tensor parallelism.", aliases=("--tp", "--tensor-parallel-size")
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
        "Servers that sglang_router.launch_server starts, with a router; one server has 1.",
        aliases=("--data-parallel-size", "--dp"),
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
    )
    keep_session_seconds: float = flag(
        600.0, "Seconds for which the prefix of a session_id is kept after its last request."
    )

    kv_events_config: str | None = flag(
        None,
        'Publish events of KV blocks (docs/hicache.md): a JSON object, e.g. {"endpoint": '
        '"tcp://*:5557", "topic": "kv-events"}. They contain the tokens of prompts.',
    )

    def __post_init__(self) -> None:
        for name, values in SAME_VALUES.items():
            value = getattr(self, name)
            if isinstance(value, str) and value in values:
                setattr(self, name, values[value])

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_is_resolved"):
            raise dataclasses.FrozenInstanceError(f"{name}: resolved settings do not change")
        super().__setattr__(name, value)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add the flags to the parser of another program, `sglang_router.launch_server`."""
        add_flags(parser, ServerArgs)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """The settings that a parser with `add_cli_args` found."""
        shown = [field for field in dataclasses.fields(cls) if field.metadata["is_shown"]]
        return cls(**{field.name: getattr(args, field.name) for field in shown})

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """Like the constructor, but judges names of other flags as the command line does: raises
        FlagErrors."""
        known = {field.name for field in dataclasses.fields(cls)}
        named = {field_of(name, cls): value for name, value in kwargs.items()}
        foreign = [(flag_name(name), named[name]) for name in named if name not in known]
        judged = explain_foreign(foreign, cls)
        raise_errors(judged.lines)
        own = {name: value for name, value in named.items() if name in known}
        args = cls(**{**own, **judged.settings})
        warn_of_ignored([*judged.ignored, *without_effect(args)])
        return args

    def with_keys(self) -> ServerArgs:
        """A copy with the keys from files and the environment. Called once, before `resolve`;
        raises as `resolve_key`."""
        return dataclasses.replace(
            self,
            api_key=resolve_key(self.api_key, self.api_key_file, "--api-key", envs.SGLANG_API_KEY),
            admin_api_key=resolve_key(
                self.admin_api_key,
                self.admin_api_key_file,
                "--admin-api-key",
                envs.SGLANG_ADMIN_API_KEY,
            ),
            disaggregation_secret=read_secret(self),
        )

    def resolve(self) -> ServerArgs:
        """Check every value; fill in those that need neither machine nor model.

        With `device="auto"`, values that depend on the device stay unset until `on_device`.

        Idempotent: resolving a resolved copy gives an equal copy.

        Raises:
            FlagErrors: A line for each mistake, with the flag and the remedy.
        """
        raise_errors(mistakes_of(self))
        hierarchical, page_size = cache_and_page_size(self)
        if hierarchical and not self.enable_hierarchical_cache:
            logger.info(
                "--hicache-storage-backend %s implies --enable-hierarchical-cache",
                self.hicache_storage_backend,
            )
        model_path = self.model_path or str(BUILTIN_MODEL_DIR)
        args = dataclasses.replace(
            self,
            model_path=model_path,
            enable_hierarchical_cache=hierarchical,
            page_size=page_size,
            enable_prefill_context_parallel=self.attn_cp_size > 1,
            disaggregation_decode_enable_radix_cache=(
                self.disaggregation_mode == DisaggregationMode.DECODE
                and not self.disable_radix_cache
            ),
            tokenizer_path=self.tokenizer_path or model_path,
            served_model_name=self.served_model_name or self.model_path or BUILTIN_MODEL_NAME,
        )
        return args._settled() if args.device == "auto" else args.on_device(args.device)

    def on_device(self, device: str) -> ServerArgs:
        """Fill in the values of a resolved copy that depend on the device, one of `DEVICE_KINDS`,
        and check them. Raises FlagErrors, a line for each mistake."""
        kind = device_kind(device)
        raise_errors(check_device(self, kind))
        assert self.page_size is not None, "resolved arguments have a page size"
        chunk = self.chunked_prefill_size
        if chunk is None:
            chunk = max(kind.prefill_chunk_tokens // self.page_size, 1) * self.page_size
        args = dataclasses.replace(
            self,
            device=device,
            attention_backend=self.attention_backend or kind.attention_backends[0],
            chunked_prefill_size=chunk,
        )
        # The command line's warning has named the others.
        warn_of_ignored([one for one in without_effect(args) if one not in without_effect(self)])
        return args._settled()

    def _settled(self) -> ServerArgs:
        """This object, which from now on refuses changes: threads share it."""
        self._is_resolved = True
        return self

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

    def to_public_dict(self) -> dict[str, Any]:
        """Field name to value for `/server_info` and the log, with secret values hidden."""
        values = dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            if field.metadata["secret"] and values[field.name] is not None:
                values[field.name] = "***"
        extra_config = public_text(self.hicache_storage_backend_extra_config)
        values["hicache_storage_backend_extra_config"] = extra_config
        return values
