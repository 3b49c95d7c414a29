"""Reads weights from the memory of a running server, the seed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
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
    BlockOutcome,
    TransferError,
    TransferOp,
)
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.model_loader.load_config import LoadConfig
from sglang.srt.model_loader.read_batches import ReadBatch, Step, cut_batches, staging_bytes
from sglang.srt.model_loader.seed_answer import SeedAnswer, check_seed
from sglang.srt.model_loader.seed_client import DIGEST_TIMEOUT_S, SeedClient
from sglang.srt.model_loader.staging_memory import StagingMemory
from sglang.srt.model_loader.tensor_memory import checksums
from sglang.srt.model_loader.weight_plan import TensorPlan, check_checksums, plan_reads
from sglang.srt.model_loader.weight_source import WeightSlots
from sglang.srt.model_loader.weights_identity import config_values
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
            ValueError: No seed is named, or this process has no Transfer Engine.
        """
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
                    slots.take(plan.name, plan.slot.shape, self.name)
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
