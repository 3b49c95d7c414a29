"""Settings that all ranks need alike: which may differ, and what is said of the others."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.caches.memory_ranks import MemoryExchange
from sglang.srt.arg_groups.extra_config import FLAG
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.process.same_settings import check_same_settings
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-a-test-cpu")

REMEDY: Final = "give all machines the same"


def checked(*settings: dict[str, Any]) -> list[str]:
    """Errors of the ranks, each with settings of its own; empty: none."""
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
        (
            "disaggregation_mode",
            ("decode", "decode", "prefill"),
            "--disaggregation-mode is decode on rank 0, prefill on rank 2",
        ),
        (
            "enable_hierarchical_cache",
            (False, True, True),
            "--enable-hierarchical-cache is False on rank 0, True on rank 1",
        ),
        (
            "hicache_storage_backend",
            (None, None, "file"),
            "--hicache-storage-backend is None on rank 0, file on rank 2",
        ),
        (
            "disaggregation_prefill_hosts",
            ("a", "a:1", "a"),
            "--disaggregation-prefill-hosts is a on rank 0, a:1 on rank 1",
        ),
        ("max_total_tokens", (None, 64, 64), "--max-total-tokens is None on rank 0, 64 on rank 1"),
    ],
)
def test_all_ranks_are_told_the_first_difference(
    field: str, values: tuple[Any, ...], message: str
) -> None:
    rest = {} if "hosts" not in field else {"disaggregation_mode": "decode"}
    settings = [{"model_path": str(BUILTIN_MODEL_DIR), **rest, field: value} for value in values]
    assert checked(*settings) == [f"{message}: {REMEDY}"] * 3


def test_another_model_is_noticed_by_its_config(tmp_path: Path) -> None:
    copy = shutil.copytree(BUILTIN_MODEL_DIR, tmp_path / "copy")
    config = copy / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    paths = (str(BUILTIN_MODEL_DIR), str(copy))
    told = checked(*({"model_path": path, "served_model_name": "m"} for path in paths))
    assert told[0] == told[1]
    assert told[0].startswith("config.json of the model is ")


@pytest.mark.parametrize("other", ["hunter3hunter3hunter3", None])
def test_the_deployments_secret_is_compared_and_not_told(other: str | None) -> None:
    """Its file is a machine's own, as are the devices of its network."""
    whole = {"disaggregation_mode": "prefill", "disaggregation_secret": "hunter2hunter2hunter2"}
    here = {**whole, "disaggregation_secret_file": "a", "disaggregation_ib_device": "mlx5_0"}
    assert checked(here, whole) == ["", ""]
    told = checked(whole, {**whole, "disaggregation_secret": other})
    how = "differs between rank 0 and rank 1" if other else "is set on rank 0, not set on rank 1"
    sources = "--disaggregation-secret-file or SGLANG_DISAGGREGATION_SECRET"
    assert told == [f"the secret of {sources} {how}: {REMEDY}"] * 2


def test_no_secret_is_told() -> None:
    keys = ({"api_key": "hunter2", "page_size": 1}, {"api_key": "hunter3", "page_size": 2})
    assert all("hunter" not in one and "--page-size" in one for one in checked(*keys))


def extra(config: object, **fields: Any) -> dict[str, Any]:
    """Settings of a rank with an extra config of that text, or of that object."""
    text = config if isinstance(config, str) else json.dumps(config)
    return {
        "model_path": str(BUILTIN_MODEL_DIR),
        "hicache_storage_backend": "mooncake",
        "hicache_storage_backend_extra_config": text,
        **fields,
    }


def saved(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"@{path}"


LONG: Final = {"master_server_address": f"{'master' * 20}:50051", "protocol": "tcp"}
"""An extra config in which what follows is beyond all that an error shows."""


def test_a_long_extra_config_is_compared_to_its_end() -> None:
    told = checked(*(extra({**LONG, "prefetch_threshold": tokens}) for tokens in (256, 4096)))
    message = f"{FLAG} prefetch_threshold is 256 on rank 0, 4096 on rank 1"
    assert told == [f"{message}: {REMEDY}"] * 2
    told = checked(extra(LONG), extra({**LONG, "tp_lcm_size": 4}))
    assert told == [f"{FLAG} tp_lcm_size is not set on rank 0, 4 on rank 1: {REMEDY}"] * 2


def test_values_that_differ_beyond_what_is_shown_are_refused() -> None:
    ends = (extra({"master_server_address": "m" * 150 + end}) for end in ("a", "b"))
    told = checked(*ends)
    assert told == [f"{FLAG} master_server_address differs between rank 0 and rank 1: {REMEDY}"] * 2


def test_what_files_say_is_compared_and_not_where_they_are(tmp_path: Path) -> None:
    one = saved(tmp_path / "a.json", '{"protocol": "tcp", "prefetch_threshold": 256}')
    same = saved(tmp_path / "b.toml", 'prefetch_threshold = 256\nprotocol = "tcp"')
    other = saved(tmp_path / "c.yaml", "prefetch_threshold: 4096\nprotocol: tcp")
    assert checked(extra(one), extra(same)) == ["", ""]
    message = f"{FLAG} prefetch_threshold is 256 on rank 0, 4096 on rank 1: {REMEDY}"
    assert checked(extra(one), extra(other)) == [message] * 2


def test_what_describes_a_machine_may_differ() -> None:
    here = {"local_hostname": "10.0.0.1", "device_name": "mlx5_0", "ssd_offload_path": "/ssd"}
    there = {"local_hostname": "10.0.0.2", "client_server_address": "10.0.0.2:5000"}
    assert checked(extra(here), extra(there)) == ["", ""]


def test_secrets_in_files_are_compared_and_never_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    texts = (f"secret_key: hunter{rank}\nnested: {{1: a, b: 2}}" for rank in range(2))
    files = [saved(tmp_path / f"{rank}.yaml", text) for rank, text in enumerate(texts)]
    own = {"hicache_storage_backend": "dynamic"}
    told = checked(*(extra(one, **own) for one in files))
    assert told == [f"{FLAG} secret_key differs between rank 0 and rank 1: {REMEDY}"] * 2
    assert "hunter" not in caplog.text
