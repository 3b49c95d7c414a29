"""`--config FILE`: flags by name from a YAML file, as words before those of the command line."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import yaml

from sglang.srt.arg_groups.foreign_flags import foreign_flags

logger = logging.getLogger(__name__)

CONFIG_FLAG: Final = "--config"


def words_of_config(path: str, fields: Mapping[str, dataclasses.Field[Any]]) -> list[str]:
    """The flags of a file as words of a command line, each `--name=value`.

    Args:
        path: A YAML file with a mapping: a flag's name, with or without its dashes, to its value.
            A null, and false for a switch, leave the flag out. A mapping becomes JSON.
        fields: The known flags by every spelling.

    Raises:
        ValueError: The file cannot be read, or is not such a mapping, or a value has a kind that
            its flag cannot have; names the file and the flag.
    """
    where = f"{CONFIG_FLAG} {path}"
    try:
        with open(path, encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            loader = yaml.SafeLoader(file.read())
        node = loader.get_single_node()
        # The mapping will have only the last of two equal names.
        names = _names_of(node)
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise ValueError(f"{where}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # The message leaves out the text around the mistake, which may have a key.
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = "" if line is None else f", line {line + 1}"
        raise ValueError(f"{where}{at}: is not YAML: give a line NAME: VALUE a flag") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"{where}: is not a mapping: give a line NAME: VALUE a flag")
    for flag, times in names.items():
        if times > 1:
            raise ValueError(f"{where}: {flag} is there {times} times: keep one")
    words: dict[str, str] = {}
    for key, value in content.items():
        flag = _flag(key)
        if flag == CONFIG_FLAG:
            raise ValueError(f"{where}: a file cannot name another file: remove {flag}")
        word = _word(where, flag, value, fields.get(flag))
        if word is not None:
            words[flag] = word
    secrets = [f for f in words if f in fields and fields[f].metadata["secret"]]
    if secrets and stat.S_IMODE(mode) & 0o077:
        logger.warning("%s: others may read %s: chmod 600", where, ", ".join(secrets))
    return list(words.values())


def _names_of(node: yaml.Node | None) -> Counter[str]:
    """The flags that the keys of a mapping name, with their numbers."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return Counter(_flag(key.value) for key, _ in pairs)


def _flag(name: object) -> str:
    return "--" + str(name).lstrip("-").replace("_", "-")


def _word(where: str, flag: str, value: Any, field: dataclasses.Field[Any] | None) -> str | None:
    """The flag with its value as one word; None: it is left out."""
    if field is None and (value is None or value is False):
        # One of SGLang's flags asks for nothing then; any other name is a mistake.
        name = flag.lstrip("-").replace("-", "_")
        return None if foreign_flags(name) is not None else flag
    if value is None:
        return None
    is_switch = field is not None and isinstance(field.default, bool)
    if isinstance(value, bool):
        if field is not None and not is_switch:
            raise ValueError(f"{where}: {flag}: {value} needs quotes to be a text")
        return flag if value else None
    if is_switch:
        raise ValueError(f"{where}: {flag}: must be true or false, not {value!r}")
    if isinstance(value, list):
        raise ValueError(f"{where}: {flag}: a list is no value of a flag: write it as a text")
    if isinstance(value, dict):
        return f"{flag}={json.dumps(value)}"
    return f"{flag}={value}"
