"""Weights that are read from a running server's memory. The server is the seed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

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
from sglang.srt.model_loader.load_config import LoadConfig
from sglang.srt.model_loader.seed_client import DIGEST_TIMEOUT_S, SeedClient
from sglang.srt.model_loader.tensor_memory import tensor_checksum
from sglang.srt.model_loader.weight_offer import (
    TensorRead,
    check_checksums,
    plan_reads,
)
from sglang.srt.model_loader.weight_source import WeightSlots
from sglang.srt.model_loader.weights_identity import config_digest
from sglang.srt.utils.network import is_loopback

logger = logging.getLogger(__name__)

_BATCH_BYTES: Final = 256 * MIB
"""Read in one go, while those read before are hashed."""
_BATCH_TIMEOUT_S: Final = 30.0
_LEAST_RATE: Final = 10e6
"""Bytes a second; a slower seed is given up."""


class RemoteInstanceWeights:
    """The weights of a running server with the same model, split alike.

    This process's Transfer Engine knows the memory of the slots (`register_weights`). The seed is
    read, never written; what arrives is compared with its checksums before anything is served.
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
        engine: None: this process's.
        client: None: one for the seed that `load_config` names.

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
        self._engine = engine
        self._client = client or SeedClient(seed, load_config.tp_group.rank)
        self._config = config_digest(model_config.model_path)
        self._identity: str | None = None

    def identity(self) -> str:
        """The seed's; after `fill`."""
        assert self._identity is not None, "asked before the weights were read"
        return self._identity

    def fill(self, slots: WeightSlots) -> None:
        """See `WeightSource`. Bounded: a seed that stalls is given up.

        Raises:
            ValueError: One line with the seed, what differs or what happened to it, and the remedy.
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
        answer = self._client.ask()
        self._check_session(answer.session_id)
        wanted = slots.empty()
        reads = plan_reads(
            answer,
            wanted,
            config=self._config,
            protocol=str(self._engine.describe()["protocol"]),
        )
        ours: dict[str, str] = {}
        hashing: Future[None] | None = None
        started = time.monotonic()
        with ThreadPoolExecutor(1, thread_name_prefix="weights-digest") as hashers:
            for batch in cut_batches(reads):
                self._read(answer.session_id, batch)
                if hashing is not None:
                    hashing.result()
                hashing = hashers.submit(_add_checksums, ours, batch)
                for read in batch:
                    slots.take(read.name, wanted[read.name].shape, self.name)
            if hashing is not None:
                hashing.result()
        _log_rate(reads, time.monotonic() - started)
        for name in set(wanted) - {read.name for read in reads}:
            slots.take(name, wanted[name].shape, self.name)
        digest = self._client.await_digest(time.monotonic() + DIGEST_TIMEOUT_S)
        check_checksums(digest.checksums, ours)
        self._identity = digest.identity
        self._engine.forget_peer(answer.session_id)

    def _check_session(self, session_id: str) -> None:
        """Refuse a session id that would lead elsewhere."""
        host, _ = parse_session_id(session_id)
        if is_loopback(host) and not is_loopback(self._host):
            raise ValueError(
                f"its Transfer Engine is at {host}, which is this host from here: start the seed "
                "with MOONCAKE_LOCAL_HOSTNAME set to its address"
            )
        if session_id == self._engine.get_session_id():
            raise ValueError("its Transfer Engine is this server's own: name another server")

    def _read(self, session_id: str, batch: Sequence[TensorRead]) -> None:
        """Read tensors, whole.

        Raises:
            TransferError: Not all of it arrived.
        """
        num_bytes = sum(read.num_bytes for read in batch)
        timeout = _BATCH_TIMEOUT_S + num_bytes / _LEAST_RATE
        blocks = [Block(read.dest.data_ptr(), read.remote, read.num_bytes) for read in batch]
        transfer = self._engine.transfer(session_id, TransferOp.READ, blocks, timeout=timeout)
        for read, outcome in zip(batch, transfer.outcomes, strict=True):
            if outcome is BlockOutcome.FAILED:
                raise TransferError(
                    f"peer {session_id} no longer has tensor {read.name!r} where it said: it was "
                    "replaced by another process"
                )
            if outcome is not BlockOutcome.DONE:
                raise TransferError(
                    f"peer {session_id} has not given tensor {read.name!r} within {timeout:.0f} s"
                )


def cut_batches(reads: Sequence[TensorRead]) -> Iterator[list[TensorRead]]:
    """Runs of reads of about `_BATCH_BYTES`; one that is larger is alone."""
    batch: list[TensorRead] = []
    num_bytes = 0
    for read in reads:
        if batch and num_bytes + read.num_bytes > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(read)
        num_bytes += read.num_bytes
    if batch:
        yield batch


def _add_checksums(ours: dict[str, str], batch: Sequence[TensorRead]) -> None:
    ours.update((read.name, tensor_checksum(read.dest)) for read in batch)


def _log_rate(reads: Sequence[TensorRead], seconds: float) -> None:
    num_bytes = sum(read.num_bytes for read in reads)
    logger.info(
        "read %.1f MiB from the seed in %.2f s, %.2f GB/s",
        num_bytes / MIB,
        seconds,
        num_bytes / seconds / 1e9,
    )
