"""Tool calls between tags, as DeepSeek, MiniMax and Qwen3-Coder write them; values by a tool's
schema."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Final

from sglang.srt.function_call.format_detector import CallFrame
from sglang.srt.function_call.json_text import valid_json
from sglang.srt.function_call.tagged_format import (
    BrokenCall,
    Parameter,
    ParameterFormatDetector,
    TaggedFormatDetector,
    Tags,
    TextCursor,
    as_object,
)

_STRING: Final = frozenset({"string"})
_PYTHON_WORDS: Final = {"True": True, "False": False, "None": None}
"""Chat templates show values as Python prints them, so models write them so."""


def typed_value(text: str, parameters: Mapping[str, Any], name: str) -> Any:
    """The value of the parameter `name`, if its schema allows the type; else the text itself.
    `parameters` is the JSON schema of all parameters."""
    properties = parameters.get("properties")
    allowed = allowed_types(properties.get(name) if isinstance(properties, Mapping) else None)
    if allowed == _STRING:
        return text
    word = text.strip()
    try:
        value = _PYTHON_WORDS[word] if word in _PYTHON_WORDS else valid_json(word)[1]
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


_BAR: Final = "\uff5c"
"""The full-width bar of DeepSeek's tokens."""
_SEPARATOR: Final = f"<{_BAR}tool▁sep{_BAR}>"
_CALL_BEGIN: Final = f"<{_BAR}tool▁call▁begin{_BAR}>"
_CALL_END: Final = f"<{_BAR}tool▁call▁end{_BAR}>"
_CALLS_END: Final = f"<{_BAR}tool▁calls▁end{_BAR}>"
_OBJECT_ENDS: Final = Tags(_CALL_END, _CALL_BEGIN, _CALLS_END)
_FENCE: Final = "```"


class DeepSeekV3Detector(TaggedFormatDetector):
    """DeepSeek-V3 and R1: `function`, the separator, the name, a newline, and the arguments in a
    fence for JSON."""

    start_markers: ClassVar[tuple[str, ...]] = (f"<{_BAR}tool▁calls▁begin{_BAR}>",)
    section_ends: ClassVar[tuple[str, ...]] = (_CALLS_END,)
    after_calls: ClassVar[tuple[str, ...]] = (_CALLS_END, _CALL_BEGIN)
    call_frame: ClassVar[CallFrame | None] = CallFrame(
        _CALL_BEGIN, (f"function{_SEPARATOR}{{name}}\n", f"{_FENCE}json"), (_FENCE,), _CALL_END
    )

    def _begin_call(self) -> None:
        self._name: str | None = None

    def _read_part(self, cursor: TextCursor) -> tuple[str, str] | None:
        if self._name is None:
            cursor.expect(_CALL_BEGIN)
            name = self._read_name(cursor)
            self._check_known(name)
            self._name = name
            return None
        return self._name, self._read_object(cursor, _CALL_END, _OBJECT_ENDS)

    def _read_name(self, cursor: TextCursor) -> str:
        """Read the name of a call and the text up to the arguments."""
        cursor.expect(f"function{_SEPARATOR}")
        return cursor.until("\n", forbidden="<").strip()

    def _object_in(self, text: str) -> str:
        """The object without the fence that must be around it."""
        fenced = text.strip()
        if not (fenced.startswith(f"{_FENCE}json") and fenced.endswith(_FENCE)):
            raise BrokenCall
        return as_object(fenced.removeprefix(f"{_FENCE}json").removesuffix(_FENCE).strip())


class DeepSeekV31Detector(DeepSeekV3Detector):
    """DeepSeek-V3.1: the name, the separator, and the arguments without a fence."""

    call_frame: ClassVar[CallFrame | None] = CallFrame(
        _CALL_BEGIN, (f"{{name}}{_SEPARATOR}",), (), _CALL_END
    )

    def _read_name(self, cursor: TextCursor) -> str:
        return cursor.until(_SEPARATOR, forbidden="\n").strip()

    def _object_in(self, text: str) -> str:
        return as_object(text.strip())


_DSML: Final = f"{_BAR}DSML{_BAR}"


def _tags(tag: str) -> tuple[str, str]:
    """A tag with and without the token; `{}` is its place."""
    return tag.format(_DSML), tag.format("")


_INVOKE: Final = _tags('<{}invoke name="')
_END_OF_INVOKE: Final = _tags("</{}invoke>")
_PARAMETER: Final = _tags('<{}parameter name="')
_END_OF_PARAMETER: Final = _tags("</{}parameter>")
_VALUE_ENDS: Final = tuple(
    Tags(*tags) for tags in zip(_END_OF_PARAMETER, _PARAMETER, _END_OF_INVOKE, strict=True)
)
"""With and without the token, as `_tags`."""


class DeepSeekV32Detector(ParameterFormatDetector):
    """DeepSeek-V3.2: `invoke` tags, with a `parameter` tag for each parameter.

    All tags begin with a token, `DSML` between full-width bars. A model may leave it out, and
    detokenizing may drop it; the tags are read without it too. A parameter's tag says whether its
    value is a string; other values are JSON.
    """

    start_markers: ClassVar[tuple[str, ...]] = _tags("<{}function_calls>")
    section_ends: ClassVar[tuple[str, ...]] = _tags("</{}function_calls>")
    after_calls: ClassVar[tuple[str, ...]] = (*section_ends, *_INVOKE)

    def _read_head(self, cursor: TextCursor) -> str:
        cursor.expect(*_INVOKE)
        return cursor.until('">', forbidden="<\n")

    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        found = cursor.expect(*_PARAMETER, *_END_OF_INVOKE)
        if found in _END_OF_INVOKE:
            return None
        name = cursor.until('" string="', forbidden="<\n")
        is_string = cursor.expect('true">', 'false">') == 'true">'
        kind = _PARAMETER.index(found)
        convert = str if is_string else _json_or_text
        return Parameter(name, _END_OF_PARAMETER[kind], _VALUE_ENDS[kind], convert)


class DeepSeekV4Detector(DeepSeekV32Detector):
    """DeepSeek-V4: the calls of V3.2 in a section of another name."""

    start_markers: ClassVar[tuple[str, ...]] = _tags("<{}tool_calls>")
    section_ends: ClassVar[tuple[str, ...]] = _tags("</{}tool_calls>")
    after_calls: ClassVar[tuple[str, ...]] = (*section_ends, *_INVOKE)


def _json_or_text(text: str) -> object:
    try:
        return valid_json(text)[1]
    except ValueError:
        return text


_NOT_IN_NAMES: Final = "<\n"
_END_OF_CALL: Final = "</tool_call>"
_QWEN_VALUE_ENDS: Final = Tags("</parameter>", "<parameter=", "</function>")


class Qwen3CoderDetector(ParameterFormatDetector):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, as
    Qwen3-Coder, Qwen3-Next's coder and Qwen3.5 write.

    Values are plain text; the tool's schema gives their types. A newline at each end of a value
    belongs to the tags. `</function>` may be missing.
    """

    start_markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    section_ends: ClassVar[tuple[str, ...]] = (_END_OF_CALL,)
    after_calls: ClassVar[tuple[str, ...]] = (_END_OF_CALL, *start_markers)

    def _read_head(self, cursor: TextCursor) -> str:
        cursor.expect("<function=")
        return cursor.until(">", forbidden=_NOT_IN_NAMES).strip()

    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        found = cursor.expect("<parameter=", "</function>", _END_OF_CALL)
        if found == _END_OF_CALL:
            cursor.position -= len(_END_OF_CALL)
        if found != "<parameter=":
            return None
        name = cursor.until(">", forbidden=_NOT_IN_NAMES).strip()
        convert = partial(_convert, schema=self._schemas.get(tool, {}), name=name)
        return Parameter(name, "</parameter>", _QWEN_VALUE_ENDS, convert)


def _convert(text: str, *, schema: Mapping[str, Any], name: str) -> object:
    return typed_value(text.removeprefix("\n").removesuffix("\n"), schema, name)


_M2_CALL: Final = '<invoke name="'
_M2_END_OF_CALL: Final = "</invoke>"
_M2_PARAMETER: Final = '<parameter name="'
_M2_VALUE_ENDS: Final = Tags("</parameter>", _M2_PARAMETER, _M2_END_OF_CALL)


class MiniMaxM2Detector(ParameterFormatDetector):
    """MiniMax-M2: `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`.

    Values are plain text; the tool's schema gives their types.
    """

    start_markers: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>",)
    section_ends: ClassVar[tuple[str, ...]] = ("</minimax:tool_call>",)
    after_calls: ClassVar[tuple[str, ...]] = (*section_ends, _M2_CALL)

    def _read_head(self, cursor: TextCursor) -> str:
        cursor.expect(_M2_CALL)
        return cursor.until('">', forbidden=_NOT_IN_NAMES)

    def _read_parameter(self, tool: str, cursor: TextCursor) -> Parameter | None:
        if cursor.expect(_M2_PARAMETER, _M2_END_OF_CALL) == _M2_END_OF_CALL:
            return None
        name = cursor.until('">', forbidden=_NOT_IN_NAMES)
        convert = partial(_convert, schema=self._schemas.get(tool, {}), name=name)
        return Parameter(name, "</parameter>", _M2_VALUE_ENDS, convert)
