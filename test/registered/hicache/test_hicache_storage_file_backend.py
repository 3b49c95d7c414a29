"""L3 in files, under ranks that split heads and prompts: experts, and sparse latent attention."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rigs.servers.storage_backend_case import StorageBackendCase, save_checkpoint
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=14, suite="base-b-test-cpu")


class FileBackendCase(StorageBackendCase):
    """Ranks with objects in a directory of the class."""

    backend_name = "HiCacheFile"
    tp_size = 2

    @classmethod
    def _get_additional_server_args_and_env(cls) -> tuple[dict[str, object], dict[str, str]]:
        directory = cls.enterClassContext(tempfile.TemporaryDirectory())
        sizes: dict[str, object] = {"--tp-size": cls.tp_size, "--attn-cp-size": 2}
        return (
            {**sizes, "--hicache-storage-backend": "file"},
            {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": directory},
        )


class TestFileBackendQwen330BCP2(FileBackendCase):
    """Two ranks with the same heads, which share prompts: the twin of the class over Mooncake."""

    __test__ = True

    @classmethod
    def _get_model_name(cls) -> str:
        directory = cls.enterClassContext(tempfile.TemporaryDirectory())
        return save_checkpoint(Path(directory), "qwen3_moe")


class TestFileBackendQwen330BTP4CP2(TestFileBackendQwen330BCP2):
    """Four ranks in two sets: the tick sync has a round over the sets and one within them."""

    tp_size = 4


class TestFileBackendDeepseekV32CP2(FileBackendCase):
    """Prompts longer than the tokens that the indexer chooses, which is 32."""

    __test__ = True

    @classmethod
    def _get_model_name(cls) -> str:
        directory = cls.enterClassContext(tempfile.TemporaryDirectory())
        return save_checkpoint(Path(directory), "deepseek_v32", num_key_value_heads=8)
