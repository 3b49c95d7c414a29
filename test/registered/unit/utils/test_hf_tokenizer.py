"""Tokenizers from local files: their warnings, and code that comes with one."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, pre_tokenizers

from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.detokenizer import detokenizer_manager
from sglang.srt.process import build
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import _SAMPLES, check_tokenizer_files, get_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

SAYS = "an incorrect regex pattern"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the library, which gives one at each load here."""
    load, lines = transformers.AutoTokenizer.from_pretrained, list[str]()
    library = logging.getLogger("transformers")

    def warn_and_load(path: str, **options: Any) -> Any:
        library.getChild("some.module").warning(SAYS)
        return load(path, **options)

    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", warn_and_load)
    monkeypatch.setattr(library, "handlers", [handler])
    return lines


def test_each_process_of_a_server_but_the_first_leaves_warnings_to_it(said: list[str]) -> None:
    args = ServerArgs().resolve()
    build._load_tokenizer(args)
    detokenizer_manager._load(args, None)
    assert said == []
    get_tokenizer(str(BUILTIN_MODEL_DIR))
    assert said == [SAYS], "the server process"


REMOTE_CLASS = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer whose class is its own; its code makes the file `ran` where it runs."""
    path = tmp_path / "tokenizer"
    path.mkdir()
    shutil.copy(BUILTIN_MODEL_DIR / "tokenizer.json", path)
    auto_map = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": auto_map}
    (path / "tokenizer_config.json").write_text(json.dumps(own))
    (path / "own.py").write_text(REMOTE_CLASS.format(marker=str(path / "ran")))
    for module in ("dynamic_module_utils", "utils.hub", "utils"):
        name = f"transformers.{module}.HF_MODULES_CACHE"
        monkeypatch.setattr(name, str(tmp_path / "modules"), raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def ask(_: object = "") -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    return path


def test_code_of_a_tokenizer_needs_the_flag(path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs code .* start with --trust-remote-code") as caught:
        get_tokenizer(str(path))
    assert "\n" not in str(caught.value)
    assert not (path / "ran").exists()
    assert type(get_tokenizer(str(path), trust_remote_code=True)).__name__ == "OwnTokenizer"
    assert (path / "ran").exists()


def test_a_vocabulary_of_tiktoken_is_a_tokenizers_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        check_tokenizer_files(str(tmp_path))
    (tmp_path / "tiktoken.model").touch()
    check_tokenizer_files(str(tmp_path))


def _with_class(path: Path, name: str, model_type: str | None) -> str:
    path.mkdir()
    shutil.copy(BUILTIN_MODEL_DIR / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    if model_type is not None:
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return str(path)


def test_a_class_that_ignores_the_rules_of_the_file_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = _with_class(tmp_path / "own", "PreTrainedTokenizerFast", "qwen2")
    tokenizer = get_tokenizer(own)
    [warned] = caplog.messages
    assert own in warned and "Qwen2Tokenizer" in warned and "TokenizersBackend" in warned
    caplog.clear()
    get_tokenizer(own, is_known=True)
    assert caplog.messages == [], "the server process warns"

    file = Tokenizer.from_file(str(BUILTIN_MODEL_DIR / "tokenizer.json"))
    [text] = [one for one in _SAMPLES if repr(one) in warned]
    by_file = file.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False) != by_file
    remedy = get_tokenizer(_with_class(tmp_path / "remedy", "TokenizersBackend", None))
    assert remedy.encode(text, add_special_tokens=False) == by_file
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "GPT2Tokenizer"])
def test_no_warning_where_ids_are_those_of_the_file(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _with_class(tmp_path / "tokenizer", name, "llama")
    if name == "GPT2Tokenizer":
        file = Tokenizer.from_file(f"{path}/tokenizer.json")
        file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        file.model.ignore_merges = False
        file.save(f"{path}/tokenizer.json")
    assert type(get_tokenizer(path)).__name__ in (name, "TokenizersBackend")
    assert caplog.messages == []


def test_a_vocabulary_in_other_files_has_no_rules_to_compare(tmp_path: Path) -> None:
    path = Path(_with_class(tmp_path / "tokenizer", "GPT2Tokenizer", "llama"))
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}))
    (path / "merges.txt").write_text("#version: 0.2\na b\n")
    assert get_tokenizer(str(path)).encode("ab") == [3]


def test_a_broken_file_that_the_class_does_not_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(_with_class(tmp_path / "tokenizer", "GPT2Tokenizer", "llama"))
    loaded = get_tokenizer(str(path))
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda path, **options: loaded
    )
    caplog.clear()
    (path / "tokenizer.json").write_text('{"model": ')
    assert get_tokenizer(str(path)) is loaded
    [warned] = caplog.messages
    assert str(path / "tokenizer.json") in warned and "Copy it again" in warned
    monkeypatch.undo()
    with pytest.raises(ValueError, match="cannot be loaded"):
        get_tokenizer(str(path))
