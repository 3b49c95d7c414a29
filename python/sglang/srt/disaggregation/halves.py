"""Makes the half of a prefill or a decode server: memory that peers read, sockets, threads."""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import zmq

from sglang.srt.disaggregation.common.bootstrap_client import find
from sglang.srt.disaggregation.common.geometry import PoolGeometry
from sglang.srt.disaggregation.common.remote_prompt import (
    STEPS,
    FindEndpoint,
    Mover,
    Patience,
    RemotePrompt,
    decline_room,
)
from sglang.srt.disaggregation.common.room_desk import RoomDesk
from sglang.srt.disaggregation.decode import DecodeHalf
from sglang.srt.disaggregation.prefill import PrefillHalf
from sglang.srt.distributed.device_communicators.call_threads import CallThreads
from sglang.srt.environ import EnvInt, envs
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.mem_cache.device.base_device_pool import PagedDevicePool
from sglang.srt.utils.network import address_for_peers

if TYPE_CHECKING:
    from sglang.srt.managers.messages.io_struct import Bootstrap
    from sglang.srt.managers.scheduler.half import Half
    from sglang.srt.managers.scheduler.parts import Holder
    from sglang.srt.managers.scheduler.state import SchedulerState
    from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool

logger = logging.getLogger(__name__)

_FIND_S: Final = 5.0
"""For one question to a bootstrap server."""
MakeHalf = Callable[["SchedulerState", "Holder"], "Half"]
PREFILL: Final = "prefill"
DECODE: Final = "decode"
_MAX_DECLINING: Final = 32
"""At once."""
_MAX_CONVERSATIONS: Final = 16_384
"""At once; ZMQ's own limit is 1023, and large servers hold more requests."""


class Engine(Mover, Protocol):
    """What halves ask of the Transfer Engine; see `MooncakeTransferEngine`."""

    def batch_register(self, ptrs: Sequence[int], lengths: Sequence[int]) -> int: ...
    def get_session_id(self) -> str: ...


@dataclass(frozen=True, slots=True)
class HalfServer:
    """What of a rank other servers find."""

    make: MakeHalf
    route: dict[str, str]
    """For the bootstrap server; empty on a decode server, which nobody looks for."""


def make_half_server(
    mode: str,
    host: str,
    pools: Sequence[BaseDevicePool],
    weights_identity: str,
    engine: Engine,
    find_endpoint: FindEndpoint | None = None,
) -> HalfServer:
    """Register the pools with the Transfer Engine, and listen.

    Args:
        mode: `prefill` or `decode`.
        host: Where this server listens.
        pools: Of the model.
        find_endpoint: How a decode server finds prefill servers; None: by their bootstrap servers.

    Raises:
        ValueError: A pool cannot be read by pages, the host is not this machine's, or a bound in
            the environment is not positive.
        RuntimeError: The transport refuses the memory.
    """
    geometry = PoolGeometry.of(pools, weights_identity)
    # Whole allocations: a peer on the same host maps those, and nothing smaller, over NVLink.
    ranges = device_runtime(pools[0].device).allocations_of(
        buffer
        for pool in pools
        if isinstance(pool, PagedDevicePool)
        for part in pool.parts
        for buffer in part
    )
    engine.batch_register(list(ranges), list(ranges.values()))
    if mode == PREFILL:
        return _prefill(host, geometry, engine)
    return HalfServer(_decode(geometry, engine, find_endpoint or _find_endpoint), {})


def _find_endpoint(host: str, port: int) -> str:
    return find(host, port, 0, _FIND_S).endpoint


def _prefill(host: str, geometry: PoolGeometry, engine: Engine) -> HalfServer:
    instance_id = uuid.uuid4().hex
    wait_s = _seconds(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)
    try:
        desk = RoomDesk(
            geometry.offer(instance_id, engine.get_session_id()),
            host,
            unwanted_s=wait_s,
            silent_s=_silence(),
        )
    except zmq.ZMQError as error:
        raise ValueError(f"--host {host}: cannot listen for decode servers: {error}") from error
    address = address_for_peers(host)
    bracketed = f"[{address}]" if ":" in address else address
    route = {"endpoint": f"tcp://{bracketed}:{desk.port}", "instance_id": instance_id}
    logger.info("decode servers are answered at %s, instance %s", *route.values())
    return HalfServer(lambda state, _: PrefillHalf(state, desk, wait_s), route)


class PrefillServers:
    """Prefill servers, as a decode server sees them. Scheduler's thread.

    Threads: `disagg-prompt`, one for each prompt on its way; `disagg-decline`, one for each room
    that is being declined.

    Args:
        failure_prob: The share of prompts that fail by injection.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        mover: Mover,
        find_endpoint: FindEndpoint,
        patience: Patience,
        failure_prob: float = 0.0,
    ) -> None:
        self._geometry = geometry
        self._mover = mover
        self._find_endpoint = find_endpoint
        self._patience = patience
        self._failure_prob = failure_prob
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_CONVERSATIONS)
        self._threads = CallThreads("disagg-prompt")
        self._declining = CallThreads("disagg-decline")

    def begin(self, meeting: Bootstrap, pages: Sequence[int], first_page: int) -> RemotePrompt:
        """See `Remote`."""
        fails = random.random() < self._failure_prob
        prompt = RemotePrompt(
            meeting,
            pages,
            first_page,
            geometry=self._geometry,
            mover=self._mover,
            find_endpoint=self._find_endpoint,
            patience=self._patience,
            context=self._context,
            fails_at=random.choice(STEPS) if fails else None,
        )
        self._threads.submit(prompt.run)
        return prompt

    def decline(self, meeting: Bootstrap, reason: str) -> None:
        """See `Remote`. Where many are being declined, this one is not: the prefill server then
        waits in vain for a while."""
        if self._declining.num_busy < _MAX_DECLINING:
            self._declining.submit(lambda: self._decline(meeting, reason))

    def close(self) -> None:
        """Take no more work. What is under way ends by itself."""
        self._threads.close()
        self._declining.close()

    def _decline(self, meeting: Bootstrap, reason: str) -> None:
        decline_room(
            meeting,
            reason,
            find_endpoint=self._find_endpoint,
            patience=self._patience,
            context=self._context,
        )


def _decode(geometry: PoolGeometry, engine: Engine, find_endpoint: FindEndpoint) -> MakeHalf:
    patience = Patience(
        bootstrap=_seconds(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT),
        waiting=_seconds(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT),
        silence=_silence(),
    )
    failure_prob = envs.SGLANG_TEST_DISAGG_FAILURE_PROB.get()
    if failure_prob:
        logger.warning("%.0f%% of the requests fail, for tests", 100 * failure_prob)
    servers = PrefillServers(geometry, engine, find_endpoint, patience, failure_prob)
    return lambda state, holder: DecodeHalf(state, holder, servers, patience.bootstrap)


def _silence() -> int:
    """Seconds without a word after which the other server counts as gone."""
    interval = _seconds(envs.SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL)
    return interval * _seconds(envs.SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE)


def _seconds(field: EnvInt) -> int:
    """The value of a bound.

    Raises:
        ValueError: It is not positive.
    """
    value = field.get()
    if value < 1:
        raise ValueError(f"environment variable {field.name}={value}: it must be at least 1")
    return value
