"""Reads weights from the memory of a running server, the seed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import MIB
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
    get_mooncake_transfer_engine,
)
from sglang.srt.distributed.device_communicators.peer import parse_session_id
from sglang.srt.distributed.device_communicators.transfer_types import (
    Block,
    BlockOutcome,
    TransferError,
    TransferOp,
)
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.layers.weight_format import FormatOf
from sglang.srt.model_loader.seed_answer import SeedAnswer, check_seed, formats_of_seed
from sglang.srt.model_loader.seed_client import DIGEST_TIMEOUT_S, SeedClient
from sglang.srt.model_loader.weight_files import config_values
from sglang.srt.model_loader.weight_plan import PartRead, TensorPlan, check_checksums, plan_reads
from sglang.srt.model_loader.weight_seed import checksums
from sglang.srt.model_loader.weight_source import LoadConfig, WeightSlots
from sglang.srt.utils.network import is_loopback

logger = logging.getLogger(__name__)

_BATCH_BYTES: Final = 256 * MIB
"""Bytes of a batch. A batch is read while earlier ones are hashed."""
_NVLINK_BATCH_BYTES: Final = 1024 * MIB
"""The same over NVLink, where the gap between two batches takes as long as 64 MiB."""
_STAGED_BYTES: Final = 32 * MIB
"""Most bytes of a batch that go through staging memory."""
_BATCH_TIMEOUT_S: Final = 30.0
_LEAST_RATE: Final = 10e6
"""Least rate, in bytes per second; reads from a slower seed time out."""

_Checked: TypeAlias = list[tuple[TensorPlan, list[str]]]
"""Tensors that have arrived, with the checksums of their cells."""


class RemoteInstanceWeights:
    """This rank's share of the weights of a running server with the same model.

    The seed may have another number of ranks. Each tensor of this rank is read in parts, each part
    from one rank of the seed. The slots' memory is registered with this process's Transfer Engine
    (`register_weights`). The seed is never written to. The read bytes are compared with its
    checksums before the server serves.

    Threads: a reader for each rank of the seed; `weights-digest`, which hashes.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        load_config: LoadConfig,
        *,
        engine: MooncakeTransferEngine | None = None,
        client: SeedClient | None = None,
    ) -> None:
        """Args:
            engine: Transfer Engine; None: that of this process.
            client: Client of the seed; None: made from `load_config`.

        Raises:
            ValueError: No seed is named, this process has no Transfer Engine, or weights are to be
                rounded at load.
        """
        if model_config.quantization is not None and model_config.quantization.is_at_load:
            raise ValueError(
                f"--quantization {model_config.quantization.method} rounds weights at load, and "
                "load format 'remote_instance' takes the seed's weights as they are: start the "
                "seed with the flag, and this server without"
            )
        seed = load_config.seed_instance
        engine = engine or get_mooncake_transfer_engine()
        if seed is None or engine is None:
            raise ValueError(
                "load format 'remote_instance' needs a seed and a Transfer Engine: start a server "
                "with --remote-instance-weight-loader-seed-instance-ip and -service-port"
            )
        self.name = f"the seed at {seed.url}"
        self._host = seed.host
        self._rank = load_config.tp_group.rank
        self._engine = engine
        self._client = client or SeedClient(seed)
        self._protocol = str(engine.describe()["protocol"])
        self._config = config_values(model_config.model_path)
        self._identity: str | None = None
        self._staging: StagingMemory | None = None
        """Staging memory. It is kept after an error, because reads in flight may write to it."""

    def identity(self) -> str:
        """The seed's identity. Call it after `fill`."""
        assert self._identity is not None, "asked before the weights were read"
        return self._identity

    def formats(self) -> FormatOf:
        """The formats in the seed's memory."""
        try:
            return formats_of_seed(self._client.ask(0).weights.tensors).get
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def has_own_head(self, head: str, embedding: str) -> bool:
        """See `WeightSource`. The seed has compared the tensors."""
        try:
            return head in self._client.ask(0).weights.tensors
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def fill(self, slots: WeightSlots) -> None:
        """See `WeightSource`. A seed that stalls causes an error after a timeout.

        Raises:
            ValueError: In one line: the seed, the difference or failure, and the remedy.
        """
        try:
            self._fill(slots)
        except TransferError as error:
            raise ValueError(
                f"{self.name}: {error}; no weights were taken over: check that it runs, or name "
                "another seed, and start again"
            ) from None
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _fill(self, slots: WeightSlots) -> None:
        answers = self._client.ask_all()
        for answer in answers:
            self._check_session(answer.session_id)
            check_seed(answer.weights, config=self._config, protocol=self._protocol)
        wanted = slots.empty()
        plans = plan_reads(answers, wanted, rank=self._rank)
        checked = self._read_all(plans, answers, slots)
        digests = self._client.await_digests(len(answers), time.monotonic() + DIGEST_TIMEOUT_S)
        for plan, found in checked:
            check_checksums(plan, found, digests)
        self._identity = digests[0].identity
        for answer in answers:
            self._engine.forget_peer(answer.session_id)

    def _check_session(self, session_id: str) -> None:
        """Refuse a session id that does not lead to the seed's process."""
        host, _ = parse_session_id(session_id)
        if is_loopback(host) and not is_loopback(self._host):
            raise ValueError(
                f"its Transfer Engine is at {host}, which is this host from here: start the seed "
                "with MOONCAKE_LOCAL_HOSTNAME set to its address"
            )
        if session_id == self._engine.get_session_id():
            raise ValueError("its Transfer Engine is this server's own: name another server")

    def _read_all(
        self, plans: Sequence[TensorPlan], answers: Sequence[SeedAnswer], slots: WeightSlots
    ) -> _Checked:
        """Fill the slots. Batches are hashed while later ones are read.

        Raises:
            TransferError: Not all bytes have arrived.
        """
        size = staging_bytes(plans, _STAGED_BYTES)
        staging = self._staging = self._make_staging(plans, size)
        sessions = [answer.session_id for answer in answers]
        checked: _Checked = []
        hashing: list[Future[None]] = []
        started, num_bytes = time.monotonic(), 0
        is_nvlink = self._protocol.startswith("nvlink")
        most = _NVLINK_BATCH_BYTES if is_nvlink else _BATCH_BYTES
        with (
            ThreadPoolExecutor(len(answers), thread_name_prefix="weights-read") as readers,
            ExitStack() as on_end,
        ):
            hashers = ThreadPoolExecutor(1, thread_name_prefix="weights-digest")
            on_end.callback(hashers.shutdown, cancel_futures=True)  # some remain after an error
            for index, batch in enumerate(cut_batches(plans, most, size)):
                for earlier, call in enumerate(hashing):
                    # This batch uses the same half of the staging memory as the last but one.
                    if call.done() or (batch.staged and earlier <= index - 2):
                        call.result()
                address = staging.half(index).data_ptr()
                reads = [
                    readers.submit(self._read, sessions[holder], steps, address)
                    for holder, steps in batch.of_holders().items()
                ]
                errors = [error for read in reads if (error := read.exception()) is not None]
                if errors:
                    raise errors[0]
                hashing.append(hashers.submit(_take_over, checked, batch, staging, index))
                num_bytes += batch.num_bytes
                for plan in batch.done:
                    slots.take(plan.name, None, self.name)
            seconds = time.monotonic() - started
            for call in hashing:
                call.result()
        staging.release()
        self._staging = None
        _log_rate(num_bytes, len(answers), seconds, time.monotonic() - started)
        return checked

    def _make_staging(self, plans: Sequence[TensorPlan], size: int) -> StagingMemory:
        tensors = [plan.slot.dest for plan in plans]
        device = tensors[0].device
        filled = [tensor for tensor in tensors if tensor.numel()]
        known = set(device_runtime(device).allocations_of(filled))
        return StagingMemory(self._engine, size, device, known)

    def _read(self, session_id: str, steps: Sequence[Step], staging: int) -> None:
        """Read parts of tensors from one rank of the seed.

        Raises:
            TransferError: Not all bytes have arrived.
        """
        num_bytes = sum(step.read.num_bytes for step in steps)
        timeout = _BATCH_TIMEOUT_S + num_bytes / _LEAST_RATE
        blocks = [step.block(staging) for step in steps]
        transfer = self._engine.transfer(session_id, TransferOp.READ, blocks, timeout=timeout)
        for step, outcome in zip(steps, transfer.outcomes, strict=True):
            if outcome is BlockOutcome.FAILED:
                raise TransferError(
                    f"peer {session_id} no longer has tensor {step.name!r} at its address: it was "
                    "replaced by another process"
                )
            if outcome is not BlockOutcome.DONE:
                raise TransferError(
                    f"peer {session_id} has not given tensor {step.name!r} within {timeout:.0f} s"
                )


def _take_over(checked: _Checked, batch: ReadBatch, staging: StagingMemory, index: int) -> None:
    """Copy a batch's rows from staging memory into place, and hash the complete tensors."""
    with torch.inference_mode():
        staging.unpack(batch, index)
        found = iter(checksums([cell.data for plan in batch.done for cell in plan.cells]))
        for plan in batch.done:
            checked.append((plan, [next(found) for _ in plan.cells]))
            plan.slot.copies[1:].copy_(plan.slot.copies[:1].expand_as(plan.slot.copies[1:]))


def _log_rate(num_bytes: int, num_ranks: int, read_s: float, hashed_s: float) -> None:
    logger.info(
        "read %.1f MiB from the seed, which has %d rank%s, in %.2f s, %.2f GB/s; all is hashed "
        "after %.2f s",
        num_bytes / MIB,
        num_ranks,
        "s" if num_ranks > 1 else "",
        read_s,
        num_bytes / read_s / 1e9,
        hashed_s,
    )


_WORD = 8


@dataclass(frozen=True, slots=True)
class Step:
    """One read of a batch.

    Attributes:
        name: Name of the tensor.
        offset: Byte offset of its rows in the staging memory; None: read directly into place.
    """

    name: str
    read: PartRead
    offset: int | None

    def block(self, staging: int) -> Block:
        """The block that the transport moves, with staging memory at the address `staging`."""
        return self.read.block(None if self.offset is None else staging + self.offset)


@dataclass(slots=True)
class ReadBatch:
    """Reads in flight at the same time.

    Attributes:
        steps: Reads, tensor by tensor.
        done: The tensors that are complete after the batch.
        num_bytes: Bytes to read from the seed.
        staged: Bytes of staging memory of the batch.
    """

    steps: list[Step] = field(default_factory=list)
    done: list[TensorPlan] = field(default_factory=list)
    num_bytes: int = 0
    staged: int = 0

    def add(self, name: str, read: PartRead) -> None:
        """Add a read. It takes staging memory unless it is direct."""
        self.steps.append(Step(name, read, None if read.is_direct else self.staged))
        self.num_bytes += read.num_bytes
        if not read.is_direct:
            self.staged += _aligned(read.num_bytes)

    def of_holders(self) -> dict[int, list[Step]]:
        """The reads of each rank of the seed."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            found.setdefault(step.read.holder, []).append(step)
        return found


def staging_bytes(plans: Sequence[TensorPlan], most: int) -> int:
    """Bytes of staging memory for one batch: half of the largest part that needs it, at most
    `most`, but at least a row. Two batches alternate."""
    staged = [read for plan in plans for read in plan.reads if not read.is_direct]
    if not staged:
        return 0
    half = max(-(-len(read.dest) // 2) * read.row_bytes for read in staged)
    return _aligned(max(min(half, most), *(read.row_bytes for read in staged)))


def cut_batches(
    plans: Sequence[TensorPlan], most_bytes: int, most_staged: int
) -> Iterator[ReadBatch]:
    """Cut plans into batches of about `most_bytes`. A larger direct read is a batch by itself.

    Args:
        most_staged: Most bytes of staging memory of one batch; see `staging_bytes`.
    """
    batch = ReadBatch()
    for plan in plans:
        for read in plan.reads:
            begin, rows = 0, len(read.dest)
            while begin < rows:
                count = rows
                if not read.is_direct:
                    count = min(rows - begin, (most_staged - batch.staged) // read.row_bytes)
                part = read.rows(begin, begin + count)
                if not count or (batch.steps and batch.num_bytes + part.num_bytes > most_bytes):
                    assert batch.steps, "a row fits into the staging memory"
                    yield batch
                    batch = ReadBatch()
                    continue
                batch.add(plan.name, part)
                begin += count
        batch.done.append(plan)
    if batch.done:
        yield batch


def _aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole words."""
    return -(-num_bytes // _WORD) * _WORD


class StagingMemory:
    """Two halves, used by alternate batches: one is filled while the other is copied from.

    Args:
        engine: The engine that the memory is registered with.
        num_bytes: Bytes of each half; 0: no batch needs staging memory.
        device: Device of the weights.
        known: Addresses of allocations that are registered with the engine already.

    Raises:
        RegistrationError: The transport refused.
    """

    def __init__(
        self,
        engine: MooncakeTransferEngine,
        num_bytes: int,
        device: torch.device,
        known: set[int],
    ) -> None:
        self._engine = engine
        self._memory = torch.empty(2 * num_bytes, dtype=torch.uint8, device=device)
        self._halves = torch.split(self._memory, num_bytes) if num_bytes else (self._memory,) * 2
        self._runtime = device_runtime(device)
        # The staging memory may be in the same allocation as weights.
        ranges = self._runtime.allocations_of([self._memory]) if num_bytes else {}
        self._own = {begin: size for begin, size in ranges.items() if begin not in known}
        if self._own:
            engine.batch_register(list(self._own), list(self._own.values()))

    def half(self, index: int) -> torch.Tensor:
        """The half for the batch with this index, as uint8."""
        return self._halves[index % 2]

    def unpack(self, batch: ReadBatch, index: int) -> None:
        """Copy the staged rows of `batch`, which has this index, into place. Any thread. The copies
        are complete on return."""
        half = self.half(index)
        for step in batch.steps:
            if step.offset is not None:
                step.read.copy_from(half[step.offset : step.offset + step.read.num_bytes])
        if batch.staged:
            self._runtime.synchronize()

    def release(self) -> None:
        """Deregister the memory. No read into it may be in flight."""
        if self._own:
            self._engine.batch_deregister(list(self._own))
