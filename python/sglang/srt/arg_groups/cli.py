"""A command line from a dataclass: each field defines a flag's name, type and default.

All mistakes of a command line are reported at once (`FlagErrors`).
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NoReturn

from sglang.srt.arg_groups.config_file import CONFIG_FLAG, words_of_config
from sglang.srt.arg_groups.foreign_flags import (
    foreign_flags,
    ignored,
    other_name,
    refusals,
    refused_choice,
    settings,
)
from sglang.srt.utils.spelling import did_you_mean, near_misspelling

logger = logging.getLogger(__name__)

_NEGATIONS: Final = frozenset({"disable", "no", "without"})
_AFFIRMATIONS: Final = frozenset({"enable", "with"})
_NUMBER: Final = re.compile(r"-\d.*|-\.\d.*")
"""A word that begins with a dash and is no flag."""


class Heading(StrEnum):
    """The groups of flags in `--help`, in their order."""

    MODEL = "Model"
    SERVER = "Server"
    MEMORY = "Memory and scheduling"
    TIERS = "Host memory (L2) and store (L3)"
    PARALLELISM = "Several devices and machines"
    SPECULATION = "Drafted tokens"
    DISAGGREGATION = "Prefill and decode on different servers"
    OBSERVABILITY = "Logs, metrics, traces"
    REMOTE_WEIGHTS = "Weights from a running server"


Mistake = tuple[str, str]
"""A field with a wrong value, and the line about it."""


class FlagErrors(ValueError):
    """All mistakes of a command line that could be found, a line each."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(dict.fromkeys(lines))
        super().__init__("\n".join(self.lines))


def raise_errors(lines: Iterable[str]) -> None:
    found = list(lines)
    if found:
        raise FlagErrors(found)


def lines_of(check: Callable[..., Iterable[str] | None], *arguments: Any) -> list[str]:
    """The lines that a check of arguments yields, then the message of its ValueError, if it raises
    one."""
    found: list[str] = []
    try:
        found.extend(check(*arguments) or ())
    except ValueError as error:
        found.append(str(error))
    return found


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    aliases: Sequence[str] = (),
    secret: bool = False,
    is_shown: bool = True,
    heading: Heading | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field that is also a flag `--its-name`.

    Args:
        default: Value if neither the command line nor the caller gives one. `None` means that the
            value is determined later.
        help: One line; the parser appends the default and the choices.
        choices: The accepted values. `check_choices` checks them for flags and for callers.
        aliases: Further spellings, with their dashes.
        secret: True if the dataclass's repr must not show the value.
        is_shown: False if the field has no flag, because users of the machine can read flags.
        heading: The group that begins in the dataclass with this field; None: the field belongs to
            the group of the one before.
        parse: Makes the value from the word on the command line; raises ValueError. If None, the
            field's type makes it.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices),
        "aliases": aliases,
        "secret": secret,
        "is_shown": is_shown,
        "heading": heading,
        "parse": parse,
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def flag_name(field_name: str) -> str:
    """The flag of a field: `page_size` becomes `--page-size`."""
    return "--" + field_name.replace("_", "-")


class _Help(argparse.Action):
    """`--help` and `--help=all`: prints and exits."""

    def __init__(self, first: Sequence[str], **options: Any) -> None:
        super().__init__(nargs="?", **options)
        self._first = first

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, *_: object
    ) -> NoReturn:
        if values != "all" and self._first:
            _shorten(parser, self._first)
        parser.print_help()
        parser.exit()


def _shorten(parser: argparse.ArgumentParser, first: Sequence[str]) -> None:
    """Let the help of `parser` explain the fields `first`, and only name the others by group."""
    by_field = {action.dest: action for action in parser._actions}
    lines = []
    for group in parser._action_groups:
        names = " ".join(
            action.option_strings[0] for action in group._group_actions if action.dest not in first
        )
        if group.title in set(Heading):
            wrapped = textwrap.fill(
                names, width=98, initial_indent="  ", subsequent_indent="  ",
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
            lines += [f"{group.title}:", wrapped, ""]
    parser._action_groups.clear()
    mine = parser.add_argument_group("Flags to begin with")
    mine._group_actions.extend(by_field[name] for name in first)
    parser.epilog = "\n".join(
        [*lines, "`sglang serve --help=all` explains each of them, and so does docs/reference.md."]
    )


class _Parser(argparse.ArgumentParser):
    """Raises ValueError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def tool_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser of a tool's own flags; the other words of the command line are the engine's.

    `--help` is a switch: the tool shows its own flags and then the engine's.

    Args:
        module: The tool's module, as Python runs it.
        doc: The module's docstring; its second and later paragraphs describe the tool.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage="%(prog)s [flags]",
        description=(doc or "").split("\n\n", 1)[1].strip(),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true")
    return parser


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


def add_flags(parser: argparse.ArgumentParser, args_class: type) -> None:
    hints = typing.get_type_hints(args_class)
    groups = {one: parser.add_argument_group(str(one)) for one in Heading}
    heading = next(iter(Heading))
    for field in _flags(args_class):
        heading = field.metadata["heading"] or heading
        group = groups[heading]
        kind = _scalar_type(hints[field.name])
        text = field.metadata["help"]
        choices = field.metadata["choices"]
        if choices:
            text += f" One of: {', '.join(choices)}."
        if field.default is not None and kind is not bool:
            text += f" Default: {field.default}."
        options: dict[str, Any] = {"dest": field.name, "help": text.replace("%", "%%")}
        if kind is bool:
            group.add_argument(*_flag_names(field), action="store_true", **options)
        else:
            parse = field.metadata["parse"]
            options["type"] = kind if parse is None else _with_message(parse)
            group.add_argument(*_flag_names(field), default=field.default, **options)


def _with_message(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse`, but its errors become `ArgumentTypeError`, because argparse shows their text."""

    def convert(word: str) -> Any:
        try:
            return parse(word)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    """The contents of a command line.

    Attributes:
        values: Field name to value; the default if the flag is absent or malformed.
        malformed: The fields whose flags are malformed.
        lines: A line for each mistake: flags that are unknown, refused or malformed.
        ignored: Flags of SGLang's that have no effect here and none on answers.
        given: The fields whose flags were given.
    """

    values: dict[str, Any]
    malformed: list[str]
    lines: list[str]
    ignored: list[str]
    given: set[str]


def parse_flags(
    args_class: type, argv: Sequence[str], *, prog: str, description: str, first: Sequence[str] = ()
) -> ParsedFlags:
    """Parse `argv`, with one flag per field of the dataclass `args_class`. Flags of a file that
    `--config` names stand before those of `argv`, which win.

    Raises SystemExit after help has been printed: `--help` explains the fields `first` and names
    the others by group, `--help=all` explains all.
    """
    parser = _Parser(
        prog=prog, usage="%(prog)s [flags]", description=description, allow_abbrev=False,
        add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "-h", "--help", action=_Help, first=first, dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS, help=argparse.SUPPRESS,
    )  # fmt: skip
    add_flags(parser, args_class)
    fields = {one: f for f in _flags(args_class) for one in _flag_names(f)}
    known = {one: f.name for one, f in fields.items()}
    namespace = parser.parse_args([])
    malformed: list[str] = []
    given: set[str] = set()
    argv, lines = _with_config(argv, fields)
    foreign: list[tuple[str, Any]] = []
    for name, group in _groups(argv):
        if name is not None and name not in (*known, "-h", "--help"):
            words = [word for _, equals, word in [group[0].partition("=")] if equals] + group[1:]
            foreign.append((name, " ".join(words) if words else True))
            continue
        try:
            _, strays = parser.parse_known_args(group, namespace)
        except ValueError as error:
            text = str(error).removeprefix("argument ")
            if "ignored explicit argument" in text:  # `--switch=true`
                text = f"{name}: takes no value; give it alone, or leave it out"
            lines.append(text)
            malformed.append(known[name or ""])
        else:
            lines += [f"{word!r} belongs to no flag; flags start with --" for word in strays]
            if name in known:
                given.add(known[name])
    judged = explain_foreign(foreign, args_class)
    values = {**vars(namespace), **judged.settings}
    given |= judged.settings.keys()
    return ParsedFlags(values, malformed, [*judged.lines, *lines], judged.ignored, given)


def _with_config(
    argv: Sequence[str], fields: Mapping[str, dataclasses.Field[Any]]
) -> tuple[list[str], list[str]]:
    """`argv` with the flags of a file in place of `--config FILE`, and a line for each mistake."""
    words: list[str] = []
    others: list[str] = []
    lines: list[str] = []
    for name, group in _groups(argv):
        if name != CONFIG_FLAG or name not in fields:
            others += group
            continue
        paths = [group[0].partition("=")[2], *group[1:]] if "=" in group[0] else group[1:]
        try:
            if len(paths) != 1:
                raise ValueError(f"{CONFIG_FLAG}: give one file")
            words += words_of_config(paths[0], fields)
        except ValueError as error:
            lines.append(str(error))
    return [*words, *others], lines


def _groups(argv: Sequence[str]) -> Iterator[tuple[str | None, list[str]]]:
    """The words of `argv`, divided before each flag, with the flag's name; None: words before the
    first one."""
    name: str | None = None
    group: list[str] = []
    for word in argv:
        if word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word):
            if group:
                yield name, group
            name, group = word.partition("=")[0], []
        group.append(word)
    if group:
        yield name, group


@dataclass(frozen=True, slots=True)
class ForeignJudgement:
    """The consequences of flags that the engine does not have.

    Attributes:
        lines: A line for each feature that is asked for and missing, and for each unknown flag.
        ignored: Flags that have no effect here and none on answers.
        settings: Fields, with their values, that the flags set under another name.
    """

    lines: list[str]
    ignored: list[str]
    settings: dict[str, Any]


def explain_foreign(given: Sequence[tuple[str, Any]], args_class: type) -> ForeignJudgement:
    """Judge flags, given as names and values, that `args_class` does not have."""
    fields = [(name.lstrip("-").replace("-", "_"), value) for name, value in given]
    unknown = (name for (name, _), (field, _) in zip(given, fields, strict=True)
               if foreign_flags(field) is None)  # fmt: skip
    lines = [*refusals(fields), *(_explain_unknown(name, args_class) for name in unknown)]
    return ForeignJudgement(lines, ignored(fields), settings(fields))


def field_of(name: str, args_class: type) -> str:
    """The field that `name` is an alias of, with underscores for dashes; else `name` itself."""
    spelling = flag_name(name)
    found = (f.name for f in _flags(args_class) if spelling in f.metadata["aliases"])
    return next(found, name)


def warn_of_ignored(flags: Sequence[str]) -> None:
    """Log one warning that names all flags that were given and are ignored."""
    if flags:
        names = ", ".join(dict.fromkeys(flags))
        logger.warning("no effect here, and none on answers: %s (docs/flags.md)", names)


def _explain_unknown(name: str, args_class: type) -> str:
    """Explain a flag that neither `args_class` nor SGLang has: vLLM's, an opposite, or a typo."""
    line = other_name(name.lstrip("-").replace("-", "_"))
    if line is not None:
        return line
    known = [spelling for field in _flags(args_class) for spelling in _flag_names(field)]
    near = near_misspelling(name, known) or _longer(name, known)
    if near is not None:
        return f"unknown flag {name}; did you mean {near}?"
    opposites = (
        one for one in known
        if _turns_off(one) != _turns_off(name) and near_misspelling(_subject(name), [_subject(one)])
    )  # fmt: skip
    opposite = next(opposites, None)
    if opposite is not None:
        return f"unknown flag {name}: the default unless {opposite} is given; remove the flag"
    return f"unknown flag {name}; --help lists what there is"


def _longer(name: str, known: Iterable[str]) -> str | None:
    """The one flag that begins with the words of `name`, of which there must be two; else None."""
    longer = [one for one in known if one.startswith(f"{name}-")]
    return longer[0] if len(longer) == 1 and "-" in name.lstrip("-") else None


def _subject(name: str) -> str:
    words = name.lstrip("-").split("-")
    return "-".join(word for word in words if word not in _NEGATIONS | _AFFIRMATIONS)


def _turns_off(name: str) -> bool:
    """True if a flag turns something off."""
    words = name.lstrip("-").split("-")
    return sum(word in _NEGATIONS for word in words) % 2 == 1


def check_choices(args: Any) -> Iterator[Mistake]:
    """Find fields whose value is not one of their choices; the line suggests the nearest choice.
    A field may be None if that is its default."""
    for field in dataclasses.fields(args):
        choices = field.metadata["choices"]
        value = getattr(args, field.name)
        if choices and value not in choices and not (value is None and field.default is None):
            yield (
                field.name,
                refused_choice(field.name, value)
                or f"{flag_name(field.name)} {value}: choose one of {', '.join(choices)}"
                f"{did_you_mean(value, choices)}",
            )


def refuse_ignored(args: Any, field: str, where: str) -> Iterator[str]:
    """Refuse `field` if it was set, because it would have no effect."""
    default = next(f.default for f in dataclasses.fields(args) if f.name == field)
    value = getattr(args, field)
    if value != default:
        given = flag_name(field) if value is True else f"{flag_name(field)} {value}"
        yield f"{given} has no effect {where}"
