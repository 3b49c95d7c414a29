"""DeepSeek-V3.2: `invoke` tags, with a `parameter` tag for each parameter, in its own markup.

All tags begin with a token, `DSML` between full-width bars. A model may leave it out, and
detokenizing may drop it; the tags are read without it too.
"""

from __future__ import annotations

from typing import ClassVar, Final

from sglang.srt.function_call.deepseekv3_detector import BAR
from sglang.srt.function_call.parameter_types import parse_json
from sglang.srt.function_call.tagged_format_detector import Parameter, ParameterFormatDetector
from sglang.srt.function_call.text_cursor import TextCursor

_DSML: Final = f"{BAR}DSML{BAR}"


def _tags(tag: str) -> tuple[str, str]:
    """A tag with and without the token; `{}` is its place."""
    return tag.format(_DSML), tag.format("")


_INVOKE: Final = _tags('<{}invoke name="')
_END_OF_INVOKE: Final = _tags("</{}invoke>")
_PARAMETER: Final = _tags('<{}parameter name="')


class DeepSeekV32Detector(ParameterFormatDetector):
    """A parameter's tag says whether its value is a string; other values are JSON."""

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
