"""Flags of SGLang 0.5.23 that this engine once did not know, by what it does with each.

A word is `NAME`, a switch; `NAME:VALUE`, with a value that asks for something; `NAME=DEFAULT` or
`NAME=DEFAULT:VALUE`, with SGLang's own default before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SglangFlag:
    """A flag with values to try.

    Attributes:
        name: The flag with its dashes.
        default: SGLang's default, if that is a value.
        value: A value that asks for something; None: the flag is a switch.
    """

    name: str
    default: str | None
    value: str | None

    @classmethod
    def parse(cls, word: str) -> SglangFlag:
        head, colon, value = word.partition(":")
        name, equals, default = head.partition("=")
        own = default if equals else None
        return cls(f"--{name}", own, value if colon else own)

    def words(self) -> list[str]:
        """The flag as it asks for something, on a command line."""
        return [self.name] if self.value is None else [self.name, self.value]


def _flags(text: str) -> tuple[SglangFlag, ...]:
    return tuple(SglangFlag.parse(word) for word in text.split())


ACTED_ON: Final = _flags("""
    enable-prefill-cp disaggregation-enable-kv-checksum disable-decode-cuda-graph
    cuda-graph-max-bs-decode:32 mamba-radix-cache-strategy=auto:extra_buffer_lazy
    hicache-host-memory-fraction=0.8:0.5 hicache-storage-prefetch-retry-poll-interval=8:4
    hicache-storage-prefetch-retry-max-attempts=8:2 mamba-max-states-per-path=-1:4
    attn-dp-size=1:2 hicache-host-memory-mode=cache:buffer_only
""")
"""Some need other flags beside them."""

ACCEPTED: Final = _flags("""
    language-model-only disable-priority-preemption disable-attn-tp-gather
    enforce-disable-flashinfer-allreduce-fusion disable-aiter-allreduce-fusion-in-prefill
    disable-aiter-allreduce-fusion-in-decode
""")

IGNORED: Final = _flags("""
    disaggregation-decode-allocation-policy=early:late disaggregation-decode-extra-slots:4
    optimistic-prefill-attempts=0:2
    disaggregation-decode-host-receive-threshold=1.0:0.5
    enable-encoder-swa-bounded-replay enable-decoder-swa-bounded-replay
    enable-lean-attention enable-nvidia-megakernel enable-amd-monokernel
    bf16-gemm-backend=auto:torch dsv4-prefill-backend=auto:flashmla_sparse
    dsv4-attn-backend=auto:trtllm enable-dsa-fused-indexer
    linear-attn-backend=triton:cutedsl linear-attn-decode-backend:triton
    linear-attn-prefill-backend:triton linear-attn-verify-backend:triton
    enable-linear-replayssm linear-replayssm-cache-len=16:32 enable-linear-replayssm-spec
    cuda-graph-config:{} cuda-graph-backend-decode:full cuda-graph-backend-prefill:disabled
    cuda-graph-max-bs-prefill:4 cuda-graph-max-seq-len-prefill:512 cuda-graph-bs-decode:8
    cuda-graph-bs-prefill:8 cuda-graph-prefill-max-context:4096 disable-prefill-cuda-graph
    enable-scattered-sconv pre-warm-nccl boundary-reduction=auto:rs
    enable-fused-moe-sum-all-reduce enforce-shared-experts-fusion
    radix-eviction-policy-config:{} enable-page-major-kv-layout enable-unified-memory
    startup-weight-load-mode=serial:parallel weight-loader-drop-cache-after-load
    engine-info-bootstrap-port=6789:6800 load-snapshot-publish-interval=15:5
    extra-metric-labels:a load-publish-endpoint:tcp://*:1 enable-forward-pass-metrics
    forward-pass-metrics-worker-id:a forward-pass-metrics-ipc-name:a trace-modules=request:all
    otlp-service-name:a enable-dsa-cache-layer-split enable-cp-decode-attn-tp
    enable-kv-cache-sharding enable-tp-lm-head-all-to-all enable-shared-experts-attn-tp
    shared-experts-tp-size:1 enable-dense-mlp-attn-tp enable-layernorm-sp
    enable-megamoe-for-layernorm-sp prefill-decode-interval:4 prefill-decode-interval-min-bs=0:8
    c128-page-size=16:32 swa-prefix-tails:4 prefill-only-disable-kv-cache min-free-slots-delay:2
    tokenizer-backend=huggingface:fastokens enable-http-worker-reuseport batch-notify-size=16:8
    speculative-use-rejection-sampling speculative-use-block-verification
    speculative-dsa-topk-backend=sgl-kernel:torch spec-trace-dir:/tmp/traces
""")

REFUSED: Final = {
    feature: _flags(text)
    for feature, text in {
        "Apple's MLX": "mlx-enable-sampling",
        "diffusion models": "model-type=auto:diffusion",
        "Ray": "use-ray",
        "speculative decoding other than": """
            decoupled-spec-bind-endpoint:tcp://*:1 decoupled-spec-connect-endpoints:tcp://a:1
            decoupled-spec-rank:1 decoupled-spec-role=null:drafter uno-lora-path:/x
            speculative-domino-candidate-pool-size=2048:64 speculative-dspark-block-size:4
            speculative-dspark-sps-table-path:/x speculative-dspark-confidence-sts-path:/x
            speculative-dspark-align-verify-tokens-to-graph-tier""",
        "multimodal models": """enable-adaptive-dispatch-to-encoder allowed-media-domains:a.example
            media-url-max-file-size-mb=64:8 trust-mm-content-hashes image-processor-backend=auto:pil
            asr-max-buffer-seconds=60:30 asr-max-concurrent-sessions=32:4""",
        "of another precision": """enable-tf32-matmul prefill-kv-cache-dequant-dtype=auto:nvfp4
            enable-deepseek-v4-fp4-indexer qsa-indexer-dtype=auto:fp8_e4m3
            enable-w4a4-mxfp4-megamoe speculative-enable-w4a4-mxfp4-megamoe""",
        "recurrent states of other precisions": """enable-mamba-cache-stochastic-rounding
            mamba-cache-philox-rounds=0:7 enable-int8-mamba-checkpoint int8-mamba-ckpt-size:8""",
        "watermarks": "enable-watermark watermark-config:{}",
        "besides logprobs": """return-hidden-states-mode:last enable-return-aux-hidden-states
            return-aux-hidden-state-layer-ids:3 enable-return-indexer-topk
            sampling-mask-max-tokens=4096:16""",
        "embedding and reward models": "enable-mis",
        "expert parallelism": "fuseep-mode=2:1 enable-waterfill max-ep-size:8",
        "offloading weights": """enable-paged-experts paged-experts-num-resident:8
            ple-offload-embedding ple-offload-backend=pinned:file ple-offload-dir:/x""",
        "LoRA": "experts-shared-outer-loras",
        "linkers": """enable-unified-cache-external-linker enable-linker-mla-dedup enable-flexkv
            unified-cache-external-linker-backend=mooncake:mori flexkv-config-file:/x
            unified-cache-external-linker-config:{}""",
        "other checkpoint formats": "model-config-parser=auto:mistral",
        "loading weights from another server": "modelexpress-config:{}",
        "keeps weights for later servers": """weight-cache-mode=off:daemon weight-cache-socket:/x
            weight-cache-timeout=1800:60""",
        "debugging": "kv-canary=none:log kv-canary-sweep-interval=0:5",
        "wait for a signal": "gated-launch-port:9000",
        "context parallelism of decoding": """dcp-size=1:2 dcp-comm-backend:a2a
            dcp-replicate-q-proj""",
        "data-parallel attention in other ways": "dwdp-size=1:2",
        "by interleaving": "cp-strategy:interleave",
        "priority scheduling": "default-priority-value:1 retraction-policy=length:priority",
        "stored responses": "enable-response-store",
        "sidecars": "sidecar:a sidecar-args:b",
        "HTTP/2": """enable-http2 http2-max-concurrent-streams=200:8
            http2-initial-connection-window-size=1048576:65536""",
        "templates in requests": "trust-request-chat-template",
        "token ids in answers": "return-input-ids return-output-ids",
        "templates and sampling values": "default-chat-template-kwargs:{}",
        "text of reasoning": "enable-strict-thinking",
        "shapes of streams": "stream-response-default-include-usage",
        "whitespace pattern": "constrained-json-max-whitespace-cnt:3",
    }.items()
}
"""Words of the feature's name, and the flags that ask for it."""

ALL_FLAGS: Final = (
    *ACTED_ON,
    *ACCEPTED,
    *IGNORED,
    *(flag for flags in REFUSED.values() for flag in flags),
)
