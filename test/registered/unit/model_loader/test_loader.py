"""Loading weights: every tensor is checked, and what is wrong is one line with the remedy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rigs.caches.memory_ranks import PlaceInGroup
from rigs.models.tiny_models import save_tiny_checkpoint
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.placement import WeightSlot
from sglang.srt.model_loader import checkpoint_files
from sglang.srt.model_loader.loader import build_model, get_model, load_weights
from sglang.srt.model_loader.weight_files import weights_identity
from sglang.srt.model_loader.weight_source import LoadConfig, WeightSlots, WeightSource
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

NAME = "model.layers.1.self_attn.k_proj.weight"


def load(path: Path, load_format: str = "auto", seed: int = 0) -> dict[str, torch.Tensor]:
    config = ModelConfig.from_path(str(path))
    load_config = LoadConfig(load_format=load_format, random_seed=seed, show_progress=False)
    model = get_model(config, load_config)
    return {name: slot.dest.clone() for name, slot in model.weight_slots()}


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; `_` stands for `.` in names."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for key, value in changes.items():
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, file)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_tiny_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True)
    return tmp_path


def assert_refused(path: Path, *fragments: str, load_format: str = "auto") -> None:
    with pytest.raises(ValueError) as caught:
        load(path, load_format)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_every_tensor_arrives(checkpoint: Path) -> None:
    want = load_file(checkpoint / "model.safetensors")
    got = load(checkpoint)
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor.expand(got[name].shape)), name


def test_sharded_and_converted_to_the_asked_dtype(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "llama", max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    config = ModelConfig.from_path(str(tmp_path), dtype="bfloat16")
    model = get_model(config, LoadConfig(show_progress=False))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_missing_tensor_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, **{NAME: None})
    assert_refused(checkpoint, NAME, "1 of ", "copy the checkpoint again")


def test_an_unexpected_tensor_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, **{"model.layers.9.mlp.up_proj.weight": torch.zeros(1)})
    assert_refused(checkpoint, "model.safetensors", "model.layers.9.mlp.up_proj.weight", "no place")


def test_redundant_tensors_are_passed_over(checkpoint: Path) -> None:
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(
        checkpoint,
        **{
            "lm_head.weight": embedding.clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        },
    )
    load(checkpoint)


def test_a_wrong_shape_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, **{NAME: torch.zeros(32, 95)})
    assert_refused(checkpoint, NAME, "[32, 95]", "[32, 96]", "model.safetensors")


def test_a_tensor_in_two_files_is_refused(checkpoint: Path) -> None:
    save_file({NAME: torch.zeros(32, 96)}, checkpoint / "extra.safetensors")
    assert_refused(checkpoint, NAME, "twice", "stray")


def stale_shard(path: Path, load_format: str) -> None:
    """Two shards, of which the second has a stale tensor that the index gives to the first."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    suffix, index = (
        ("bin", "pytorch_model.bin.index.json")
        if load_format == "pt"
        else ("safetensors", "model.safetensors.index.json")
    )
    others = [name for name in tensors if "layers.1" in name and name != NAME]
    shards = {
        f"a.{suffix}": {name: one for name, one in tensors.items() if name not in others},
        f"b.{suffix}": {NAME: tensors[NAME] + 1, **{name: tensors[name] for name in others}},
    }
    for file, held in shards.items():
        (torch.save if load_format == "pt" else save_file)(held, path / file)
    names = {name: file for file, held in shards.items() for name in held if name != NAME}
    (path / index).write_text(json.dumps({"weight_map": {**names, NAME: f"a.{suffix}"}}))


@pytest.mark.parametrize("load_format", ["auto", "pt"])
def test_the_index_decides_which_of_two_shards_has_a_tensor(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, load_format: str
) -> None:
    want = load(checkpoint)
    stale_shard(checkpoint, load_format)
    got = load(checkpoint, load_format)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert f"1 tensors are in a file although the index gives them to another, such as {NAME}" in (
        caplog.text
    )


def test_pages_know_which_of_two_shards_the_index_chose(checkpoint: Path, tmp_path: Path) -> None:
    stale_shard(checkpoint, "auto")
    file = checkpoint / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    identities = []
    for shard in ("a.safetensors", "b.safetensors"):
        index["weight_map"][NAME] = shard
        file.write_text(json.dumps(index))
        config, load_config = ModelConfig.from_path(str(checkpoint)), LoadConfig()
        source = load_weights(build_model(config, load_config), config, load_config)
        identities.append(source.identity())
    assert identities[0] != identities[1]


def test_a_wrong_index_does_not_matter_for_a_tensor_that_one_shard_has(checkpoint: Path) -> None:
    want = load(checkpoint)
    stale_shard(checkpoint, "auto")
    file = checkpoint / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    lost = "model.embed_tokens.weight"
    index["weight_map"][lost] = "b.safetensors"
    file.write_text(json.dumps(index))
    assert torch.equal(load(checkpoint)[lost], want[lost])
    # Without a word from the index, none of two is chosen.
    del index["weight_map"][NAME]
    file.write_text(json.dumps(index))
    assert_refused(checkpoint, NAME, "twice", "stray")


@pytest.mark.parametrize("keep", [0, 4, 200, -1000])
def test_a_torn_file_is_refused(checkpoint: Path, keep: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_refused(checkpoint, "model.safetensors", "torn", "copy the file again")


def test_a_missing_shard_and_a_torn_index_are_refused(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path, "qwen2", max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert_refused(tmp_path, shard.name, "is missing", "model.safetensors.index.json")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    assert_refused(tmp_path, "not a valid index")


def test_a_folder_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert_refused(checkpoint, "no *.safetensors", "--load-format dummy")


def test_pickled_weights_only_when_asked_for(checkpoint: Path) -> None:
    want = load(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    file = checkpoint / "pytorch_model.bin"
    torch.save(tensors, file)
    assert_refused(checkpoint, "pickled", "--load-format pt")
    got = load(checkpoint, "pt")
    assert all(torch.equal(got[name], want[name]) for name in want)
    file.write_bytes(file.read_bytes()[:5000])
    assert_refused(checkpoint, "pytorch_model.bin", "torn", load_format="pt")


class Hostile:
    """Would run a function when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.mkdir, (Path("hostile"),))  # type: ignore[return-value]


def test_pickles_cannot_run_code(checkpoint: Path) -> None:
    torch.save({"x": Hostile()}, checkpoint / "pytorch_model.bin")
    assert_refused(checkpoint, "not a plain pickled state dict", load_format="pt")
    assert not Path("hostile").exists()


def test_dummy_weights_depend_on_seed_and_name_alone(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    first, again, other = (load(checkpoint, "dummy", seed) for seed in (0, 0, 1))
    config = json.loads((checkpoint / "config.json").read_text())
    config["num_hidden_layers"] = 3
    config["layer_types"] = ["full_attention"] * 3
    (checkpoint / "config.json").write_text(json.dumps(config))
    deeper = load(checkpoint, "dummy", 0)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], deeper[name])
        assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[NAME], first[NAME.replace("k_proj", "v_proj")])


def test_names_and_sizes_that_are_not_supported(checkpoint: Path) -> None:
    config = ModelConfig.from_path(str(checkpoint))
    with pytest.raises(ValueError, match="'gguf' is not supported: supported are auto"):
        get_model(config, LoadConfig(load_format="gguf"))
    with pytest.raises(ValueError, match="6 attention heads cannot be split over 4 ranks"):
        get_model(config, LoadConfig(tp_group=PlaceInGroup(0, 4)))


def test_a_source_tells_the_identity_of_its_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = ModelConfig.from_path(str(checkpoint))
    found = {}
    for kind in ("auto", "safetensors", "dummy"):
        load_config = LoadConfig(load_format=kind, random_seed=3, show_progress=False)
        source = load_weights(build_model(config, load_config), config, load_config)
        found[kind] = source.identity()
        assert found[kind] == weights_identity(str(checkpoint), load_format=kind, random_seed=3)
    assert found["auto"] == found["safetensors"] != found["dummy"]


def replace_weights(path: Path) -> None:
    """A file of the same name and size with other weights, moved into place."""
    new = load_file(path / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in new.items()}, path / "new")
    (path / "new").rename(path / "model.safetensors")


def change_in_place(path: Path) -> None:
    """Another byte in the file; its size and inode stay."""
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")


def keep_size_and_time(path: Path) -> None:
    """Other weights whose file differs in its inode alone, as `rsync -t` leaves it."""
    stat = (path / "model.safetensors").stat()
    replace_weights(path)
    os.utime(path / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))


def add_an_index(path: Path, names: Mapping[str, str]) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def add_shards(path: Path) -> None:
    """An index with another file; the one that was loaded stays."""
    save_file(load_file(path / "model.safetensors"), path / "b.safetensors")
    add_an_index(path, {NAME: "b.safetensors"})


CHANGES: Sequence[tuple[Callable[[Path], object], str]] = (
    (replace_weights, "model.safetensors has changed"),
    (change_in_place, "model.safetensors has changed"),
    (keep_size_and_time, "model.safetensors has changed"),
    (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is gone"),
    (lambda path: (path / "config.json").write_text("{}"), "config.json has changed"),
    (lambda path: shutil.rmtree(path), "config.json is gone (and 1 more)"),
    (add_shards, "b.safetensors was added"),
    (lambda path: add_an_index(path, {NAME: "lost.safetensors"}), "the index has changed"),
)


@pytest.fixture
def source(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightSource]:
    """The files of `checkpoint`, loaded. Known digests are in a directory of the test's own."""
    config, load_config = ModelConfig.from_path(str(checkpoint)), LoadConfig(show_progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield load_weights(build_model(config, load_config), config, load_config)


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_files_that_changed_since_do_not_tell_what_was_loaded(
    checkpoint: Path, source: WeightSource, change: Callable[[Path], object], what: str
) -> None:
    change(checkpoint)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            source.identity()
        assert str(caught.value) == (
            f"{checkpoint}: {what} since the weights were loaded, so the files no longer identify "
            "the weights in memory: restart this server"
        )


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_an_identity_that_was_told_is_told_again(
    checkpoint: Path, source: WeightSource, change: Callable[[Path], object], what: str
) -> None:
    told = source.identity()
    change(checkpoint)
    assert source.identity() == told, what


def test_files_that_change_while_they_are_hashed(
    checkpoint: Path, source: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hash_late(*args: Any, **kwargs: Any) -> str:
        replace_weights(checkpoint)
        return weights_identity(*args, **kwargs)

    monkeypatch.setattr(checkpoint_files, "weights_identity", hash_late)
    with pytest.raises(ValueError, match=r"model\.safetensors has changed since the weights were"):
        source.identity()


def test_files_that_change_while_they_are_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, load_config = ModelConfig.from_path(str(checkpoint)), LoadConfig(show_progress=False)
    model = build_model(config, load_config)
    take = WeightSlots.take
    changes = [change_in_place]

    def take_and_change(slots: WeightSlots, *args: Any) -> WeightSlot | None:
        while changes:
            changes.pop()(checkpoint)
        return take(slots, *args)

    monkeypatch.setattr(WeightSlots, "take", take_and_change)
    source = load_weights(model, config, load_config)
    with pytest.raises(ValueError, match=r"model\.safetensors has changed since the weights were"):
        source.identity()


def test_random_weights_are_told_apart_by_the_config_that_they_were_made_for(
    checkpoint: Path,
) -> None:
    config = ModelConfig.from_path(str(checkpoint))
    load_config = LoadConfig(load_format="dummy", show_progress=False)
    source = load_weights(build_model(config, load_config), config, load_config)
    made_for = weights_identity(str(checkpoint), load_format="dummy")
    (checkpoint / "config.json").write_text("{}")
    assert source.identity() == made_for
