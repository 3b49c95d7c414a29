"""Interface of the transport between prefill and decode servers, under SGLang's names.

Each rank has a manager. A prefill server has a sender for each request, a decode server a receiver;
both are called by the scheduler's thread, and never block. The decode server reads: a sender says
which of its pages hold the prompt, and a receiver reads them into its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

    from sglang.srt.arg_groups.disaggregation import DisaggregationMode
    from sglang.srt.disaggregation.base.bootstrap_route import Route
    from sglang.srt.distributed.rank_group import RankGroup
    from sglang.srt.mem_cache.device.base_device_pool import BaseDevicePool
    from sglang.srt.messages.first_token import FirstToken

BootstrapAddr: TypeAlias = tuple[str, int]  # host and port


class KVPoll(IntEnum):
    """Progress of a sender or a receiver. The least of all ranks counts."""

    Failed = 0
    Bootstrapping = 1
    """Sender: no decode server asks for the prompt. Receiver: the prefill server has not said that
    it has the request."""
    WaitingForInput = 2
    """Sender: a decode server asks for the prompt. Receiver: it needs slots."""
    Transferring = 3
    """Sender: all is computed, and the decode server reads. Receiver: it reads."""
    Success = 4
    """The decode server has the prompt and its metadata."""


class KVTransferError(RuntimeError):
    """A request's transfer has failed; the message says why."""


@dataclass(frozen=True, slots=True)
class KVTransferMetric:
    """Amounts that a receiver has read.

    Attributes:
        transfer_latency_s: Seconds with reads in flight.
        transfer_total_bytes: Bytes of pages and states.
        aux_bytes: Bytes of metadata, by the way that it came.
        checked: Pages and states by the outcome of their check, one for each pool.
    """

    transfer_latency_s: float = 0.0
    transfer_total_bytes: int = 0
    aux_bytes: Mapping[str, int] = field(default_factory=dict)
    checked: Mapping[str, int] = field(default_factory=dict)


class AuxBuffers(Protocol):
    """Rows for metadata in memory that the transport can read; see `MetadataBuffers`. Any
    thread."""

    def alloc(self, timeout: float = 0.0) -> int | None: ...
    def free(self, free_index: int) -> None: ...
    def clear(self, index: int) -> None: ...
    def address(self, index: int) -> int: ...
    def allocations(self) -> dict[int, int]: ...
    def get_buf_infos(self) -> tuple[list[int], list[int], list[int]]: ...
    def get_buf(self, index: int, room: int) -> FirstToken: ...
    def set_buf(self, index: int, room: int, metadata: FirstToken) -> bool: ...

    device: torch.device
    row_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVArgs:
    """The memory of a rank that its transport moves. Addresses, lengths and sizes of items are the
    pools' own (`get_contiguous_buf_infos`).

    Attributes:
        pools: Pools of the model, of pages and of recurrent states.
        weights_identity: Identity of the weights; only servers with the same exchange pages.
        dtype: Dtype in which the model computes.
        aux_buffers: Rows for metadata; None: it is sent over the control connection.
        dp_rank: The DP group that `ranks` are, among `dp_size` of the server.
    """

    ranks: RankGroup
    pools: Sequence[BaseDevicePool]
    weights_identity: str
    dtype: torch.dtype
    aux_buffers: AuxBuffers | None = None
    dp_rank: int = 0
    dp_size: int = 1


class ServerSettings(Protocol):
    """The part of `ServerArgs` that a transport uses."""

    host: str
    disaggregation_secret: str | None
    disaggregation_ib_device: str | None
    enable_pd_role_switch: bool


class BaseKVManager(ABC):
    """A rank's end of the transport."""

    @abstractmethod
    def __init__(
        self, args: KVArgs, disaggregation_mode: DisaggregationMode, server_args: ServerSettings
    ) -> None:
        """Register the memory, and listen. A collective of `args.ranks`."""

    @abstractmethod
    def register_to_bootstrap(self) -> list[Route]:
        """Routes of all ranks, for the bootstrap server; [] on a decode server. A collective."""

    @abstractmethod
    def in_role(self, disaggregation_mode: DisaggregationMode) -> BaseKVManager:
        """A manager over the same memory for the other role. This one stays as it is. A collective.
        Raises ValueError, the same on all ranks, if it cannot listen."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, and refuse new transfers. Transfers in flight end by themselves."""


class KVPoller(Protocol):
    """A transfer on whose state the ranks agree; see `poll_and_all_reduce`."""

    bootstrap_room: int

    @abstractmethod
    def poll(self) -> KVPoll:
        """Progress on this rank."""

    @abstractmethod
    def failure_exception(self) -> NoReturn:
        """Raise a KVTransferError with the reason for `KVPoll.Failed`."""


class BaseKVSender(KVPoller):
    """A request whose prompt this prefill server computes for a decode server.

    Args:
        bootstrap_addr: The bootstrap server that the request names.
        bootstrap_room: Number of the room. No other request has it; `clear` was called on the
            sender of an earlier one.
    """

    @abstractmethod
    def __init__(
        self, mgr: BaseKVManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None: ...

    @property
    @abstractmethod
    def num_sent(self) -> int:
        """Number of pages given to `send`."""

    @abstractmethod
    def send(self, kv_indices: Sequence[int]) -> None:
        """Let the next pages of the prompt be read. They are not written to until `abort`."""

    @abstractmethod
    def send_aux(self, metadata: FirstToken) -> None:
        """Let the metadata be read; all pages are sent."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End the transfer. The pages may be written to from now on. Idempotent.

        Args:
            reason: Sent to a decode server that has not read all.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget the room after `abort`. Until then decode servers that ask for it hear of its
        end."""


class BaseKVReceiver(KVPoller):
    """A request whose prompt a prefill server computes for this decode server. `Failed` may come
    while reads are still in flight.

    Attributes:
        metadata: Results of the prefill, once `poll` is `Success`; None: not yet, or the transport
            moves nothing.
    """

    metadata: FirstToken | None

    @abstractmethod
    def __init__(
        self, mgr: BaseKVManager, bootstrap_addr: BootstrapAddr, bootstrap_room: int
    ) -> None: ...

    @abstractmethod
    def init(self) -> None:
        """Ask the prefill server whether it has the request. It reserves nothing."""

    @abstractmethod
    def send_metadata(
        self,
        kv_indices: Sequence[int],
        *,
        state_indices: Sequence[int] = (),
        decode_prefix_len: int = 0,
        request_row: int | None = None,
    ) -> None:
        """Ask for the prompt, and read it. `poll` was `WaitingForInput`. All ranks call this for
        the same requests in the same order.

        Args:
            kv_indices: Pages of this server for the rest of the prompt.
            state_indices: Slot for the prompt's recurrent state; (): the model has none.
            decode_prefix_len: Number of leading tokens whose pages this server has already; a
                multiple of the page size.
            request_row: The request's row, which has its state without snapshots; None: the model
                has none.
        """

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """True if no read into the pages is in flight, or will begin."""

    @abstractmethod
    def get_transfer_metric(self) -> KVTransferMetric:
        """Amount and duration of the reads so far."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Give the prompt up. The prefill server gets the reason, also before `init`."""


class BaseKVBootstrapServer(ABC):
    """Gives decode servers the routes of a prefill server's ranks."""

    @abstractmethod
    def __init__(self, host: str, port: int) -> None:
        """Listen. Raises ValueError if that is not possible."""

    @abstractmethod
    def register(self, route: Route) -> None:
        """Register a rank; replaces the one registered before."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening. Idempotent."""
