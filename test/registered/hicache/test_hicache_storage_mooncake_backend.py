"""L3 in a real Mooncake Store over TCP, under ranks that split heads and prompts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rigs.servers.storage_backend_case import StorageBackendCase, save_checkpoint
from rigs.stores.mooncake_cluster import MooncakeCluster
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-b-test-cpu")


class TestMooncakeBackendQwen330BCP2(StorageBackendCase):
    """Qwen3-30B-A3B's architecture, tiny: two ranks with the same heads, which share prompts."""

    __test__ = True
    backend_name = "MooncakeStore"

    @classmethod
    def _get_model_name(cls) -> str:
        directory = cls.enterClassContext(tempfile.TemporaryDirectory())
        return save_checkpoint(Path(directory), "qwen3_moe")

    @classmethod
    def _get_additional_server_args_and_env(cls) -> tuple[dict[str, object], dict[str, str]]:
        cluster = cls.enterClassContext(MooncakeCluster(segment_size="64mb"))
        sizes: dict[str, object] = {"--tp-size": 2, "--attn-cp-size": 2}
        return {**sizes, "--hicache-storage-backend": "mooncake"}, cluster.engine_env()
