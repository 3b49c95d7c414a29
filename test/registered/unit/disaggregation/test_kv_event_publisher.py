"""The publisher of KV events, with real sockets: order, numbers, replays, slow and bad peers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import psutil
import pytest
import zmq

from sglang.srt.arg_groups.kv_events_config import KVEventsConfig
from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    KVEventBatch,
    ZmqEventPublisher,
)
from sglang.srt.utils.network import get_free_ports, wait_until
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


SLOW = config_of(hwm=2, buffer_steps=1)


@pytest.mark.parametrize("publisher", [SLOW], indirect=True)
def test_a_subscriber_that_hangs_delays_nobody_and_takes_no_memory(
    publisher: ZmqEventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    hanging = context.socket(zmq.SUB)
    hanging.setsockopt(zmq.RCVHWM, 1)
    hanging.setsockopt(zmq.SUBSCRIBE, b"")
    hanging.connect(SLOW.endpoint)
    join(publisher, hanging)
    large = [BlockRemoved(block_hashes=list(range(10**9, 10**9 + 50_000)), medium="GPU")]
    memory = psutil.Process().memory_info
    before = memory().rss
    for _ in range(400):
        publisher.publish(large)
    publisher.publish(event(3))
    asker = socket_to(context, zmq.REQ, SLOW.replay_endpoint)
    assert wait_until(publisher._queue.empty, 60)
    # All 400, of 250 KB each, were sent, and most of them dropped for the one that hangs.
    assert memory().rss - before < 50e6
    asker.send((publisher._next - 1).to_bytes(8, "big"))
    assert decoded(asker.recv_multipart()[1]) == 3


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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
