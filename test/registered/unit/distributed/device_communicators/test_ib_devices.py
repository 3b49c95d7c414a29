"""The forms of `--disaggregation-ib-device`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
    get_ib_devices_for_gpu,
    parse_ib_device_config,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


def test_a_list_is_for_all_gpus() -> None:
    assert parse_ib_device_config(None) is None
    assert parse_ib_device_config("mlx5_0, mlx5_1") is None
    assert get_ib_devices_for_gpu("mlx5_0, mlx5_1", 7) == "mlx5_0,mlx5_1"
    assert get_ib_devices_for_gpu(None, 0) is None
    assert get_ib_devices_for_gpu(" ", 0) is None


def test_an_object_is_by_gpu(tmp_path: Path) -> None:
    text = '{"0": "mlx5_0", "1": "mlx5_1,mlx5_2"}'
    (tmp_path / "devices.json").write_text(text)
    for form in (text, str(tmp_path / "devices.json")):
        assert parse_ib_device_config(form) == {0: "mlx5_0", 1: "mlx5_1,mlx5_2"}
        assert get_ib_devices_for_gpu(form, 1) == "mlx5_1,mlx5_2"
        with pytest.raises(ValueError, match=r"has no devices for GPU 2, only for \[0, 1\]"):
            get_ib_devices_for_gpu(form, 2)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("mlx5_0,,mlx5_1", "'' is no device's name"),
        ("mlx5 0", "'mlx5 0' is no device's name"),
        ("{", "not JSON"),
        ("{}", "not a JSON object"),
        ('["mlx5_0"]', "not a JSON object"),
        ('{"a": "mlx5_0"}', "'a': 'mlx5_0' is not a GPU's number"),
        ('{"0": ["mlx5_0"]}', "is not a GPU's number with a list"),
        ('{"0": "mlx5_0", "00": "mlx5_1"}', "GPU 0 is named twice"),
        ('{"0": ""}', "'' is no device's name"),
        ("/nowhere/devices.json", "cannot be read"),
    ],
)
def test_wrong_forms_name_the_flag_and_the_remedy(form: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^--disaggregation-ib-device") as refused:
        get_ib_devices_for_gpu(form, 0)
    assert message in str(refused.value)
    assert 'a JSON object by GPU like {"0": "mlx5_0"' in str(refused.value)
