"""Simulated servers: times and hits of small loads, each computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang.planning.page_tiers import Page
from sglang.planning.served_costs import WHOLE_UNIT, Clock, CopyThread, Costs, ServerSizes
from sglang.planning.served_load import ServedRequest, SimulatedServer
from sglang.planning.served_tiers import GATHER_S
from sglang.srt.mem_cache.l3.prefetch_table import PrefetchPolicy
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")

PAGE = 10
COSTS = Costs(linear=1.0, by_pair=0.0, step=0.5, by_context=0.0)
SIZES = ServerSizes(page_size=PAGE, l1=10_000, chunk=1_000, threshold=PAGE)


class World:
    """Servers with one clock and one store."""

    def __init__(
        self, costs: Costs = COSTS, sizes: ServerSizes = SIZES, *, servers: int = 1
    ) -> None:
        self.clock, self.store = Clock(), set[Page]()
        copier = CopyThread(self.clock)
        store = None if costs.read is None else self.store
        self.servers = [
            SimulatedServer(self.clock, costs, sizes, copier, store) for _ in range(servers)
        ]

    def send(
        self, name: str, prompt: int, answer: int = 1, *, at: float = 0.0, server: int = 0
    ) -> ServedRequest:
        """Prompts of one name have the same tokens; those of "a+b" 50 of `a` and then those of
        `b`."""
        whole = (prompt + answer - 1) // PAGE
        first, _, rest = name.partition("+")
        pages = [(first if not rest or place < 5 else rest, place) for place in range(whole)]
        request = ServedRequest(prompt=prompt, answer=answer, pages=pages, sent=at)
        self.clock.after(at, lambda: self.servers[server].send(request))
        return request

    def run(self) -> None:
        self.clock.run()


def ended(request: ServedRequest) -> float:
    assert request.ended is not None
    return request.ended


# ---- the device ------------------------------------------------------------------------------


def test_a_prefill_costs_tokens_and_pairs() -> None:
    world = World(Costs(linear=1.0, by_pair=0.01, step=0.0, by_context=0.0))
    first = world.send("a", 100)
    again = world.send("a", 150, at=1000.0)
    world.run()
    assert first.ttft == pytest.approx(100 + 0.01 * 100 * 50)
    assert again.device == 100
    assert again.ttft == pytest.approx(50 + 0.01 * 50 * (100 + 25))


def test_each_pass_of_a_prompt_costs_what_it_reads_of_the_tokens_before() -> None:
    costs = Costs(linear=1.0, by_pair=0.0, by_before=0.5, step=0.0, by_context=0.0)
    assert costs.prefill(WHOLE_UNIT, 100) == WHOLE_UNIT + 50
    assert costs.prefill(2 * WHOLE_UNIT, 100) == 2 * WHOLE_UNIT + 50
    assert costs.prefill(WHOLE_UNIT // 2, 100) == WHOLE_UNIT // 2 + 25


def test_a_step_costs_its_contexts_and_brings_each_request_a_token() -> None:
    world = World(Costs(linear=1.0, by_pair=0.0, step=0.5, by_context=0.01))
    one, two = world.send("a", 100, 3), world.send("b", 50, 2)
    world.run()
    assert one.ttft == two.ttft == 150.0  # One pass.
    step = 0.5 + 0.01 * (101 + 51)
    assert ended(two) == pytest.approx(150 + step)
    assert ended(one) == pytest.approx(150 + step + 0.5 + 0.01 * 102)


def test_parts_of_a_prompt_and_steps_take_turns() -> None:
    world = World(sizes=replace(SIZES, chunk=50))
    early = world.send("a", 50, 4)
    late = world.send("b", 100, at=1.0)
    world.run()
    assert early.ttft == 50.0
    # A step, 50 tokens, a step, 50 tokens, a step.
    assert late.ttft == pytest.approx(49.0 + 0.5 + 50 + 0.5 + 50)
    assert ended(early) == pytest.approx(50 + 0.5 + 50 + 0.5 + 50 + 0.5)


def test_a_pass_takes_the_next_prompt_into_the_rest_of_its_chunk() -> None:
    world = World(sizes=replace(SIZES, chunk=100))
    one, two = world.send("a", 120), world.send("b", 120)
    world.run()
    assert (one.ttft, two.ttft) == (200.0, 240.0)


def test_requests_of_one_pass_share_no_pages_and_later_ones_do() -> None:
    world = World()
    one, two = world.send("s+a", 100), world.send("s+b", 100)
    late = world.send("s+c", 100, at=1.0)
    world.run()
    assert (one.device, two.device, late.device) == (0, 0, 50)
    assert late.ttft == 200 - 1 + 50


def test_the_tokens_of_an_answer_are_found_but_the_last() -> None:
    world = World()
    world.send("a", 100, 31)
    again = world.send("a", 200, at=1000.0)
    longer = world.send("b", 100, 30, at=2000.0)
    short = world.send("b", 200, at=3000.0)
    world.run()
    assert (again.device, short.device) == (130, 120)
    assert longer.device == 0


# ---- L1 --------------------------------------------------------------------------------------


def test_a_request_without_room_waits_for_the_end_of_another() -> None:
    sizes = replace(SIZES, l1=150)
    world = World(sizes=sizes)
    one, two = world.send("a", 100, 11), world.send("b", 100, 11)
    world.run()
    assert one.ttft == 100.0
    assert two.scheduled == ended(one) == 105.0
    assert two.ttft == 205.0


def test_requests_hold_a_shared_prefix_once() -> None:
    world = World(sizes=replace(SIZES, l1=180))
    one = world.send("s+a", 100, 11)
    two = world.send("s+b", 100, 11, at=1.0)
    world.run()
    # 110, 50 after the shared ones, and a page of each answer to come; after a step of `one`.
    assert two.device == 50 and two.scheduled == 100.5 and ended(one) == 155.0


def test_a_request_that_waits_for_room_is_looked_at_when_another_ends() -> None:
    world = World(sizes=replace(SIZES, l1=320))
    one, two = world.send("a", 100, 11), world.send("b", 100, 101)
    three = world.send("c", 100, at=1.0)
    world.run()
    assert three.scheduled == ended(one) == 205.0 and ended(two) > 250.0


def test_answers_to_come_of_others_keep_their_room() -> None:
    world = World(sizes=replace(SIZES, l1=220))
    one = world.send("a", 100, 61)
    two = world.send("b", 100, 2, at=1.0)
    world.run()
    assert two.scheduled == ended(one) == 130.0


def test_ended_requests_hold_nothing() -> None:
    world = World(sizes=replace(SIZES, l1=120))
    requests = [world.send(f"{place}", 95, at=200.0 * place) for place in range(5)]
    world.run()
    assert [one.ttft for one in requests] == [95.0] * 5


def test_the_first_of_the_queue_holds_up_those_behind_it() -> None:
    world = World(sizes=replace(SIZES, l1=150))
    one = world.send("a", 100, 11)
    world.send("b", 100, 2, at=1.0)
    small = world.send("c", 20, at=2.0)
    world.run()
    assert small.scheduled is not None and small.scheduled >= ended(one)


def test_the_longest_unused_pages_leave_and_the_last_ones_first() -> None:
    world = World(sizes=replace(SIZES, l1=200))
    world.send("a", 90)
    world.send("b", 90, at=200.0)
    world.send("c", 50, at=400.0)
    old = world.send("a", 90, at=600.0)
    world.run()
    # 180 of 200, and 50 more: 30 of `a` leave.
    assert old.device == 60


def test_the_newest_request_gives_way_if_answers_find_no_room() -> None:
    world = World(sizes=replace(SIZES, l1=300))
    one, two = world.send("a", 100, 61), world.send("b", 100, 61)
    world.run()
    # 43 of 61 tokens are expected, so both are admitted, and L1 is full when both have 150.
    assert one.first_token == two.first_token == 200.0
    assert 230.0 <= ended(one) < ended(two)


# ---- L2 --------------------------------------------------------------------------------------


def test_l2_brings_what_l1_lost() -> None:
    sizes = replace(SIZES, l1=200, l2=1_000)
    costs = replace(COSTS, load=0.5)
    world = World(costs, sizes)
    world.send("a", 150)
    world.send("b", 150, at=500.0)
    again = world.send("a", 160, at=1000.0)
    world.run()
    assert (again.device, again.host) == (50, 100)
    # The load of 100 tokens takes longer than computing 10.
    assert again.ttft == 50.0


# ---- L3 --------------------------------------------------------------------------------------

WITH_L3 = replace(COSTS, read=0.1, write=0.2)
TIERS = replace(SIZES, l2=1_000)


def test_another_server_reads_what_one_has_written() -> None:
    world = World(WITH_L3, TIERS, servers=2)
    world.send("a", 100)
    read = world.send("a", 110, at=500.0, server=1)
    world.run()
    assert read.storage == 100 and read.ttft == pytest.approx(10.0 + 10.0)


def test_pages_are_stored_when_they_are_written() -> None:
    world = World(WITH_L3, TIERS, servers=2)
    world.send("a", 100)
    written = 100 + GATHER_S + 0.2 * 100
    early = world.send("a", 110, at=written - 0.01, server=1)
    late = world.send("a", 110, at=written + 200.0, server=1)
    world.run()
    assert early.storage == 0 and early.ttft == pytest.approx(110)
    assert late.device == 100
    again = World(WITH_L3, TIERS, servers=2)
    again.send("a", 100)
    found = again.send("a", 110, at=written + 0.01, server=1)
    again.run()
    assert found.storage == 100


def test_a_server_reads_one_prompt_after_the_other_while_it_computes() -> None:
    world = World(WITH_L3, replace(TIERS, threshold=40), servers=2)
    world.send("a", 100)
    world.send("b", 100)
    one = world.send("a", 110, at=500.0, server=1)
    two = world.send("b", 110, at=500.0, server=1)
    other = world.send("c", 15, at=500.0, server=1)
    world.run()
    assert other.ttft == 15.0
    # `a` landed after 10 s and `b` after 20.
    assert (one.scheduled, two.scheduled) == (515.0, 525.0)


def test_reads_hold_half_of_l2_and_others_follow_when_there_is_room() -> None:
    world = World(WITH_L3, replace(TIERS, l2=300), servers=2)
    for place, name in enumerate("ab"):
        world.send(name, 100, at=500.0 * place)
    one = world.send("a", 110, at=2000.0, server=1)
    two = world.send("b", 110, at=2000.0, server=1)
    world.run()
    assert (one.storage, two.storage) == (100, 100)
    # The rest of `two` is read behind the step that computes `one`.
    assert (one.ttft, two.ttft) == pytest.approx((20, 20 + 5 + 10))


def test_a_request_without_room_for_its_read_is_computed() -> None:
    # Writes of `b` pin the pages of L2 that a read needs.
    world = World(replace(WITH_L3, write=100.0), replace(TIERS, l2=100), servers=2)
    world.store.update(("a", place) for place in range(10))
    world.send("b", 100, server=1)
    read = world.send("a", 110, at=200.0, server=1)
    world.run()
    assert read.storage == 0 and read.ttft == 110.0


def test_a_read_shorter_than_the_threshold_is_not_made() -> None:
    world = World(WITH_L3, replace(TIERS, threshold=200), servers=2)
    world.send("a", 100)
    again = world.send("a", 110, at=500.0, server=1)
    world.run()
    assert again.storage == 0 and again.ttft == 110.0


def test_a_wait_ends_with_its_limit_and_what_landed_is_used() -> None:
    sizes = replace(TIERS, l2=10_000, timeout=(2.0, 0.1, 70.0))
    world = World(WITH_L3, sizes, servers=2)
    world.send("a", 1_000)
    read = world.send("a", 1_010, at=2000.0, server=1)
    world.run()
    # A call brings 64 pages in 64 s; the second would end after 100.
    assert read.storage == 640 and read.ttft == pytest.approx(70 + 1_010 - 640)


def _two_readers(copied: float) -> list[ServedRequest]:
    world = World(replace(WITH_L3, write=0.0, copied=copied), TIERS, servers=3)
    world.send("a", 100)
    reads = [world.send("a", 110, at=500.0, server=server) for server in (1, 2)]
    world.run()
    return reads


def test_one_thread_copies_for_all_servers() -> None:
    assert [round(read.ttft) for read in _two_readers(0.0)] == [20, 20]
    assert [round(read.ttft) for read in _two_readers(0.1)] == [30, 30]
    assert [round(read.ttft) for read in _two_readers(0.06)] == [26, 26]


def test_calls_share_the_copying_thread_by_their_pieces() -> None:
    clock, ends = Clock(), dict[str, float]()
    copier = CopyThread(clock)

    def end(name: str) -> None:
        ends[name] = clock.now

    copier.after(0.0, 10.0, lambda: end("put"))
    copier.after(5.0, 8.0, lambda: end("get"), pieces=4)
    clock.run()
    # The put is half done when the get comes, and gets a fifth of the thread until that has ended.
    assert ends == {"get": 15.0, "put": 18.0}


def test_a_get_has_more_pieces_under_way_than_a_put() -> None:
    world = World(replace(WITH_L3, copied=0.2), TIERS, servers=2)
    world.send("a", 100)
    world.send("b", 300, at=400.0)
    # `b` is written from 700.1 on.
    read = world.send("a", 110, at=701.0, server=1)
    world.run()
    assert read.ttft == pytest.approx(10 * 5 / 4 + 10)


@pytest.mark.parametrize(
    ("read", "policy", "storage"),
    [
        (0.005, PrefetchPolicy.TIMEOUT, 100),
        (0.016, PrefetchPolicy.TIMEOUT, 0),  # Begun and cut.
        (0.04, PrefetchPolicy.TIMEOUT, 0),  # Not begun.
        (0.04, PrefetchPolicy.WAIT_COMPLETE, 100),
        (0.005, PrefetchPolicy.BEST_EFFORT, 0),
    ],
)
def test_slow_reads_are_made_only_by_a_policy_that_waits_for_them(
    read: float, policy: PrefetchPolicy, storage: int
) -> None:
    sizes = replace(TIERS, policy=policy, timeout=(1e3, 0.0, 1e3))
    world = World(replace(WITH_L3, linear=0.01, read=read), sizes, servers=2)
    names = "abcdefghijklmnopqrstuvwxyz"
    for place, name in enumerate(names):
        world.send(name, 100, at=200.0 * place)
    # The first reads tell their rate.
    found = [
        world.send(name, 110, at=1e4 + 1e3 * place, server=1) for place, name in enumerate(names)
    ]
    world.run()
    assert found[-1].storage == storage
    assert found[-1].ttft == pytest.approx(storage * read + 0.01 * (110 - storage))


def test_writes_pin_half_of_l2_and_those_that_wait_may_lose_their_pages() -> None:
    slow = replace(WITH_L3, linear=0.01, write=1.0)
    world = World(slow, replace(TIERS, l2=200), servers=2)
    for place, name in enumerate("abc"):
        world.send(name, 100, at=10.0 * place)
    found = [
        world.send(name, 110, at=1e3 + 500 * place, server=1) for place, name in enumerate("abc")
    ]
    world.run()
    # While `a` is written, `b` waits, and leaves L2 for `c`, which is written after it.
    assert [one.storage for one in found] == [100, 0, 100]


def test_pages_that_another_server_wrote_are_not_written_again() -> None:
    world = World(replace(WITH_L3, linear=0.01, write=1.0), TIERS, servers=2)
    world.send("a", 100)
    world.send("c", 100, at=200.0, server=1)
    world.send("a", 100, at=201.5, server=1)
    world.send("b", 100, at=203.0, server=1)
    # `c` is written until 301, `a` in no time, `b` until 401.
    read = world.send("b", 110, at=410.0)
    world.run()
    assert read.storage == 100


def test_a_copy_without_room_in_l2_is_made_when_there_is_some() -> None:
    world = World(replace(WITH_L3, linear=0.01, write=1.0), replace(TIERS, l2=100), servers=2)
    world.send("a", 100)
    world.send("b", 100, at=10.0)
    read = world.send("b", 110, at=1e3, server=1)
    world.run()
    assert read.storage == 100


def test_what_was_read_for_a_waiting_request_stays_in_l2() -> None:
    world = World(replace(WITH_L3, write=0.01), replace(TIERS, l1=150, l2=200), servers=2)
    world.send("a", 100)
    world.send("z", 100, 31, at=500.0, server=1)
    read = world.send("a", 110, at=505.0, server=1)
    world.run()
    # The answer's three pages find no room in L2.
    assert read.storage == 100
