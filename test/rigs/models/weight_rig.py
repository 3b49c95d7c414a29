"""A seed of some ranks and readers of its weights, in one process where reads copy memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from rigs.caches.memory_ranks import PlaceInGroup, run_on_ranks
from rigs.stores.fake_transfer_engine import (
    FakeCall,
    FakeTransferEngine,
    FakeTransferEngines,
    listening_peer,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.distributed.rank_group import RankGroup
from sglang.srt.model_loader.loader import build_model, get_model
from sglang.srt.model_loader.remote_weights import RemoteInstanceWeights
from sglang.srt.model_loader.seed_answer import SeedAnswer, WeightsDigest
from sglang.srt.model_loader.weight_files import config_values
from sglang.srt.model_loader.weight_seed import WeightSeed, register_weights
from sglang.srt.model_loader.weight_source import LoadConfig, SeedAddress, WeightSlots
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.utils.network import wait_until

IDENTITY = "5eed" * 8
ADDRESS = SeedAddress(host="127.0.0.1", port=1)


def copying(engine: FakeTransferEngine, call: FakeCall) -> int:
    """Copy the bytes of a read between two parts of one process, as a transport would."""
    for local, remote, length in call.requests:
        ctypes.memmove(local, remote, length)
    return 0


def weights_of(model: CausalLM) -> dict[str, torch.Tensor]:
    """Each checkpoint tensor as this rank has it."""
    return {name: slot.dest for name, slot in model.weight_slots()}


def start_bare_engine(fakes: FakeTransferEngines) -> MooncakeTransferEngine:
    """An engine over TCP that knows no memory."""
    return MooncakeTransferEngine(
        "127.0.0.1", new_engine=fakes.new_engine, supported=("tcp",), rdma_root=Path("/nowhere")
    )


class SeedAtHand:
    """A `SeedClient` of a seed in this process, whose answers tests can replace."""

    def __init__(self, answers: Sequence[SeedAnswer]) -> None:
        self.told = list(answers)

    def ask(self, rank: int) -> SeedAnswer:
        return self.told[rank]

    def ask_all(self) -> list[SeedAnswer]:
        return self.told

    def await_digests(self, num_ranks: int, deadline: float) -> list[WeightsDigest]:
        digests = [one.weights.digest for one in self.told if one.weights.digest is not None]
        assert len(digests) == num_ranks
        return digests


class WeightRig:
    """A seed with the checkpoint at `path`, and its readers, all on the CPU.

    Args:
        session_ids: Session ids of the seed's ranks, one for each.
        model: Further arguments of `ModelConfig.from_path`, for all models.
    """

    def __init__(self, path: Path, session_ids: Sequence[str], **model: Any) -> None:
        self.config = ModelConfig.from_path(str(path), **model)
        self.fakes = FakeTransferEngines(answer=copying)
        size = len(session_ids)
        self.seed_models = [self.load_rank(rank, size) for rank in range(size)]
        self.client = self.seed_of(self.seed_models, session_ids)
        self.engine = start_bare_engine(self.fakes)
        self._models: list[CausalLM] = []

    @property
    def seed_model(self) -> CausalLM:
        """Model of the seed's first rank."""
        return self.seed_models[0]

    def load_rank(self, rank: int, size: int) -> CausalLM:
        """A rank's share of the model, from its files."""
        load_config = LoadConfig(tp_group=PlaceInGroup(rank, size), show_progress=False)
        return get_model(self.config, load_config)

    def seed_of(self, models: Sequence[CausalLM], session_ids: Sequence[str]) -> SeedAtHand:
        """A seed of several ranks that serves the weights of `models`."""

        def told(group: RankGroup) -> list[SeedAnswer]:
            engine = start_bare_engine(FakeTransferEngines())
            seed = WeightSeed(
                engine,
                models[group.rank],
                group=group,
                config=config_values(self.config.model_path),
                identity=lambda: IDENTITY,
            )
            engine.close()
            # All ranks see the digests in the same call.
            assert wait_until(lambda: seed.answer(0)["weights"]["digest"] is not None, 30)
            return [msgspec.convert(seed.answer(rank), SeedAnswer) for rank in range(group.size)]

        answers = run_on_ranks(len(models), told)
        assert all(one == answers[0] for one in answers)
        return SeedAtHand(
            [with_session(*pair) for pair in zip(answers[0], session_ids, strict=True)]
        )

    def empty_model(self, rank: int = 0, size: int = 1) -> CausalLM:
        """A model to read into, all zeros, registered."""
        model = build_model(self.config, LoadConfig(tp_group=PlaceInGroup(rank, size)))
        with torch.inference_mode():
            for tensor in model.parameters():
                tensor.zero_()
        # Registered memory stays alive.
        self._models.append(model)
        register_weights(self.engine, (slot for _, slot in model.weight_slots()))
        return model

    def source(
        self, seed: SeedAddress = ADDRESS, *, rank: int = 0, size: int = 1
    ) -> RemoteInstanceWeights:
        """A weight source that reads from the seed."""
        load_config = LoadConfig(seed_instance=seed, tp_group=PlaceInGroup(rank, size))
        # Only the client's two methods are used.
        client: object = self.client
        return RemoteInstanceWeights(
            self.config,
            load_config,
            engine=self.engine,
            client=client,  # type: ignore[arg-type]
        )

    def read(self, rank: int = 0, size: int = 1) -> tuple[CausalLM, RemoteInstanceWeights]:
        """A model that was read, and its source. Raises as `RemoteInstanceWeights.fill`."""
        model, source = self.empty_model(rank, size), self.source(rank=rank, size=size)
        slots = WeightSlots(model, lambda: None)
        with torch.inference_mode():
            source.fill(slots)
        slots.check_filled(source.name)
        return model, source


def with_session(answer: SeedAnswer, session_id: str) -> SeedAnswer:
    """The same rank at another address."""
    info = (session_id, answer.places)
    return msgspec.structs.replace(answer, remote_instance_transfer_engine_info=info)


@contextlib.contextmanager
def weight_rig(path: Path, size: int = 1, **model: Any) -> Iterator[WeightRig]:
    """A rig whose seed has `size` ranks and accepts connections; `model` as for `WeightRig`."""
    with contextlib.ExitStack() as stack:
        session_ids = [stack.enter_context(listening_peer()) for _ in range(size)]
        rig = WeightRig(path, session_ids, **model)
        yield rig
        rig.engine.close()
