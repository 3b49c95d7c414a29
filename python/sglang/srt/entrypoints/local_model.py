"""Finds or makes the directory of the served model.

Names of the Hugging Face hub are looked up in its cache on this host, else downloaded.
`--json-model-override-args` makes a directory with its own config.json, and links to the
checkpoint's other files. All readers and digests of the config then see the changes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import xxhash

from sglang.srt.arg_groups.model_pages import has_default_page, is_hub_name, page_size_of_model
from sglang.srt.model_loader.weight_files import config_file
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.json_files import read_json

logger = logging.getLogger(__name__)

_TEXT: Final = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
"""Config, tokenizer, chat template, and code, which runs only with `--trust-remote-code`."""
_DUPLICATES: Final = ("original/*", "consolidated*", "*/*.safetensors")
"""The same weights in other formats."""


def with_local_model(args: ServerArgs) -> ServerArgs:
    """Resolved arguments whose model and tokenizer are directories, if the hub has them, and whose
    model has the config that is asked for.

    A name is `OWNER/NAME`, and not a directory here. Files that the hub's cache lacks are
    downloaded with a progress bar on stderr; that may take long. Other paths stay as they are.

    Raises:
        ValueError: The hub cannot be reached, or lacks the name, the revision or access rights; or
            the changes of the config are not JSON. One line with the name and the remedy.
    """
    assert args.model_path is not None, "resolved"
    if args.revision is not None and not is_hub_name(args.model_path):
        raise ValueError(
            f"--revision {args.revision}: model path {args.model_path!r} is not a name of the hub: "
            "leave the flag out"
        )
    weights = {"dummy": (), "remote_instance": (), "pt": ("*.bin", "*.pt", "*.pth")}
    model = _local(args, args.model_path, weights.get(args.load_format, ("*.safetensors",)))
    tokenizer = args.tokenizer_path
    if tokenizer == args.model_path:
        tokenizer = model
    elif tokenizer is not None:
        tokenizer = _local(args, tokenizer, (), is_model=False)
    overrides = _overrides(args.json_model_override_args)
    if overrides:
        model = _with_config(Path(model), overrides)
    if (model, tokenizer) == (args.model_path, args.tokenizer_path):
        return args
    found = dataclasses.replace(
        args,
        model_path=model,
        tokenizer_path=tokenizer,
        revision=None,
        json_model_override_args="{}",
    )
    page_size = page_size_of_model(found)
    if page_size is not None and has_default_page(args) and page_size != args.page_size:
        # The config came with this start. The model does not take the default.
        logger.info("Pages have %d tokens, as the model asks for", page_size)
        found = dataclasses.replace(found, page_size=page_size)
    return found.resolve()


def _local(args: ServerArgs, path: str, weights: tuple[str, ...], *, is_model: bool = True) -> str:
    """The directory that `path` names.

    Args:
        weights: Patterns of the weight files.
        is_model: `--revision` is about it.
    """
    if not is_hub_name(path):
        return path
    # Imported here, because few starts need it.
    from huggingface_hub import snapshot_download

    revision = args.revision if is_model else None
    try:
        found = snapshot_download(
            path,
            revision=revision,
            cache_dir=args.download_dir,
            allow_patterns=[*_TEXT, *weights],
            ignore_patterns=list(_DUPLICATES),
        )
    # Errors of the hub, of the network and of the disk are all of these two.
    except (OSError, ValueError) as error:
        what = path if revision is None else f"{path} (revision {revision})"
        raise ValueError(
            f"{'model' if is_model else 'tokenizer'} path {what!r} is no directory here, and "
            f"{_why_not(error)}, or copy the checkpoint to this host and give its directory"
        ) from error
    assert isinstance(found, str)
    logger.info("%s is in %s", path, found)
    return found


def _why_not(error: Exception) -> str:
    """Why the hub gave nothing, and the remedy, in place of the library's paragraphs."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it to approved users alone: ask there for access and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such name, or it is private: check the name, set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the hub has it without that revision: check --revision"
    if constants.HF_HUB_OFFLINE:
        return "the hub's cache here lacks it: unset HF_HUB_OFFLINE"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"the hub ({constants.ENDPOINT}) is out of reach and its cache here lacks it: connect "
            "this host (HTTPS_PROXY, or a mirror in HF_ENDPOINT)"
        )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"the hub ({constants.ENDPOINT}) answered {status}: try again later"
    first = str(error).strip().partition("\n")[0][:200].rstrip(".")
    return f"it cannot be had from the hub ({first}): check name, disk and network"


def _overrides(text: str) -> dict[str, Any]:
    """The fields of config.json to be changed."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--json-model-override-args {text!r} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"--json-model-override-args {text!r} must be a JSON object")
    return found


def _with_config(checkpoint: Path, overrides: dict[str, Any]) -> str:
    """A directory below `~/.cache/sglang` with the files of `checkpoint`, and fields of config.json
    changed. Starts with the same files and fields share it."""
    config = read_json(config_file(str(checkpoint)))
    assert config is not None, "it is there"
    scaling = overrides.get("rope_scaling")
    if isinstance(scaling, dict) and isinstance(config.get("rope_parameters"), dict):
        # The older name would replace the newer one as a whole, `rope_theta` included.
        rest = {name: value for name, value in overrides.items() if name != "rope_scaling"}
        overrides = {**rest, "rope_parameters": {**config["rope_parameters"], **scaling}}
    text = json.dumps({**config, **overrides}, indent=2)
    files = {file.name: str(file.resolve()) for file in sorted(checkpoint.iterdir())}
    del files["config.json"]
    digest = xxhash.xxh3_128_hexdigest(json.dumps([text, files]).encode())
    found = Path.home() / ".cache" / "sglang" / "models" / digest
    if not found.is_dir():
        try:
            _make(found, text, files)
        except OSError as error:
            raise ValueError(
                f"--json-model-override-args: {found} cannot be made ({error}): make room, or "
                "change config.json itself"
            ) from error
    logger.info("config.json of %s is changed in %s: %s", checkpoint, found, json.dumps(overrides))
    return str(found)


def _make(directory: Path, config: str, files: dict[str, str]) -> None:
    """Make a directory with a config.json and links, at once or not at all."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        (made / "config.json").write_text(config, encoding="utf-8")
        for name, target in files.items():
            (made / name).symlink_to(target)
        made.rename(directory)
    except OSError:
        shutil.rmtree(made)
        if not directory.is_dir():  # another start was not faster
            raise
