"""A whole scheduler in this process, without sockets: real pools, tree and model."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest
import torch

from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.arg_groups.speculative import num_draft_tokens
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constrained.xgrammar_backend import XGrammarBackend
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.distributed.rank_group import RankGroup, SingleRank
from sglang.srt.distributed.tensor_group import TensorGroup
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.managers.detokenizer.detokenizer_manager import make_decoder_factory
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.managers.scheduler.role_switch import MakeRole, RemakeRole
from sglang.srt.managers.scheduler.scheduler import Scheduler, SchedulerResources
from sglang.srt.mem_cache.base_prefix_cache import CacheableRequest, EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.device.pool_registry import ModelPools
from sglang.srt.mem_cache.device.request_pool import RequestPool
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
from sglang.srt.mem_cache.tree.held_pages import HeldPages
from sglang.srt.mem_cache.tree.kv_events import KVCacheEvent
from sglang.srt.mem_cache.tree.radix_key import token_array
from sglang.srt.mem_cache.tree.state_component import StateComponent
from sglang.srt.messages.io_struct import (
    AbortReq,
    ControlReqOutput,
    FinishReason,
    HeldPagesReport,
    RequestOutput,
    TokenizedGenerateReqInput,
    TopLogprobs,
    ToScheduler,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig
from sglang.srt.observability.engine_metrics import SchedulerMetrics
from sglang.srt.process.build import init_pools
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.portable_tokenizer import DecodingTokenizer

MAX_STEPS = 5000
MAX_SECONDS = 60.0
_WRITING: Final = threading.Lock()
"""Held while a checkpoint is written, which rigs of ranks in threads share."""
RIG_DEVICE = detect_device()
"""A GPU if there is one. Without CUDA graphs, because each rig would capture them again."""


def greedy(max_new_tokens: int = 8, **params: Any) -> SamplingParams:
    """Normalized parameters of a greedy request, which by default ignores end tokens."""
    params.setdefault("ignore_eos", True)
    made = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **params)
    made.normalize()
    return made


def stored_in_files(fewest: int) -> dict[str, Any]:
    """Settings of an L3 of files, from which requests wait for `fewest` tokens or more."""
    return {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": fewest}),
    }


@dataclass(slots=True)
class Collected:
    """All outputs of one request."""

    output_ids: list[int] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    """Number of new tokens in each message."""
    last: RequestOutput | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_top_logprobs: list[TopLogprobs] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.last is None else self.last.finish_reason

    @property
    def cached(self) -> tuple[int, int, int]:
        """Tokens of the prompt that came from L1, L2 and L3."""
        assert self.last is not None
        details = self.last.cached_tokens_details
        return details.device, details.host, details.storage


def offer_all_snapshots(tree: RadixCache) -> None:
    """Let `tree` fail if a request ends with a snapshot that the tree was not offered."""

    def checking(component: StateComponent) -> Callable[[CacheableRequest], None]:
        release = component.release

        def checked(req: CacheableRequest) -> None:
            if not req.last_node.is_condemned:
                assert component.snapshot_end(req) is None, f"{req.rid}: its snapshot is dropped"
            release(req)

        return checked

    for component in tree.tree.components:
        component.release = checking(component)  # type: ignore[assignment, method-assign]


class SchedulerRig:
    """Sends requests to `Scheduler.step` and collects the outputs.

    Args:
        model_path: The directory of another rig, or an empty one, which gets a tiny random model.
        pool_tokens: Slots of L1; None: slots and rows of a server with `args`.
        max_requests: Rows of the request table.
        num_states: Slots of recurrent states, if the model has some; None: one for each row.
        snapshot_alignment: Tokens between positions for snapshots; None: a page.
        tokenizer: Tokenizer for stop strings and patterns.
        grammar_backend: Factory of the backend for constraints.
        overlap: Prepare a step while the last one runs; None: the class attribute.
        group: The ranks, each with its own rig; None: this rank alone.
        tp_group: The ranks that split the model's layers with this one; None: it has them all.
        cp_group: Ranks that split the tokens of prefills with this one; None: there are none.
        make_role: Makes `SchedulerResources.make_role` of the model's pools; None: there is none.
        remake_role: Makes the transport of the other role; None: the role does not change.
        publish_events: Gets the KV events of each tick; None: there are none.
        held_pages: Notes from which the scheduler reports its pages; None: it reports none.
        args: Fields of `ServerArgs`.
    """

    device: ClassVar[str] = RIG_DEVICE
    overlap: ClassVar[bool] = False
    """Default of `overlap` for new rigs."""
    captures_graphs: ClassVar[bool] = False
    """True: steps run as CUDA graphs."""
    tick_s: ClassVar[float] = 1.0
    """Seconds between two ticks."""

    def __init__(
        self,
        model_path: Path,
        *,
        pool_tokens: int | None = 512,
        max_requests: int = 8,
        num_states: int | None = None,
        snapshot_alignment: int | None = None,
        tokenizer: DecodingTokenizer | None = None,
        grammar_backend: Callable[[], XGrammarBackend] | None = None,
        overlap: bool | None = None,
        group: RankGroup | None = None,
        tp_group: TensorGroup | None = None,
        cp_group: TensorGroup | None = None,
        make_role: Callable[[Sequence[BaseDevicePool]], MakeRole] | None = None,
        remake_role: RemakeRole | None = None,
        publish_events: Callable[[Sequence[KVCacheEvent]], object] | None = None,
        held_pages: HeldPages | None = None,
        **args: Any,
    ) -> None:
        self.group = group or SingleRank()
        self._tp_group, self._cp_group = tp_group, cp_group
        self._num_states = num_states
        self.server_args = (
            ServerArgs(model_path=str(model_path), **args).resolve().on_device(self.device)
        )
        page_size = self.server_args.page_size
        assert page_size is not None
        self.model_pools: ModelPools | None = None
        """Pools of all kinds of state; None: keys and values alone."""
        self.worker = self.make_worker(model_path, page_size, pool_tokens, max_requests)
        mark_device_set(RIG_DEVICE)
        metrics = SchedulerMetrics(num_drafts=num_draft_tokens(self.server_args) - 1)
        self.tree = create_tree_cache(
            TreeCacheBuildContext(
                server_args=self.server_args,
                params=CacheInitParams(
                    disable=self.server_args.disable_radix_cache,
                    req_to_token_pool=self.worker.req_to_token_pool,
                    token_to_kv_pool_allocator=self.worker.token_to_kv_pool_allocator,
                    page_size=page_size,
                    eviction_policy=self.server_args.radix_eviction_policy,
                    weights_identity="rig",
                    tp_cache_group=self.group,
                    metrics_registry=metrics.registry,
                    model_pools=self.model_pools,
                    mamba_snapshot_alignment=snapshot_alignment,
                    mamba_max_states_per_path=self.server_args.mamba_max_states_per_path,
                    pages_alone=self.server_args.keeps_pages_alone,
                    session_share=self.server_args.keep_session_share,
                    session_ttl=self.server_args.keep_session_seconds,
                    enable_kv_cache_events=publish_events is not None,
                    held_pages=held_pages,
                ),
                enable_hierarchical_cache=self.server_args.enable_hierarchical_cache,
            )
        )
        offer_all_snapshots(self.tree)
        resources = SchedulerResources(
            worker=self.worker,
            tree=self.tree,
            metrics=metrics,
            group=self.group,
            new_decoder=None if tokenizer is None else make_decoder_factory(tokenizer),
            grammar_backend=grammar_backend,
            make_role=None if make_role is None else make_role(self.pools),
            remake_role=remake_role,
            publish_events=publish_events,
            overlap=self.overlap if overlap is None else overlap,
        )
        self.scheduler = self.make_scheduler(resources)
        self.now = 1000.0
        self.results: dict[str, Collected] = {}
        self.answers: list[ControlReqOutput] = []
        self.reports: list[HeldPagesReport] = []

    def make_worker(
        self, model_path: Path, page_size: int, pool_tokens: int | None, max_requests: int
    ) -> TpModelWorker:
        """Create the model with its pools. Arguments as in the constructor."""
        with _WRITING:
            if not (model_path / "config.json").exists():
                save_tiny_checkpoint(model_path, "qwen3", eos_token_id=None)
        runner = self.make_runner(
            ModelRunnerConfig(
                model_config=ModelConfig.from_path(
                    str(model_path),
                    dtype=self.server_args.dtype,
                    context_length=self.server_args.context_length,
                    has_draft_layer=self.server_args.speculative_algorithm is not None,
                ),
                device=self.device,
                page_size=page_size,
                kv_cache_dtype=self.server_args.kv_cache_dtype,
                disable_cuda_graph=not self.captures_graphs,
                num_draft_tokens=num_draft_tokens(self.server_args),
                show_progress=False,
                tp_group=self._tp_group,
                cp_group=self._cp_group,
            )
        )
        if pool_tokens is None:
            init_pools(runner, self.server_args, self.group)
        else:
            runner.init_memory_pool(pool_tokens, max_requests, num_states=self._num_states)
        layers = runner.model_config.num_layers
        self.model_pools = ModelPools.of(runner.pools.values(), layers)
        return TpModelWorker(runner)

    def make_runner(self, config: ModelRunnerConfig) -> ModelRunner:
        """Create the model."""
        return ModelRunner(config)

    def make_scheduler(self, resources: SchedulerResources) -> Scheduler:
        """Create the scheduler, after all else."""
        return Scheduler(self.server_args, resources)

    @property
    def pools(self) -> list[BaseDevicePool]:
        """Device pools of the model."""
        known = self.model_pools
        if known is None:
            return [self.worker.token_to_kv_pool]
        return [*known.pools, *self.worker.req_to_token_pool.request_pools]

    def request(
        self, rid: str, input_ids: list[int], params: SamplingParams | None = None, **fields: Any
    ) -> TokenizedGenerateReqInput:
        """A request message, not sent yet."""
        fields.setdefault("seed", 7)
        return TokenizedGenerateReqInput(
            rid=rid, input_ids=token_array(input_ids), sampling_params=params or greedy(), **fields
        )

    def step(self, *messages: ToScheduler) -> None:
        """Run one tick, `tick_s` after the last one."""
        self.now += self.tick_s
        for output in self.scheduler.step(self.scheduler.make_tick(self.now, messages)):
            if isinstance(output, ControlReqOutput):
                self.answers.append(output)
                continue
            if isinstance(output, HeldPagesReport):
                self.reports.append(output)
                continue
            for of_request in output.outputs:
                self._collect(of_request)

    def wait_a_tick(self) -> None:
        """Run one tick, a millisecond after the last one, and let threads work for as long.

        For waits that end by the work of threads: the scheduler's clock does not run ahead of them.
        """
        self.now += 0.001 - self.tick_s
        self.step()
        time.sleep(0.001)

    def check(self) -> None:
        """Assert that every slot has exactly one owner."""
        self.scheduler.state.check_integrity()

    def run(self, *messages: ToScheduler, check_each_step: bool = False) -> None:
        """Send `messages`, then step until idle."""
        self.step(*messages)
        deadline = time.monotonic() + MAX_SECONDS
        for count in itertools.count():
            if check_each_step:
                self.check()
            if self.scheduler.is_idle():
                self.assert_clean()
                return
            if count >= MAX_STEPS:
                # The rest is done by threads, which need the time that steps take.
                time.sleep(0.001)
            counters = self.scheduler.state.counters
            assert time.monotonic() < deadline, f"not idle after {count} steps: {counters}"
            self.step()

    def generate(self, prompts: Iterable[list[int]], max_new_tokens: int = 8) -> list[list[int]]:
        """Greedy outputs of `prompts`, which run together."""
        rids = []
        messages = []
        for number, prompt in enumerate(prompts):
            rids.append(f"generate-{len(self.results)}-{number}")
            messages.append(self.request(rids[-1], prompt, greedy(max_new_tokens)))
        self.run(*messages)
        return [self.results[rid].output_ids for rid in rids]

    def settle(self, seconds: float = 20.0) -> None:
        """Step until the threads of L3 have ended their work too, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while not self.scheduler.is_idle():
            assert time.monotonic() < deadline, self.tree.is_busy()
            self.wait_a_tick()
        self.assert_clean()

    def assert_clean(self) -> None:
        """Assert that the scheduler holds no slot and no row, and that every page has one owner."""
        state = self.scheduler.state
        pools = state.pools
        rows = pools.req_to_token_pool
        # States are left out: the tree may hold all of them.
        assert ReqToTokenPool.available_size(rows) == rows.size
        assert self.tree.protected_size() == 0
        assert state.free_tokens() == state.limits.pool_tokens
        self.tree.check_integrity()

    def abort(self, rid: str) -> AbortReq:
        """The message that aborts `rid`."""
        return AbortReq(rid=rid)

    def close(self) -> None:
        """End the threads of the cache."""
        self.scheduler.close()

    def _collect(self, output: RequestOutput) -> None:
        got = self.results.setdefault(output.rid, Collected())
        assert got.finish_reason is None, f"{output.rid} spoke after its end"
        got.output_ids += output.output_ids
        got.pieces.append(len(output.output_ids))
        got.logprobs += output.output_logprobs or []
        got.top_logprobs += output.output_top_logprobs or []
        got.input_logprobs += output.input_logprobs or []
        got.input_top_logprobs += output.input_top_logprobs or []
        got.last = output
        assert output.completion_tokens == len(got.output_ids)


def rig_that_knows(
    known: list[int], tier: str, make_rig: Callable[..., SchedulerRig], stored: dict[str, Any]
) -> SchedulerRig:
    """A rig that has a prompt in one tier alone: L1, L2 or L3.

    Args:
        make_rig: Makes a rig with more settings.
        stored: Settings with all tiers.
    """
    rig = make_rig(**({} if tier == "L1" else stored))
    rig.generate([known], 1)
    if tier != "L1":
        rig.settle()
        rig.tree.evict(EvictParams(num_tokens=10_000))
    return make_rig(**stored) if tier == "L3" else rig


def watch_repeats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The contexts of tokens that are computed again from now on, although the state that they
    continue from has them. Asserts that each request has that state again after the step, and that
    graphs of decode steps need not read states of the tree."""
    contexts: list[int] = []
    forward = ModelRunner.forward

    def checking(runner: ModelRunner, batch: ForwardBatch) -> Any:
        output = forward(runner, batch)
        states = batch.states
        if states is None:
            return output
        assert states.first_slots is None or batch.forward_mode is ForwardMode.EXTEND
        if batch.forward_mode is not ForwardMode.EXTEND or states.copied is None:
            return output
        slots = states.slots.tolist()
        for source, own in zip(*(part.tolist() for part in states.copied), strict=True):
            if source in slots:
                continue  # The state behind a prompt, for others.
            place = slots.index(own)
            read = int(states.read_slots[place])
            assert read == source and own != read
            contexts.append(batch.seq_lens_cpu[place])
            assert states.track_slots is None or not states.track_slots[place]
            assert batch.req_pool_indices_cpu is not None
            row = batch.req_pool_indices_cpu[place]
            for pool in runner.pools.values():
                if isinstance(pool, StatePool):
                    assert all(torch.equal(one[:, own], one[:, read]) for one in pool.buffers)
                elif isinstance(pool, RequestPool):
                    assert not any(one[:, row].any() for one in pool.buffers)
        return output

    monkeypatch.setattr(ModelRunner, "forward", checking)
    return contexts


def run_beside_evictions(
    rig: SchedulerRig, known: list[int], asked: list[int], count: int
) -> Collected:
    """Run `asked` behind `known`, for `count` tokens, while all that may be evicted is at each
    step."""
    rig.generate([known], 1)
    rig.step(rig.request("runs", asked, greedy(count)))
    for _ in range(count):
        rig.tree.evict(EvictParams(num_tokens=10_000, mamba_num=100))
        rig.check()
        rig.step()
    rig.run()
    return rig.results["runs"]


def prompt(seed: int, length: int, vocab_size: int = 160) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()


PROMPTS: Final = [prompt(seed, length) for seed, length in enumerate((5, 17, 40, 64, 33, 1))]
"""Prompts of one page, of several pages, of one token."""
