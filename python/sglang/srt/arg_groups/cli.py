"""A command line from a dataclass: a field is the one source of a flag's name, type, default."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from sglang.srt.arg_groups.refusals import refusal
from sglang.srt.utils.spelling import did_you_mean


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    aliases: Sequence[str] = (),
    secret: bool = False,
) -> Any:
    """A dataclass field that is also `--its-name`.

    Args:
        default: Used where neither the command line nor the caller gives a value. `None` means
            that the value is worked out later.
        help: One line; the default and the choices are added to it.
        choices: The names that are accepted. Checked by `check_choices`, for every way in.
        aliases: Further spellings, with their dashes.
        secret: Keep the value out of the dataclass's repr.
    """
    metadata = {"help": help, "choices": tuple(choices), "aliases": aliases, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def flag_name(field_name: str) -> str:
    """`page_size` to `--page-size`."""
    return "--" + field_name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _scalar_type(hint: Any) -> type:
    """`int | None` to `int`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if hint not in (bool, int, float, str):
        raise TypeError(f"a flag is a bool, int, float or str, not {hint}")
    return typing.cast(type, hint)


def _flag_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    return (flag_name(field.name), *field.metadata["aliases"])


def _build_parser(args_class: type, prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    hints = typing.get_type_hints(args_class)
    for field in dataclasses.fields(args_class):
        kind = _scalar_type(hints[field.name])
        text = field.metadata["help"]
        choices = field.metadata["choices"]
        if choices:
            text += f" One of: {', '.join(choices)}."
        if field.default is not None and kind is not bool:
            text += f" Default: {field.default}."
        options: dict[str, Any] = {"dest": field.name, "help": text.replace("%", "%%")}
        if kind is bool:
            parser.add_argument(*_flag_names(field), action="store_true", **options)
        else:
            parser.add_argument(*_flag_names(field), type=kind, default=field.default, **options)
    return parser


def parse_flags(
    args_class: type, argv: Sequence[str], *, prog: str, description: str
) -> dict[str, Any]:
    """Field name to value for `argv`, with one flag per field of the dataclass `args_class`.

    Raises:
        ValueError: A flag that is unknown, refused or malformed; the message is one line.
        SystemExit: `--help` was asked for and printed.
    """
    namespace, unknown = _build_parser(args_class, prog, description).parse_known_args(argv)
    if unknown:
        raise ValueError(explain_unknown(unknown[0].split("=", 1)[0], args_class))
    return vars(namespace)


def explain_unknown(name: str, args_class: type) -> str:
    """Why `name` is no flag of `args_class`: what SGLang has and we do not, or a typo."""
    if not name.startswith("-"):
        return f"{name!r} belongs to no flag; flags start with --, see --help"
    reason = refusal(name.lstrip("-").replace("-", "_"))
    if reason is not None:
        return reason
    known = [spelling for f in dataclasses.fields(args_class) for spelling in _flag_names(f)]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; --help lists what there is"
    return f"unknown flag {name}{hint}"


def check_choices(args: Any) -> None:
    """Every field that has choices holds one of them (or None where that is its default).

    Raises:
        ValueError: Naming the flag, the value and the choices, and the one that may be meant.
    """
    for field in dataclasses.fields(args):
        choices = field.metadata["choices"]
        value = getattr(args, field.name)
        if choices and value not in choices and not (value is None and field.default is None):
            raise ValueError(
                f"{flag_name(field.name)} {value}: choose one of {', '.join(choices)}"
                f"{did_you_mean(value, choices)}"
            )
