"""What tool-call parsers give back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ToolCallItem:
    """A call, or in a stream a piece of one.

    Attributes:
        tool_index: Which call of this output it belongs to, from 0.
        name: The tool's; None in the pieces after a call's first.
        parameters: The arguments, a JSON object as the model wrote it; in a stream, what came
            since the last piece.
    """

    tool_index: int
    name: str | None
    parameters: str


@dataclass
class StreamingParseResult:
    """What one increment of a stream added."""

    normal_text: str = ""
    calls: list[ToolCallItem] = field(default_factory=list)
