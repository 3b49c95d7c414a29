"""A structural tag that holds calls to schemas while the text around them stays free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang.srt.function_call.format_detector import CallFrame

_BLANKS: Final = r"[ \n]{0,9}"


def strict_calls(frame: CallFrame, schemas: Mapping[str, Any]) -> str:
    """The structural tag of an output whose calls are of known tools, with fitting arguments.

    Wherever the output has the text that begins a call, also in reasoning, a whole call follows.

    Args:
        schemas: For each tool's name the JSON schema of its arguments.
    """
    calls = []
    for name, schema in schemas.items():
        arguments = {"type": "json_schema", "json_schema": schema}
        parts = [_spaced(frame.head, name), arguments, _spaced(frame.tail, name)]
        calls.append({"type": "sequence", "elements": parts})
    call = {"type": "or", "elements": calls}
    tag = {"type": "tag", "begin": frame.begin, "content": call, "end": frame.end}
    free = {"type": "triggered_tags", "triggers": [frame.begin], "tags": [tag]}
    return json.dumps({"type": "structural_tag", "format": free}, separators=(",", ":"))


def _spaced(pieces: Sequence[str], name: str) -> dict[str, Any]:
    """The pieces with blanks before, between and after them."""
    written = json.dumps(name)[1:-1]
    texts = [re.escape(piece.replace("{name}", written)) for piece in pieces]
    return {"type": "regex", "pattern": _BLANKS.join(["", *texts, ""])}
