"""Parts shared by prefill and decode, under SGLang's names: metadata rows, agreement, backends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias, overload

import msgspec
import numpy as np
import torch
import xxhash

# The types of the flags, under SGLang's names.
from sglang.srt.arg_groups.disaggregation import DisaggregationMode as DisaggregationMode
from sglang.srt.arg_groups.disaggregation import TransferBackend as TransferBackend
from sglang.srt.disaggregation.base.conn import (
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVArgs,
    KVPoll,
    KVPoller,
    KVTransferError,
    ServerSettings,
)
from sglang.srt.disaggregation.common.metadata_reader import (
    HEAD_BYTES,
    ROW_BYTES,
    pack_row,
    unpack_row,
)
from sglang.srt.disaggregation.fake.conn import FakeKVManager, FakeKVReceiver, FakeKVSender
from sglang.srt.disaggregation.mooncake.conn import (
    MooncakeKVReceiver,
    MooncakeKVSender,
    make_mooncake_manager,
)
from sglang.srt.disaggregation.nixl.conn import (
    NixlKVReceiver,
    NixlKVSender,
    make_nixl_manager,
)
from sglang.srt.distributed.device_communicators.mooncake_mem_pool import (
    CustomMemPool,
    check_mooncake_custom_mem_pool_enabled,
)
from sglang.srt.distributed.rank_group import RankGroup, RanksDiverged, gather_bytes
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_kinds import CUDA, device_kind
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.messages.first_token import FirstToken

NUM_ROWS: Final = 512
"""Rows of a rank, 2 MiB together without hidden states. Requests that need one more wait."""
_WORD_BYTES: Final = 4
POLL_SLOTS: Final = 512
"""Requests in one vector of statuses. Its size is fixed, since unequal ones abort gloo."""
_HEAD: Final = 2
_REASON_CHARS: Final = 512
"""Most characters of one rank's reason; the rest is cut off."""


def metadata_device(pages: torch.device) -> torch.device | None:
    """Device of `MetadataBuffers`; None: there are no rows, and metadata is sent over the control
    connection.

    The control connection is the default, since a decode server needs a message that a prompt is
    complete anyway, and a row is one more transfer. With INTRA_NODE_NVLINK metadata is read like
    pages: only that pool has rows on GPUs.

    Raises:
        ValueError: SGLANG_MOONCAKE_CUSTOM_MEM_POOL names no pool.
    """
    pool = check_mooncake_custom_mem_pool_enabled()
    is_inline = envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get()
    if is_inline or pool == CustomMemPool.NVLINK:
        return None
    if pool == CustomMemPool.INTRA_NODE_NVLINK:
        return pages if device_kind(str(pages)) is CUDA else torch.device("cpu")
    return None if is_inline is None else torch.device("cpu")


class ReqToMetadataIdxAllocator:
    """The free rows, at first all of them. Any thread."""

    def __init__(self, size: int) -> None:
        self._free = list(reversed(range(size)))
        self._changed = threading.Condition()

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, timeout: float = 0.0) -> int | None:
        """Take a row; None: none was free for `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._free), timeout):
                return None
            return self._free.pop()

    def free(self, free_index: int) -> None:
        with self._changed:
            assert free_index not in self._free, f"row {free_index} is free already"
            self._free.append(free_index)
            self._changed.notify()


class MetadataBuffers(ReqToMetadataIdxAllocator):
    """Rows for metadata (see `metadata_reader`). Decode servers read the rows of a prefill server
    into their own. Any thread; each row has one owner at a time.

    Attributes:
        row_bytes: Bytes of a row: `ROW_BYTES`, and those of a hidden state.

    Args:
        hidden_bytes: Bytes of the hidden state in `FirstToken`; 0: there is none.
    """

    def __init__(self, size: int, device: torch.device, hidden_bytes: int = 0) -> None:
        super().__init__(size)
        self.row_bytes = ROW_BYTES + _whole_words(hidden_bytes)
        self._rows = torch.zeros((size, self.row_bytes), dtype=torch.uint8, device=device)
        self.device = self._rows.device
        self._runtime = device_runtime(device)
        self._stream = self._runtime.make_side_stream()
        self._stream.follow()  # The stream must see the zeros.

    @classmethod
    def beside(cls, pages: torch.device, hidden_bytes: int = 0) -> MetadataBuffers | None:
        """The rows of a rank with pages on `pages`; None: see `metadata_device`."""
        device = metadata_device(pages)
        return None if device is None else cls(NUM_ROWS, device, hidden_bytes)

    def allocations(self) -> dict[int, int]:
        """Memory to register: address to bytes."""
        return self._runtime.allocations_of([self._rows])

    def get_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Address, bytes, and bytes of a row, of the only tensor."""
        return [self._rows.data_ptr()], [self._rows.nbytes], [self.row_bytes]

    def address(self, index: int) -> int:
        return self._rows.data_ptr() + index * self.row_bytes

    def set_buf(self, index: int, room: int, metadata: FirstToken) -> bool:
        """Write the metadata. Peers can read them after the return. False: they do not fit."""
        raw = pack_row(room, metadata, self.row_bytes)
        if raw is None:
            return False
        # Whole words: such short copies to a GPU do not wait behind long ones.
        raw = raw.ljust(_whole_words(len(raw)), b"\0")
        row = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        with self._runtime.waiting_for(self._stream):
            self._rows[index, : len(raw)].copy_(self._runtime.stage_to_device(row))
        return True

    def clear(self, index: int) -> None:
        """Mark a row as empty. Peers see that after the return."""
        with self._runtime.waiting_for(self._stream):
            self._rows[index, :HEAD_BYTES].zero_()

    def get_buf(self, index: int, room: int) -> FirstToken:
        """Decode the row's content for `room`. Raises BadRow if the row is empty, or has other
        content."""
        with self._stream.use():
            (row,) = self._runtime.copy_to_host([self._rows[index]]).wait()
        assert row is not None
        return unpack_row(row.numpy().tobytes(), room)


def _whole_words(num_bytes: int) -> int:
    return -(-num_bytes // _WORD_BYTES) * _WORD_BYTES


def poll_and_all_reduce(pollers: Sequence[KVPoller], gloo_group: RankGroup) -> list[KVPoll]:
    """The least status of each poller among the ranks. Each rank talks to its own peers, so that
    the ranks learn of progress at different moments. A collective, unless there is nothing to poll
    or one rank.

    Args:
        pollers: One for each request. All ranks give the same requests in the same order.

    Raises:
        RanksDiverged: Another rank polls other requests.
    """
    polls = [one.poll() for one in pollers]
    if gloo_group.size == 1 or not polls:
        return polls
    rooms = np.array([one.bootstrap_room for one in pollers], dtype=np.uint64)
    digest = xxhash.xxh3_64_intdigest(rooms.tobytes()) >> 1
    least: list[int] = []
    for begin in range(0, len(polls), POLL_SLOTS):
        vector = np.zeros(_HEAD + POLL_SLOTS, dtype=np.int64)
        vector[:_HEAD] = digest, -digest
        part = polls[begin : begin + POLL_SLOTS]
        vector[_HEAD : _HEAD + len(part)] = part
        found = gloo_group.reduce_min(torch.from_numpy(vector)).tolist()
        if found[0] != -found[1]:
            raise RanksDiverged("the ranks do not poll the same requests")
        least += found[_HEAD : _HEAD + len(part)]
    return [KVPoll(one) for one in least]


def failure_reasons(failed: Sequence[KVPoller], gloo_group: RankGroup) -> list[str]:
    """Reasons of pollers that have failed, by `poll_and_all_reduce`: each from the first rank that
    has one, with the rank's name if there are several. A collective."""
    own = [_failure(one) for one in failed]
    if gloo_group.size == 1 or not failed:
        return own
    raws = gather_bytes(gloo_group, msgspec.json.encode([why[:_REASON_CHARS] for why in own]))
    by_rank = [msgspec.json.decode(raw, type=list[str]) for raw in raws]
    return [
        next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why), "")
        for reasons in zip(*by_rank, strict=True)
    ]


def _failure(poller: KVPoller) -> str:
    """Why a poller has failed on this rank; "" if it has not."""
    try:
        poller.failure_exception()
    except KVTransferError as error:
        return str(error)


MakeManager: TypeAlias = Callable[[KVArgs, DisaggregationMode, ServerSettings], BaseKVManager]


class KVClassType(StrEnum):
    MANAGER = "manager"
    SENDER = "sender"
    RECEIVER = "receiver"


@overload
def get_kv_class(
    transfer_backend: TransferBackend, class_type: Literal[KVClassType.MANAGER]
) -> MakeManager: ...
@overload
def get_kv_class(
    transfer_backend: TransferBackend, class_type: Literal[KVClassType.SENDER]
) -> type[BaseKVSender]: ...
@overload
def get_kv_class(
    transfer_backend: TransferBackend, class_type: Literal[KVClassType.RECEIVER]
) -> type[BaseKVReceiver]: ...
def get_kv_class(transfer_backend: TransferBackend, class_type: KVClassType) -> Any:
    """A class of the transport that `--disaggregation-transfer-backend` names, or the function that
    makes its manager."""
    return _TRANSPORTS[transfer_backend][class_type]


_MOONCAKE: Final = {
    KVClassType.MANAGER: make_mooncake_manager,
    KVClassType.SENDER: MooncakeKVSender,
    KVClassType.RECEIVER: MooncakeKVReceiver,
}
_TRANSPORTS: Final[Mapping[TransferBackend, Mapping[KVClassType, Any]]] = {
    TransferBackend.MOONCAKE: _MOONCAKE,
    TransferBackend.MOONCAKE_TCP: _MOONCAKE,
    TransferBackend.NIXL: {
        KVClassType.MANAGER: make_nixl_manager,
        KVClassType.SENDER: NixlKVSender,
        KVClassType.RECEIVER: NixlKVReceiver,
    },
    TransferBackend.FAKE: {
        KVClassType.MANAGER: FakeKVManager,
        KVClassType.SENDER: FakeKVSender,
        KVClassType.RECEIVER: FakeKVReceiver,
    },
}
