"""Damage between two servers: what arrives is compared, read once more, and refused."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import pytest
import torch

from rigs.disaggregation.prompt_scene import PAGE, ROOM, TOKEN, Prompt, Scene
from sglang.srt.disaggregation.common.room_checksums import RoomChecksums
from sglang.srt.distributed.device_communicators.transfer_types import Block
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

THEIRS, OWN = [4, 9, 5], [2, 3, 7]


def read(scene: Scene) -> Prompt:
    """A prompt of three pages, to its end."""
    scene.prefill.open(ROOM, THEIRS[:2])
    prompt = scene.begin(OWN)
    scene.prefill.add_pages(ROOM, THEIRS[2:])
    scene.prefill.complete(ROOM, TOKEN)
    return scene.end(prompt)


def checked(prompt: Prompt) -> dict[str, int]:
    return dict(prompt.get_transfer_metric().checked)


def assert_right(scene: Scene) -> None:
    for theirs, own in zip(THEIRS, OWN, strict=True):
        assert torch.equal(scene.there.page(theirs), scene.here.page(own))


def flips(scene: Scene, times: int) -> list[int]:
    """Let the mover flip a bit of the first block of the first so many reads. Returns the
    addresses, as they come."""
    move, flipped = scene.mover.move, list[int]()

    def moved(peer: str, blocks: Sequence[Block]) -> None:
        move(peer, blocks)
        if len(flipped) < times:
            flipped.append(blocks[0].local)
            ctypes.c_uint8.from_address(blocks[0].local + 5).value ^= 1

    scene.mover.move = moved  # type: ignore[method-assign]
    return flipped


def test_what_arrives_intact_is_counted(scene: Scene) -> None:
    prompt = read(scene)
    assert prompt.outcome == TOKEN
    assert checked(prompt) == {"intact": 3}
    assert_right(scene)


def test_a_flipped_bit_on_the_way_is_read_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    flipped = flips(scene, times=1)
    caplog.set_level(logging.ERROR)
    prompt = read(scene)
    assert flipped and prompt.outcome == TOKEN
    assert checked(prompt) == {"intact": 3, "damaged": 1}
    assert "1 pages and 0 states of pools kv differ from their checksums" in caplog.text
    assert_right(scene)


def test_what_differs_again_fails_the_prompt(scene: Scene) -> None:
    flips(scene, times=9)
    prompt = read(scene)
    assert "differ from their checksums" in str(prompt.outcome)
    assert prompt.has_ended, "its slots are free"
    assert checked(prompt)["damaged"] >= 2


def test_a_peer_that_sends_another_page_is_noticed(scene: Scene) -> None:
    """Its page was overwritten after its checksum was computed."""
    scene.prefill.open(ROOM, THEIRS)
    for part in scene.there.pool.parts:
        for buffer in part:
            span = slice(THEIRS[1] * PAGE, (THEIRS[1] + 1) * PAGE)
            buffer[span] = buffer[:PAGE]
    scene.prefill.complete(ROOM, TOKEN)
    prompt = scene.end(scene.begin(OWN))
    assert "1 pages and 0 states of pools kv differ" in str(prompt.outcome)


def test_servers_without_checksums_are_counted(scene: Scene) -> None:
    def none(pages: Sequence[int]) -> list[list[bytes]]:
        return []

    scene.prefill._manager.checksums.draw_pages = none  # type: ignore[method-assign]
    prompt = read(scene)
    assert prompt.outcome == TOKEN
    assert checked(prompt) == {"unchecked": 3}


def test_only_pools_with_the_same_heads_are_compared() -> None:
    pool = MHATokenToKVPool(PAGE * 4, PAGE, torch.float32, 1, 2, 2, "cpu")
    checksums = RoomChecksums([pool])
    (of_zeros,) = checksums.draw_pages([1])
    pool.k_buffer[1][PAGE] = 1.0
    assert checksums.compare_pages({"kv"}, [1, 2], [of_zeros, of_zeros]).damaged == [0]
    assert checksums.compare_pages((), [1], [of_zeros]).outcomes == {"unchecked": 1}


def test_a_share_of_the_pages_is_hashed_and_compared() -> None:
    pool = MHATokenToKVPool(PAGE * 10, PAGE, torch.float32, 1, 2, 2, "cpu")
    checksums, pages = RoomChecksums([pool], share=0.25), list(range(1, 9))
    drawn = checksums.draw_pages(pages[:3]) + checksums.draw_pages(pages[3:])
    assert [bool(one) for one in drawn] == [False, False, False, True] * 2
    pool.k_buffer[1][PAGE] = 1.0
    pool.k_buffer[1][PAGE * 8] = 1.0
    compared = checksums.compare_pages({"kv"}, pages, drawn)
    assert compared.damaged == [7]
    assert compared.outcomes == {"intact": 1, "damaged": 1, "unchecked": 6}
