"""Results of tool-call parsers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCallItem:
    """A call, or a piece of a call in a stream.

    Attributes:
        tool_index: Index of the call in the output, from 0.
        name: The tool's name; None in later pieces of a call.
        parameters: The arguments, a JSON object as the model wrote it. In a stream: the part that
            follows the last piece.
    """

    tool_index: int
    name: str | None
    parameters: str


@dataclass
class StreamingParseResult:
    """The text and calls that one increment of a stream added."""

    normal_text: str = ""
    calls: list[ToolCallItem] = field(default_factory=list)
