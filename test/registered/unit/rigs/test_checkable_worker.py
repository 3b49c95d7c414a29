"""Proof that the checkable model sees wrong states, and copies that do not wait for its steps."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rigs.mixed.held_copies import HeldCopies
from rigs.schedulers.checkable_model import WrongContext, words
from rigs.schedulers.checkable_pools import CheckableState
from rigs.schedulers.checkable_worker import CheckableRig, CheckableWorker
from rigs.schedulers.lagging_device import LaggingDevice, LaggingRuntime
from rigs.schedulers.random_setup import impatient
from rigs.schedulers.scheduler_rig import greedy
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.device.state_spec import RankShare, RankSplit
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.mem_cache.tree.tree_node import TreeNode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

PAGE = 4
PROMPT = [*range(1, 31)]
HYBRID = CheckableState(num_states=12, alignment=2 * PAGE)
"""Its last snapshot of `PROMPT` is behind 24 tokens."""


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with impatient():
        yield


def make_rig(state: CheckableState = HYBRID, **args: Any) -> CheckableRig:
    args["enable_hierarchical_cache"] = "hicache_ratio" in args
    args.setdefault("pool_tokens", 32 * PAGE)
    return CheckableRig(
        BUILTIN_MODEL_DIR, state=state, page_size=PAGE, mamba_track_interval=8 * PAGE, **args
    )


def ask(rig: CheckableRig, rid: str, ids: list[int] = PROMPT, seed: int = 1) -> tuple[int, int]:
    """Ask for 6 words, which must be right; the tokens that came from L1 and from L2."""
    rig.run(rig.request(rid, ids, greedy(6), seed=seed))
    got = rig.results[rid]
    assert got.output_ids == words(ids, seed, 6)
    assert got.last is not None
    details = got.last.cached_tokens_details
    return details.device, details.host


def node_behind(rig: CheckableRig, tokens: int) -> TreeNode:
    """The node of `PROMPT` that ends behind the first `tokens`, with a state."""
    path = rig.tree.tree.walk(RadixKey(PROMPT[:tokens]))
    assert path[-1].depth == tokens and path[-1].states[0].is_on_any_tier
    return path[-1]


def state_of(node: TreeNode) -> int:
    assert node.states[0].value is not None
    return int(node.states[0].value)


@pytest.mark.parametrize("is_sparse", [False, True], ids=["keys and values", "latent rows"])
def test_a_hybrid_says_the_same_words_from_a_state_of_the_tree(is_sparse: bool) -> None:
    rig = make_rig(CheckableState(is_sparse=is_sparse, num_states=12, alignment=2 * PAGE))
    assert ask(rig, "cold") == (0, 0)
    assert ask(rig, "cached") == (24, 0)
    assert isinstance(rig.worker, CheckableWorker) and rig.worker.num_continued == 1


@pytest.mark.parametrize(
    ("buffer", "name"), [("temporal", "recurrent states"), ("conv", "convolution states")]
)
@pytest.mark.parametrize(("place", "layer"), [(1, 2), (2, 3)])
def test_a_changed_state_is_named(buffer: str, name: str, place: int, layer: int) -> None:
    rig = make_rig()
    ask(rig, "first")
    slot = state_of(node_behind(rig, 24))
    tensor = getattr(rig.worker.req_to_token_pool.mamba_pool, buffer)
    tensor[place, slot].view(-1).view(torch.uint8)[-1] ^= 1
    where = rf"layer {layer}, {name} behind 24 tokens \(slot {slot}, "
    with pytest.raises(WrongContext, match=where):
        ask(rig, "second")


@pytest.mark.parametrize("is_whole", [True, False], ids=["in all layers", "in one layer"])
def test_the_state_of_another_prefix_shows(is_whole: bool) -> None:
    rig = make_rig()
    ask(rig, "first")
    ask(rig, "other", [*range(101, 131)])
    others = rig.tree.tree.walk(RadixKey([*range(101, 125)]))[-1]
    pool = rig.worker.req_to_token_pool.mamba_pool
    assert pool is not None
    for buffer in pool.buffers:
        for layer in range(3 if is_whole else 1):
            buffer[layer, state_of(node_behind(rig, 24))] = buffer[layer, state_of(others)]
    with pytest.raises(WrongContext, match="token 124 at position 23"):
        ask(rig, "second")


def test_a_new_request_whose_state_is_not_zeroed_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    pool = rig.worker.req_to_token_pool.mamba_pool
    ask(rig, "first")
    monkeypatch.setattr(type(pool), "zero", lambda *_: None)
    with pytest.raises(WrongContext, match=r"behind 0 tokens .* and not zeros"):
        ask(rig, "second", [7])


@pytest.mark.parametrize("buffer", ["index_k_buffer", "kv_buffer"])
def test_a_changed_row_of_sparse_attention_is_named(buffer: str) -> None:
    rig = make_rig(CheckableState(is_sparse=True))
    ask(rig, "first")
    pool: Any = rig.worker.token_to_kv_pool
    slot = int(rig.tree.all_values_flatten()[5])
    owner = pool.index_pool if buffer == "index_k_buffer" else pool
    getattr(owner, buffer)[2][slot].view(-1).view(torch.uint8)[-1] ^= 1
    name = {"index_k_buffer": "indexer keys", "kv_buffer": "latent rows"}[buffer]
    with pytest.raises(WrongContext, match=rf"layer 2, {name}, position 5 of \d+ \(slot {slot}"):
        ask(rig, "second")


def test_facts_of_another_head_show() -> None:
    pages = torch.arange(8 * PAGE)
    pools = []
    for head in (0, 1):
        share = RankShare(RankSplit.HEADS, head, head + 1, 2)
        rig = make_rig(CheckableState(heads=share))
        ask(rig, "first")
        pools.append(rig)
    for ours, theirs in zip(
        pools[1].worker.token_to_kv_pool.parts, pools[0].worker.token_to_kv_pool.parts, strict=True
    ):
        for layer, other in zip(ours, theirs, strict=True):
            layer[pages] = other[pages]
    with pytest.raises(WrongContext, match="position 0"):
        ask(pools[1], "second")


# ---- a device that lags ------------------------------------------------------------------------


@pytest.fixture(name="lagging")
def run_on_lagging_devices() -> Iterator[None]:
    with LaggingRuntime.as_cpu():
        yield


@pytest.mark.usefixtures("lagging")
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_steps_that_run_later_give_the_same_words(write_policy: str) -> None:
    rig = make_rig(
        overlap=True, most_lag_s=0.002, hicache_ratio=4.0, hicache_write_policy=write_policy
    )
    try:
        ask(rig, "cold")
        assert ask(rig, "cached") == (24, 0)
        for number in range(4):
            first = 200 + 40 * number
            ask(rig, f"others {number}", [*range(first, first + 37)])
        assert ask(rig, "from L2") == (0, 24)
    finally:
        rig.close()


def wait_for(gate: threading.Event) -> None:
    gate.wait(30)


@pytest.mark.usefixtures("lagging")
def test_a_copy_that_does_not_wait_for_the_step_before_it_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_rig(overlap=True, most_lag_s=0.001, hicache_ratio=4.0)
    controller, gate = rig.tree.cache_controller, threading.Event()  # type: ignore[attr-defined]
    submit = controller._write_stream.submit
    monkeypatch.setattr(
        controller._write_stream, "submit", lambda work: submit(work, follows_caller=False)
    )
    try:
        assert rig._device is not None
        rig._device.submit(lambda: wait_for(gate))
        rig.step(rig.request("first", PROMPT, greedy(6), seed=1))
        controller.ack_write_queue[-1].finish_event.synchronize()
        gate.set()
        rig.settle()
        rig.tree.evict(EvictParams(num_tokens=len(PROMPT)))
        with pytest.raises(WrongContext):
            ask(rig, "from L2")
    finally:
        gate.set()
        rig.close()


def test_work_runs_in_order_and_its_results_come_later() -> None:
    gate, done = threading.Event(), list[str]()
    result = torch.zeros(1)

    def first() -> None:
        wait_for(gate)
        done.append("first")

    def second() -> None:
        result.fill_(5)
        done.append("second")

    with LaggingRuntime.as_cpu():
        device = LaggingDevice(random.Random(0), 0.0)
        stream = device_runtime("cpu").make_copy_stream("copies")
        device.submit(first)
        device.submit(second)
        copies = device_runtime("cpu").copy_to_host([result])
        stream.submit(lambda: done.append("copy"))
        assert not copies.is_done and not done
        gate.set()
        (found,) = copies.wait()
        assert found is not None and found.tolist() == [5] and copies.is_done
        stream.close()
        device.close()
    assert done == ["first", "second", "copy"]


def fail() -> None:
    raise WrongContext("as planned")


def test_what_fails_on_the_device_is_raised_where_results_are_awaited() -> None:
    with LaggingRuntime.as_cpu():
        device, ran = LaggingDevice(random.Random(0), 0.0), list[int]()
        device.submit(fail)
        device.submit(lambda: ran.append(1))
        with pytest.raises(WrongContext, match="as planned"):
            device_runtime("cpu").copy_to_host([]).wait()
        device.close()
        assert not ran


def test_held_steps_and_copies_run_when_something_waits_for_them() -> None:
    ran: list[str] = []
    with HeldCopies(LaggingRuntime):
        runtime, device = device_runtime("cpu"), LaggingDevice.new(random.Random(0), 0.0)
        stream, landed = runtime.make_copy_stream("held"), runtime.make_event()
        device.submit(lambda: ran.append("step"))
        stream.submit(lambda: ran.append("copy"))
        stream.submit(landed.record)
        device.submit(lambda: ran.append("next step"))
        assert not ran and not landed.query()
        landed.synchronize()
        assert "copy" in ran and ran[0] == "step"
        device.close()
    assert sorted(ran) == ["copy", "next step", "step"]
