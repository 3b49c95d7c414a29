"""Looks for the class of a `dynamic` storage backend without running its module.

This check is early and needs no torch. The import, later and in another process, reports all
remaining errors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from typing import Any, Final, NamedTuple

_FIELDS: Final = ("backend_name", "module_path", "class_name")
_DYNAMIC_NAMES: Final = re.compile(r"import\s*\(?\s*\*|\b(__getattr__|globals|setattr|exec)\b")
"""Constructs that can give a module names which its source does not contain."""


class ClassPath(NamedTuple):
    """Module and name of a backend's class."""

    module_path: str
    class_name: str

    def __str__(self) -> str:
        return ".".join(self)


def dynamic_class(extra_config: Mapping[str, Any]) -> ClassPath:
    """The class that the extra config of a `dynamic` backend names.

    Raises:
        ValueError: A field is missing or is not a string.
    """
    for field in _FIELDS:
        if not isinstance(extra_config.get(field), str) or not extra_config[field]:
            raise ValueError(
                f"--hicache-storage-backend dynamic needs {field!r} (a string) in "
                "--hicache-storage-backend-extra-config"
            )
    return ClassPath(extra_config["module_path"], extra_config["class_name"])


def check_findable(path: ClassPath) -> None:
    """Check that the module exists and is Python, and that its source has the class's name.

    Raises:
        ValueError: A check fails. One line that names module and class.
    """
    cause = _find_problem(path)
    if cause is not None:
        raise ValueError(f"--hicache-storage-backend dynamic: cannot load {path}: {cause}")


def _find_problem(path: ClassPath) -> str | None:
    try:
        spec = _find_spec(path.module_path)
        if spec is None:
            return f"no module {path.module_path!r} on the path of Python (PYTHONPATH)"
        # Compiled modules have no source.
        source = getattr(spec.loader, "get_source", lambda name: None)(path.module_path)
    except (KeyError, ImportError, OSError, UnicodeError):
        # A finder failed, or nested packages lack `__init__.py`: only an import can find those.
        return None
    if source is None:
        return None
    try:
        compile(source, spec.origin or path.module_path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"{spec.origin}: {error}"
    is_named = re.search(rf"\b{re.escape(path.class_name)}\b", source)
    if is_named or _DYNAMIC_NAMES.search(source):
        return None
    return f"{spec.origin} has no {path.class_name!r}"


def _find_spec(module_path: str) -> ModuleSpec | None:
    """Like `importlib.util.find_spec`, but without running the packages around the module."""
    name, places, spec = "", None, None
    for part in module_path.split("."):
        name = f"{name}.{part}" if name else part
        if not part:  # A relative name.
            return None
        if name in sys.modules:
            spec = sys.modules[name].__spec__
        else:
            found = (finder.find_spec(name, places) for finder in sys.meta_path)
            spec = next((one for one in found if one is not None), None)
        if spec is None:
            return None
        places = spec.submodule_search_locations or []
    return spec
