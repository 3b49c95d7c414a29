"""A command line from a dataclass: each field defines a flag's name, type and default."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from sglang.srt.arg_groups.refusals import other_name, refusal, refused_choice
from sglang.srt.utils.spelling import did_you_mean

_NEGATIONS: Final = frozenset({"disable", "no", "without"})
_AFFIRMATIONS: Final = frozenset({"enable", "with"})


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    aliases: Sequence[str] = (),
    secret: bool = False,
    is_shown: bool = True,
) -> Any:
    """A dataclass field that is also a flag `--its-name`.

    Args:
        default: Value if neither the command line nor the caller gives one. `None` means that the
            value is determined later.
        help: One line; the parser appends the default and the choices.
        choices: The accepted values. `check_choices` checks them for flags and for callers.
        aliases: Further spellings, with their dashes.
        secret: Whether to keep the value out of the dataclass's repr.
        is_shown: False: the field is no flag, since users of the machine can read those.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices),
        "aliases": aliases,
        "secret": secret,
        "is_shown": is_shown,
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def flag_name(field_name: str) -> str:
    """The flag of a field: `page_size` becomes `--page-size`."""
    return "--" + field_name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """Raises ValueError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _scalar_type(hint: Any) -> type:
    """The type without None: `int | None` becomes `int`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if hint not in (bool, int, float, str):
        raise TypeError(f"a flag is a bool, int, float or str, not {hint}")
    return typing.cast(type, hint)


def _flags(args_class: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(args_class) if field.metadata["is_shown"]]


def _flag_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    return (flag_name(field.name), *field.metadata["aliases"])


def _build_parser(args_class: type, prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    hints = typing.get_type_hints(args_class)
    for field in _flags(args_class):
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
        SystemExit: `--help` was given and has been printed.
    """
    namespace, unknown = _build_parser(args_class, prog, description).parse_known_args(argv)
    if unknown:
        raise ValueError(explain_unknown(unknown[0].split("=", 1)[0], args_class))
    return vars(namespace)


def explain_unknown(name: str, args_class: type) -> str:
    """Explain why `args_class` has no flag `name`: another engine's, an opposite, or a typo."""
    if not name.startswith("-"):
        return f"{name!r} belongs to no flag; flags start with --, see --help"
    field_name = name.lstrip("-").replace("-", "_")
    line = refusal(field_name) or other_name(field_name)
    if line is not None:
        return line
    known = [spelling for f in _flags(args_class) for spelling in _flag_names(f)]
    opposite = next((one for one in known if _negates(name, one)), None)
    if opposite is not None:
        return f"unknown flag {name}: the default unless {opposite} is given; remove the flag"
    alike = [one for one in known if _sense(one) == _sense(name)]
    close = difflib.get_close_matches(name, alike, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; --help lists what there is"
    return f"unknown flag {name}{hint}"


def _negates(name: str, other: str) -> bool:
    """Whether two flags mean the opposite: equal words, and one of them turns the feature off."""
    first, second = _subject(name), _subject(other)
    return first == second and _sense(name) != _sense(other)


def _subject(name: str) -> list[str]:
    words = name.lstrip("-").split("-")
    return [word for word in words if word not in _NEGATIONS | _AFFIRMATIONS]


def _sense(name: str) -> tuple[bool, bool]:
    """The meaning that a typo does not reverse: whether a flag turns something off, and whether it
    is a minimum."""
    words = name.lstrip("-").split("-")
    return sum(word in _NEGATIONS for word in words) % 2 == 1, "min" in words


def check_choices(args: Any) -> None:
    """Check that each field with choices has one of them, or None if that is its default.

    Raises:
        ValueError: A value is none of the choices; the message suggests the nearest one.
    """
    for field in dataclasses.fields(args):
        choices = field.metadata["choices"]
        value = getattr(args, field.name)
        if choices and value not in choices and not (value is None and field.default is None):
            raise ValueError(
                refused_choice(field.name, value)
                or f"{flag_name(field.name)} {value}: choose one of {', '.join(choices)}"
                f"{did_you_mean(value, choices)}"
            )
