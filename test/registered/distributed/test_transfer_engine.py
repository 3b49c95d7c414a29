"""Transfers between real processes over Mooncake's TCP transport: sizes, numbers, users at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from rigs.stores.host_pools import (
    copy_to_host,
    make_device_pool,
    make_host_pool,
    page_keys,
    storage_config,
)
from rigs.stores.mooncake_cluster import MooncakeCluster
from rigs.stores.transfer_peer import TransferPeer
from sglang.embedded_mooncake import LOOPBACK
from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    BATCH_REQUESTS,
    MAX_SLICES,
    Block,
    BlockOutcome,
    TransferOp,
    UnknownRange,
)
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_runtime import detect_device
from sglang.srt.mem_cache.hicache_storage import CacheOutcome, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=14, suite="base-b-test-cpu")

KIB = 1024
SIZE = 64 * MIB
TIMEOUT = 60.0


class Here:
    """This process's end: an engine and as much memory twice, to send and to receive.

    Args:
        rdma_root: Folder that is searched for InfiniBand devices.
        protocol: Value of MOONCAKE_PROTOCOL.
    """

    def __init__(
        self, rdma_root: Path = Path("/sys/class/infiniband"), protocol: str = "tcp"
    ) -> None:
        mark_device_set(detect_device())
        with envs.MOONCAKE_PROTOCOL.override(protocol):
            self.engine = MooncakeTransferEngine(LOOPBACK, rdma_root=rdma_root)
        self.sent = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
        self.got = np.zeros(SIZE, np.uint8)
        for memory in (self.sent, self.got):
            self.engine.register(memory.ctypes.data, SIZE)

    def blocks(self, memory: np.ndarray, peer: TransferPeer, parts: list[slice]) -> list[Block]:
        return [
            Block(memory.ctypes.data + p.start, peer.address + p.start, p.stop - p.start)
            for p in parts
        ]

    def round_trip(self, peer: TransferPeer, parts: list[slice]) -> None:
        """There and back, bit by bit."""
        write = self.blocks(self.sent, peer, parts)
        read = self.blocks(self.got, peer, parts)
        assert self.engine.transfer(
            peer.session_id, TransferOp.WRITE, write, timeout=TIMEOUT
        ).is_done
        assert self.engine.transfer(peer.session_id, TransferOp.READ, read, timeout=TIMEOUT).is_done
        for part in parts:
            assert np.array_equal(self.got[part], self.sent[part])


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    made = Here()
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def peers() -> Iterator[list[TransferPeer]]:
    with TransferPeer(SIZE) as first, TransferPeer(SIZE) as second:
        yield [first, second]


def parts_of(size: int, gap: int) -> list[slice]:
    return [slice(at, at + size) for at in range(0, SIZE - size + 1, size + gap)]


@pytest.mark.parametrize("size", [64 * KIB, MIB, 16 * MIB])
def test_what_was_written_is_read_back(here: Here, peers: list[TransferPeer], size: int) -> None:
    here.got[:] = 0
    here.round_trip(peers[0], parts_of(size, gap=64))


def test_rdma_without_a_device_is_refused_or_becomes_tcp_where_that_is_allowed(
    peers: list[TransferPeer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    default, allowed = envs.MOONCAKE_PROTOCOL.default, envs.SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK
    with allowed.override(False), pytest.raises(ValueError, match="set MOONCAKE_PROTOCOL=tcp"):
        Here(tmp_path, default)
    with allowed.override(True), caplog.at_level(logging.WARNING):
        here = Here(tmp_path, default)
    assert "Mooncake uses tcp" in caplog.text
    assert here.engine.describe()["protocol"] == "tcp"
    here.round_trip(peers[0], parts_of(MIB, gap=64))
    here.engine.close()


def test_odd_ranges_leave_their_neighbours_alone(here: Here, peers: list[TransferPeer]) -> None:
    here.got[:] = 0
    here.round_trip(peers[0], [slice(1, 2), slice(5, 70_001), slice(70_001, SIZE - 3)])
    assert here.got[0] == here.got[2] == here.got[-1] == 0, "neighbouring bytes are untouched"


def test_ten_thousand_blocks_of_several_threads_arrive(
    here: Here, peers: list[TransferPeer]
) -> None:
    """Seven transfers, six of them with one peer: calls of 512 requests, which without a budget
    would be 3,072 at once."""
    here.got[:] = 0
    parts = parts_of(4 * KIB, gap=64)[:10_000]
    failures: list[BaseException] = []

    def work(peer: TransferPeer, mine: list[slice]) -> None:
        try:
            here.round_trip(peer, mine)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [
        threading.Thread(target=work, args=(peers[index == 0], parts[index::6]))
        for index in range(6)
    ]
    for thread in threads:
        thread.start()
    here.round_trip(peers[0], parts)
    for thread in threads:
        thread.join(TIMEOUT)
    assert not failures
    budget = here.engine._peers.of(peers[0].session_id).budget
    assert BATCH_REQUESTS <= budget.peak <= MAX_SLICES
    wanted = {peer.session_id: 0 for peer in peers}
    assert wait_until(lambda: here.engine.describe()["requests_in_flight"] == wanted, 30)


def test_a_peer_takes_only_what_it_registered(here: Here, peers: list[TransferPeer]) -> None:
    inside, outside = peers[0].address, peers[0].address + SIZE
    local = here.sent.ctypes.data
    transfer = here.engine.transfer(
        peers[0].session_id,
        TransferOp.WRITE,
        [Block(local, inside, 10), Block(local, outside, 10), Block(local, outside - 5, 10)],
        timeout=TIMEOUT,
    )
    done, failed = BlockOutcome.DONE, BlockOutcome.FAILED
    assert transfer.outcomes == [done, failed, failed]
    here.round_trip(peers[0], [slice(0, MIB)])


def test_local_memory_that_is_not_registered_is_refused(
    here: Here, peers: list[TransferPeer]
) -> None:
    other = np.zeros(100, np.uint8)
    with pytest.raises(UnknownRange):
        here.engine.transfer_sync(peers[0].session_id, other.ctypes.data, peers[0].address, 100)


def test_upstreams_calls_answer_with_numbers(here: Here, peers: list[TransferPeer]) -> None:
    session_id, address, local = peers[0].session_id, peers[0].address, here.sent.ctypes.data
    assert here.engine.transfer_sync(session_id, local, address, 4096) == 0
    assert here.engine.batch_transfer_sync(session_id, [local], [address + SIZE], [1]) == -1
    assert here.engine.send_probe(session_id) == 0


def test_three_processes_meet_in_one_memory(here: Here, peers: list[TransferPeer]) -> None:
    """Bytes that this process wrote to a peer are read there by a third process's engine."""
    third = Here()
    third.sent[:] = 7
    ours, theirs = slice(0, 3 * MIB), slice(3 * MIB, 5 * MIB)
    here.round_trip(peers[1], [ours])
    third.round_trip(peers[1], [theirs])
    here.got[:] = 0
    both = here.blocks(here.got, peers[1], [ours, theirs])
    assert here.engine.transfer(peers[1].session_id, TransferOp.READ, both, timeout=TIMEOUT).is_done
    assert np.array_equal(here.got[ours], here.sent[ours])
    assert (here.got[theirs] == 7).all()
    third.engine.close()


def test_the_store_and_the_engine_at_once(here: Here, peers: list[TransferPeer]) -> None:
    """Three threads of the engine, and one each that the store has for gets and for sets. Each has
    its transport in this process; neither sees the other's load."""
    num_pages, rounds = 64, 4
    device = make_device_pool(num_pages, head_dim=512)
    host = make_host_pool(device, "page_first_direct")
    parts = parts_of(4 * KIB, gap=64)[:10_000]
    with MooncakeCluster(num_nodes=1, segment_size="256mb") as cluster:
        store = MooncakeStore(
            storage_config(
                master_server_address=cluster.engine_env()["MOONCAKE_MASTER"],
                protocol="tcp",
                global_segment_size=0,
            )
        )
        store.register_mem_host_pool_v2(host, PoolName.KV)
        slots = copy_to_host(device, host, list(range(num_pages)))

        mine, others = slots.chunk(2)

        def pages(name: str, host_indices: torch.Tensor) -> PoolTransfer:
            keys = page_keys(num_pages // 2, name)
            return PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)

        def write() -> list[object]:
            sets = [store.batch_set_v2([pages(f"new{nth}", mine)]) for nth in range(rounds)]
            return [one for outcomes in sets for one in outcomes[PoolName.KV]]

        def read() -> list[object]:
            gets = [store.batch_get_v2([pages("old", others)]) for _ in range(rounds)]
            return [one for outcomes in gets for one in outcomes[PoolName.KV]]

        store.batch_set_v2([pages("old", others)])
        with ThreadPoolExecutor() as pool:
            stored = [pool.submit(write), pool.submit(read)]
            moved = [
                pool.submit(here.round_trip, peers[nth % 2], parts[nth::3])
                for nth in range(3)
                for _ in range(2)
            ]
            outcomes = [one for user in stored for one in user.result(TIMEOUT)]
            for one in moved:
                one.result(TIMEOUT)
        assert store._client.budget.peak <= 1024
        store.close()
    assert len(outcomes) == rounds * num_pages
    assert set(outcomes) == {CacheOutcome.LANDED}
