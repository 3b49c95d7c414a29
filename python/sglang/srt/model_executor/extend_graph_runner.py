"""Short prefills as CUDA graphs, one for each layer, with a wait for the layer's load in between.

A question after a long cached prefix is a prefill of few tokens. The CPU takes longer to launch its
kernels than the GPU to run them, and delays the first token. A graph for each layer launches the
kernels at once; one graph for all layers could not wait for the loads of single layers. A step is
padded to the next captured number of tokens, and of requests. Padding tokens attend to nothing, and
are stored in slot 0, the padding page. An exact repeat computes one token.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention_kind import AttentionKind
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode, StateBatch
from sglang.srt.layers.linear_attention.extend_plan import SHORT, ChunkPlan, ShortPlan
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.device.pool_registry import kv_pool
from sglang.srt.mem_cache.device.state_pool import state_pool
from sglang.srt.mem_cache.device.state_spec import ItemKind, PoolName
from sglang.srt.model_executor.cuda_graph_runner import Forward
from sglang.srt.model_executor.graph_capture import Graph, GraphCapture

TOKEN_COUNTS: Final = (1, 16, 32, 64, 128, 256)
"""Captured numbers of tokens. Above about 300, the GPU computes longer than the CPU launches."""
assert TOKEN_COUNTS[-1] <= SHORT, "layers of linear attention plan longer prefills on the CPU"
MAX_REQUESTS: Final = 8
_TOKENS_OF_CHUNKS: Final = 64
"""Fewest tokens of each request that recurrent layers compute in chunks. Token by token, a layer of
Nemotron-3-Nano takes 0.65 us for each, and in chunks 25 to 30 us for 64 to 128."""


class Size(NamedTuple):
    """Numbers of tokens and requests that a graph computes."""

    tokens: int
    requests: int

    def __str__(self) -> str:
        return f"{self.tokens}/{self.requests}"


def waits_of(pools: Mapping[PoolName, BaseDevicePool]) -> list[tuple[int, BaseDevicePool]]:
    """Layers with state, ascending, each with a pool that can wait for the layer's load."""
    # No tier has what running requests keep for themselves, so these pools know of no loads.
    loaded = (pool for pool in pools.values() if pool.spec.item is not ItemKind.REQUEST)
    pool_of = {layer: pool for pool in loaded for layer in pool.spec.layers}
    return sorted(pool_of.items(), key=lambda wait: wait[0])


class ExtendGraphRunner:
    """Captures prefills when it is created, then replays them. Only for the model's thread."""

    def __init__(
        self,
        forward: Forward,
        attn_backends: Mapping[AttentionKind, AttentionBackend],
        req_to_token_pool: ReqToTokenPool,
        pools: Mapping[PoolName, BaseDevicePool],
        *,
        num_logits: int,
        show_progress: bool,
        chunk: int | None = None,
        capture_hidden: bool = False,
    ) -> None:
        """Args:
        forward: The model's `forward`.
        attn_backends: The backend of each kind of layer; each `captures_extend`.
        pools: The pools of all the model's state.
        num_logits: Number of logits per request on this rank.
        show_progress: See `progress_bar`.
        chunk: Tokens that recurrent layers compute at once; None: the model has no such layers.
        capture_hidden: If true, steps return the hidden states of all their tokens.
        """
        for pool in pools.values():
            assert pool.layer_transfer_counter is None, "waits cannot be captured"
        self._forward = forward
        self._chunk, self._capture_hidden = chunk, capture_hidden
        self._attn_backends = attn_backends
        self._req_to_token_pool = req_to_token_pool
        self._pools = pools
        self._waits = waits_of(pools)
        table = req_to_token_pool.req_to_token
        device = table.device
        self._max_requests = min(MAX_REQUESTS, req_to_token_pool.size)
        self._token_counts = [count for count in TOKEN_COUNTS if count <= table.shape[1]]
        with torch.inference_mode():
            # Rows: input_ids, positions, out_cache_loc.
            self._tokens = torch.zeros((3, TOKEN_COUNTS[-1]), dtype=torch.int64, device=device)
            # Rows: req_pool_indices, seq_lens, last_rows; of states: written, read, snapshots.
            self._no_request = torch.tensor([[0], [1], [0], [0], [0], [0]], device=device)
            self._has_states = state_pool(pools.values()) is not None
            self._plans: dict[Size, ShortPlan | ChunkPlan] = {}
            """Static memory of the plan of each size."""
            self._requests = self._no_request.repeat(1, self._max_requests)
            self._logits_out = torch.empty(
                (self._max_requests, num_logits), dtype=torch.float32, device=device
            )
            capture = GraphCapture(show_progress=show_progress)
            sizes = [
                Size(tokens, requests)
                for requests in sorted({1, self._max_requests})
                for tokens in self._token_counts
                if tokens >= requests
            ]
            self._captured = capture.capture_sizes(
                "prefills of tokens/requests %s", sizes, lambda size: self._capture(size, capture)
            )

    def can_run(self, forward_batch: ForwardBatch) -> bool:
        """True if there are graphs for this batch."""
        return (
            forward_batch.forward_mode is ForwardMode.EXTEND
            and bool(self._token_counts)
            and len(forward_batch.input_ids) <= self._token_counts[-1]
            and forward_batch.batch_size <= self._max_requests
            and forward_batch.extend_logprob_start_lens_cpu is None
        )

    def replay(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run a short prefill.

        Returns:
            Logits, and hidden states, that the next replay overwrites.
        """
        count, requests = len(forward_batch.input_ids), forward_batch.batch_size
        size = self._size_of(count, requests)
        if count < size.tokens:
            self._tokens[:, count : size.tokens] = 0
        if requests < size.requests:
            self._requests[:, requests : size.requests] = self._no_request
        values = [
            forward_batch.input_ids,
            forward_batch.positions,
            forward_batch.out_cache_loc,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.last_rows(),
        ]
        places = [*self._tokens[:, :count].unbind(), *self._requests[:, :requests].unbind()]
        if self._has_states:
            values += self._states_of(forward_batch)
            plan = self._plan_of(forward_batch, size)
            places = [*places[: len(values)], *_tensors(self._plans[size])]
            values += _tensors(plan)
        torch._foreach_copy_(places[: len(values)], values)
        for backend in self._attn_backends.values():
            backend.init_forward_metadata_extend_graph(forward_batch, *size)
        (first, *others), output = self._captured[size]
        first.replay()
        # A draft layer, the last one, is no part of this pass.
        for (layer, pool), piece in zip(self._waits[: len(others)], others, strict=True):
            forward_batch.begin_layer(layer)
            pool.wait_for_layer(layer)
            piece.replay()
        return output.first(requests, count)

    def _size_of(self, tokens: int, requests: int) -> Size:
        """The smallest captured size that has room for a step."""
        padded = 1 if requests == 1 else self._max_requests
        fitting = bisect.bisect_left(self._token_counts, max(tokens, padded))
        return Size(self._token_counts[fitting], padded)

    def _states_of(self, forward_batch: ForwardBatch) -> list[torch.Tensor]:
        """Slots of a step's states, in the order of the static tensors."""
        states = forward_batch.states
        assert states is not None, "the maker of the batch gave it states"
        # Without snapshots, any slots will do as targets: they are not read.
        targets = states.slots if states.track_slots is None else states.track_slots
        return [states.slots, states.read_slots, targets]

    def _plan_of(self, forward_batch: ForwardBatch | None, size: Size) -> ShortPlan | ChunkPlan:
        """Plan of a step, padded to `size`; None: a step without requests."""
        num_new, track_lens = list[int](), None
        if forward_batch is not None:
            assert forward_batch.states is not None and forward_batch.extend_seq_lens_cpu
            num_new = forward_batch.extend_seq_lens_cpu
            track_lens = forward_batch.states.track_lens_cpu
        device, chunk = self._tokens.device, self._chunk
        if chunk is None or size.tokens < _TOKENS_OF_CHUNKS * size.requests:
            return ShortPlan.of(num_new, track_lens, device, size.requests)
        # A request's last chunk may be short, and the one before its snapshot.
        most_chunks = size.tokens // chunk + 2 * size.requests
        padded = size.requests, most_chunks
        return ChunkPlan.of(num_new, track_lens, device, chunk, padded)

    def _capture(
        self, size: Size, capture: GraphCapture
    ) -> tuple[list[Graph], LogitsProcessorOutput]:
        """Graphs of a forward, cut before the attention of each layer, and its output."""
        if self._has_states:
            self._plans[size] = self._plan_of(None, size)
        batch = self._static_batch(size)
        for backend in self._attn_backends.values():
            backend.init_forward_metadata_extend_graph(batch, *size)

        def run(cut: Callable[[], None]) -> LogitsProcessorOutput:
            batch.on_layer = lambda layer: cut()
            return self._forward(batch.input_ids, batch.positions, batch)

        return capture.capture_pieces(run)

    def _static_batch(self, size: Size) -> ForwardBatch:
        """One request of `size` tokens, all in the padding page."""
        ids, positions, loc = self._tokens[:, : size.tokens]
        requests = self._requests[:, : size.requests]
        rows, seq_lens, last_rows, slots, first_slots, track_slots = requests
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=ids,
            positions=positions,
            req_pool_indices=rows,
            req_pool_indices_cpu=[0],
            seq_lens=seq_lens,
            seq_lens_cpu=[size.tokens],
            out_cache_loc=loc,
            req_to_token_pool=self._req_to_token_pool,
            token_to_kv_pool=kv_pool(self._pools),
            pools=self._pools,
            extend_prefix_lens_cpu=[0],
            extend_seq_lens_cpu=[size.tokens],
            logits_out=self._logits_out[: size.requests],
            last_rows_in=last_rows,
            capture_hidden=self._capture_hidden,
            states=None
            if not self._has_states
            else StateBatch(
                slots=slots,
                first_slots=first_slots,
                track_slots=track_slots,
                plan=self._plans[size],
            ),
            attn_backends=self._attn_backends,
            is_captured=True,
        )


def _tensors(plan: ShortPlan | ChunkPlan) -> list[torch.Tensor]:
    return plan.tensors if isinstance(plan, ChunkPlan) else list(plan)
