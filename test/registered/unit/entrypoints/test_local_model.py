"""Names of the hub, and changed configs, become directories before the model is looked at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

from rigs.servers.fake_hub import SHA, fake_hub
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.entrypoints import engine_processes
from sglang.srt.entrypoints.engine_processes import StartError
from sglang.srt.entrypoints.local_model import with_local_model
from sglang.srt.entrypoints.start_checks import check_model
from sglang.srt.model_loader.weight_files import weights_identity
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

NAME = "owner/recall-2m"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Files that the hub has sent. It has the built-in model, and what no server needs."""
    repository = tmp_path / "repository"
    shutil.copytree(BUILTIN_MODEL_DIR, repository)
    (repository / "pytorch_model.bin").write_bytes(b"weights once more")
    (repository / "consolidated.safetensors").write_bytes(b"weights once more")
    with fake_hub(NAME, repository) as (url, names):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield names


def args_of(tmp_path: Path, model_path: str = NAME, **fields: object) -> ServerArgs:
    args = ServerArgs(model_path=model_path, download_dir=str(tmp_path / "cache"), **fields)  # type: ignore[arg-type]
    return args.resolve()


def test_a_name_is_fetched_once_and_served_under_itself(
    tmp_path: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = with_local_model(args_of(tmp_path, device="cpu"))
    assert args.model_path is not None
    assert Path(args.model_path).is_relative_to(tmp_path / "cache")
    assert (args.tokenizer_path, args.served_model_name) == (args.model_path, NAME)
    check_model(args)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(fetched)
    assert not {"pytorch_model.bin", "consolidated.safetensors"} & set(fetched)
    fetched.clear()
    assert with_local_model(args_of(tmp_path, device="cpu")) == args
    # Without the hub, the cache is enough.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert with_local_model(args_of(tmp_path, device="cpu")) == args
    assert fetched == []
    assert with_local_model(args) is args


@pytest.mark.parametrize("load_format", ["dummy", "pt"])
def test_only_the_weights_that_are_loaded_are_fetched(
    tmp_path: Path, fetched: list[str], load_format: str
) -> None:
    with_local_model(args_of(tmp_path, load_format=load_format, device="cpu"))
    assert "config.json" in fetched
    assert "model.safetensors" not in fetched
    assert ("pytorch_model.bin" in fetched) == (load_format == "pt")


def test_revisions_and_tokenizers_are_fetched(tmp_path: Path, fetched: list[str]) -> None:
    tagged = with_local_model(args_of(tmp_path, revision="v1.0"))
    assert tagged.model_path is not None
    assert Path(tagged.model_path).name == SHA
    own = args_of(tmp_path, str(BUILTIN_MODEL_DIR), tokenizer_path=NAME)
    fetched.clear()
    found = with_local_model(own)
    assert found.model_path == str(BUILTIN_MODEL_DIR)
    assert found.tokenizer_path == tagged.model_path


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize("revision", [None, "v1.0"])
def test_pages_have_the_size_that_a_model_of_the_hub_asks_for(
    tmp_path: Path, revision: str | None
) -> None:
    """Once the config came with a start, and from the hub's cache before later ones."""
    file = tmp_path / "repository" / "config.json"
    fields = json.loads(file.read_text()) | {"architectures": ["DeepseekV4ForCausalLM"]}
    file.write_text(json.dumps(fields))

    def args(**given: Any) -> ServerArgs:
        return args_of(tmp_path, revision=revision, device="cpu", **given)

    for hierarchical, default in ((False, 1), (True, 64)):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        first = args(enable_hierarchical_cache=hierarchical)
        assert first.page_size == default
        found = with_local_model(first)
        assert found.page_size == 256
        later = args(enable_hierarchical_cache=hierarchical)
        assert later.page_size == 256
        assert with_local_model(later) == found
        assert with_local_model(args(page_size=512)).page_size == 512


def test_paths_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory whose path looks like a name is a directory."""
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in (NAME, "/nowhere/model", "dummy", "a/b/c", "./a/b"):
        args = args_of(tmp_path, path)
        assert with_local_model(args) is args


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize(
    ("model", "revision", "words"),
    [
        (
            "owner/other",
            None,
            r"^model path 'owner/other' is no directory here, and the hub has no such name, or",
        ),
        (
            NAME,
            "v2.0",
            r"'owner/recall-2m \(revision v2.0\)' is no .* without that revision",
        ),
        ("/nowhere/model", "main", r"--revision main: model path '/nowhere/model' is not a name"),
    ],
)
def test_what_the_hub_lacks_is_named_in_a_line(
    tmp_path: Path, model: str, revision: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words) as error:
        with_local_model(args_of(tmp_path, model, revision=revision))
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("HF_HUB_OFFLINE", True, "the hub's cache here lacks it: unset HF_HUB_OFFLINE, or copy"),
        (
            "ENDPOINT",
            f"http://127.0.0.1:{get_free_port()}",
            r"the hub \(http://\S+\) is out of reach and .* HF_ENDPOINT\), or copy",
        ),
    ],
)
def test_a_hub_out_of_reach_takes_one_short_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: object, words: str
) -> None:
    """The library's own text has four sentences, and its exception's name."""
    monkeypatch.setattr(constants, setting, value)
    with pytest.raises(ValueError, match=words) as error:
        with_local_model(args_of(tmp_path))
    assert len(str(error.value)) < 260 and "Error" not in str(error.value)


def test_what_else_the_hub_says_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Mock(status_code=403, headers={})
    for error, words in (
        (GatedRepoError, "approved users alone: ask there for access and set HF_TOKEN, or copy"),
        (HfHubHTTPError, "answered 403: try again later"),
    ):
        raised = error("Many words.\nAnd more.", response=answer)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=raised))
        with pytest.raises(ValueError, match=words):
            with_local_model(args_of(tmp_path))
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=full))
    with pytest.raises(ValueError, match=r"\(\[Errno 28\] No space left on device\): check name"):
        with_local_model(args_of(tmp_path))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("is_old", [False, True])
def test_a_changed_config_is_seen_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """The override is the one that model cards give to enable YaRN. A config may name the rotation
    in either of two ways."""
    monkeypatch.setenv("HOME", str(tmp_path))
    plain = tmp_path / "plain"
    shutil.copytree(BUILTIN_MODEL_DIR, plain)
    config = json.loads((plain / "config.json").read_text())
    del config["rope_parameters" if is_old else "rope_theta"]
    (plain / "config.json").write_text(json.dumps(config))
    asked = args_of(
        tmp_path,
        str(plain),
        json_model_override_args=json.dumps({"rope_scaling": YARN, "eos_token_id": 7}),
    )
    args = with_local_model(asked)
    assert args.model_path is not None
    assert args.served_model_name == str(plain)
    changed = ModelConfig.from_path(args.model_path)
    before = ModelConfig.from_path(str(plain))
    assert (changed.rope.rope_type, changed.rope.factor) == ("yarn", 4.0)
    assert changed.rope.theta == before.rope.theta
    assert 7 in changed.eos_token_ids
    check_model(args)
    plain_identity, own = (
        weights_identity(one, load_format="auto") for one in (str(plain), args.model_path)
    )
    assert plain_identity != own, "pages of another rotation"
    assert with_local_model(asked) == args
    assert with_local_model(args) is args
    (plain / "config.json").write_text(json.dumps({**config, "bos_token_id": 3}))
    assert with_local_model(asked).model_path != args.model_path, "the checkpoint's own has changed"


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON"), ("[1]", "must be a JSON object")]
)
def test_overrides_are_a_json_object(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"--json-model-override-args .*{words}"):
        with_local_model(args_of(tmp_path, str(BUILTIN_MODEL_DIR), json_model_override_args=text))


def test_starts_at_once_share_a_changed_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = args_of(
        tmp_path, str(BUILTIN_MODEL_DIR), json_model_override_args='{"eos_token_id": 7}'
    )
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: with_local_model(asked).model_path, range(8)))
    assert len(found) == 1
    models = tmp_path / ".cache" / "sglang" / "models"
    assert [str(one) for one in models.iterdir()] == list(found)
    shutil.rmtree(models)
    models.write_text("a file")
    with pytest.raises(ValueError, match=r"cannot be made .*change config.json itself"):
        with_local_model(asked)


def test_later_machines_of_a_server_serve_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = args_of(
        tmp_path, str(BUILTIN_MODEL_DIR), json_model_override_args='{"eos_token_id": 7}'
    )
    seen: list[ServerArgs] = []

    def launch(args: ServerArgs) -> None:
        seen.append(args)
        raise StartError("enough")

    monkeypatch.setattr(engine_processes, "check_start", seen.append)
    monkeypatch.setattr(engine_processes, "launch_subprocesses", launch)
    with pytest.raises(StartError, match="enough"):
        engine_processes.run_node(asked)
    assert seen == [with_local_model(asked)] * 2
