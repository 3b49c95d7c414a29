"""Turns in the form that gpt-oss's chat template reads.

The template shows one instruction, the first turn's, and one call of a turn, whose result follows.
It knows reasoning as `thinking`, and refuses a call with both reasoning and text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sglang.srt.entrypoints.http.errors import bad_request
from sglang.srt.function_call.gpt_oss_detector import MESSAGES_APART

EFFORTS: Final = ("low", "medium", "high")


def check_effort(effort: object) -> None:
    """Refuse another effort than the model knows; the template would write it into the prompt."""
    if effort not in EFFORTS:
        raise bad_request(
            f"reasoning_effort={str(effort)[:32]!r} must be one of {', '.join(EFFORTS)}: this "
            "model always reasons",
            "reasoning_effort",
        )


def message_turns(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation, without a loss.

    All instructions become the first turn. Each call is a turn, followed by its results. Reasoning
    and texts directly before a call become its `thinking`.
    """
    instructions = [turn["content"] for turn in turns if turn["role"] == "system"]
    others = [turn for turn in turns if turn["role"] != "system"]
    made = [{"role": "system", "content": MESSAGES_APART.join(instructions)}]
    made = made if instructions else []
    index = 0
    while index < len(others):
        turn = others[index]
        index += 1
        if turn["role"] != "assistant":
            made.append(turn)
        elif turn.get("tool_calls"):
            end = index
            while end < len(others) and others[end]["role"] == "tool":
                end += 1
            before = made.pop() if made and _may_join(made[-1]) else {}
            made += _calls(before, turn, others[index:end])
            index = end
        else:
            made.append(_renamed(turn))
    return made


def _may_join(turn: Mapping[str, Any]) -> bool:
    return turn["role"] == "assistant" and "tool_calls" not in turn


def _renamed(turn: Mapping[str, Any]) -> dict[str, Any]:
    """The turn with its reasoning under the template's name."""
    others = {name: value for name, value in turn.items() if name != "reasoning_content"}
    thought = turn.get("reasoning_content")
    return others | ({"thinking": thought} if thought else {})


def _calls(
    before: Mapping[str, Any], turn: Mapping[str, Any], results: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A turn for each call of `turn`, and its results. The last call has those of unknown calls."""
    texts = [
        *(before.get(name) for name in ("thinking", "content")),
        *(turn.get(name) for name in ("reasoning_content", "content")),
    ]
    thought = MESSAGES_APART.join(text for text in texts if text)
    left = list(results)
    calls = turn["tool_calls"]
    for number, call in enumerate(calls, start=1):
        made = {"role": "assistant", "content": "", "tool_calls": [call]}
        yield made | ({"thinking": thought} if thought and number == 1 else {})
        is_last = number == len(calls)
        own = [one for one in left if is_last or one.get("tool_call_id") == call["id"]]
        yield from own
        left = [one for one in left if not any(one is other for other in own)]
