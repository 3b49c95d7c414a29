"""A model runner sets its device before it starts what looks for a device context.

Over an NPU whose library records its calls: neither NPU nor model are needed.
"""

from __future__ import annotations

import atexit
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rigs.models.recorded_calls import fake_torch_npu
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import device_context
from sglang.srt.distributed.device_communicators import mooncake_transfer_engine
from sglang.srt.distributed.device_context import require_device_set
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig, SharedTransferEngine
from sglang.test.ci.ci_register import register_cpu_ci, register_npu_ci

register_cpu_ci(est_time=4, suite="base-a-test-cpu")
register_npu_ci(est_time=4, suite="base-a-test-npu")


class ModelWasReached(Exception):
    """Ends a runner's start where the model would be made."""


class Start:
    """Calls made by starting a runner on the second NPU, in order."""

    def __init__(self, model_path: Path, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self._config = ModelConfig.from_path(str(model_path))
        answers = {"current_device()": 1}  # Asked after `set_device`, as the log shows.
        patch.setitem(sys.modules, "torch_npu", fake_torch_npu(self.log, answers))
        patch.setattr(device_context, "_device", None)
        patch.setattr(mooncake_transfer_engine, "_engine", None)
        patch.setattr(mooncake_transfer_engine, "_engine_arguments", None)
        patch.setattr(dist, "is_initialized", lambda: False)
        patch.setattr(dist, "init_process_group", self._note_world)
        patch.setattr(atexit, "register", lambda *_: None)
        patch.setattr(mooncake_transfer_engine.MooncakeTransferEngine, "initialize", self._note)
        patch.setattr(model_runner, "build_model", self._model)

    def run(
        self,
        kind: type[ModelRunner],
        engine: SharedTransferEngine | None,
        *,
        device: str = "npu:1",
        gpu_id: int | None = None,
    ) -> None:
        config = ModelRunnerConfig(
            model_config=self._config,
            device=device,
            gpu_id=gpu_id,
            show_progress=False,
            transfer_engine=engine,
        )
        device_runtime.cache_clear()
        try:
            with pytest.raises(ModelWasReached):
                kind(config)
        finally:
            device_runtime.cache_clear()

    def _note_world(self, backend: str, **_: Any) -> None:
        self.log.append(f"world over {backend} on {require_device_set('the world')}")

    def _note(self, hostname: str, device_name: str) -> None:
        self.log.append(f"engine at {hostname}, devices {device_name!r}")

    def _model(self, *_: Any) -> None:
        raise ModelWasReached


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    save_tiny_checkpoint(tmp_path, "qwen3")
    return Start(tmp_path, monkeypatch)


ENGINE = SharedTransferEngine(hostname="10.0.0.1", gpu_id=1, ib_device="mlx5_0")


class SwappedRunner(ModelRunner):
    """A runner that starts the engine first."""

    def init_torch_distributed(self) -> None:
        self.init_shared_mooncake_transfer_engine()
        super().init_torch_distributed()


def test_the_device_comes_before_the_world_and_the_engine(start: Start) -> None:
    start.run(ModelRunner, ENGINE)
    assert start.log == [
        "set_device(1)",
        "world over hccl on npu:1",
        "engine at 10.0.0.1, devices 'mlx5_0'",
    ]


def test_a_rank_of_a_server_stays_on_its_own_device(start: Start) -> None:
    """Servers name the kind of device and its index apart (`base_gpu_id` and the rank)."""
    start.run(ModelRunner, ENGINE, device="npu", gpu_id=1)
    assert start.log == [
        "set_device(1)",
        "current_device()",
        "set_device(1)",
        "world over hccl on npu:1",
        "engine at 10.0.0.1, devices 'mlx5_0'",
    ]


def test_the_other_order_fails_with_the_reason_and_touches_nothing(start: Start) -> None:
    with pytest.raises(RuntimeError, match=r"before a device was set.* ret: 107002"):
        start.run(SwappedRunner, ENGINE)
    assert start.log == ["is_available()"], "asked whether there is an NPU at all"


def test_a_server_without_such_features_starts_no_engine(start: Start) -> None:
    start.run(ModelRunner, None)
    assert start.log == ["set_device(1)", "world over hccl on npu:1"]
    assert mooncake_transfer_engine.get_mooncake_transfer_engine() is None
