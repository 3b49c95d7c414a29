"""Tool calls between tags, several of them in a section: read part by part."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

from sglang.srt.function_call.format_detector import FormatDetector, StreamingParseResult
from sglang.srt.function_call.json_text import valid_json


class NeedMoreText(Exception):
    """The text ends too early to be classified."""


class BrokenCall(Exception):
    """The text cannot be a call."""


def as_object(text: str) -> str:
    """The JSON object `text`, with its strings mended. Raises BrokenCall if it is none."""
    try:
        text, value = valid_json(text)
    except ValueError:
        raise BrokenCall from None
    if not isinstance(value, dict):
        raise BrokenCall
    return text


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

    @property
    def is_at_end(self) -> bool:
        return self.position == len(self._text)

    def word(self, *, ends: str) -> str:
        """Read a word and the blanks around it. A blank or a character of `ends` ends it."""
        self.skip_blanks()
        begin = self.position
        while not self.is_at_end and not self._text[self.position].isspace():
            if self._text[self.position] in ends:
                break
            self.position += 1
        word = self._text[begin : self.position]
        self.skip_blanks()
        if self.is_at_end:
            raise NeedMoreText
        return word

    def text_to(self, end: int) -> str:
        """Read up to the position `end`."""
        read = self._text[self.position : end]
        self.position = end
        return read

    def places(self, pattern: re.Pattern[str], begin: int) -> Iterator[int]:
        """The positions at which `pattern` matches, from `begin` on."""
        return (found.start() for found in pattern.finditer(self._text, begin))

    def at(self, position: int) -> TextCursor:
        """Another cursor of the same text."""
        other = TextCursor(self._text)
        other.position = position
        return other

    def until(self, literal: str, *, forbidden: str = "") -> str:
        """Read up to `literal` and past it. It raises BrokenCall if a `forbidden` character comes
        first."""
        end = self._text.find(literal, self.position)
        read = self._text[self.position : len(self._text) if end < 0 else end]
        if any(char in read for char in forbidden):
            raise BrokenCall
        if end < 0:
            raise NeedMoreText
        self.position = end + len(literal)
        return read


class Tags:
    """Texts that a value's end may begin with."""

    def __init__(self, *tags: str) -> None:
        self.pattern: Final = re.compile("|".join(map(re.escape, tags)))
        self.longest: Final = max(map(len, tags))


class TaggedFormatDetector(FormatDetector):
    """A section has a start marker, calls, maybe blanks between them, and an end marker.

    A stream sends a call when it is complete, so no call is ever cut, and a stream gives what
    `parse_non_stream` gives. A call that breaks off is text. The end of the section may be missing.
    """

    section_ends: ClassVar[tuple[str, ...]]
    after_calls: ClassVar[tuple[str, ...]]
    """Texts that may follow a call."""

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
        self._has_ended = False
        """True if no text follows the buffer."""

    def finish(self, *, is_cut: bool = False) -> StreamingParseResult:
        """End the output. Returns the text that was held back, and a call whose end was open."""
        self._has_ended = True
        while self._step():
            pass
        self._buffer, self._opener = self._opener + self._buffer, ""
        self._in_section = False
        self._finish_text(is_cut=is_cut, markers=self.after_calls if self._after_call else ())
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
            self._in_section = False
            may_follow = self.end_of_reasoning is not None and not self._in_call
            self._after_call = self._after_call and may_follow
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

    def _check_known(self, name: str) -> None:
        """Raises BrokenCall if `name` is no known tool."""
        if not self._knows(name):
            raise BrokenCall
        self._note_head()

    def _read_value(self, cursor: TextCursor, tags: Tags, is_end: Callable[[int], bool]) -> str:
        """Read a part that is all text, up to the first of `tags` that is its end.

        Args:
            is_end: True if the part ends at this position; raises as `_read_part`.
        """
        for place in cursor.places(tags.pattern, max(cursor.position, self._searched)):
            self._searched = place
            try:
                if is_end(place):
                    return cursor.text_to(place)
            except BrokenCall:
                pass
            except NeedMoreText:
                if not self._has_ended:
                    raise
            self._searched = place + 1
        self._searched = max(self._searched, len(self._buffer) - tags.longest + 1)
        raise NeedMoreText

    def _read_object(self, cursor: TextCursor, end: str, tags: Tags) -> str:
        """Read a JSON object up to `end` and past it. Without `end` it ends at another of `tags`,
        or where the output ends, if it is whole there."""
        begin = cursor.position

        def is_end(place: int) -> bool:
            return cursor.at(place).accept(end) is not None or self._is_object(begin, place)

        try:
            text = self._read_value(cursor, tags, is_end)
        except NeedMoreText:
            if not (self._has_ended and self._is_object(begin, len(self._buffer))):
                raise
            text = cursor.text_to(len(self._buffer))
        else:
            cursor.accept(end)
        return self._object_in(text)

    def _is_object(self, begin: int, end: int) -> bool:
        try:
            self._object_in(self._buffer[begin:end])
        except BrokenCall:
            return False
        return True

    def _object_in(self, text: str) -> str:
        """`text` as a JSON object, with blanks around it allowed. Raises like `as_object`."""
        return as_object(text.strip())


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter whose value follows."""

    name: str
    end: str
    """Tag that ends the value."""
    ends: Tags
    """The end tag, and the tags that may come after it."""
    convert: Callable[[str], Any]
    """Converts the text of the value."""


class ParameterFormatDetector(TaggedFormatDetector):
    """Calls that name each parameter in a tag of its own. The last of equal names counts.

    Values may contain tags, and models forget end tags. An end tag ends a value if the next
    parameter or the end of the call follows. Without an end tag the value ends where a parameter of
    the tool begins, or where the call ends and the section's end, a call or nothing follows.
    """

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
            self._check_known(name)
            self._name = name
        elif self._parameter is not None:
            parameter = self._parameter
            text = self._read_value(
                cursor, parameter.ends, partial(self._ends_value, self._name, parameter, cursor)
            )
            if cursor.accept(parameter.end) is None:
                text = text.rstrip()  # Blanks at the end separate tags.
            self._arguments[parameter.name] = parameter.convert(text)
            self._parameter = None
        else:
            cursor.skip_blanks()
            self._parameter = self._read_parameter(self._name, cursor)
            if self._parameter is None:
                return self._name, json.dumps(self._arguments, ensure_ascii=False)
        return None

    def _ends_value(self, tool: str, parameter: Parameter, cursor: TextCursor, place: int) -> bool:
        after = cursor.at(place)
        has_end_tag = after.accept(parameter.end) is not None
        if has_end_tag:
            after.skip_blanks()
        following = self._read_parameter(tool, after)
        if has_end_tag:
            return True
        if following is not None:
            return self._may_have(tool, following.name)
        after.skip_blanks()
        is_last = self._has_ended and after.is_at_end
        return is_last or after.accept(*self.after_calls) is not None

    def _may_have(self, tool: str, parameter: str) -> bool:
        properties = self._schemas.get(tool, {}).get("properties")
        return not properties or not isinstance(properties, Mapping) or parameter in properties
