"""`context_management` of Anthropic's bodies: edits that shorten a conversation once it is long.

No conversation is shortened here. The field is accepted as long as it asks for nothing: no edit is
due. Otherwise it is refused by name. A wrong field is an `ApiError` of status 400 that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from sglang.srt.entrypoints.http.body import convert
from sglang.srt.entrypoints.http.errors import ApiError, bad_request
from sglang.srt.entrypoints.openai.protocol import ChatMessage

FIELD: Final = "context_management"
NOTHING_APPLIED: Final[dict[str, list[str]]] = {"applied_edits": []}
"""The answer's `context_management`."""
MAX_EDITS: Final = 16
_INPUT_TOKENS: Final = "input_tokens"
_TOOL_USES: Final = "tool_uses"
_THINKING_TURNS: Final = "thinking_turns"
_ALL: Final = "all"


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    edits: list[dict[str, Any]] | None = None


class Amount(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A number of tokens, tool uses or turns, as `type` says; `all` has no number."""

    type: str
    value: int | None = None


class ClearToolUses(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Removes the results of old tool uses."""

    type: str
    trigger: Amount | None = None
    keep: Amount | None = None
    exclude_tools: list[str] | None = None
    # How much is removed matters only where something is.
    clear_at_least: Any = None
    clear_tool_inputs: Any = None


class ClearThinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Removes the thinking of old turns."""

    type: str
    keep: str | Amount | None = None


class Compact(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Replaces old turns by a summary."""

    type: str
    trigger: Amount | None = None
    # These two fields control the summary.
    instructions: str | None = None
    pause_after_compaction: bool | None = None


Edit: TypeAlias = ClearToolUses | ClearThinking | Compact
_EDITS: Final[dict[str, type[Edit]]] = {
    "clear_tool_uses_20250919": ClearToolUses,
    "clear_thinking_20251015": ClearThinking,
    "compact_20260112": Compact,
}
# Anthropic's defaults.
_CLEAR_AT: Final = Amount(type=_INPUT_TOKENS, value=100_000)
_COMPACT_AT: Final = Amount(type=_INPUT_TOKENS, value=150_000)
_KEPT_USES: Final = Amount(type=_TOOL_USES, value=3)
_KEPT_TURNS: Final = Amount(type=_THINKING_TURNS, value=1)


@dataclass(frozen=True, slots=True)
class PendingEdit:
    """An edit that is due once the prompt has more than `tokens` tokens."""

    edit: str
    """Place of the edit in the body, and type."""
    tokens: int

    def check(self, num_tokens: int) -> None:
        """Raise ApiError if the edit is due for a prompt of `num_tokens` tokens."""
        if num_tokens > self.tokens:
            raise _due(self.edit)


def pending_edit(
    given: ContextManagement | None, messages: Sequence[ChatMessage]
) -> PendingEdit | None:
    """The edit that is due first as the prompt grows; None: none is due for `messages`, however
    long they are. Raises ApiError if one is due in any case."""
    edits = (given.edits if given is not None else None) or []
    if len(edits) > MAX_EDITS:
        raise bad_request(f"{FIELD}.edits has {len(edits)} edits, at most {MAX_EDITS}", FIELD)
    pending = []
    for index, one in enumerate(edits):
        place = f"{FIELD}.edits[{index}]"
        kind = one.get("type")
        if not isinstance(kind, str) or kind not in _EDITS:
            raise bad_request(
                f"{place}.type={str(kind)[:32]!r} must be one of {', '.join(_EDITS)}", FIELD
            )
        tokens = _due_beyond(place, convert(one, _EDITS[kind], place), messages)
        if tokens is not None:
            pending.append(PendingEdit(f"{place}, {kind},", tokens))
    due = min(pending, key=lambda one: one.tokens, default=None)
    if due is not None:
        due.check(0)
    return due


def _due_beyond(place: str, edit: Edit, messages: Sequence[ChatMessage]) -> int | None:
    """Tokens of a prompt beyond which `edit` changes `messages`, negative if it always does; None:
    it never does."""
    if isinstance(edit, Compact):
        return _value(f"{place}.trigger", edit.trigger or _COMPACT_AT, _INPUT_TOKENS)
    if isinstance(edit, ClearThinking):
        turns = Amount(type=edit.keep) if isinstance(edit.keep, str) else edit.keep or _KEPT_TURNS
        if turns.type == _ALL:
            return None
        most = _value(f"{place}.keep", turns, _THINKING_TURNS)
        return -1 if sum(bool(one.reasoning_content) for one in messages) > most else None
    uses = [call.function.name for message in messages for call in message.tool_calls or ()]
    keep = _value(f"{place}.keep", edit.keep or _KEPT_USES, _TOOL_USES)
    trigger = edit.trigger or _CLEAR_AT
    at = _value(f"{place}.trigger", trigger, _INPUT_TOKENS, _TOOL_USES)
    if set(edit.exclude_tools or ()).issuperset(uses[: max(0, len(uses) - keep)]):
        return None
    if trigger.type == _TOOL_USES:
        return -1 if len(uses) > at else None
    return at


def _value(field: str, given: Amount, *kinds: str) -> int:
    if given.type not in kinds:
        raise bad_request(f"{field}.type={given.type[:32]!r} must be {' or '.join(kinds)}", FIELD)
    if given.value is None or given.value < 0:
        raise bad_request(f"{field}.value: expected a number, at least 0", FIELD)
    return given.value


def _due(edit: str) -> ApiError:
    return bad_request(
        f"{edit} has to be applied to these messages, which this server does not do: shorten them "
        "yourself",
        FIELD,
    )
