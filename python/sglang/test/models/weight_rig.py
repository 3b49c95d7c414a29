"""A seed and readers of its weights in one process, over a transport that copies memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    MooncakeTransferEngine,
)
from sglang.srt.model_loader.load_config import LoadConfig, SeedAddress
from sglang.srt.model_loader.loader import build_model, get_model
from sglang.srt.model_loader.remote_weights import RemoteInstanceWeights
from sglang.srt.model_loader.tensor_memory import register_weights
from sglang.srt.model_loader.weight_offer import SeedAnswer, WeightsDigest
from sglang.srt.model_loader.weight_seed import WeightSeed
from sglang.srt.model_loader.weight_source import WeightSlots
from sglang.srt.model_loader.weights_identity import config_digest
from sglang.srt.models.causal_lm import CausalLM
from sglang.srt.utils.network import wait_until
from sglang.test.stores.fake_transfer_engine import (
    FakeCall,
    FakeTransferEngine,
    FakeTransferEngines,
    listening_peer,
)

IDENTITY = "5eed" * 8
ADDRESS = SeedAddress(host="127.0.0.1", port=1)


def copying(engine: FakeTransferEngine, call: FakeCall) -> int:
    """What the transport does with reads between two parts of one process."""
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
    """The `SeedClient` of a seed in this process, which tells whatever a test has put there."""

    def __init__(self, answer: SeedAnswer) -> None:
        self.told = answer

    def ask(self) -> SeedAnswer:
        return self.told

    def await_digest(self, deadline: float) -> WeightsDigest:
        assert self.told.weights.digest is not None
        return self.told.weights.digest


class WeightRig:
    """A seed with the checkpoint at `path`, and what reads it. The process is on a CPU."""

    def __init__(self, path: Path, session_id: str) -> None:
        self.config = ModelConfig.from_path(str(path))
        self.fakes = FakeTransferEngines(answer=copying)
        self.seed_model = get_model(self.config, LoadConfig(show_progress=False))
        seed_engine = start_bare_engine(FakeTransferEngines())
        self.seed = WeightSeed(
            seed_engine,
            self.seed_model,
            rank=0,
            config=config_digest(str(path)),
            identity=lambda: IDENTITY,
        )
        seed_engine.close()
        assert wait_until(lambda: self.seed.answer(0)["weights"]["digest"] is not None, 30)
        answer = msgspec.convert(self.seed.answer(0), SeedAnswer)
        self.client = SeedAtHand(with_session(answer, session_id))
        self.engine = start_bare_engine(self.fakes)
        self._models: list[CausalLM] = []

    def empty_model(self) -> CausalLM:
        """A model to read into, all zeros, registered."""
        model = build_model(self.config, LoadConfig())
        with torch.inference_mode():
            for tensor in model.parameters():
                tensor.zero_()
        # What is registered stays alive.
        self._models.append(model)
        register_weights(self.engine, (slot for _, slot in model.weight_slots()))
        return model

    def source(self, seed: SeedAddress = ADDRESS) -> RemoteInstanceWeights:
        """Reads from the seed."""
        load_config = LoadConfig(seed_instance=seed)
        # The client's two methods are all that is used of it.
        client: object = self.client
        return RemoteInstanceWeights(
            self.config,
            load_config,
            engine=self.engine,
            client=client,  # type: ignore[arg-type]
        )

    def read(self) -> tuple[CausalLM, RemoteInstanceWeights]:
        """A model that was read, and where from. Raises as `RemoteInstanceWeights.fill`."""
        model, source = self.empty_model(), self.source()
        slots = WeightSlots(model, lambda: None)
        source.fill(slots)
        slots.check_filled(source.name)
        return model, source


def with_session(answer: SeedAnswer, session_id: str) -> SeedAnswer:
    """The same seed at another address."""
    info = (session_id, answer.places)
    return msgspec.structs.replace(answer, remote_instance_transfer_engine_info=info)


@contextlib.contextmanager
def weight_rig(path: Path) -> Iterator[WeightRig]:
    """A rig whose seed accepts connections."""
    with listening_peer() as session_id:
        rig = WeightRig(path, session_id)
        yield rig
        rig.engine.close()
