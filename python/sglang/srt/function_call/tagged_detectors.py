"""Tool calls between tags, several of them in a section: read part by part."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from sglang.srt.function_call.format_detector import FormatDetector, StreamingParseResult

_STRING: Final = frozenset({"string"})
_PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
"""Chat templates show values as Python prints them, so models write them so."""


def parse_json(text: str) -> Any:
    """The value of the JSON text `text`; constants that only some readers know are refused. Raises
    ValueError if it is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def typed_value(text: str, parameters: Mapping[str, Any], name: str) -> Any:
    """The value of the parameter `name`, if its schema allows the type; else the text itself.
    `parameters` is the JSON schema of all parameters."""
    properties = parameters.get("properties")
    allowed = allowed_types(properties.get(name) if isinstance(properties, Mapping) else None)
    if allowed == _STRING:
        return text
    word = text.strip()
    try:
        value = _PYTHON_WORDS[word] if word in _PYTHON_WORDS else parse_json(word)
    except ValueError:
        return text
    return value if not allowed.isdisjoint(_types_of(value)) else text


def allowed_types(schema: object) -> frozenset[str]:
    """Names of the JSON types that a schema allows. A schema without a type allows strings."""
    if not isinstance(schema, Mapping):
        return _STRING
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            return frozenset().union(*map(allowed_types, branches))
    if isinstance(schema.get("enum"), list):
        return frozenset(name for value in schema["enum"] for name in _types_of(value))
    return frozenset({"object", "array"}) if "$ref" in schema else _STRING


def _types_of(value: object) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("number",)
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


class NeedMoreText(Exception):
    """The text ends too early to be classified."""


class BrokenCall(Exception):
    """The text cannot be a call."""


class TextCursor:
    """A place in a text, after `position` characters. The text may end within what comes next:
    `NeedMoreText`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0

    def skip_blanks(self) -> None:
        """Read on to the next character that is no blank."""
        rest = self._text[self.position :]
        self.position = len(self._text) - len(rest.lstrip())

    def accept(self, *literals: str) -> str | None:
        """Read the one of `literals` that comes next, and return it; None: none of them comes
        next."""
        for literal in literals:
            if self._text.startswith(literal, self.position):
                self.position += len(literal)
                return literal
        longest = max(map(len, literals))
        if len(self._text) - self.position < longest:
            rest = self._text[self.position :]
            if any(literal.startswith(rest) for literal in literals):
                raise NeedMoreText
        return None

    def expect(self, *literals: str) -> str:
        """Like `accept`, but raises BrokenCall if none of `literals` comes next."""
        found = self.accept(*literals)
        if found is None:
            raise BrokenCall
        return found

    def until(self, literal: str, *, forbidden: str = "", searched: int = 0) -> str:
        """Read up to `literal` and past it. It raises BrokenCall if a `forbidden` character comes
        first. `literal` is known not to begin before the position `searched`."""
        end = self._text.find(literal, max(self.position, searched))
        read = self._text[self.position : len(self._text) if end < 0 else end]
        if any(char in read for char in forbidden):
            raise BrokenCall
        if end < 0:
            raise NeedMoreText
        self.position = end + len(literal)
        return read


class TaggedFormatDetector(FormatDetector):
    """A section has a start marker, calls, maybe blanks between them, and an end marker.

    A stream sends a call when it is complete, so no call is ever cut, and a stream gives what
    `parse_non_stream` gives. A call that breaks off is text. The end of the section may be missing.
    """

    section_ends: ClassVar[tuple[str, ...]]

    def __init__(
        self, tool_names: Collection[str] | None, schemas: Mapping[str, Mapping[str, Any]]
    ) -> None:
        super().__init__(tool_names, schemas)
        self._in_section = False
        self._opener = ""
        """Text that was read and belongs to no complete call yet."""
        self._in_call = False
        self._searched = 0
        """Characters of the buffer in which the end of the part does not begin."""

    def finish(self) -> StreamingParseResult:
        """End the output. Returns the text that was held back."""
        self._buffer, self._opener = self._opener + self._buffer, ""
        self._in_section = False
        self._finish_text()
        return self._take_result()

    @abstractmethod
    def _begin_call(self) -> None:
        """Forget the call before."""

    @abstractmethod
    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        """Read the next part of a call. Returns name and arguments, a JSON object, if the call ends
        with it.

        Raises:
            NeedMoreText: The part is not complete.
            BrokenCall: The text is no part of a call, or the call names an unknown tool.
        """

    def _step(self) -> bool:
        return self._step_section() if self._in_section else self._step_text()

    def _start_call(self, opener_length: int) -> None:
        self._opener = self._buffer[:opener_length]
        self._buffer = self._buffer[opener_length:]
        self._in_section = True
        self._after_call = False
        self._new_call()

    def _new_call(self) -> None:
        self._in_call = False
        self._searched = 0
        self._begin_call()

    def _step_section(self) -> bool:
        cursor = TextCursor(self._buffer)
        try:
            if not self._in_call:
                cursor.skip_blanks()
                if self._after_call and cursor.accept(*self.section_ends):
                    self._buffer = self._buffer[cursor.position :]
                    self._in_section = False
                    return True
            call = self._read_part(cursor)
        except NeedMoreText:
            return False
        except BrokenCall:
            self._emit_text(self._opener)
            self._opener = ""
            self._in_section = self._after_call = False
            return True
        self._opener += self._buffer[: cursor.position]
        self._buffer = self._buffer[cursor.position :]
        self._in_call = True
        self._searched = 0
        if call is not None:
            self._emit_call(*call)
            self._num_calls += 1
            self._opener = ""
            self._after_call = True
            self._new_call()
        return True

    def _read_value(self, cursor: TextCursor, end: str) -> str:
        """Read a part that is all text up to `end`."""
        try:
            return cursor.until(end, searched=self._searched)
        except NeedMoreText:
            self._searched = max(0, len(self._buffer) - len(end) + 1)
            raise


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter whose value follows."""

    name: str
    end: str
    """Text that ends the value."""
    convert: Callable[[str], Any]
    """Converts the text of the value."""


class ParameterFormatDetector(TaggedFormatDetector):
    """Calls that name each parameter in a tag of its own. The last of equal names counts."""

    def _begin_call(self) -> None:
        self._name: str | None = None
        self._arguments: dict[str, Any] = {}
        self._parameter: Parameter | None = None

    @abstractmethod
    def _read_head(self, cursor: TextCursor) -> str:
        """Read the start of a call. Returns the tool's name; raises as `_read_part`."""

    @abstractmethod
    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        """Read a parameter's opening tag, or the end of the call (None); raises as `_read_part`."""

    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        if self._name is None:
            name = self._read_head(cursor)
            if not self._knows(name):
                raise BrokenCall
            self._name = name
        elif self._parameter is not None:
            text = self._read_value(cursor, self._parameter.end)
            self._arguments[self._parameter.name] = self._parameter.convert(text)
            self._parameter = None
        else:
            cursor.skip_blanks()
            self._parameter = self._read_parameter(self._name, cursor)
            if self._parameter is None:
                return self._name, json.dumps(self._arguments, ensure_ascii=False)
        return None


_BAR: Final = "\uff5c"
"""The full-width bar of DeepSeek's tokens."""
_SEPARATOR: Final = f"<{_BAR}tool▁sep{_BAR}>"
_CALL_BEGIN: Final = f"<{_BAR}tool▁call▁begin{_BAR}>"
_CALL_END: Final = f"<{_BAR}tool▁call▁end{_BAR}>"
_FENCE: Final = "```"


class DeepSeekV3Detector(TaggedFormatDetector):
    """DeepSeek-V3 and R1: `function`, the separator, the name, a newline, and the arguments in a
    fence for JSON."""

    start_markers: ClassVar[tuple[str, ...]] = (f"<{_BAR}tool▁calls▁begin{_BAR}>",)
    section_ends: ClassVar[tuple[str, ...]] = (f"<{_BAR}tool▁calls▁end{_BAR}>",)

    def _begin_call(self) -> None:
        self._name: str | None = None

    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        if self._name is None:
            cursor.expect(_CALL_BEGIN)
            name = self._read_name(cursor)
            if not self._knows(name):
                raise BrokenCall
            self._name = name
            return None
        arguments = self._bare(self._read_value(cursor, _CALL_END))
        if not isinstance(_json_or_text(arguments), dict):
            raise BrokenCall
        return self._name, arguments

    def _read_name(self, cursor: TextCursor) -> str:
        """Read the name of a call and the text up to the arguments."""
        cursor.expect(f"function{_SEPARATOR}")
        return cursor.until("\n", forbidden="<").strip()

    def _bare(self, arguments: str) -> str:
        """The JSON text of the arguments, without the fence that must be around it."""
        fenced = arguments.strip()
        if not (fenced.startswith(f"{_FENCE}json") and fenced.endswith(_FENCE)):
            raise BrokenCall
        return fenced.removeprefix(f"{_FENCE}json").removesuffix(_FENCE).strip()


class DeepSeekV31Detector(DeepSeekV3Detector):
    """DeepSeek-V3.1: the name, the separator, and the arguments without a fence."""

    def _read_name(self, cursor: TextCursor) -> str:
        return cursor.until(_SEPARATOR, forbidden="\n").strip()

    def _bare(self, arguments: str) -> str:
        return arguments.strip()


_DSML: Final = f"{_BAR}DSML{_BAR}"


def _tags(tag: str) -> tuple[str, str]:
    """A tag with and without the token; `{}` is its place."""
    return tag.format(_DSML), tag.format("")


_INVOKE: Final = _tags('<{}invoke name="')
_END_OF_INVOKE: Final = _tags("</{}invoke>")
_PARAMETER: Final = _tags('<{}parameter name="')


class DeepSeekV32Detector(ParameterFormatDetector):
    """DeepSeek-V3.2: `invoke` tags, with a `parameter` tag for each parameter.

    All tags begin with a token, `DSML` between full-width bars. A model may leave it out, and
    detokenizing may drop it; the tags are read without it too. A parameter's tag says whether its
    value is a string; other values are JSON.
    """

    start_markers: ClassVar[tuple[str, ...]] = _tags("<{}function_calls>")
    section_ends: ClassVar[tuple[str, ...]] = _tags("</{}function_calls>")

    def _read_head(self, cursor: TextCursor) -> str:
        cursor.expect(*_INVOKE)
        return cursor.until('">', forbidden="<\n")

    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        found = cursor.expect(*_PARAMETER, *_END_OF_INVOKE)
        if found in _END_OF_INVOKE:
            return None
        name = cursor.until('" string="', forbidden="<\n")
        is_string = cursor.expect('true">', 'false">') == 'true">'
        end = "</{}parameter>".format(_DSML if _DSML in found else "")
        return Parameter(name, end, str if is_string else _json_or_text)


def _json_or_text(text: str) -> object:
    try:
        return parse_json(text)
    except ValueError:
        return text


_NOT_IN_NAMES = "<\n"


class Qwen3CoderDetector(ParameterFormatDetector):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, as
    Qwen3-Coder, Qwen3-Next's coder and Qwen3.5 write.

    Values are plain text; the tool's schema gives their types. A newline at each end of a value
    belongs to the tags.
    """

    start_markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    section_ends: ClassVar[tuple[str, ...]] = ("</tool_call>",)

    def _read_head(self, cursor: TextCursor) -> str:
        cursor.expect("<function=")
        return cursor.until(">", forbidden=_NOT_IN_NAMES).strip()

    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        if cursor.expect("<parameter=", "</function>") == "</function>":
            return None
        name = cursor.until(">", forbidden=_NOT_IN_NAMES).strip()
        schema = self._schemas.get(tool, {})
        return Parameter(name, "</parameter>", partial(_convert, schema=schema, name=name))


def _convert(text: str, *, schema: Mapping[str, Any], name: str) -> object:
    return typed_value(text.removeprefix("\n").removesuffix("\n"), schema, name)
