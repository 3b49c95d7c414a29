"""Command lines as today's cookbooks have them: each works, or is refused by what it asks for."""

from __future__ import annotations

import shlex
from typing import Final

import pytest

from sglang.srt.arg_groups.cli import FlagErrors
from sglang.srt.server_args import prepare_server_args
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

HICACHE: Final = "--enable-hicache --page-size 64 --hicache-io-backend kernel"
MOONCAKE: Final = f"{HICACHE} --hicache-storage-backend mooncake --hicache-mem-layout page_first"
PREFILL: Final = "--disaggregation-mode prefill --disaggregation-ib-device mlx5_0"
DECODE: Final = "--disaggregation-mode decode --disaggregation-ib-device mlx5_0"
GRAPHS: Final = "--cuda-graph-max-bs-decode 128 --cuda-graph-bs-prefill 64 128 256"
EAGLE: Final = (
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
CP: Final = "--tp 8 --attn-cp-size 4 --enable-prefill-cp"

WORKING: Final = {
    "HiCache": f"-m --tp 8 {HICACHE} --hicache-ratio 2 --hicache-write-policy write_through",
    "HiCache, sized": f"-m --tp 4 {HICACHE} --hicache-size 200 --mem-fraction-static 0.85 "
    "--hicache-mem-layout page_first --hicache-write-policy write_through_selective",
    "HiCache, allocated early": f"-m {HICACHE} --enable-hicache-prealloc",
    "HiCache, by share of the host": f"-m {HICACHE} --hicache-host-memory-fraction 0.6",
    "HiCache, buffers": f"-m {MOONCAKE} --hicache-host-memory-mode buffer_only",
    "HiCache, file": f"-m {HICACHE} --hicache-storage-backend file --enable-metrics "
    "--hicache-storage-prefetch-policy best_effort --enable-cache-report",
    "Mooncake": f"-m --tp 8 {MOONCAKE} --hicache-storage-prefetch-policy timeout "
    "--hicache-storage-backend-extra-config '{\"prefetch_threshold\": 256}'",
    "Mooncake, late writers": f"-m {MOONCAKE} --hicache-storage-prefetch-retry-max-attempts 4 "
    "--hicache-storage-prefetch-retry-poll-interval 4",
    "Mooncake, dynamic": f"-m {HICACHE} --hicache-storage-backend dynamic "
    "--hicache-storage-backend-extra-config "
    '\'{"backend_name": "a", "module_path": "b", "class_name": "C"}\'',
    "prefill": f"-m --tp 8 {PREFILL} --disaggregation-transfer-backend mooncake --port 30000",
    "prefill, TCP": "-m --disaggregation-mode prefill "
    "--disaggregation-transfer-backend mooncake_tcp --disaggregation-enable-kv-checksum",
    "prefill with HiCache": f"-m {PREFILL} {MOONCAKE} --chunked-prefill-size 16384",
    "prefill, CP": f"-m {PREFILL} {CP} --cp-strategy zigzag --moe-dp-size 4 "
    "--enable-dsa-cache-layer-split --max-prefill-tokens 65536",
    "decode": f"-m {DECODE} --max-running-requests 256 {GRAPHS} --num-reserved-decode-tokens 512",
    "decode, slots": f"-m {DECODE} --disaggregation-decode-extra-slots 8 "
    "--disaggregation-decode-allocation-policy early "
    "--disaggregation-decode-retraction-backup host_pool",
    "decode that changes": f"-m {DECODE} --enable-pd-role-switch --admin-api-key operator",
    "decode that offloads": f"-m {DECODE} --hicache-storage-backend mooncake --page-size 64 "
    "--disaggregation-decode-enable-offload-kvcache "
    "--hicache-storage-prefetch-policy wait_complete",
    "CP": f"-m {CP} --cp-strategy zigzag --dsa-prefill-backend flashmla_sparse",
    "CP, earlier names": "-m --tp 8 --attn-cp-size 8 --enable-dsa-prefill-context-parallel "
    "--moe-dp-size 8 --moe-dense-tp-size 1",
    "hybrid": "-m --tp 4 --mamba-radix-cache-strategy extra_buffer --mamba-track-interval 256 "
    "--mamba-ssm-dtype bfloat16 --linear-attn-backend triton",
    "hybrid, lazy buffers": "-m --mamba-radix-cache-strategy extra_buffer_lazy --page-size 64 "
    "--mamba-full-memory-ratio 0.5 --mamba-max-states-per-path 8",
    "hybrid with MTP": f"-m --tp 4 {EAGLE} --mamba-scheduler-strategy extra_buffer "
    "--linear-attn-decode-backend cutedsl --speculative-use-rejection-sampling",
    "hybrid with HiCache": f"-m {HICACHE} --hicache-ratio 2 --mamba-scheduler-strategy auto",
    "windows": "-m --tp 2 --swa-full-tokens-ratio 0.2 --enable-decoder-swa-bounded-replay "
    "--swa-prefix-tails 4",
    "agents": "-m --tp 8 --tool-call-parser qwen3_coder --reasoning-parser qwen3 "
    "--enable-session-radix-cache --enable-cache-report",
    "agents, GLM": "-m --tp 8 --tool-call-parser glm47 --reasoning-parser glm45 "
    f'--served-model-name glm-5 --model-loader-extra-config \'{{"enable_multithread_load": '
    f'true, "num_threads": 64}}\' {HICACHE}',
    "agents, Kimi": "-m --tp 8 --trust-remote-code --tool-call-parser kimi_k2 "
    "--reasoning-parser kimi_k2 --language-model-only",
    "agents, DeepSeek": f"-m --tp 8 {EAGLE} --tool-call-parser deepseekv32 {GRAPHS} "
    "--reasoning-parser deepseek-v3 --dsv4-attn-backend flashmla",
    "graphs off": "-m --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled",
    "DP attention": "-m --tp 8 --dp-size 8 --attn-dp-size 8 --enable-dp-attention "
    "--enable-dp-lm-head --load-balance-method round_robin",
    "one rank of each": "-m --dp-size 1 --attn-dp-size 1 --dcp-size 1 --pp-size 1 --ep-size 1",
    "CPU": "-m --device cpu --cuda-graph-max-bs 16 --dtype half",
}
"""Accepted as they are; `-m` stands for a model."""

REFUSED: Final = {
    "DCP": ("-m --tp 8 --dcp-size 8 --dcp-comm-backend a2a", ["context parallelism of decoding"]),
    "DP attention on nodes": (
        "-m --tp 16 --enable-dp-attention --dp-size 16 --nnodes 2 --node-rank 1 "
        "--dist-init-addr a:1 --disaggregation-mode prefill",
        ["--nnodes 2 yet", "do not reach this machine"],
    ),
    "EP": (
        "-m --tp 8 --ep-size 8 --moe-a2a-backend deepep --enable-waterfill --max-ep-size 16",
        ["expert parallelism"],
    ),
    "CP, interleaved": (f"-m {CP} --cp-strategy interleave", ["by interleaving"]),
    "CP without ranks": ("-m --tp 8 --enable-prefill-cp", ["--attn-cp-size N"]),
    "Mori": (
        "-m --disaggregation-mode prefill --disaggregation-transfer-backend mori",
        ["--disaggregation-transfer-backend mori: SGLang has it"],
    ),
    "HiCache, buffers without a store": (
        f"-m {HICACHE} --hicache-host-memory-mode buffer_only",
        ["buffer_only needs --hicache-storage-backend"],
    ),
    "HiCache, buffers that write back": (
        f"-m {MOONCAKE} --hicache-host-memory-mode buffer_only --hicache-write-policy write_back",
        ["buffer_only does not work with --hicache-write-policy write_back"],
    ),
    "HiCache on 3FS": (
        f"-m {HICACHE} --hicache-storage-backend hf3fs",
        ["--hicache-storage-backend hf3fs: SGLang has it"],
    ),
    "linker": (
        "-m --enable-unified-cache-external-linker --unified-cache-external-linker-backend mori",
        ["linkers"],
    ),
    "FlexKV": ("-m --enable-flexkv --flexkv-config-file f.yml", ["FlexKV"]),
    "int8 states": ("-m --enable-int8-mamba-checkpoint", ["recurrent states of other"]),
    "draft of another model": (
        f"-m {EAGLE} --speculative-draft-model-path d --speculative-dspark-block-size 4",
        ["speculative decoding other than by the checkpoint's own layer"],
    ),
    "agents' responses": ("-m --enable-response-store", ["stored responses"]),
    "agents' templates": (
        "-m --default-chat-template-kwargs '{\"enable_thinking\": false}' --enable-strict-thinking",
        ["templates and sampling values", "text of reasoning"],
    ),
    "sessions": ("-m --enable-streaming-session", ["sessions that grow on the server"]),
    "Ray on nodes": ("-m --tp 16 --use-ray", ["Ray"]),
}  # fmt: skip
"""Command lines, and words of each line that refuses a part of one."""


def answer(line: str) -> list[str]:
    """The lines about a command line; none if it is accepted."""
    argv = shlex.split(line.replace("-m ", "--model-path owner/model ", 1))
    try:
        prepare_server_args(argv)
    except FlagErrors as errors:
        return list(errors.lines)
    return []


@pytest.mark.parametrize("name", WORKING)
def test_a_line_works(name: str) -> None:
    assert answer(WORKING[name]) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_line_is_refused_by_what_it_asks_for(name: str) -> None:
    line, features = REFUSED[name]
    lines = answer(line)
    assert len(lines) == len(features), lines
    for one, feature in zip(lines, features, strict=True):
        assert feature in one and "did you mean" not in one, one
