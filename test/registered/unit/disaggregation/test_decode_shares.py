"""Whom a decode server gives slots to: requests that are known, in order, in fair shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rigs.disaggregation.decode_rig import PAGE, SILENT_S, WAIT_S, DecodeRig
from rigs.schedulers.scheduler_rig import greedy, prompt
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.control.protocol import MAX_POLLED_ROOMS
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

IDS = prompt(1, 10)


@pytest.fixture(scope="module")
def hybrid(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_next", mlp_only_layers=[1], eos_token_id=None)


def rooms(rig: DecodeRig) -> list[int]:
    """Rooms whose requests have slots, in the order in which they got them."""
    return [one.bootstrap_room for one in rig.servers.begun]


def free(rig: DecodeRig) -> int:
    return rig.scheduler.state.free_tokens()


# ---- meet first, then reserve ------------------------------------------------------------------


def test_a_request_has_no_slots_before_its_prefill_server_knows_it(model: Path) -> None:
    rig = DecodeRig(model)
    rig.servers.unknown = {1}
    rig.step(rig.ask("a", IDS, 1))
    for _ in range(5):
        rig.step()
    assert (rooms(rig), free(rig), rig.scheduler.state.queues.num_holders) == ([], 128, 0)
    rig.servers.receiver(1).is_known = True
    rig.step()
    assert rooms(rig) == [1]
    rig.prompt(1).come(IDS)
    rig.run()
    rig.assert_idle()


def test_twenty_rooms_that_nobody_knows_delay_no_other(model: Path) -> None:
    """These rooms would fill the server."""
    rig = DecodeRig(model, pool_tokens=256, max_requests=16)
    rig.servers.unknown = set(range(20))
    rig.step(*(rig.ask(f"nobody {n}", prompt(n, 40), n) for n in range(20)))
    rig.step(rig.ask("a", IDS, 100))
    assert rooms(rig) == [100]
    rig.prompt(100).come(IDS)
    rig.run_until(lambda: "a" in rig.results)
    for room in range(20):
        rig.servers.receiver(room).failure = "the prefill server does not know the request in time"
    rig.step()
    assert {rig.end(f"nobody {n}").status_code for n in range(20)} == {503}
    assert sorted(room for room, _ in rig.servers.declined) == list(range(20))
    rig.assert_idle()


def test_a_stuck_prefill_server_costs_its_own_requests_alone(model: Path) -> None:
    """The server has said that it knows the rooms, and reads nothing."""
    rig = DecodeRig(model, pool_tokens=320, max_requests=16)
    rig.step(*(rig.ask(f"s{n}", prompt(n, 20), n, host="stuck") for n in range(40)))
    stuck = len(rooms(rig))
    assert 0 < stuck < 16
    for turn in range(30):
        room, ids = 100 + turn, prompt(turn, 20)
        rig.step(rig.ask(f"h{turn}", ids, room, greedy(2), host="healthy"))
        assert rooms(rig)[-1] == room, "it need not wait"
        rig.prompt(room).come(ids)
        rig.run_until(lambda: f"h{turn}" in rig.results)  # noqa: B023 - called within this turn
        assert len(rig.results[f"h{turn}"].output_ids) == 2
    assert len(rooms(rig)) == stuck + 30


def test_a_request_that_fails_while_it_waits_for_slots(model: Path) -> None:
    rig = DecodeRig(model, pool_tokens=32)
    rig.step(rig.ask("holds", prompt(1, 20), 1), rig.ask("waits", prompt(2, 20), 2))
    assert rooms(rig) == [1]
    rig.servers.receiver(2).failure = "the prefill server ended the request: aborted there"
    rig.step()
    assert rig.end("waits").message == "the prefill server ended the request: aborted there"


def test_progress_of_a_request_that_has_ended_is_ignored(model: Path) -> None:
    rig = DecodeRig(model)
    rig.servers.unknown = {1}
    rig.step(rig.ask("a", IDS, 1))
    old = rig.servers.receiver(1)
    rig.step(rig.abort("a"))
    rig.step(rig.ask("b", IDS, 1))
    old.is_known = True
    rig.step()
    assert rooms(rig) == [], "it is asked anew"
    rig.servers.asked[-1].is_known = True
    rig.step()
    assert rooms(rig) == [1]


def test_a_prefill_server_is_asked_about_so_many_rooms_at_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_UNKNOWN_S", math.inf)
    rig = DecodeRig(model)
    rig.servers.unknown = set(range(MAX_POLLED_ROOMS + 5))
    rig.step(*(rig.ask(f"r{n}", [n % 100 + 1], n) for n in range(MAX_POLLED_ROOMS + 2)))
    rig.step(rig.ask("other", [5], MAX_POLLED_ROOMS + 4, host="another"))
    assert len(rig.servers.asked) == MAX_POLLED_ROOMS + 1
    rig.step(rig.abort("r7"))
    rig.step()
    assert rig.servers.asked[-1].bootstrap_room == MAX_POLLED_ROOMS
    rig.now += WAIT_S + 1
    rig.step()
    assert rig.end(f"r{MAX_POLLED_ROOMS + 1}").message == (
        f"{MAX_POLLED_ROOMS} requests before it wait for the same prefill server"
    )
    assert rig.end("r1").message == "the prefill server does not know the request within 100 s"


def test_rooms_that_nobody_knows_make_way_for_others(model: Path) -> None:
    """A router leaves one with each try of a request that the prefill server refuses."""
    rig = DecodeRig(model)
    rig.servers.unknown = set(range(MAX_POLLED_ROOMS))
    rig.step(*(rig.ask(f"r{n}", [n % 100 + 1], n) for n in range(MAX_POLLED_ROOMS)))
    rig.now += 3
    rig.step()
    assert not rig.results, "they are in nobody's way"
    good = MAX_POLLED_ROOMS + 1
    rig.step(rig.ask("good", IDS, good))
    rig.step()
    assert rooms(rig) == [good], "it waits for nothing"
    assert rig.end("r0").message == "the prefill server does not know the request in time"
    assert [room for room, _ in rig.servers.declined] == [0], "one makes way for one"
    rig.step(rig.ask("another", [5], good + 1, host="another"))
    rig.step()
    assert len(rig.results) == 1, "another server's are no reason"


# ---- the order of requests ---------------------------------------------------------------------


def test_a_request_that_is_not_known_yet_blocks_nobody(model: Path) -> None:
    rig = DecodeRig(model)
    rig.servers.unknown = {1}
    rig.step(rig.ask("first", IDS, 1), rig.ask("second", prompt(2, 10), 2))
    assert rooms(rig) == [2]


def test_small_requests_do_not_starve_a_large_one(model: Path) -> None:
    rig = DecodeRig(model, pool_tokens=128, max_requests=16)
    small = {n: prompt(n, 20) for n in range(40)}
    rig.step(*(rig.ask(f"s{n}", small[n], n, greedy(3), host="small") for n in range(3)))
    large = prompt(99, 110)
    rig.step(rig.ask("large", large, 99, greedy(1), host="large"))
    coming = 3
    for _ in range(60):
        # There is always a further small one.
        if coming < 40:
            rig.step(rig.ask(f"s{coming}", small[coming], coming, greedy(3), host="small"))
            coming += 1
        for one in rig.servers.begun:
            if not one.is_settled:
                ids = large if one.bootstrap_room == 99 else small[one.bootstrap_room]
                one.come(ids)
        rig.step()
        if "large" in rig.results:
            break
    assert rig.end("large").type == "length"
    assert rooms(rig).index(99) <= 4


def test_a_request_beyond_its_servers_share_comes_before_later_ones_of_the_server(
    model: Path,
) -> None:
    rig = DecodeRig(model, pool_tokens=160, max_requests=16)
    first, large = prompt(1, 60), prompt(2, 60)
    rig.step(rig.ask("first", first, 1, host="a"), rig.ask("large", large, 2, host="a"))
    assert rooms(rig) == [1], "both together are beyond the share"
    rig.step(rig.ask("small", IDS, 3, host="a"), rig.ask("other", prompt(4, 8), 4, host="b"))
    assert rooms(rig) == [1, 4]
    rig.prompt(1).come(first)
    rig.run_until(lambda: 2 in rooms(rig))
    assert rooms(rig).index(2) < 3 or 3 not in rooms(rig)


# ---- shares ------------------------------------------------------------------------------------


def test_a_long_prompt_may_have_more_than_its_servers_share(model: Path) -> None:
    rig = DecodeRig(model)
    rig.step(rig.ask("long", prompt(1, 120), 1))
    assert rooms(rig) == [1]


def test_what_is_cached_here_counts_in_no_share(model: Path) -> None:
    """A long conversation goes on with little that is new."""
    rig = DecodeRig(model, pool_tokens=256)
    long = prompt(1, 150)
    rig.run(rig.request("plain", long, greedy(1)))
    rig.step(rig.ask("first", prompt(2, 20), 1))
    rig.step(rig.ask("next", [*long, 7, 8], 2))
    assert rooms(rig) == [1, 2]
    assert len(rig.prompt(2).pages) == 1


def test_shares_are_left_by_requests_that_decode(model: Path) -> None:
    rig = DecodeRig(model, max_requests=5, pool_tokens=512)
    ids = [prompt(n, 10) for n in range(5)]
    rig.step(*(rig.ask(f"r{n}", ids[n], n, greedy(30)) for n in range(5)))
    assert rooms(rig) == [0, 1, 2, 3], "one row is left to others"
    rig.prompt(0).come(ids[0])
    rig.step()
    rig.step()
    assert rooms(rig) == [0, 1, 2, 3, 4] or len(rooms(rig)) == 4
    rig.prompt(1).come(ids[1])
    rig.prompt(2).come(ids[2])
    rig.run_until(lambda: len(rooms(rig)) == 5)


def test_reads_that_never_end_fill_their_servers_share_and_no_more(model: Path) -> None:
    rig = DecodeRig(model, pool_tokens=128, max_requests=16)
    rig.step(*(rig.ask(f"r{n}", prompt(n, 20), n, host="bad") for n in range(8)))
    held = len(rooms(rig))
    for room in rooms(rig):
        rig.prompt(room).failure = "reading failed, and cannot end"
    rig.step()
    assert rig.scheduler.state.queues.num_holders == held, "they linger"
    # A while they may just be aborted reads.
    waiting = [f"r{n}" for n in range(8) if f"r{n}" not in rig.results]
    rig.step(rig.ask("later", prompt(9, 20), 9, host="bad"))
    assert waiting and "later" not in rig.results and len(rooms(rig)) == held
    rig.now += SILENT_S
    rig.step()
    for rid in [*waiting, "later"]:
        assert rig.end(rid).status_code == 503
        assert rig.end(rid).message == (
            f"reads of {held} earlier prompts from the prefill server have not ended for 10 s, "
            "and hold its share of the slots"
        )
    rig.step(rig.ask("good", IDS, 50, host="good"))
    assert rooms(rig)[-1] == 50
    for room in rooms(rig)[:-1]:
        rig.prompt(room).is_settled = True
    rig.step()
    rig.step(rig.ask("again", prompt(8, 20), 51, host="bad"))
    assert rooms(rig)[-1] == 51, "it is taken back"


# ---- recurrent states --------------------------------------------------------------------------


def test_a_state_never_comes_without_pages(hybrid: Path) -> None:
    """Looking at its pages waits for the device, which zeroes the state; a prompt without pages
    would not wait."""
    rig = DecodeRig(hybrid, mamba_track_interval=PAGE)
    ids = prompt(1, 30)
    rig.step(rig.ask("first", ids, 1000, greedy(12)))
    rig.prompt(1000).come(ids)
    rig.run()
    ids += rig.results["first"].output_ids
    has_cached = False
    for length in range(PAGE, len(ids)):
        rig.step(rig.ask(f"r{length}", ids[:length], length))
        coming = rig.prompt(length)
        assert coming.pages, f"{length} tokens"
        has_cached |= coming.first_page > 0
        rig.step(rig.abort(f"r{length}"))
        coming.is_settled = True
        rig.step()
    assert has_cached, "some begin with a state that is cached"
