"""The sentences of the recall task, and the pieces into which the built-in tokenizer cuts text.

The generator of conversations (`recall_task`) and the vocabulary of the built-in model
(`scripts/builtin_model/make_tokenizer.py`) share these templates: every word of a template is a
token. `{n}` means a name, `{c}` its code, `{d}` a small number.
"""

from __future__ import annotations

import re

ACKNOWLEDGEMENT = "ok"
UNKNOWN = "unknown"

# The first template of each kind is the plain form, the most frequent one.
FACTS: tuple[str, ...] = (
    "the code of {n} is {c}",
    "the code for {n} is {c}",
    "{n} has code {c}",
    "{n} has the code {c}",
    "{n}'s code is {c}",
    "code of {n}: {c}",
    "{n}: {c}",
    "{n} = {c}",
    "{n} is {c}",
    "{n} {c}",
    "remember that the code of {n} is {c}",
    "note: the code of {n} is {c}",
    "my code for {n} is {c}",
)
QUESTIONS: tuple[str, ...] = (
    "what is the code of {n}?",
    "what is the code for {n}?",
    "what is {n}'s code?",
    "what's the code of {n}?",
    "what code has {n}?",
    "what code does {n} have?",
    "which code does {n} have?",
    "what was the code of {n}?",
    "tell me the code of {n}.",
    "please tell me the code of {n}.",
    "can you tell me the code of {n}?",
    "give me the code for {n}.",
    "do you remember the code of {n}?",
    "and the code of {n}?",
    "code of {n}?",
    "and {n}?",
    "{n}?",
)
FILLERS: tuple[str, ...] = (
    "here are some codes",
    "please remember these codes",
    "i will tell you some codes",
    "the weather is fine today",
    "it rains a lot here",
    "we went for a long walk",
    "please keep this in mind",
    "thank you for your help",
    "this is not important",
    "i will tell you more later",
    "here is some more",
    "the train was late again",
    "my friend likes to read",
    "we had a good time",
    "let us go on",
    "the house is very old",
    "there is a small shop near the road",
    "she said that it was fine",
    "he did not know what to say",
    "nobody was at home",
    "they came back in the evening",
    "it is a long story",
    "i am not sure about that",
    "we waited for {d} minutes",
    "there were {d} people in the shop",
    "hello",
)
SYSTEMS: tuple[str, ...] = (
    "you are a helpful assistant.",
    "You are a helpful assistant.",
    "you remember codes. answer with the code.",
    "answer with the code and nothing more.",
)
ROLES = ("system", "user", "assistant")


def _templates() -> tuple[str, ...]:
    return (*FACTS, *QUESTIONS, *FILLERS, *SYSTEMS, *ROLES, ACKNOWLEDGEMENT, UNKNOWN)


def template_words() -> tuple[str, ...]:
    """Return every word of the templates in lower case, in order of first use, without repeats."""
    words = re.findall(r"[a-z]+", re.sub(r"\{.\}", "", " ".join(_templates()).lower()))
    return tuple(dict.fromkeys(words))


def opening_words() -> tuple[str, ...]:
    """Return the first words of the templates, which also occur capitalised."""
    firsts = (re.match(r"[A-Za-z]+", text) for text in (*FACTS, *QUESTIONS, *FILLERS, *SYSTEMS))
    return tuple(dict.fromkeys(match.group().lower() for match in firsts if match))


def piece_pattern() -> str:
    """Return the regex that cuts text into the tokenizer's pieces, without losing a character.

    The piece of a template word includes the space before it. The piece of any other word does not,
    so that a name is the same token everywhere. Digits and other characters are single pieces.
    """
    words = "|".join(sorted(template_words(), key=lambda word: (-len(word), word)))
    return rf" (?:{words})(?![A-Za-z])|[A-Za-z]+|[0-9]|[^A-Za-z0-9]"
