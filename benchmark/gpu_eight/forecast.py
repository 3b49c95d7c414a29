"""Forecast for whole models on eight GPUs, calculated before they run.

Bytes and operations come from config.json through the planner, rates from measurements on one and
two H200s (`benchmark/results`). Every figure has a limit, at which all bytes move at the rate of a
large copy and all products run at the rate of a large one, and an expected value. The time that one
GPU lost beyond its limits is counted in two ways: as a constant time of each layer, which more
ranks do not shorten, and as a share of the limit, which more ranks shorten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmark.report import Report
from sglang.hicache_plan import make_plan, parse_args
from sglang.planning.model_costs import build_on_meta, kept_formats
from sglang.planning.plan_text import Plan
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import GB

COPY_BYTES_S: Final = 4.2e12
"""A large copy of an H200, bytes read and written together."""
PRODUCT_FLOP_S: Final = 1.2e15
"""Large products of fp8 blocks by cuBLAS: 1,180 to 1,320 TFLOP/s."""
EXPERT_FLOP_S: Final = 5.5e14
"""Products of 1,024 tokens of an expert: 510 to 650 TFLOP/s, in bf16 and fp8 alike."""
ATTENTION_FLOP_S: Final = 3.5e14
"""Attention of DeepSeek-V3.2 under a mask: 348 to 383 TFLOP/s."""
SCORES_FLOP_S: Final = 5.62e14
"""Scores of the indexer, 1,024 tokens over 32,768 keys."""
LINK_BYTES_S: Final = 3.94e11
"""A peer copy over NVLink."""
L2_BYTES_S: Final = 4.7e10
"""Copies from host memory on each of two GPUs."""
L3_BYTES_S: Final = 2 * GB
"""Mooncake over TCP on one host, for each rank."""
HTTP_S: Final = 5e-3
"""Time of a request from L1 outside its step: a repeat takes 5.6 ms, its step 2.9 of them."""
LOST_LATENT_S: Final = 1.37e-4
"""A layer's time beyond its limit: decode of one with 6 of DeepSeek-V3.2's layers took 2.94 ms,
and 2.115 at the limit."""
LOST_S: Final = 2.0e-5
"""The same of the 12 layers of Qwen3-Next: 0.741 ms, and 0.501 at the limit."""
LOST_SHARE: Final = 0.43
"""The share of the limit that was lost by both: 0.39 and 0.48."""
LOST_PREFILL: Final = 0.2
"""The same of prefills: assumed, since kernels were measured alone."""
SUM_S: Final = 6.8e-6
"""NCCL's sum of one row of two ranks, without the norm (8.0 - 1.2 us). Assumed for more ranks: it
grows as the depth of a tree."""
PUBLIC_TOKENS_S: Final = 2391.0
"""SGLang's cookbook, GLM-5.2-FP8 on eight H200s: tokens/s a GPU in all. It has 5.05 ms a token for
one request."""
INPUT: Final = 8192
OUTPUT: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """Weights that a rank reads and multiplies."""

    dense_bytes: int
    """Weights that each step reads; no embedding, no routed experts."""
    expert_bytes: int
    """All routed experts of the rank."""
    dense_weights: int
    """Elements of the weights that a token of a prompt is multiplied with; no head."""
    expert_weights: float
    """Elements of the routed experts that a token uses."""
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Seconds: at the limit, and with each way to count the loss."""

    limit: float
    if_shared: float
    if_constant: float


class Forecast:
    """Figures of one model on `tp_size` H200s.

    Args:
        model: Directory with a config.json.
        flags: Flags of the server that change sizes.

    Raises:
        ValueError: The model does not fit, or cannot be split so; names the flag.
    """

    def __init__(self, model: str, tp_size: int, flags: tuple[str, ...] = ()) -> None:
        words = ["--model-path", model, "--tp-size", str(tp_size), "--machine", "h200", *flags]
        own, args = parse_args(words)
        self.tp_size = tp_size
        self.plan: Plan = make_plan(own, args)
        self.config = ModelConfig.from_args(args)
        self.work = rank_work(self.config, tp_size)
        self._bytes = {pool.name: pool.rank_bytes for pool in self.plan.pools}
        self._layers = {pool.name: pool.layers for pool in self.plan.pools}

    def decode(self, requests: int, context: int) -> Expected:
        """A decode step of `requests`, each after `context` tokens."""
        work, hidden = self.work, self.config.hidden_size
        used = 1.0
        if work.num_experts:
            used -= (1 - work.experts_per_token / work.num_experts) ** requests
        moved = work.dense_bytes + used * work.expert_bytes
        for pool in self.plan.pools:
            # A recurrent state is read and written; attention of a sparse model reads some rows.
            items = 2 if pool.item == "state" else self._rows_read(pool.name, context)
            moved += requests * items * pool.rank_bytes
        read_s = moved / COPY_BYTES_S
        return self._with_losses(read_s, self.sums(requests * hidden * 2), LOST_SHARE)

    def prefill(self, tokens: int) -> Expected:
        """The prefill of one prompt."""
        work, config = self.work, self.config
        fields, share = config.hf_config, 1 / self.tp_size
        keys = np.arange(1, tokens + 1, dtype=np.float64)
        seconds = 2 * tokens * work.dense_weights / PRODUCT_FLOP_S
        seconds += 2 * tokens * work.expert_weights / EXPERT_FLOP_S
        scores = 0.0
        chosen = getattr(fields, "index_topk", 0)
        if "indexer" in self._bytes:
            # Ranks divide the tokens.
            each = 2 * fields.index_n_heads * fields.index_head_dim * share
            scores = self._layers["indexer"] * each * keys.sum() / SCORES_FLOP_S
        if getattr(fields, "kv_lora_rank", None):
            plain = fields.qk_nope_head_dim + fields.qk_rope_head_dim + fields.v_head_dim
            latent = 2 * fields.kv_lora_rank + fields.qk_rope_head_dim
            of_query = 2 * plain * keys
            if chosen:
                of_query = np.minimum(of_query, 2 * latent * chosen)
        else:
            of_query = 4 * config.head_dim * keys
        heads = config.num_attention_heads * share
        attention = self._layers["kv"] * heads * of_query.sum() / ATTENTION_FLOP_S
        limit = seconds + scores + attention
        sums_s = self.sums(tokens * config.hidden_size * 2)
        return self._with_losses(limit, sums_s, LOST_PREFILL)

    def from_tier(self, tokens: int, bytes_per_s: float) -> Expected:
        """TTFT of a prompt that a tier has, read by each rank at this rate, with its last token
        computed."""
        one = self.decode(1, tokens)
        rows = sum(pool.rank_bytes for pool in self.plan.pools if pool.item == "token")
        states = sum(pool.rank_bytes for pool in self.plan.pools if pool.item == "state")
        copy_s = (tokens * rows + states) / bytes_per_s
        # Layers are computed while later ones are copied, so only the longer one counts.
        longer = [max(copy_s, step) for step in (one.limit, one.if_shared, one.if_constant)]
        limit, shared, constant = longer
        return Expected(limit=limit, if_shared=shared + HTTP_S, if_constant=constant + HTTP_S)

    def throughput(self, requests: int, prefill_s: float, step_s: float) -> float:
        """Tokens/s in all of `requests` that are under way at once, each with INPUT and OUTPUT
        tokens: their prefills come one after the other, their decode steps together."""
        seconds = requests * prefill_s + OUTPUT * step_s
        return requests * (INPUT + OUTPUT) / seconds

    def most_requests(self) -> int:
        """Requests of INPUT and OUTPUT tokens that L1 holds, 256 at most."""
        return max(1, min(256, int(self.plan.tiers[0].tokens // (INPUT + OUTPUT))))

    def sums(self, num_bytes: int) -> float:
        """Seconds of a step's sums over the ranks: two a layer, one of the embedding."""
        n = self.tp_size
        if n == 1:
            return 0.0
        each = SUM_S * (1 + math.log2(n)) / 2 + 2 * (n - 1) / n * num_bytes / LINK_BYTES_S
        return (2 * self.config.num_hidden_layers + 1) * each

    def _rows_read(self, pool: str, context: int) -> int:
        chosen = getattr(self.config.hf_config, "index_topk", 0)
        return min(context, chosen) if chosen and pool == "kv" else context

    def _with_losses(self, limit: float, sums_s: float, share: float) -> Expected:
        is_latent = bool(getattr(self.config.hf_config, "kv_lora_rank", None))
        lost = self.config.num_hidden_layers * (LOST_LATENT_S if is_latent else LOST_S)
        return Expected(
            limit=limit,
            if_shared=(1 + share) * limit + sums_s,
            if_constant=limit + lost + sums_s,
        )


def rank_work(config: ModelConfig, tp_size: int) -> RankWork:
    """Calculate the reads and products of the first of `tp_size` ranks from shapes alone."""
    fields = config.hf_config
    experts = getattr(fields, "n_routed_experts", None) or getattr(fields, "num_experts", 0) or 0
    used = fields.num_experts_per_tok if experts else 0
    sizes = {True: [0, 0], False: [0, 0]}
    stored = dict(build_on_meta(config, tp_size, kept_formats(config)).weight_slots())
    plain = dict(build_on_meta(config, tp_size).weight_slots())
    for name, slot in stored.items():
        if "embed_tokens" not in name:
            sizes[".mlp.experts." in name][0] += slot.dest.nbytes
    for name, slot in plain.items():
        if "embed_tokens" not in name and "lm_head" not in name:
            sizes[".mlp.experts." in name][1] += slot.dest.numel()
    return RankWork(
        dense_bytes=sizes[False][0],
        expert_bytes=sizes[True][0],
        dense_weights=sizes[False][1],
        expert_weights=sizes[True][1] * (used / experts if experts else 0.0),
        num_experts=experts,
        experts_per_token=used,
    )


def report_forecast(forecast: Forecast, shape: str, report: Report) -> None:
    """Give all figures to a report, in milliseconds, tokens/s and GB."""
    about = {"forecast": shape, "gpus": forecast.tp_size}
    for part, size in forecast.plan.memory.items():
        report.add(f"memory_{part}", size / GB, "GB", about)
    report.add("l1", forecast.plan.tiers[0].tokens, "tokens", about)
    found: dict[str, Expected] = {}
    for requests in (1, 16, 64):
        found[f"decode of {requests}"] = forecast.decode(requests, INPUT)
    for tokens in (8192, 32768):
        found[f"prefill of {tokens}"] = forecast.prefill(tokens)
        found[f"TTFT of {tokens} from L2"] = forecast.from_tier(tokens, L2_BYTES_S)
        found[f"TTFT of {tokens} from Mooncake"] = forecast.from_tier(tokens, L3_BYTES_S)
    for what, one in found.items():
        case = {**about, "of": what}
        report.add("if_shared", one.if_shared * 1e3, "ms", case, limit=one.limit * 1e3)
        report.add("if_constant", one.if_constant * 1e3, "ms", case, limit=one.limit * 1e3)
    for tokens in (1, 64, INPUT):
        seconds = forecast.sums(tokens * forecast.config.hidden_size * 2)
        report.add("sums", seconds * 1e3, "ms", {**about, "rows": tokens})
    prefill = found["prefill of 8192"]
    most = forecast.most_requests()
    for requests in sorted({min(one, most) for one in (16, 64, most)}):
        step = forecast.decode(requests, INPUT + OUTPUT // 2)
        case = {**about, "in": INPUT, "out": OUTPUT, "requests": requests}
        for way in ("limit", "if_shared", "if_constant"):
            whole = forecast.throughput(requests, getattr(prefill, way), getattr(step, way))
            rate = whole / forecast.tp_size
            of_public = rate / PUBLIC_TOKENS_S
            report.add(way, rate, "token/s a GPU", case, of_public=of_public)
