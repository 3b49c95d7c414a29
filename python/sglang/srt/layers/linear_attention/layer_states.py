"""The states of one recurrent layer in a step."""

from __future__ import annotations

from sglang.srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.layers.linear_attention.verify import VerifyBuffers
from sglang.srt.layers.triton_ops.arguments import DeltaStates
from sglang.srt.mem_cache.device.state_pool import MambaPool
from sglang.srt.mem_cache.device.state_spec import PoolName


def states_of_layer(forward_batch: ForwardBatch, layer_id: int) -> DeltaStates:
    """The states of the model's layer `layer_id`, and the step's slots in them; the plan of a
    prefill has the rest. Waits for a load that fills the layer."""
    assert forward_batch.pools is not None, "the runner sets it before the model runs"
    states = forward_batch.states
    assert states is not None, "the maker of the batch gave it states"
    is_verify = forward_batch.forward_mode is ForwardMode.TARGET_VERIFY
    buffers = states.verify
    assert is_verify == (buffers is not None), "a verification, and it alone, has buffers"
    pool = forward_batch.pools[PoolName.MAMBA]
    assert isinstance(pool, MambaPool)
    place = pool.wait_for_layer(layer_id)
    kept = None
    if buffers is not None:
        assert isinstance(buffers, VerifyBuffers)
        kept = buffers.of_layer(place, len(forward_batch.input_ids), len(states.slots))
    return DeltaStates(
        temporal=pool.temporal[place],
        conv=pool.conv[place],
        slots=states.slots,
        read_slots=states.read_slots,
        kept=kept,
        track_slots=states.track_slots,
    )
