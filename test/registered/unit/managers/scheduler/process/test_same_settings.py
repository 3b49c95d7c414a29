"""Settings that all ranks need alike: which may differ, and what is said of the others."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.scheduler.process.same_settings import check_same_settings
from sglang.srt.server_args import ServerArgs
from sglang.test.caches.memory_ranks import MemoryExchange
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")


def checked(*settings: dict[str, Any]) -> list[str]:
    """What each rank, with settings of its own, is told; empty: nothing."""
    exchange = MemoryExchange(len(settings))

    def run(rank: int) -> str:
        fields = {"tp_size": len(settings), "device": "cpu", **settings[rank]}
        try:
            check_same_settings(exchange.group(rank), ServerArgs.from_kwargs(**fields).resolve())
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(settings)) as pool:
        return list(pool.map(run, range(len(settings))))


def test_paths_addresses_and_keys_are_a_machines_own(tmp_path: Path) -> None:
    copy = shutil.copytree(BUILTIN_MODEL_DIR, tmp_path / "copy")
    here: dict[str, Any] = {"host": "127.0.0.1", "served_model_name": "m"}
    there: dict[str, Any] = {
        "port": 31000, "api_key": "hunter2", "model_path": str(copy), "tokenizer_path": str(copy),
        "served_model_name": "m", "log_level": "debug", "base_gpu_id": 4, "nnodes": 2,
        "node_rank": 1, "dist_init_addr": "10.0.0.1:5000",
    }  # fmt: skip
    here |= {"nnodes": 2, "dist_init_addr": "node-0:5000"}
    assert checked(here, there) == ["", ""]


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("page_size", (1, 1, 32), "--page-size is 1 on rank 0, 32 on rank 2"),
        ("served_model_name", ("a", "b", "b"), "--served-model-name is a on rank 0, b on rank 1"),
        ("max_total_tokens", (None, 64, 64), "--max-total-tokens is None on rank 0, 64 on rank 1"),
    ],
)
def test_all_ranks_are_told_the_first_difference(
    field: str, values: tuple[Any, ...], message: str
) -> None:
    settings = [{"model_path": str(BUILTIN_MODEL_DIR), field: value} for value in values]
    assert checked(*settings) == [f"{message}: give all machines the same"] * 3


def test_another_model_is_noticed_by_its_config(tmp_path: Path) -> None:
    copy = shutil.copytree(BUILTIN_MODEL_DIR, tmp_path / "copy")
    config = copy / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    paths = (str(BUILTIN_MODEL_DIR), str(copy))
    told = checked(*({"model_path": path, "served_model_name": "m"} for path in paths))
    assert told[0] == told[1]
    assert told[0].startswith("config.json of the model is ")


def test_no_secret_is_told() -> None:
    keys = ({"api_key": "hunter2", "page_size": 1}, {"api_key": "hunter3", "page_size": 2})
    assert all("hunter" not in one and "--page-size" in one for one in checked(*keys))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
