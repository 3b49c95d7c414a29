"""The publisher of KV events, with real sockets: order, numbers, replays, slow and bad peers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from unittest.mock import patch

import msgspec
import psutil
import pytest
import zmq

from sglang.srt.arg_groups.kv_events_config import KVEventsConfig
from sglang.srt.constants import MIB
from sglang.srt.disaggregation import kv_events
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    KVEventBatch,
    ZmqEventPublisher,
    endpoints_to_bind,
)
from sglang.srt.utils.network import get_free_ports, own_addresses_of, wait_until
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

END = -1


@pytest.fixture(name="context")
def make_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def config_of(**settings: object) -> KVEventsConfig:
    ports = [f"tcp://127.0.0.1:{port}" for port in get_free_ports(2)]
    values = {"endpoint": ports[0], "replay_endpoint": ports[1], "topic": "kv", **settings}
    return msgspec.convert(values, KVEventsConfig)


@pytest.fixture(name="publisher")
def make_publisher(request: pytest.FixtureRequest) -> Iterator[ZmqEventPublisher]:
    publisher = ZmqEventPublisher(request.param)
    yield publisher
    publisher.shutdown()


def socket_to(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str | None
) -> zmq.Socket[bytes]:
    assert endpoint is not None
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, 20_000)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
    socket.connect(endpoint)
    return socket


def event(number: int) -> list[BlockRemoved]:
    return [BlockRemoved(block_hashes=[number], medium="GPU")]


def decoded(payload: bytes) -> int:
    """The block of a batch of `event`."""
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    (only,) = batch.events
    assert isinstance(only, BlockRemoved) and batch.attn_dp_rank == 0
    return only.block_hashes[0]


def join(publisher: ZmqEventPublisher, subscriber: zmq.Socket[bytes]) -> int:
    """Publish until the subscriber hears something; returns the number that it heard."""

    def heard() -> bool:
        publisher.publish(event(0))
        return bool(subscriber.poll(20))

    assert wait_until(heard, 20)
    return int.from_bytes(subscriber.recv_multipart()[1], "big")


CONFIG = config_of(buffer_steps=3)


@pytest.mark.parametrize("publisher", [CONFIG], indirect=True)
def test_batches_come_in_order_and_the_last_ones_again(
    publisher: ZmqEventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    subscriber = socket_to(context, zmq.SUB, CONFIG.endpoint)
    number = join(publisher, subscriber)
    for block in (7, 8, 9):
        publisher.publish(event(block))
    heard: list[tuple[int, int]] = []
    while not heard or heard[-1][1] != 9:
        topic, numbers, payload = subscriber.recv_multipart()
        assert topic == b"kv"
        heard.append((int.from_bytes(numbers, "big"), decoded(payload)))
    last = heard[-1][0]
    assert [one for one, _ in heard] == list(range(number + 1, last + 1))
    # A REQ socket takes the first answer alone.
    asker = socket_to(context, zmq.REQ, CONFIG.replay_endpoint)
    asker.send((last - 1).to_bytes(8, "big"))
    assert asker.recv_multipart()[0] == (last - 1).to_bytes(8, "big")
    dealer = socket_to(context, zmq.DEALER, CONFIG.replay_endpoint)
    dealer.send_multipart((b"", (0).to_bytes(8, "big")))
    got = [dealer.recv_multipart() for _ in range(4)]
    assert [int.from_bytes(one[1], "big", signed=True) for one in got] == [
        last - 2, last - 1, last, END,
    ]  # fmt: skip
    assert [decoded(one[2]) for one in got[:3]] == [7, 8, 9]


STRANGE = config_of()


@pytest.mark.parametrize("publisher", [STRANGE], indirect=True)
def test_bad_requests_and_askers_that_leave_harm_nobody(
    publisher: ZmqEventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    publisher.publish(event(5))
    for frames in ([b""], [b"", b"x"], [b"", b"", b""], [b"", bytes(5000)], [b"", bytes(9)]):
        stranger = socket_to(context, zmq.DEALER, STRANGE.replay_endpoint)
        stranger.send_multipart(frames)
        stranger.close(linger=1000)
    dealer = socket_to(context, zmq.DEALER, STRANGE.replay_endpoint)

    def has_answer() -> bool:
        dealer.send_multipart((b"", bytes(8)))
        return bool(dealer.poll(100))

    assert wait_until(has_answer, 20)
    assert decoded(dealer.recv_multipart()[2]) == 5


def hanging_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str | None
) -> zmq.Socket[bytes]:
    """One that has room for hardly anything, and whose owner never reads."""
    assert endpoint is not None
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RCVBUF, 4096)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    return socket


def large(number: int) -> list[BlockRemoved]:
    """Events that become a payload of 90 KB."""
    return [BlockRemoved(block_hashes=[number] + [10**9] * 18_000, medium="GPU")]


def publish_large(publisher: ZmqEventPublisher, count: int) -> None:
    """Publish `count` large batches, no faster than the thread sends them."""
    for _ in range(count):
        publisher.publish(large(publisher._next))
        assert wait_until(lambda: publisher._queue.qsize() < 2, 20, interval=0.001)
    assert wait_until(lambda: publisher._num_taken == publisher._num_put, 20)


def answers(asker: zmq.Socket[bytes]) -> list[int]:
    """The numbers of an answer, to its end."""
    numbers: list[int] = []
    while (number := int.from_bytes(asker.recv_multipart()[1], "big", signed=True)) != END:
        numbers.append(number)
    return numbers


SLOW = config_of(hwm=2, buffer_steps=1)


@pytest.mark.parametrize("publisher", [SLOW], indirect=True)
def test_a_subscriber_that_hangs_delays_nobody_and_takes_no_memory(
    publisher: ZmqEventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    hanging = hanging_socket(context, zmq.SUB, SLOW.endpoint)
    join(publisher, hanging)
    memory = psutil.Process().memory_info
    before = memory().rss
    publish_large(publisher, 800)
    publisher.publish(event(3))
    asker = socket_to(context, zmq.REQ, SLOW.replay_endpoint)
    assert wait_until(publisher._queue.empty, 60)
    # All 800, of 90 KB each, were sent, and most of them dropped for the one that hangs.
    assert memory().rss - before < 40e6
    asker.send((publisher._next - 1).to_bytes(8, "big"))
    assert decoded(asker.recv_multipart()[1]) == 3


def test_what_subscribers_do_not_read_is_bounded_and_they_are_disconnected(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscriber that hangs costs others batches for a while, which they may ask for."""
    monkeypatch.setattr(kv_events, "_MOST_UNREAD", 1_000_000)
    monkeypatch.setattr(kv_events, "_STUCK_MS", 500)
    config = config_of()
    publisher = ZmqEventPublisher(config)
    try:
        hanging = hanging_socket(context, zmq.SUB, config.endpoint)
        join(publisher, hanging)
        publish_large(publisher, 100)
        assert publisher._unread.size() <= 1_000_000
        asker = socket_to(context, zmq.DEALER, config.replay_endpoint)
        asker.send_multipart((b"", bytes(8)))
        assert answers(asker) == list(range(publisher._next))
        fresh = socket_to(context, zmq.SUB, config.endpoint)

        def hears_large() -> bool:
            publish_large(publisher, 1)
            return bool(fresh.poll(20)) and len(fresh.recv_multipart()[2]) > 50_000

        assert wait_until(hears_large, 20), "the one that hangs is still connected"
    finally:
        publisher.shutdown()


def test_kept_batches_are_bounded_in_bytes(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MOST_KEPT", 500_000)
    config = config_of()
    publisher = ZmqEventPublisher(config)
    try:
        publish_large(publisher, 20)
        asker = socket_to(context, zmq.DEALER, config.replay_endpoint)
        asker.send_multipart((b"", bytes(8)))
        assert answers(asker) == [15, 16, 17, 18, 19]
        huge = [BlockRemoved(block_hashes=[10**9] * 200_000, medium="GPU")]
        publisher.publish(huge)
        asker.send_multipart((b"", bytes(8)))
        assert wait_until(lambda: publisher._num_taken == publisher._num_put, 20)
        asker.send_multipart((b"", bytes(8)))
        answers(asker)
        assert answers(asker) == [20], "the last one is always kept"
    finally:
        publisher.shutdown()


@pytest.mark.parametrize("publisher", [config_of()], indirect=True)
def test_askers_that_do_not_read_wait_with_little_and_lose_nothing(
    publisher: ZmqEventPublisher,
    context: zmq.Context[zmq.Socket[bytes]],
    request: pytest.FixtureRequest,
) -> None:
    endpoint = request.node.callspec.params["publisher"].replay_endpoint
    publish_large(publisher, 100)
    hanging = [hanging_socket(context, zmq.DEALER, endpoint) for _ in range(3)]
    for asker in hanging:
        asker.send_multipart((b"", bytes(8)))
    prompt = socket_to(context, zmq.DEALER, endpoint)
    for first in (98, 99):  # A second request waits for the answer to the first.
        prompt.send_multipart((b"", first.to_bytes(8, "big")))
    assert [answers(prompt), answers(prompt)] == [[98, 99], [99]]
    assert wait_until(lambda: len(publisher._askers) == 3, 20)
    unread = [asker.unread.size() for asker in publisher._askers.values()]
    assert max(unread) < 1.2 * MIB, unread
    for asker in hanging[:2]:
        assert answers(asker) == list(range(100))
    hanging[2].close(linger=0)
    assert wait_until(lambda: not publisher._askers, 20)


def test_askers_wait_for_their_turn_until_those_that_hang_are_disconnected(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MOST_ANSWERED", 2)
    monkeypatch.setattr(kv_events, "_STUCK_MS", 2000)
    config = config_of()
    publisher = ZmqEventPublisher(config)
    try:
        publish_large(publisher, 60)
        hanging = [hanging_socket(context, zmq.DEALER, config.replay_endpoint) for _ in range(3)]
        for one in hanging:
            for _ in range(40):  # More requests than one may have.
                one.send_multipart((b"", bytes(8)))
        assert wait_until(lambda: len(publisher._askers) == 3, 20)
        assert [asker.unread.size() > 0 for asker in publisher._askers.values()][2] is False
        asker = socket_to(context, zmq.DEALER, config.replay_endpoint)
        asker.send_multipart((b"", bytes(8)))
        assert answers(asker) == list(range(60))
        assert publisher._bad.count >= 24
    finally:
        publisher.shutdown()


def test_batches_beyond_the_numbers_that_may_wait_leave_a_gap(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_MOST_WAITING", 20_000)
    publisher = ZmqEventPublisher(config_of())
    publisher.shutdown()  # Nobody takes batches any more.
    for number in range(3):
        publisher.publish(large(number))
    assert publisher._next == 3 and publisher._queue.qsize() == 1
    assert "18001 hashes and tokens wait already, of at most 20000" in caplog.text


def test_batches_beyond_the_queue_leave_a_gap(caplog: pytest.LogCaptureFixture) -> None:
    publisher = ZmqEventPublisher(config_of(max_queue_size=1))
    publisher.shutdown()  # Nobody takes batches any more.
    for number in range(3):
        publisher.publish(event(number))
    assert publisher._next == 3
    assert "dropped a bad batch of KV events (2 so far): 1 wait already: raise" in caplog.text


def test_a_port_in_use_is_named_with_the_remedy() -> None:
    config = config_of()
    first = ZmqEventPublisher(config)
    try:
        with pytest.raises(
            ValueError, match=r"endpoint 'tcp:.*in use.*: name a free port"
        ) as caught:
            ZmqEventPublisher(config)
        assert "\n" not in str(caught.value)
    finally:
        first.shutdown()


# -- endpoints -----------------------------------------------------------------------------------


def own_hosts() -> list[str]:
    """Every kind of host that means this machine."""
    hosts = ["localhost", "127.0.0.1", "127.0.0.9"]
    for name, addresses in psutil.net_if_addrs().items():
        found = [one for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        hosts += [f"[{one.address}]" if ":" in one.address else one.address for one in found]
        if any(one.family == socket.AF_INET for one in found):
            hosts.append(name)
    if own_addresses_of(socket.gethostname()):
        hosts.append(socket.gethostname())
    return list(dict.fromkeys(hosts))


@pytest.mark.parametrize("host", ["*", "0.0.0.0", *own_hosts()])
def test_every_name_of_this_machine_is_bound(
    host: str, context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """A name that means all addresses causes a warning."""
    config = config_of(endpoint=f"tcp://{host}:{get_free_ports(1)[0]}", replay_endpoint=None)
    publisher = ZmqEventPublisher(config)
    try:
        assert all(endpoints_to_bind(config.endpoint))
        warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert len(warnings) == (host in ("*", "0.0.0.0")), warnings
        assert all(f"endpoint {config.endpoint} is open on all" in line for line in warnings)
        # Subscribers know the host, or for names of interfaces and wildcards the address.
        name = host.strip("[]")
        own = psutil.net_if_addrs().get(name, [])
        address = next((one.address for one in own if one.family == socket.AF_INET), name)
        address = "127.0.0.1" if address in ("*", "0.0.0.0") else address
        port = config.endpoint.rpartition(":")[2]
        subscriber = context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.IPV6, ":" in address)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        subscriber.connect(
            f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
        )
        join(publisher, subscriber)
    finally:
        publisher.shutdown()


def test_other_hosts_are_connected_to(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Names that nobody knows are other hosts: they may come to be known later."""
    for host in ("192.0.2.77", "[2001:db8::7]", "host.invalid"):
        assert endpoints_to_bind(f"tcp://{host}:5557") == []
    # A subscriber that binds is reached by the name of another host, as in a cluster.
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    with patch.object(kv_events, "own_addresses_of", return_value=[]):
        publisher = ZmqEventPublisher(
            config_of(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None)
        )
    try:
        join(publisher, subscriber)
    finally:
        publisher.shutdown()
