"""A prefill and a decode server: every key and value is checked, reads are slow or fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.pd_rig import (
    LocalMover,
    PdRig,
    RoleRig,
    make_manager,
)
from rigs.disaggregation.prompt_scene import Place
from rigs.schedulers import checkable_model
from rigs.schedulers.scheduler_rig import greedy, prompt
from rigs.servers.scarce_threads import no_threads
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.shard_read import STEPS
from sglang.srt.disaggregation.roles import role_of
from sglang.srt.distributed.device_communicators.transfer_types import PeerUnreachable
from sglang.srt.distributed.rank_group import SingleRank
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.messages.io_struct import ShutdownReq, TokenizedGenerateReqInput
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
pytestmark = pytest.mark.usefixtures("short_repeats")

LENGTHS = (1, 4, 15, 16, 17, 64, 70)
PROMPTS = [prompt(seed, length, 1000) for seed, length in enumerate(LENGTHS)]


@pytest.fixture
def mover() -> LocalMover:
    return LocalMover()


def make_pair(mover: LocalMover, **args: Any) -> PdRig:
    settings = {
        "page_size": 4,
        "pool_tokens": 512,
        "max_requests": 16,
        "chunked_prefill_size": 16,
    }
    return PdRig(BUILTIN_MODEL_DIR, mover, checkable=True, **{**settings, **args})


@pytest.fixture(name="pair", params=[False, True], ids=["settled", "overlap"])
def each_pair(mover: LocalMover, request: pytest.FixtureRequest) -> Iterator[PdRig]:
    with make_pair(mover, overlap=request.param) as pair:
        yield pair
        mover.release()


def words(message: TokenizedGenerateReqInput) -> list[int]:
    ids = message.input_ids.tolist()
    return checkable_model.words(ids, message.seed, message.sampling_params.max_new_tokens)


def assert_said(pair: PdRig, *messages: TokenizedGenerateReqInput) -> None:
    for message in messages:
        got = pair.result(message.rid)
        assert got.finish_reason is not None and got.finish_reason.type == "length"
        assert got.output_ids == words(message)


def stepped(rig: RoleRig, rid: str) -> bool:
    """True if a request has ended after a further tick."""
    rig.step()
    return rid in rig.results


def why(pair: PdRig, rid: str) -> str:
    """Reason why a request failed on the decode server."""
    reason = pair.result(rid).finish_reason
    assert reason is not None and reason.type == "abort"
    return reason.message or ""


# ---- words -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_key_and_value_is_right_cold_and_cached(
    mover: LocalMover, page_size: int, overlap: bool
) -> None:
    with make_pair(mover, page_size=page_size, overlap=overlap) as pair:
        for turn in range(2):
            messages = [
                pair.request(f"{turn} {n}", ids, greedy(9)) for n, ids in enumerate(PROMPTS)
            ]
            reads = len(mover.begun)
            pair.run(*messages)
            assert_said(pair, *messages)
        if page_size == 1:
            assert len(mover.begun) == reads, "all prompts were cached whole"
        assert pair.decode.scheduler.state.counters.prefill_tokens == 0


def test_retracted_requests_are_computed_on_the_decode_server(mover: LocalMover) -> None:
    tight = {"pool_tokens": 120, "schedule_conservativeness": 0.01}
    with make_pair(mover, decode=tight) as pair:
        # The outputs are so long that a request still runs when the next one arrives.
        messages = [pair.request(f"r{n}", prompt(n, 30, 1000), greedy(85)) for n in range(6)]
        pair.run(*messages)
        assert_said(pair, *messages)
        counters = pair.decode.scheduler.state.counters
        assert counters.retractions > 0 and counters.prefill_tokens > 0


def test_more_requests_than_either_side_has_room_for(pair: PdRig) -> None:
    messages = [
        pair.request(f"r{n}", prompt(n, 20 + 9 * (n % 9), 1000), greedy(1 + n % 12))
        for n in range(60)
    ]
    pair.run(*messages)
    assert_said(pair, *messages)


# ---- reads that are slow or fail ---------------------------------------------------------------


def test_pages_of_an_aborted_read_are_not_reused_before_it_has_ended(
    pair: PdRig, mover: LocalMover
) -> None:
    """Their canaries: keys and values of requests that would have got them."""
    victim = pair.request("victim", prompt(1, 100, 1000), greedy(9))
    mover.hold = True
    pair.until(lambda: bool(mover.begun), victim)
    held = list(mover.begun)
    pair.step([pair.prefill.abort("victim")], [pair.decode.abort("victim")])
    assert "abort" in why(pair, "victim")
    mover.hold = False
    others = [pair.request(f"r{n}", prompt(n, 50, 1000), greedy(30)) for n in range(20)]
    pair.until(lambda: all(one.rid in pair.decode.results for one in others), *others)
    assert_said(pair, *others)
    state = pair.decode.scheduler.state
    assert (state.queues.num_holders, state.free_tokens()) == (1, 512 - 100)
    assert not any(transfer.is_settled for transfer in held)
    # Late bytes land on pages that nobody uses.
    mover.release()
    pair.until(pair.decode.scheduler.is_idle)
    pair.assert_clean()
    again = [pair.request("again", prompt(1, 100, 1000), greedy(9)), *others[:3]]
    for message in again:
        pair.decode.results.pop(message.rid, None)
        pair.prefill.results.pop(message.rid, None)
    fresh = [
        pair.request(f"again {one.rid}", one.input_ids.tolist(), one.sampling_params)
        for one in again
    ]
    pair.run(*fresh)
    assert_said(pair, *fresh)


def test_a_read_that_fails_fails_its_request_alone(pair: PdRig, mover: LocalMover) -> None:
    mover.fails = lambda blocks: PeerUnreachable("p", "ended during a transfer")
    pair.run(pair.request("a", PROMPTS[6]))
    assert why(pair, "a") == (
        "reading from the prefill server failed: peer p ended during a transfer"
    )
    reason = pair.prefill.results["a"].finish_reason
    assert reason is not None and "the decode server gave it up" in (reason.message or "")
    mover.fails = lambda blocks: None
    message = pair.request("b", PROMPTS[6])
    pair.run(message)
    assert_said(pair, message)


@pytest.mark.usefixtures("short_heartbeats")
def test_silence_during_a_read_ends_the_request(pair: PdRig, mover: LocalMover) -> None:
    """The request ends after the silence, its slots with the read."""
    is_silent: list[bool] = []
    proxy = ControlProxy(pair.prefill.endpoint, lambda *_: () if is_silent else (0.0,))
    with proxy:
        pair.endpoints[0] = proxy.endpoint
        mover.hold = True
        pair.until(lambda: bool(mover.begun), pair.request("a", PROMPTS[6]))
        is_silent.append(True)
        pair.until(lambda: "a" in pair.decode.results)
        assert "has not answered for 2 s" in why(pair, "a")
        assert pair.decode.scheduler.state.queues.num_holders == 1
        # Prefill misses the decode server likewise.
        pair.until(lambda: "a" in pair.prefill.results)
        reason = pair.prefill.results["a"].finish_reason
        assert reason is not None
        assert reason.message == "the decode server has not been heard of for 2 s"
        mover.release()
        pair.until(pair.decode.scheduler.is_idle)
        pair.assert_clean()


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_an_abort_on_one_side_ends_the_other(pair: PdRig, mover: LocalMover, where: str) -> None:
    mover.hold = True
    pair.until(lambda: bool(mover.begun), pair.request("a", PROMPTS[6]))
    abort = [pair.decode.abort("a")]
    pair.step(abort if where == "prefill" else [], abort if where == "decode" else [])
    pair.until(lambda: "a" in pair.prefill.results and "a" in pair.decode.results)
    mover.release()
    pair.until(pair.decode.scheduler.is_idle)
    pair.assert_clean()


def test_a_prompt_without_a_thread_fails_alone(pair: PdRig) -> None:
    first = pair.request("first", PROMPTS[6])
    with no_threads("disagg-prompt"):
        pair.until(lambda: "first" in pair.decode.results, first)
    reason = pair.result("first").finish_reason
    assert reason is not None and reason.status_code == 503
    assert reason.message == "no thread for the prompt: can't start new thread"
    pair.step([pair.prefill.abort("first")], [])
    pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
    pair.assert_clean()
    second = pair.request("second", PROMPTS[6])
    pair.run(second)
    assert_said(pair, second)


# ---- rooms that do not meet --------------------------------------------------------------------


def test_a_second_request_of_a_room_leaves_the_first_alone(pair: PdRig, mover: LocalMover) -> None:
    mover.hold = True
    first = pair.request("first", PROMPTS[6], room=9)
    pair.until(lambda: bool(mover.begun), first)
    pair.step(*[[pair.request("second", PROMPTS[5], room=9)]] * 2)
    for rig in pair.rigs:
        reason = rig.results["second"].finish_reason
        assert reason is not None and reason.status_code == 400
    mover.release()
    pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
    assert_said(pair, first)
    # The number again: prefill remembers it, and decode hears so at once.
    pair.run(pair.request("third", PROMPTS[5], room=9))
    assert "the prefill server ended the request" in why(pair, "third")


def test_two_decode_servers_in_one_room(mover: LocalMover) -> None:
    with make_pair(mover) as pair, make_pair(mover) as other:
        other.other = pair.prefill
        mover.hold = True
        message = pair.request("a", PROMPTS[6], room=3)
        pair.until(lambda: bool(mover.begun), message)
        other.decode.step(message)
        other.until(lambda: "a" in other.decode.results)
        assert "the room belongs to another reader" in why(other, "a")
        mover.release()
        pair.until(lambda: all(rig.scheduler.is_idle() for rig in pair.rigs))
        assert_said(pair, message)
        pair.assert_clean()
        # Its slots stay until the transport says that nothing is written there any more.
        other.until(other.is_idle)
        other.assert_clean()


def test_what_decode_refuses_does_not_wait_at_prefill(mover: LocalMover) -> None:
    with make_pair(mover, decode={"pool_tokens": 64}) as pair:
        pair.run(pair.request("long", PROMPTS[6]))
        reason = pair.prefill.results["long"].finish_reason
        assert reason is not None
        assert "the decode server gave it up: the prompt has 70 tokens" in (reason.message or "")


def test_what_prefill_refuses_does_not_wait_at_decode(mover: LocalMover) -> None:
    with make_pair(mover, prefill={"pool_tokens": 64}) as pair:
        pair.run(pair.request("long", PROMPTS[6]))
        assert "the prompt has 70 tokens, at most 63 can ever fit" in why(pair, "long")


# ---- the end, and injected failures ------------------------------------------------------------


def test_a_prefill_server_that_shuts_down_says_so(pair: PdRig) -> None:
    """A server that asks learns of it, even if the request has only just come."""
    pair.decode.step(pair.request("a", PROMPTS[6], room=2))
    rooms = pair.prefill.rooms
    assert wait_until(lambda: bool(rooms._waiting), 60, interval=0.001)
    pair.prefill.step(pair.request("a", PROMPTS[6], room=2), ShutdownReq(timeout=0.0))
    while not pair.prefill.scheduler.is_stopped:
        pair.prefill.step()
    pair.prefill.scheduler.close()
    assert wait_until(lambda: stepped(pair.decode, "a"), 60, interval=0.001)
    assert "the server is shutting down" in why(pair, "a")


def test_injected_failures_name_their_step(mover: LocalMover) -> None:
    with envs.SGLANG_TEST_DISAGG_FAILURE_PROB.override(1.0), make_pair(mover) as pair:
        messages = [pair.request(f"r{n}", PROMPTS[n % 7]) for n in range(12)]
        pair.run(*messages)
        said = {why(pair, message.rid) for message in messages}
        steps = {f"injected by SGLANG_TEST_DISAGG_FAILURE_PROB: {s} failed" for s in STEPS}
        assert said and said <= steps
    with make_pair(mover) as pair:
        message = pair.request("a", PROMPTS[6])
        pair.run(message)
        assert_said(pair, message)


def test_a_host_that_is_not_this_machines_is_refused(mover: LocalMover) -> None:
    why = r"--host 192\.0\.2\.1: for decode servers: cannot listen"
    with make_pair(mover) as pair, pytest.raises(ValueError, match=why):
        make_manager(DisaggregationMode.PREFILL, pair.prefill.pools, mover, host="192.0.2.1")


class Registering(LocalMover):
    """Refuses memory that is registered already, as a Transfer Engine does."""

    def __init__(self, known: dict[int, int]) -> None:
        super().__init__()
        self.known = known

    def is_registered(self, ptr: int, length: int) -> bool:
        return self.known.get(ptr) == length

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        assert not self.known.keys() & set(ptrs), "it is registered already"
        self.known |= dict(zip(ptrs, lengths, strict=True))
        return 0


def test_memory_that_is_registered_with_weights_is_not_registered_again() -> None:
    """On a GPU a small pool can lie in an allocation that has weights for other servers too."""
    pool = Place(0).pool
    whole = device_runtime("cpu").allocations_of(
        PoolGeometry.of([pool], "w", torch.float32).tensors
    )
    first = next(iter(whole.items()))
    engine = Registering(dict([first]))
    make_manager(DisaggregationMode.DECODE, [pool], engine)
    assert len(whole) > 1 and engine.known == whole


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("prefill", "BOOTSTRAP_TIMEOUT"),
        ("prefill", "HEARTBEAT_INTERVAL"),
        ("decode", "HEARTBEAT_MAX_FAILURE"),
        ("decode", "WAITING_TIMEOUT"),
        ("decode", "BOOTSTRAP_TIMEOUT"),
    ],
)
def test_bounds_are_positive(
    mover: LocalMover, monkeypatch: pytest.MonkeyPatch, mode: str, name: str
) -> None:
    monkeypatch.setenv(f"SGLANG_DISAGGREGATION_{name}", "0")
    place, chosen = Place(0), DisaggregationMode(mode)
    with pytest.raises(ValueError, match=f"SGLANG_DISAGGREGATION_{name}=0: it must be at least 1"):
        role_of(chosen, make_manager(chosen, [place.pool], mover), SingleRank())
