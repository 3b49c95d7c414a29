"""Buffers for pages of ranks with other heads: how many there are, and when one is free again."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rigs.disaggregation.desk_rig import PrefillRooms, until
from rigs.disaggregation.pd_rig import LocalMover
from rigs.disaggregation.prompt_scene import LONG_TIMEOUTS, ROOM, TOKEN, Context, Prompt
from rigs.servers.scarce_threads import no_threads
from sglang.srt.disaggregation.base.bootstrap_route import Route
from sglang.srt.disaggregation.base.timeouts import Timeouts
from sglang.srt.disaggregation.common import staging
from sglang.srt.disaggregation.common.geometry import (
    CutBuffer,
    IncompatibleLayouts,
    PoolGeometry,
    RankPlace,
)
from sglang.srt.disaggregation.common.metadata_reader import MetadataReader
from sglang.srt.disaggregation.common.room_checksums import RoomChecksums
from sglang.srt.disaggregation.common.sessions import Sessions
from sglang.srt.disaggregation.common.staging import (
    NUM_BUFFERS,
    Piece,
    Staging,
    rounds,
    unit_bytes_of,
)
from sglang.srt.disaggregation.control.protocol import PoolBuffer
from sglang.srt.distributed.device_communicators.transfer_types import Block, PeerUnreachable
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.device.state_spec import KVSpec, RankShare, RankSplit
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

PAGE, PAGES = 2, 8


class Recorded(LocalMover):
    """An engine that records the registered memory."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int:
        self.ranges += zip(ptrs, lengths, strict=True)
        return 0

    def is_registered(self, ptr: int, length: int) -> bool:
        return (ptr, length) in self.ranges


def test_buffers_are_made_when_they_are_needed_and_used_again() -> None:
    registry = Recorded()
    buffers = Staging(registry, torch.device("cpu"))
    assert registry.ranges == []
    taken = [buffers.take(0) for _ in range(NUM_BUFFERS)]
    assert len({address for address, _ in registry.ranges}) == NUM_BUFFERS
    assert buffers.take(0.01) is None
    given_back = taken[2]
    assert given_back is not None
    threading.Timer(0.02, given_back.give_back).start()
    assert buffers.take(10) is given_back
    assert len(registry.ranges) == NUM_BUFFERS


def test_a_buffer_that_cannot_be_registered_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Recorded()
    buffers = Staging(registry, torch.device("cpu"))
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> int:
            raise RuntimeError("no memory")

        patched.setattr(registry, "batch_register", fail)
        for _ in range(NUM_BUFFERS + 1):
            with pytest.raises(RuntimeError):
                buffers.take(0)
    assert buffers.take(0) is not None


def test_memory_of_an_allocation_that_is_known_is_not_registered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's allocators cut several tensors out of one."""
    registry = Recorded()
    registry.batch_register([4096], [1 << 30])
    buffers = Staging(registry, torch.device("cpu"))
    found = iter(({4096: 1 << 30}, {8192: 1 << 26}, {8192: 1 << 26}))
    monkeypatch.setattr(type(buffers._runtime), "allocations_of", lambda *_: next(found))
    for _ in range(3):
        assert buffers.take(0) is not None
    assert registry.ranges == [(4096, 1 << 30), (8192, 1 << 26)]


def test_rounds_hold_as_much_as_fits() -> None:
    found = [
        [(piece.place, piece.offset, piece.begin, piece.end) for piece in one]
        for one in rounds([10, 30], 4, 72)
    ]
    assert found == [
        [(0, 0, 0, 4), (1, 40, 0, 1)],
        [(1, 0, 1, 3)],
        [(1, 0, 3, 4)],
    ]
    assert not list(rounds([10, 30], 0, 64))


def test_no_round_is_longer_than_its_buffer() -> None:
    """Pieces begin at whole words; the last word may reach beyond the end."""
    for capacity in range(9, 60):
        for pieces in rounds([9, 5, 3], 7, capacity):
            assert unit_bytes_of(pieces) <= capacity


def test_pages_that_follow_one_another_there_are_one_block() -> None:
    assert list(Piece(0, 16, 1, 5, 8).blocks(500, 1000, [3, 5, 6, 9, 8])) == [
        Block(516, 1000 + 5 * 8, 16),
        Block(532, 1000 + 9 * 8, 8),
        Block(540, 1000 + 8 * 8, 8),
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [1, 3, 4])
def test_heads_of_any_size_are_copied(dtype: torch.dtype, dim: int) -> None:
    """The word that moves at once divides a head."""
    own = torch.zeros(6 * PAGE, 3, dim, dtype=dtype)
    head = dim * dtype.itemsize
    theirs = torch.arange(2 * PAGE * 2 * dim).to(dtype).view(2, PAGE, 2, dim)
    other = PoolBuffer(0, PAGE * 2 * head)
    cut = CutBuffer.of(own, PAGE, other, [(2 * head, 1 * head, head)])
    cut.unpack(theirs.contiguous().view(torch.uint8).flatten(), torch.tensor([4, 1]))
    want = torch.zeros_like(own).view(6, PAGE, 3, dim)
    want[4, :, 2], want[1, :, 2] = theirs[0, :, 1], theirs[1, :, 1]
    assert torch.equal(own.view_as(want), want)


def test_a_page_that_no_buffer_holds_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = (
        PoolGeometry.of([pool_of(*heads)], "w", torch.float32) for heads in ((0, 1), (0, 2))
    )
    layouts = [there.layout("i", "s")]
    monkeypatch.setattr("sglang.srt.disaggregation.common.geometry.STAGING_BYTES", 31)
    with pytest.raises(
        IncompatibleLayouts, match="a page of pool kv has 32 bytes of a layer there, which"
    ):
        here.slices(layouts, 0)
    monkeypatch.setattr("sglang.srt.disaggregation.common.geometry.STAGING_BYTES", 32)
    here.slices(layouts, 0)


# ---- prompts of ranks with other heads ---------------------------------------------------------


def pool_of(begin: int, end: int) -> MHATokenToKVPool:
    share = RankShare(RankSplit.HEADS, begin, end, 2)
    spec = KVSpec.of_heads((0, 1), end - begin, 2, torch.float32, share=share)
    return MHATokenToKVPool.from_spec(spec, PAGE * PAGES, PAGE, "cpu")


class Scene:
    """Two ranks of a prefill server with a head each, and a decode server of one rank."""

    def __init__(self) -> None:
        self.theirs = [pool_of(0, 1), pool_of(1, 2)]
        self.own = pool_of(0, 2)
        for number, pool in enumerate(self.theirs):
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                slots = torch.arange(1, len(buffer) + 1).reshape(-1, 1, 1)
                buffer.copy_((slots + 100 * number) * torch.ones(1, 1, 2))
        self.mover = LocalMover()
        self.prefills = []
        for number, pool in enumerate(self.theirs):
            layout = PoolGeometry.of([pool], "w", torch.float32).layout(
                f"rank {number}", "this process"
            )
            self.prefills.append(PrefillRooms(layout, "127.0.0.1", unwanted_s=300, silent_s=300))
        geometry = PoolGeometry.of([self.own], "w", torch.float32)
        self.context = Context(
            place=RankPlace(),
            geometry=geometry,
            engine=self.mover,
            staging=Staging(self.mover, torch.device("cpu")),
            checksums=RoomChecksums([self.own]),
            metadata=MetadataReader(),
            sessions=Sessions(self.mover),
            find_rank=self._find,
            timeouts=LONG_TIMEOUTS,
        )
        self._readers = itertools.count()

    def _find(self, host: str, port: int, rank: int, dp_rank: int) -> Route:
        endpoint = f"tcp://127.0.0.1:{self.prefills[rank].port}"
        return Route(
            rank=rank,
            endpoint=endpoint,
            instance_id=f"rank {rank}",
            num_ranks=2,
            attn_tp_size=2,
        )

    def begin(self, pages: list[int], room: int = ROOM, **fields: Any) -> Prompt:
        prompt = Prompt(
            dataclasses.replace(self.context, **fields),
            [self._find("host", 1, rank, 0) for rank in range(2)],
            room,
            f"reader {next(self._readers)}",
        )
        prompt.send_metadata(pages)
        return prompt

    def fill(self, room: int = ROOM, pages: Sequence[int] = (4, 7)) -> None:
        for prefill in self.prefills:
            prefill.open(room, pages)
            prefill.complete(room, TOKEN)

    def assert_read(self, theirs: Sequence[int], own: Sequence[int]) -> None:
        for buffers in zip(
            (*self.own.k_buffer, *self.own.v_buffer),
            *((*pool.k_buffer, *pool.v_buffer) for pool in self.theirs),
            strict=True,
        ):
            here, first, second = (one.view(-1, PAGE, *one.shape[1:]) for one in buffers)
            for their, mine in zip(theirs, own, strict=True):
                assert torch.equal(here[mine, :, 0], first[their, :, 0])
                assert torch.equal(here[mine, :, 1], second[their, :, 0])

    def close(self) -> None:
        self.mover.release()
        for prefill in self.prefills:
            prefill.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_a_prompt_of_two_ranks_is_there_when_both_parts_are(scene: Scene) -> None:
    prompt = scene.begin([3, 5])
    scene.fill()
    until(lambda: prompt.has_ended)
    assert prompt.outcome == TOKEN
    scene.assert_read([4, 7], [3, 5])
    assert [prefill.outcome(ROOM) for prefill in scene.prefills] == ["", ""]


def test_a_part_that_fails_ends_the_other_with_its_reason(scene: Scene) -> None:
    second = scene.theirs[1].k_buffer[0]

    def fails(blocks: Sequence[Block]) -> PeerUnreachable | None:
        is_second = second.data_ptr() <= blocks[0].remote < second.data_ptr() + second.nbytes
        return PeerUnreachable("p", "is gone") if is_second else None

    scene.mover.fails = fails
    prompt = scene.begin([3, 5])
    for prefill in scene.prefills:
        prefill.open(ROOM, [4])
    until(lambda: prompt.has_ended)
    failure = "reading from the prefill server failed: peer p is gone"
    assert prompt.outcome == failure
    for prefill in scene.prefills:
        heard: dict[int, str] = {}

        def is_heard(prefill: PrefillRooms = prefill, heard: dict[int, str] = heard) -> bool:
            heard.update(prefill.take_given_up())
            return ROOM in heard

        until(is_heard)
        assert heard[ROOM] == f"the decode server gave it up: {failure}"


def test_a_part_without_a_thread_ends_the_prompt_and_leaves_no_slot(scene: Scene) -> None:
    with no_threads("disagg-shard"):
        scene.fill()
        prompt = scene.begin([3, 5])
        until(lambda: prompt.has_ended)
    assert prompt.outcome == "no thread for a part of the prompt: can't start new thread"
    again = scene.begin([3, 5], 6)
    scene.fill(6)
    until(lambda: again.has_ended)
    assert again.outcome == TOKEN


def test_a_rank_that_does_not_fit_ends_all_parts(scene: Scene) -> None:
    """The two ranks of the prefill server both claim the first head."""
    scene.prefills[1].close()
    layout = PoolGeometry.of([scene.theirs[0]], "w", torch.float32).layout("rank 1", "this process")
    scene.prefills[1] = PrefillRooms(layout, "127.0.0.1", unwanted_s=300, silent_s=300)
    prompt = scene.begin([3, 5])
    until(lambda: prompt.has_ended)
    why = "none of its ranks has head 1 of pool kv"
    assert prompt.outcome == f"the prefill server at host:1 cannot serve this one: {why}"


def test_a_buffer_is_lost_as_long_as_something_may_be_read_into_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that would need it wait, and give up after a while."""
    monkeypatch.setattr(staging, "NUM_BUFFERS", 1)
    scene.mover.hold = True
    scene.fill()
    first = scene.begin([3, 5])
    until(lambda: bool(scene.mover.begun))
    first.cancel("not wanted")
    until(lambda: isinstance(first.outcome, str))
    assert not first.has_ended
    scene.mover.hold = False
    hasty = Timeouts(unknown_room=60, waiting=0.3, silence=30)
    scene.fill(6)
    second = scene.begin([1, 2], 6, timeouts=hasty)
    until(lambda: second.has_ended)
    assert second.outcome == "no memory for pages of ranks with other heads was free in 0.3 s"
    scene.mover.release()
    until(lambda: first.has_ended)
    scene.fill(7)
    third = scene.begin([1, 2], 7)
    until(lambda: third.has_ended)
    assert third.outcome == TOKEN
    scene.assert_read([4, 7], [1, 2])
