"""Metrics and stages of requests between two servers, for operators and clients."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import pytest

from rigs.disaggregation.pd_rig import LocalMover, PdRig, RoleRig
from rigs.schedulers.scheduler_rig import greedy, prompt
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.distributed.device_communicators.transfer_types import PeerUnreachable
from sglang.srt.environ import envs
from sglang.srt.messages.io_struct import Stages
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

PAGE = 4
IDS = prompt(1, 18)


@pytest.fixture
def mover() -> LocalMover:
    return LocalMover()


@pytest.fixture
def pair(mover: LocalMover) -> Iterator[PdRig]:
    with (
        envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.override(1),
        PdRig(
            BUILTIN_MODEL_DIR,
            mover,
            checkable=True,
            page_size=PAGE,
            prefill={"pool_tokens": 256},
            decode={"pool_tokens": 64},
        ) as pair,
    ):
        yield pair
        mover.release()


def value(rig: RoleRig, name: str) -> float:
    """Value of a metric, which must exist."""
    found = rig.scheduler.state.metrics.registry.get_sample_value(f"sglang:{name}")
    assert found is not None, name
    return found


def queues(pair: PdRig) -> dict[str, float]:
    """Lengths of the queues that are not empty."""
    names = {
        pair.prefill: ("num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs"),
        pair.decode: (
            "num_decode_prealloc_queue_reqs",
            "num_decode_transfer_queue_reqs",
            "num_decode_lingering_reqs",
        ),
    }
    lengths = {name: value(rig, name) for rig, each in names.items() for name in each}
    return {name: length for name, length in lengths.items() if length}


def failures(rig: RoleRig) -> tuple[float, float]:
    """Before, and after the servers had met."""
    return (
        value(rig, "num_bootstrap_failed_reqs_total"),
        value(rig, "num_transfer_failed_reqs_total"),
    )


def stages(rig: RoleRig, rid: str) -> Stages:
    last = rig.results[rid].last
    assert last is not None and last.stages is not None
    return last.stages


# ---- metrics -----------------------------------------------------------------------------------


def test_a_request_is_counted_in_the_queue_where_it_is(pair: PdRig, mover: LocalMover) -> None:
    assert queues(pair) == {}
    alone = pair.request("alone", IDS)
    pair.step([alone], [])
    assert queues(pair) == {"num_prefill_bootstrap_queue_reqs": 1}
    mover.hold = True
    read = pair.request("read", prompt(2, 30))
    pair.until(lambda: bool(mover.begun), read)
    pair.until(lambda: value(pair.prefill, "num_prefill_inflight_queue_reqs") == 1)
    # Slots for its prompt are not free.
    pair.step([], [pair.request("waits", prompt(3, 40))])
    assert queues(pair) == {
        "num_prefill_bootstrap_queue_reqs": 1,
        "num_prefill_inflight_queue_reqs": 1,
        "num_decode_prealloc_queue_reqs": 1,
        "num_decode_transfer_queue_reqs": 1,
    }
    pair.step(
        [pair.prefill.abort("alone")], [pair.decode.abort("read"), pair.decode.abort("waits")]
    )
    pair.until(lambda: "read" in pair.prefill.results)
    assert queues(pair) == {"num_decode_lingering_reqs": 1}
    mover.release()
    pair.until(pair.decode.scheduler.is_idle)
    assert queues(pair) == {}


def test_failures_before_and_after_the_servers_have_met(pair: PdRig, mover: LocalMover) -> None:
    pair.step([], [pair.request("unknown there", IDS)])
    pair.until(lambda: "unknown there" in pair.decode.results)
    assert failures(pair.decode) == (1, 0)
    pair.step([pair.request("not asked for", IDS)], [])
    pair.prefill.now += 2
    pair.until(lambda: "not asked for" in pair.prefill.results)
    assert failures(pair.prefill) == (1, 0)
    mover.fails = lambda blocks: PeerUnreachable("p", "by the test")
    pair.run(pair.request("not read", IDS))
    assert failures(pair.decode) == failures(pair.prefill) == (1, 1)


def test_what_ends_by_its_clients_wish_has_not_failed(pair: PdRig, mover: LocalMover) -> None:
    mover.hold = True
    pair.until(lambda: bool(mover.begun), pair.request("a", IDS))
    pair.step([pair.prefill.abort("a")], [pair.decode.abort("a")])
    mover.release()
    pair.until(pair.decode.scheduler.is_idle)
    assert failures(pair.decode) == failures(pair.prefill) == (0, 0)


def test_each_prompt_that_came_is_measured_once(pair: PdRig) -> None:
    pair.run(pair.request("a", IDS, greedy(2)))
    pages = -(-len(IDS) // PAGE)
    infos = [pool.get_contiguous_buf_infos() for pool in pair.decode.pools]
    size = pages * sum(sum(page_bytes) for _, _, page_bytes in infos) / 1e6
    assert value(pair.decode, "kv_transfer_total_mb_count") == 1
    assert value(pair.decode, "kv_transfer_total_mb_sum") == pytest.approx(size)
    assert value(pair.decode, "kv_transfer_latency_ms_count") == 1
    seconds = value(pair.decode, "kv_transfer_latency_ms_sum") / 1e3
    speed = value(pair.decode, "kv_transfer_speed_gb_s_sum")
    assert speed * seconds * 1e3 == pytest.approx(size)
    assert stages(pair.decode, "a").transfer == pytest.approx(seconds)
    # Only the page of this prompt that the first one did not fill.
    pair.run(pair.request("b", IDS, greedy(2)))
    assert value(pair.decode, "kv_transfer_total_mb_sum") == pytest.approx(size * (1 + 1 / pages))


# ---- stages ------------------------------------------------------------------------------------


def test_a_request_says_where_its_time_went(pair: PdRig, mover: LocalMover) -> None:
    began = time.monotonic()
    mover.hold = True
    message = pair.request("a", IDS, greedy(4), stream=True)
    pair.until(lambda: bool(mover.begun), message)
    held = time.monotonic()
    pair.until(lambda: time.monotonic() - held > 0.05)
    waited = time.monotonic() - held
    mover.release()
    pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
    whole = time.monotonic() - began
    decode, prefill = stages(pair.decode, "a"), stages(pair.prefill, "a")
    assert decode.transfer is not None and waited <= decode.transfer <= whole
    assert prefill.transfer is not None and prefill.transfer <= whole
    assert decode.prefill == prefill.prefill, "what the prefill server has measured"
    for seconds in (decode.prefill, decode.decode):
        assert seconds is not None and 0 < seconds < whole
    assert prefill.decode is None
    assert decode.queue is not None and decode.queue >= 0


def test_waiting_for_slots_and_for_a_turn_is_queueing(pair: PdRig, mover: LocalMover) -> None:
    """First on the decode server, then on the prefill server once it was asked."""
    state = pair.prefill.scheduler.state
    state.limits = dataclasses.replace(state.limits, max_running_requests=1)
    mover.hold = True
    began, created = time.monotonic(), pair.decode.now
    messages = [
        pair.request(rid, prompt(len(rid), 16), created_time=created) for rid in ("first", "second")
    ]
    unasked = "sglang:num_prefill_bootstrap_queue_reqs"
    registry = state.metrics.registry
    pair.until(lambda: bool(mover.begun) and not registry.get_sample_value(unasked), *messages)
    asked = time.monotonic()
    # Slots are awaited by the rig's clock, turns by the real one.
    before = (asked - began) + (pair.decode.now - created)
    pair.until(lambda: time.monotonic() - asked > 0.05)
    waited = time.monotonic() - asked
    mover.release()
    pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
    first, second = sorted(stages(pair.decode, rid).queue or 0.0 for rid in ("first", "second"))
    assert second >= waited
    assert first <= before, "its turn had come"


def test_a_server_that_does_both_transfers_nothing(pair: PdRig) -> None:
    """Prefill and decode servers serve requests without a room like any server."""
    began = time.monotonic()
    message = pair.decode.request("plain", IDS, greedy(4), stream=True)
    pair.decode.run(message)
    found = stages(pair.decode, "plain")
    assert found.transfer is None
    assert found.prefill is not None and found.decode is not None
    assert 0 < found.prefill + found.decode < time.monotonic() - began


def test_stages_are_reported_at_the_end_alone(pair: PdRig) -> None:
    pair.decode.step(pair.decode.request("plain", IDS, greedy(4), stream=True))
    for _ in range(20):
        if (last := pair.decode.results["plain"].last) and last.finish_reason is not None:
            break
        assert last is not None and last.stages is None
        pair.decode.step()
    assert stages(pair.decode, "plain").decode is not None
