"""NIXL's engine over agents of a test: outcomes, refusals, peers that hang or die."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch

from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.nixl.conn import make_nixl_manager
from sglang.srt.distributed.device_communicators import nixl_transfer_engine
from sglang.srt.distributed.device_communicators.nixl_library import (
    NixlAgent,
    RemoteFailed,
    UnknownRemoteRange,
)
from sglang.srt.distributed.device_communicators.nixl_transfer_engine import (
    BATCH_BYTES,
    NixlTransferEngine,
    _Peer,
    parse_session_id,
)
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    PeerError,
    PeerStalled,
    PeerUnreachable,
    RangeInUse,
    RegistrationError,
    Request,
    Transfer,
    TransferError,
    TransferOp,
    UnknownRange,
)
from sglang.srt.utils.network import wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")

HERE, THERE = 0x1000, 0x9000
NAME = "there#" + 32 * "0"
PEER = f"nixl:{NAME}:bWV0YQ=="


class Agents:
    """Makes agents whose reads behave as told."""

    def __init__(self) -> None:
        self.made: list[FakeAgent] = []
        self.hangs = False
        self.connects = True
        self.refuses_memory = False
        self.broken: set[int] = set()
        """Remote addresses whose reads fail."""
        self.unknown: set[int] = set()
        """Remote addresses that the peer has not registered."""

    def __call__(self, name: str) -> NixlAgent:
        agent = FakeAgent(self, name)
        self.made.append(agent)
        return cast(NixlAgent, agent)


class FakeAgent:
    def __init__(self, agents: Agents, name: str) -> None:
        self.name = name
        self.registered: dict[int, int] = {}
        self.reads: list[Sequence[Request]] = []
        self.has_ended = False
        self.num_progressed = 0
        self._agents = agents

    def register(self, ranges: dict[int, int]) -> None:
        if self._agents.refuses_memory:
            raise RuntimeError("NIXL refused")
        self.registered |= ranges

    def unregister(self, address: int) -> None:
        self.registered.pop(address, None)

    def metadata(self) -> bytes:
        return repr(sorted(self.registered)).encode()

    def connect(self, metadata: bytes) -> str:
        if not self._agents.connects:
            raise RemoteFailed("NIXL_ERR_BACKEND")
        return metadata.decode()

    def begin_read(self, peer: str, requests: Sequence[Request]) -> int:
        assert peer == "meta" and not self.has_ended
        if self._agents.unknown & {one.remote for one in requests}:
            raise UnknownRemoteRange("NIXL_ERR_NOT_FOUND")
        self.reads.append(requests)
        return len(self.reads) - 1

    def is_read(self, number: int) -> bool:
        assert not self.has_ended
        if self._agents.broken & {one.remote for one in self.reads[number]}:
            raise RemoteFailed("NIXL_ERR_REMOTE_DISCONNECT")
        return not self._agents.hangs

    def progress(self) -> None:
        assert not self.has_ended
        self.num_progressed += 1

    def end(self) -> None:
        self.has_ended = True


@pytest.fixture
def agents() -> Agents:
    return Agents()


@pytest.fixture
def engine(agents: Agents) -> Iterator[NixlTransferEngine]:
    engine = NixlTransferEngine("127.0.0.1", make_agent=agents)
    engine.batch_register([HERE], [0x1000])
    yield engine
    agents.hangs = False
    engine.close()


def blocks(count: int) -> list[Block]:
    """Blocks that are not neighbours."""
    return [Block(HERE + 32 * i, THERE + 64 * i, 16) for i in range(count)]


def read(engine: NixlTransferEngine, count: int = 3, timeout: float | None = None) -> list[str]:
    """Outcomes of a read; raises its error."""
    transfer = engine.begin(PEER, TransferOp.READ, blocks(count), timeout=timeout)
    assert transfer.wait(20)
    if transfer.error is not None:
        raise transfer.error
    return [one.value for one in transfer.outcomes]


def test_each_peer_has_one_agent_with_all_memory(
    engine: NixlTransferEngine, agents: Agents
) -> None:
    assert read(engine) == ["done"] * 3 == read(engine)
    home, link = agents.made
    assert wait_until(lambda: home.num_progressed > 1, 20), "peers can connect"
    assert engine.batch_register([0x5000], [16]) == 0
    assert home.registered == link.registered == {HERE: 0x1000, 0x5000: 16}
    assert engine.batch_deregister([0x5000]) == 0
    assert home.registered == link.registered == {HERE: 0x1000}
    engine.forget_peer(PEER)
    engine.forget_peer(PEER)
    assert link.has_ended and not home.has_ended
    assert read(engine) == ["done"] * 3 and len(agents.made) == 3
    engine.close()
    assert all(one.has_ended for one in agents.made)


def test_a_session_is_the_metadata_of_the_memory(engine: NixlTransferEngine) -> None:
    name, metadata = parse_session_id(engine.get_session_id())
    assert name.startswith("127.0.0.1#") and metadata == b"[4096]"
    engine.batch_register([0x5000], [16])
    assert parse_session_id(engine.get_session_id()) == (name, b"[4096, 20480]")


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:15001",
        "",
        f"nixl:{NAME}:",
        f"nixl:{NAME}:!",
        f"nixl:{NAME}:\u00e9",
        "nixl::YQ==",
        "nixl:there:YQ==",
        f"nixl:a\n{NAME}:YQ==",
        f"nixl:{300 * 'a'}{NAME}:YQ==",
        f"nixl:{NAME}\n:YQ==",
        f"nixl:{NAME}:{(1 << 21) * 'YWFh'}",
    ],
    ids=range(11),
)
def test_other_sessions_are_refused(engine: NixlTransferEngine, text: str) -> None:
    with pytest.raises(ValueError, match="is no session id of NIXL"):
        engine.begin(text, TransferOp.READ, blocks(1), timeout=None)


def test_a_peer_that_lies_about_its_memory_is_asked_once(
    engine: NixlTransferEngine, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    begin = FakeAgent.begin_read

    def begin_read(agent: FakeAgent, peer: str, requests: Sequence[Request]) -> int:
        asked.append(len(requests))
        return begin(agent, peer, requests)

    monkeypatch.setattr(FakeAgent, "begin_read", begin_read)
    agents.unknown = {THERE + 64}
    with pytest.raises(PeerError, match=r"there#0+ has not registered the addresses that it named"):
        read(engine)
    assert asked == [3]
    agents.unknown = set()
    assert read(engine) == ["done"] * 3
    assert len(agents.made) == 2, "the link is as good as before"


def test_a_peer_that_is_forgotten_keeps_its_link_while_it_is_read(
    engine: NixlTransferEngine, agents: Agents
) -> None:
    agents.hangs = True
    under_way = engine.begin(PEER, TransferOp.READ, blocks(1), timeout=None)
    assert wait_until(lambda: len(agents.made) == 2 and len(agents.made[1].reads) == 1, 20)
    engine.forget_peer(PEER)
    assert not under_way.wait(0.01) and not agents.made[1].has_ended
    agents.hangs = False
    assert under_way.wait(20) and under_way.is_done
    assert wait_until(lambda: agents.made[1].has_ended, 20)


def test_a_peer_that_is_forgotten_while_it_connects_keeps_no_link(
    engine: NixlTransferEngine, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = FakeAgent.connect

    def forget_first(agent: FakeAgent, metadata: bytes) -> str:
        engine.forget_peer(PEER)
        return connect(agent, metadata)

    monkeypatch.setattr(FakeAgent, "connect", forget_first)
    assert read(engine) == ["done"] * 3
    assert wait_until(lambda: agents.made[1].has_ended, 20)


def test_a_link_that_cannot_be_made_ends(engine: NixlTransferEngine, agents: Agents) -> None:
    agents.refuses_memory = True
    with pytest.raises(TransferError, match="NIXL refused"):
        read(engine)
    assert agents.made[1].has_ended and engine.describe()["engine_objects"] == 1
    agents.refuses_memory = False
    assert read(engine) == ["done"] * 3


def test_peers_connect_after_one_has_failed_to(
    engine: NixlTransferEngine, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, counted = agents.made[0], FakeAgent.progress

    def fail(agent: FakeAgent) -> None:
        monkeypatch.setattr(FakeAgent, "progress", counted)
        raise RemoteFailed("NIXL_ERR_BACKEND")

    monkeypatch.setattr(FakeAgent, "progress", fail)
    assert wait_until(lambda: FakeAgent.progress is counted, 20)
    since = home.num_progressed
    assert wait_until(lambda: home.num_progressed > since, 20)


def test_local_memory_is_checked(engine: NixlTransferEngine, agents: Agents) -> None:
    with pytest.raises(UnknownRange):
        engine.begin(PEER, TransferOp.READ, [Block(0x5000, THERE, 1)], timeout=None)
    agents.refuses_memory = True
    with pytest.raises(RegistrationError, match="NIXL refused"):
        engine.batch_register([0x5000], [16])
    assert not engine.is_registered(0x5000, 16)


def test_memory_that_one_agent_refuses_is_registered_with_none(
    engine: NixlTransferEngine, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(engine)
    home, link = agents.made

    def refuse(ranges: dict[int, int]) -> None:
        assert 0x5000 in home.registered
        raise RuntimeError("NIXL refused")

    monkeypatch.setattr(link, "register", refuse)
    with pytest.raises(RegistrationError, match="NIXL refused"):
        engine.batch_register([0x5000], [16])
    assert home.registered == link.registered == {HERE: 0x1000}
    assert not engine.is_registered(0x5000, 16)


def test_a_failed_read_ends_its_agent(engine: NixlTransferEngine, agents: Agents) -> None:
    agents.broken = {THERE + 64}
    with pytest.raises(PeerUnreachable, match=r"UCX cannot read its memory.*UCX_PROTO_EMULATION"):
        read(engine)
    assert agents.made[1].has_ended
    agents.broken = set()
    assert read(engine) == ["done"] * 3
    agents.broken = {THERE}
    with pytest.raises(PeerUnreachable, match=r"ended during a transfer \(NIXL_ERR_REMOTE"):
        read(engine)
    agents.connects = False
    with pytest.raises(PeerUnreachable, match="it is not running"):
        read(engine)
    assert all(one.has_ended for one in agents.made[1:])


def test_memory_is_free_once_the_agent_of_a_hanging_read_has_ended(
    engine: NixlTransferEngine, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents.hangs = True
    first = engine.begin(PEER, TransferOp.READ, blocks(2), timeout=None)
    second = engine.begin(PEER, TransferOp.READ, blocks(1), timeout=None)
    assert wait_until(lambda: len(agents.made) == 2 and len(agents.made[1].reads) == 2, 20)
    first.abandon()
    with pytest.raises(RangeInUse):
        engine.batch_deregister([HERE])
    assert not first.wait(0.01) and first.in_flight == [0, 1]
    ended = threading.Event()
    end = FakeAgent.end

    def slow_end(agent: FakeAgent) -> None:
        assert not first.is_settled and not second.is_settled, "bytes may still arrive"
        end(agent)
        ended.set()

    monkeypatch.setattr(FakeAgent, "end", slow_end)
    monkeypatch.setattr(nixl_transfer_engine, "STALLED_AFTER_S", 0.0)
    late = engine.begin(PEER, TransferOp.READ, blocks(1), timeout=None)
    for transfer in (first, second, late):
        assert transfer.wait(20)
    assert ended.is_set() and isinstance(late.error, PeerStalled)
    assert {type(first.error), type(second.error)} == {PeerUnreachable}
    monkeypatch.setattr(FakeAgent, "end", end)
    engine.batch_deregister([HERE])


def test_the_end_waits_for_reads_that_hang(engine: NixlTransferEngine, agents: Agents) -> None:
    agents.hangs = True
    hanging = engine.begin(PEER, TransferOp.READ, blocks(1), timeout=None)
    assert wait_until(lambda: len(agents.made) == 2 and len(agents.made[1].reads) == 1, 20)
    engine.close()
    assert hanging.is_settled and all(one.has_ended for one in agents.made)
    assert not engine._progress.is_alive() and not engine._threads.num_busy
    late = _Peer(engine, "there", b"meta")
    with pytest.raises(PeerUnreachable, match="this process shuts down"), late.link():
        pass


def test_the_end_waits_for_a_call_in_progress(
    engine: NixlTransferEngine, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def progress(agent: FakeAgent) -> None:
        begun.set()
        assert goes_on.wait(20)

    monkeypatch.setattr(FakeAgent, "progress", progress)
    assert begun.wait(20)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive() and not agents.made[0].has_ended
    goes_on.set()
    closing.join(20)
    assert agents.made[0].has_ended


def test_the_engine_of_a_process_ends_with_it() -> None:
    """Python would end the threads in the middle of a call of NIXL, and C++ then the process."""
    script = """
import sys, time
from sglang.srt.distributed.device_communicators import nixl_transfer_engine as module
class Agent:
    def progress(self): pass
    def end(self): print("ended", flush=True)
engine = module.NixlTransferEngine
module.NixlTransferEngine = lambda *_: engine("127.0.0.1", make_agent=lambda name: Agent())
module.init_nixl_transfer_engine("127.0.0.1", None)
sys.exit(3)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("ended\n", 3), ended.stderr


def test_a_read_begins_only_in_time(engine: NixlTransferEngine, agents: Agents) -> None:
    assert read(engine, timeout=-1.0) == ["not sent"] * 3
    assert not agents.made[1].reads


def test_a_block_is_not_done_before_its_last_read(
    engine: NixlTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is larger than a read, and its time is over behind the first."""
    engine.batch_register([1 << 40], [BATCH_BYTES + 1])
    asked: list[int] = []
    begin = Transfer.begin

    def begin_once(transfer: Transfer, first: int, last: int, deadline: float | None) -> bool:
        asked.append(first)
        return begin(transfer, first, last, deadline if len(asked) == 1 else -1.0)

    monkeypatch.setattr(Transfer, "begin", begin_once)
    large = [Block(1 << 40, THERE, BATCH_BYTES + 1)]
    transfer = engine.begin(PEER, TransferOp.READ, large, timeout=None)
    assert transfer.wait(20) and transfer.error is None
    assert [one.value for one in transfer.outcomes] == ["not sent"] and asked == [0, 0]


def test_a_read_has_the_time_that_its_bytes_take(
    engine: NixlTransferEngine, agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transfer_engine, "STALLED_AFTER_S", 0.0)
    monkeypatch.setattr(nixl_transfer_engine, "LEAST_RATE", 0.1)
    agents.hangs = True
    transfer = engine.begin(PEER, TransferOp.READ, blocks(1), timeout=None)
    assert not transfer.wait(0.05)
    agents.hangs = False
    assert transfer.wait(20) and transfer.error is None


def test_without_a_thread_no_memory_stays_in_use(
    engine: NixlTransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(work: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine._threads, "submit", no_thread)
    with pytest.raises(Exception, match="no thread for the transfer"):
        read(engine)
    engine.batch_deregister([HERE])


def test_pages_in_a_gpus_memory_are_refused_before_nixl_starts() -> None:
    args = types.SimpleNamespace(pools=[types.SimpleNamespace(device=torch.device("cuda:0"))])
    with pytest.raises(ValueError, match="the pages are on cuda:0: use mooncake"):
        make_nixl_manager(cast(Any, args), DisaggregationMode.PREFILL, cast(Any, None))
