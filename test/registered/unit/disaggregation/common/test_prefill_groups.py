"""A prefill server with DP groups that is asked about rooms: the group that has one is found."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from rigs.disaggregation import desk_rig
from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.desk_rig import PrefillRooms, until
from rigs.disaggregation.pd_rig import one_rank
from rigs.disaggregation.prompt_scene import LONG_TIMEOUTS, Scene, receiver_of, sources_of
from sglang.srt.disaggregation.base.bootstrap_route import BootstrapError, Route
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common.asked_room import UNKNOWN, AskedRoom
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.common.prefill_groups import PrefillGroups
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

HASTY = Timeouts(unknown_room=60, waiting=60, silence=2)
IMPATIENT = Timeouts(unknown_room=0.3, waiting=60, silence=30)


class Groups:
    """A prefill server with DP groups of one rank, and a decode rank that asks it."""

    def __init__(self, scene: Scene, size: int, timeouts: Timeouts = LONG_TIMEOUTS) -> None:
        self._scene = scene
        self.rooms: list[PrefillRooms] = []
        self.routes: list[Route] = []
        self.look_ups: list[int] = []
        """Groups that were looked up."""
        self.start(size)
        self.servers = scene.context(timeouts, find_rank=self._find).servers()

    def start(self, size: int, instance: str = "first") -> None:
        """Another server takes the place of the one before."""
        self.close_rooms()
        session_id = self._scene.mover.get_session_id()
        self.rooms, self.routes = [], []
        for dp_rank in range(size):
            name = f"{instance} {dp_rank}"
            layout = self._scene.there.geometry.layout(name, session_id)
            rooms = PrefillRooms(layout, "127.0.0.1", unwanted_s=300, silent_s=300)
            self.rooms.append(rooms)
            route = one_rank(f"tcp://127.0.0.1:{rooms.port}", name)
            self.routes.append(msgspec.structs.replace(route, dp_rank=dp_rank, dp_size=size))

    def _find(self, host: str, port: int, rank: int, dp_rank: int) -> Route:
        assert (host, port, rank) == ("host", 1, 0)
        self.look_ups.append(dp_rank)
        if dp_rank >= len(self.routes):
            raise BootstrapError(f"rank 0 of dp_rank {dp_rank} is not registered here")
        return self.routes[dp_rank]

    def ask(self, room: int) -> CommonKVReceiver:
        receiver = receiver_of(self.servers, ("host", 1), room)
        receiver.init()
        return receiver

    @property
    def peer(self) -> PrefillGroups:
        found = self.servers.find(("host", 1))
        assert found is not None
        return found

    def asked(self) -> list[list[int]]:
        """Rooms that each group is asked about."""
        return [sorted(group._rooms) for group in self.peer.groups]

    def said(self, receiver: CommonKVReceiver, dp_rank: int) -> str | None:
        """Why a group has no room that is sought."""
        return self.peer.sought[receiver._room][dp_rank].room.failure

    def close_rooms(self) -> None:
        for rooms in self.rooms:
            rooms.close()

    def close(self) -> None:
        self.servers.close()
        self.close_rooms()


@pytest.fixture
def groups(scene: Scene) -> Iterator[Groups]:
    with contextlib.closing(Groups(scene, 3)) as made:
        yield made


def is_known(receiver: CommonKVReceiver) -> bool:
    return receiver.poll() == KVPoll.WaitingForInput


def group_of(receiver: CommonKVReceiver) -> int:
    until(lambda: is_known(receiver))
    return sources_of(receiver)[0].dp_rank


def failure(receiver: CommonKVReceiver) -> str:
    until(lambda: receiver.poll() == KVPoll.Failed)
    return desk_rig.failure(receiver)


def test_each_room_is_found_in_the_group_that_has_it(groups: Groups) -> None:
    for room, rooms in enumerate(groups.rooms):
        rooms.open(room)
    receivers = [groups.ask(room) for room in (0, 1, 2, 7)]
    assert [group_of(one) for one in receivers[:3]] == [0, 1, 2]
    assert groups.asked() == [[0, 7], [1, 7], [2, 7]], "no other group is asked any more"
    assert not is_known(receivers[3])
    groups.rooms[2].open(7)
    assert group_of(receivers[3]) == 2
    assert sorted(groups.look_ups) == [0, 1, 2]


def test_a_room_ends_in_the_group_that_knows_of_its_end(groups: Groups) -> None:
    groups.rooms[1].open(5)
    groups.rooms[1].end(5, "the queue is full")
    assert failure(groups.ask(5)) == "the prefill server ended the request: the queue is full"
    groups.rooms[2].open(6)
    known = groups.ask(6)
    assert group_of(known) == 2
    groups.rooms[2].end(6, "out of memory")
    assert failure(known) == "the prefill server ended the request: out of memory"


def test_a_room_that_no_group_knows_fails_in_time(scene: Scene) -> None:
    with contextlib.closing(Groups(scene, 2, IMPATIENT)) as groups:
        assert failure(groups.ask(5)) == UNKNOWN
        assert groups.asked() == [[], []]
        groups.rooms[1].open(6)
        assert group_of(groups.ask(6)) == 1


def test_a_group_that_does_not_answer_fails_only_what_may_be_its_own(scene: Scene) -> None:
    with (
        contextlib.closing(Groups(scene, 2, HASTY)) as groups,
        ControlProxy(groups.routes[1].endpoint, lambda *_: ()) as proxy,
    ):
        groups.routes[1] = msgspec.structs.replace(groups.routes[1], endpoint=proxy.endpoint)
        groups.rooms[0].open(5)
        known, nowhere = groups.ask(5), groups.ask(6)
        assert group_of(known) == 0
        groups.rooms[0].open(7)
        assert group_of(groups.ask(7)) == 0
        silent = f"the prefill server at {proxy.endpoint} has not answered for 2 s"
        until(lambda: groups.said(nowhere, 1) is not None)
        assert groups.said(nowhere, 1) == silent
        assert is_known(known)
        assert nowhere.poll() == KVPoll.Bootstrapping, "the other group may still get it"
        groups.rooms[0].open(6)
        assert group_of(nowhere) == 0


def test_the_reason_of_a_silent_group_is_told_for_a_room_that_no_other_knows(
    scene: Scene,
) -> None:
    timeouts = Timeouts(unknown_room=1, waiting=60, silence=2)
    with (
        contextlib.closing(Groups(scene, 2, timeouts)) as groups,
        ControlProxy(groups.routes[1].endpoint, lambda *_: ()) as proxy,
    ):
        groups.routes[1] = msgspec.structs.replace(groups.routes[1], endpoint=proxy.endpoint)
        silent = f"the prefill server at {proxy.endpoint} has not answered for 2 s"
        assert failure(groups.ask(6)) == silent


def test_a_group_that_announces_another_number_of_groups_is_not_asked(scene: Scene) -> None:
    with contextlib.closing(Groups(scene, 2, HASTY)) as groups:
        right = groups.routes[1]
        groups.routes[1] = msgspec.structs.replace(right, dp_size=3)
        groups.rooms[0].open(5)
        groups.rooms[1].open(6)
        assert group_of(groups.ask(5)) == 0
        other = groups.ask(6)
        until(lambda: bool(groups.said(other, 1)))
        assert groups.said(other, 1) == (
            "the prefill server is not found: the bootstrap server at host:1: dp_rank 1 is one of "
            "3 DP groups, and dp_rank 0 one of 2: start all with the same --attn-dp-size"
        )
        groups.routes[1] = right
        assert group_of(groups.ask(6)) == 1, "no group is given up for good"


def given_up(rooms: PrefillRooms, room: int) -> str:
    found: dict[int, str] = {}

    def is_told() -> bool:
        found.update(rooms.take_given_up())
        return room in found

    until(is_told)
    return found[room].removeprefix("the decode server gave it up: ")


def test_a_room_is_declined_where_it_is(groups: Groups) -> None:
    """The first one before it is known how many groups there are."""
    for rooms in groups.rooms:
        rooms.open(5)
        rooms.open(6)
    groups.servers.decline(("host", 1), 5, "refused")
    assert [given_up(rooms, 5) for rooms in groups.rooms] == ["refused"] * 3
    until(lambda: not any(group._declined for group in groups.peer.groups))
    unknown, known = groups.ask(7), groups.ask(6)
    until(lambda: is_known(known))
    has_it = group_of(known)
    known.abort("aborted")
    unknown.abort("aborted too")
    assert given_up(groups.rooms[has_it], 6) == "aborted"
    for rooms in groups.rooms:
        until(lambda rooms=rooms: 7 in rooms._unwanted)  # type: ignore[misc]
        assert 6 not in rooms._unwanted
    others = [rooms for rooms in groups.rooms if rooms is not groups.rooms[has_it]]
    assert not any(rooms.take_given_up() for rooms in others), "they were not told"
    assert groups.asked() == [[], [], []]


def test_a_room_is_declined_where_it_was_found_since_the_last_poll(groups: Groups) -> None:
    groups.rooms[0].open(5)
    assert group_of(groups.ask(5)) == 0, "the groups are known"
    groups.rooms[1].open(6)
    receiver = groups.ask(6)
    until(lambda: bool(groups.peer.sought[receiver._room][1].room.sources))
    receiver.abort("aborted")
    assert given_up(groups.rooms[1], 6) == "aborted"
    assert not any(group._declined for group in groups.peer.groups)
    assert groups.asked() == [[5], [], []] and groups.peer.sought == {}


def test_only_rooms_of_several_groups_are_sought(scene: Scene) -> None:
    with contextlib.closing(Groups(scene, 1)) as groups:
        groups.rooms[0].open(5)
        known, waiting = groups.ask(5), groups.ask(6)
        assert group_of(known) == 0
        assert groups.peer.sought == {}
        groups.start(2, "second")
        two = msgspec.structs.replace(groups.routes[0], dp_size=2)
        assert groups.peer._on_route(two) is None
        assert list(groups.peer.sought) == [waiting._room], "the first group has the other one"
        groups.peer.seek(waiting._room)
        assert [len(asked) for asked in groups.peer.sought.values()] == [2], "it was sought already"
        groups.rooms[1].open(6)
        assert group_of(waiting) == 1
        assert groups.peer.sought == {}
        between = AskedRoom(7)
        groups.peer.groups[0].ask(between)
        three = msgspec.structs.replace(two, dp_size=3)
        assert groups.peer._on_route(three) is None
        groups.peer.seek(between)
        assert {one.group for one in groups.peer.sought[between]} == {*groups.peer.groups}
        assert groups.asked() == [[5, 7], [6, 7], [7]], "room 6 is found"
        groups.peer.leave(between)
        assert groups.asked() == [[5], [6], []]
        assert groups.peer.sought == {} and is_known(waiting)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 2), (3, 2)])
def test_a_server_that_is_replaced_may_have_other_groups(
    scene: Scene, sizes: Sequence[int]
) -> None:
    before, after = sizes
    timeouts = Timeouts(unknown_room=0.5, waiting=60, silence=2)
    with contextlib.closing(Groups(scene, before, timeouts)) as groups:
        groups.rooms[-1].open(5)
        known = groups.ask(5)
        assert group_of(known) == before - 1
        groups.start(after, "second")
        reason = failure(known)
        assert any(one in reason for one in ("replaced", "has not answered", "is not found"))
        known.abort("it has failed")
        rooms = itertools.count(6)

        def is_found() -> bool:
            """The first requests may come while the decode server still knows the old server."""
            room = next(rooms)
            groups.rooms[-1].open(room)
            receiver = groups.ask(room)
            until(lambda: receiver.poll() != KVPoll.Bootstrapping)
            if receiver.poll() == KVPoll.Failed:
                receiver.abort("it has failed")
                return False
            return group_of(receiver) == after - 1

        until(is_found)
        assert len(groups.peer.groups) == after


def test_a_server_that_is_forgotten_starts_no_group(groups: Groups) -> None:
    peer = groups.peer
    peer.close()
    assert peer._on_route(groups.routes[0]) is None
    assert len(peer.groups) == 1
