"""Decode steps as CUDA graphs, one for each of a few batch sizes.

For small decode steps, the CPU takes longer to launch the kernels than the GPU to run them; a graph
launches them all at once. A batch is padded to the next captured size with requests of one token,
in the last row of the table and slot 0, the padding page, which no request owns.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention_kind import AttentionKind
from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode, StateBatch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
from sglang.srt.mem_cache.device.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.device.pool_registry import kv_pool
from sglang.srt.mem_cache.device.state_pool import state_pool
from sglang.srt.mem_cache.device.state_spec import ItemKind, PoolName
from sglang.srt.model_executor.graph_capture import Graph, GraphCapture

MAX_BATCH_SIZE = 256
_FIXED_BYTES = 512 << 20
"""Bytes for kernels, library workspaces and the activations of one layer, for any model."""

_COPIES_OF_STATES = 4
"""Copies of a layer's states that exist at once: as read, in fp32, after the step, as stored."""

Forward = Callable[[torch.Tensor, torch.Tensor, ForwardBatch], LogitsProcessorOutput]


def graph_batch_sizes(max_batch_size: int | None, max_running_requests: int) -> list[int]:
    """Batch sizes to capture, ascending. Padding adds at most an eighth, or 7 rows.

    Args:
        max_batch_size: The largest size, from the user; None: `max_running_requests`, at most
            `MAX_BATCH_SIZE`.

    Raises:
        ValueError: `max_batch_size` is less than 1.
    """
    if max_batch_size is not None and max_batch_size < 1:
        raise ValueError(
            f"--cuda-graph-max-bs {max_batch_size} must be at least 1: "
            "give --disable-cuda-graph to do without graphs"
        )
    largest = min(max_batch_size or MAX_BATCH_SIZE, max_running_requests)
    sizes = [1, 2, 4]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] // 8 * 8 + max(8, (sizes[-1] // 8) // 8 * 8))
    return sorted({min(size, largest) for size in sizes})


def estimate_graph_bytes(max_batch_size: int, vocab_size: int, state_bytes: int = 0) -> int:
    """Estimate the bytes of all graphs and their logits, both as gathered and in vocabulary order.

    Args:
        state_bytes: Bytes of one layer's recurrent state of a request.
    """
    per_request = 2 * 4 * vocab_size + _COPIES_OF_STATES * state_bytes
    return max_batch_size * per_request + _FIXED_BYTES


class CudaGraphRunner:
    """Captures decode steps when it is created, then replays them. Only for the model's thread."""

    def __init__(
        self,
        forward: Forward,
        attn_backends: Mapping[AttentionKind, AttentionBackend],
        req_to_token_pool: ReqToTokenPool,
        pools: Mapping[PoolName, BaseDevicePool],
        *,
        batch_sizes: Sequence[int],
        num_logits: int,
        show_progress: bool,
        least_context: int = 1,
    ) -> None:
        """Args:
        forward: The model's `forward`.
        pools: The pools of all the model's state.
        batch_sizes: Ascending.
        num_logits: Number of logits per request on this rank.
        show_progress: See `progress_bar`.
        least_context: Fewest tokens of a context, the new one included.
        """
        for pool in pools.values():
            assert pool.layer_transfer_counter is None, "waits cannot be captured"
        self._forward = forward
        self._attn_backends = attn_backends
        self._req_to_token_pool = req_to_token_pool
        self._pools = pools
        # No tier has what running requests keep for themselves.
        loaded = (pool for pool in pools.values() if pool.spec.item is not ItemKind.REQUEST)
        self._loaded_last = max(loaded, key=lambda pool: pool.end_layer)
        self._batch_sizes, self._least_context = list(batch_sizes), least_context
        largest, device = self._batch_sizes[-1], req_to_token_pool.device
        with torch.inference_mode():
            # Rows: input_ids, positions, req_pool_indices, seq_lens, out_cache_loc, slots of
            # running states (if the model has states).
            row = req_to_token_pool.size
            self._padding = torch.tensor(
                [[0], [0], [row], [least_context], [0], [0]], device=device
            )
            self._inputs = self._padding.repeat(1, largest)
            self._logits_out = torch.empty(
                (largest, num_logits), dtype=torch.float32, device=device
            )
            self._batches = {size: self._static_batch(size) for size in self._batch_sizes}
            capture = GraphCapture(show_progress=show_progress)
            self._graphs = capture.capture_sizes(
                "decoding of %s requests",
                self._batch_sizes,
                lambda size: self._capture(size, capture),
            )

    def can_run(self, forward_batch: ForwardBatch) -> bool:
        """True if there is a graph for this batch."""
        is_small = forward_batch.batch_size <= self._batch_sizes[-1]
        is_long = self._least_context == 1 or min(forward_batch.seq_lens_cpu) >= self._least_context
        return forward_batch.forward_mode.is_decode() and is_small and is_long

    def replay(self, forward_batch: ForwardBatch, at_least: int = 0) -> LogitsProcessorOutput:
        """Run a decode step.

        Args:
            at_least: Run the graph for so many requests, if the batch has fewer.

        Returns:
            Logits that the next replay overwrites.
        """
        count = forward_batch.batch_size
        size = self._batch_sizes[bisect.bisect_left(self._batch_sizes, max(count, at_least))]
        # Layers are loaded in order, so the last layer's load ends last.
        self._loaded_last.wait_for_layer(self._loaded_last.end_layer)
        if count < size:
            self._inputs[:, count:size] = self._padding
        values = [
            forward_batch.input_ids,
            forward_batch.positions,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.out_cache_loc,
        ]
        if forward_batch.states is not None:
            values.append(forward_batch.states.slots)
        torch._foreach_copy_(list(self._inputs[: len(values), :count].unbind()), values)
        batch = self._batches[size]
        padding = [self._least_context] * (size - count)
        batch.seq_lens_cpu = forward_batch.seq_lens_cpu + padding
        for backend in self._attn_backends.values():
            backend.init_forward_metadata_graph(batch)
        graph, output = self._graphs[size]
        graph.replay()
        return output.first(count)

    def _capture(self, size: int, capture: GraphCapture) -> tuple[Graph, LogitsProcessorOutput]:
        batch = self._batches[size]
        for backend in self._attn_backends.values():
            backend.init_forward_metadata_graph(batch)
        return capture.capture(lambda: self._forward(batch.input_ids, batch.positions, batch))

    def _static_batch(self, size: int) -> ForwardBatch:
        inputs = self._inputs[:, :size]
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=inputs[0],
            positions=inputs[1],
            req_pool_indices=inputs[2],
            seq_lens=inputs[3],
            seq_lens_cpu=[self._least_context] * size,
            out_cache_loc=inputs[4],
            req_to_token_pool=self._req_to_token_pool,
            token_to_kv_pool=kv_pool(self._pools),
            pools=self._pools,
            states=StateBatch(slots=inputs[5]) if state_pool(self._pools.values()) else None,
            logits_out=self._logits_out[:size],
            attn_backends=self._attn_backends,
            is_captured=True,
        )
