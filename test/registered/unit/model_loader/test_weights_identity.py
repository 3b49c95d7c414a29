"""Weights' identity: follows contents, remembers digests, survives a damaged memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sglang.srt.model_loader import weight_files as module
from sglang.srt.model_loader.weight_files import (
    CACHE_FILE,
    config_digest,
    config_values,
    weights_identity,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-a-test-cpu")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "a.safetensors").write_bytes(b"first" * 1000)
    (path / "b.safetensors").write_bytes(b"second" * 1000)
    return path


def identity(model: Path, load_format: str = "auto", seed: int = 0) -> str:
    cache = model.parent / "cache"
    return weights_identity(str(model), load_format=load_format, random_seed=seed, cache_dir=cache)


def test_the_digest_of_a_config_follows_its_bytes(model: Path) -> None:
    first = config_digest(str(model))
    assert len(first) == 32
    (model / "a.safetensors").write_bytes(b"other weights")
    assert config_digest(str(model)) == first
    (model / "config.json").write_text("{ }")
    assert config_digest(str(model)) != first
    (model / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        config_digest(str(model))


def test_the_values_of_a_config_are_told_by_name(model: Path) -> None:
    values = {"b": 1e-05, "a": {"d": [1, {"f": 2, "e": None}], "c": {}, "g": {"h": "x"}}}
    (model / "config.json").write_text(json.dumps(values))
    assert config_values(str(model)) == {
        "b": "1e-05",
        "a.d": '[1, {"e": null, "f": 2}]',
        "a.c": "{}",
        "a.g.h": '"x"',
    }
    (model / "config.json").write_text('{"limit": [0.0, Infinity]}')
    assert config_values(str(model)) == {"limit": "[0.0, Infinity]"}
    (model / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json"):
        config_values(str(model))


def test_same_contents_elsewhere_are_the_same_weights(model: Path, tmp_path: Path) -> None:
    first = identity(model)
    assert len(first) == 32
    moved = tmp_path / "moved"
    model.rename(moved)
    assert identity(moved) == first


@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "b.safetensors"])
def test_any_byte_counts(model: Path, name: str) -> None:
    first = identity(model)
    data = bytearray((model / name).read_bytes())
    data[-1] ^= 1
    (model / name).write_bytes(data)
    os.utime(model / name, ns=(0, 12345))
    assert identity(model) != first


def test_digests_are_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = identity(model)
    hashed: list[Path] = []
    plain = module._hash_file

    def counted(path: Path) -> str:
        hashed.append(path)
        return plain(path)

    monkeypatch.setattr(module, "_hash_file", counted)
    assert identity(model) == first
    assert hashed == []
    os.utime(model / "a.safetensors", ns=(0, 777))
    assert identity(model) == first
    assert [path.name for path in hashed] == ["a.safetensors"]


@pytest.mark.parametrize(
    "damage", ["", "{", "[1]", '{"k": 5}', "\x00\x01", '{"k": "not a digest"}'], ids=repr
)
def test_a_damaged_memory_is_ignored_and_mended(model: Path, damage: str) -> None:
    first = identity(model)
    cache = model.parent / "cache" / CACHE_FILE
    cache.write_text(damage)
    assert identity(model) == first
    assert len(json.loads(cache.read_text())) == 3
    assert [path.name for path in cache.parent.iterdir()] == [CACHE_FILE]


def test_a_wrong_digest_in_the_memory_is_not_believed_when_malformed(model: Path) -> None:
    first = identity(model)
    cache = model.parent / "cache" / CACHE_FILE
    entries = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: value[:31] + "x" for key, value in entries.items()}))
    assert identity(model) == first


def test_an_unwritable_memory_costs_only_time(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model.parent / "cache").write_text("a file where the directory should be")
    assert len(identity(model)) == 32
    assert "not remembered" in caplog.text


def test_dummy_weights_are_config_and_seed(model: Path) -> None:
    first = identity(model, "dummy")
    assert first == identity(model, "dummy")
    assert first != identity(model, "dummy", seed=1)
    assert first != identity(model)
    (model / "config.json").write_text('{"a": 1}')
    assert first != identity(model, "dummy")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        identity(tmp_path)
