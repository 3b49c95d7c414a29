"""Tokens of a page that a model asks for, by its config.json: here, or in the hub's cache."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from sglang.srt.arg_groups.server_flags import ServerFlags
from sglang.srt.constants import (
    DEFAULT_HIERARCHICAL_PAGE_SIZE,
    DEFAULT_PAGE_SIZE,
    PAGE_SIZES,
)
from sglang.srt.utils.json_files import read_json

_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_name(path: str) -> bool:
    """True if a model path is a name of the hub, `OWNER/NAME`, and no path here."""
    return _NAME.fullmatch(path) is not None and not os.path.exists(path)


def cache_and_page_size(args: ServerFlags) -> tuple[bool, int]:
    """True if the cache is hierarchical, and the tokens of a page. A storage backend implies the
    hierarchical cache. Reads the model's config.json if no page size is given."""
    hierarchical = args.enable_hierarchical_cache or args.hicache_storage_backend is not None
    if args.page_size is not None:
        return hierarchical, args.page_size
    return hierarchical, page_size_of_model(args) or _default(hierarchical)


def page_size_of_model(args: ServerFlags) -> int | None:
    """Tokens of a page that the model asks for; None: its config is not on this host, or it takes
    any."""
    if args.model_path is None:
        return None
    path = _config_path(args, args.model_path)
    try:
        config = None if path is None else read_json(path)
    except (OSError, ValueError):
        return None  # Who reads the whole config says what is wrong with it.
    names = (config or {}).get("architectures")
    return PAGE_SIZES.get(str(names[0])) if isinstance(names, list) and names else None


def has_default_page(args: ServerFlags) -> bool:
    """True if resolved arguments have the page size of models that take any."""
    return args.page_size == _default(args.enable_hierarchical_cache)


def _default(hierarchical: bool) -> int:
    return DEFAULT_HIERARCHICAL_PAGE_SIZE if hierarchical else DEFAULT_PAGE_SIZE


def _config_path(args: ServerFlags, model_path: str) -> Path | None:
    if not is_hub_name(model_path):
        return Path(model_path) / "config.json"
    # Imported here, because few starts need it.
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(
            model_path, "config.json", cache_dir=args.download_dir, revision=args.revision
        )
    except ValueError:
        return None  # No name of the hub after all, which the download says.
    return Path(found) if isinstance(found, str) else None
