"""Grammars and matchers of the `xgrammar` library, and the messages for its errors."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Final

import torch
import xgrammar

from sglang.srt.constrained.base_grammar_backend import Grammar, GrammarMatcher
from sglang.srt.constrained.constraint import Constraint, ConstraintKind, GrammarError
from sglang.srt.constrained.limits import GrammarLimits
from sglang.srt.constrained.vocabulary import Vocabulary

_MAX_DEPTH: Final = 1000
"""Deepest nesting for the library's recursive passes; its own default needs a larger stack."""
_MAX_WHITESPACE: Final = 40
"""Most blanks in a row between JSON tokens; without a limit, weak models write only blanks."""
_MAX_CAUSE_CHARS: Final = 240
_NOISE: Final = re.compile(
    r"\[\d\d:\d\d:\d\d\] \S+:\d+: |Check failed: \(.*?\) is (?:true|false): "
    r"|The JSON string is:.*",
    re.DOTALL,
)


def make_compiler(vocabulary: Vocabulary) -> xgrammar.GrammarCompiler:
    """A compiler with one thread and no cache. Sets the library's limit of nesting."""
    xgrammar.set_max_recursion_depth(_MAX_DEPTH)
    return xgrammar.GrammarCompiler(vocabulary.tokenizer_info(), max_threads=1, cache_enabled=False)


def compile_constraint(
    compiler: xgrammar.GrammarCompiler, constraint: Constraint, *, any_whitespace: bool
) -> xgrammar.CompiledGrammar:
    """Compile a constraint, without a limit of time or memory. Releases the interpreter lock.

    Args:
        compiler: From `make_compiler`.
        constraint: The constraint; schemas and structural tags must have been checked.
        any_whitespace: Whether JSON may have whitespace between its tokens. If not, it is
            written as `json.dumps` does: one blank after each comma and colon, no line breaks.

    Raises:
        GrammarError: The text is not a grammar of its kind, or needs too much memory.
    """
    kind, text = constraint
    try:
        if kind is ConstraintKind.JSON_SCHEMA:
            if not any_whitespace:
                return compiler.compile_json_schema(text, any_whitespace=False)
            return compiler.compile_json_schema(text, max_whitespace_cnt=_MAX_WHITESPACE)
        if kind is ConstraintKind.REGEX:
            return compiler.compile_regex(text)
        if kind is ConstraintKind.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(text)
        return compiler.compile_grammar(text)
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise GrammarError(f"{kind.value}: {cause_of(error)}") from error


def cause_of(error: Exception) -> str:
    """One line for the client: the library's message without its timestamps and source lines."""
    text = str(error)
    if isinstance(error, MemoryError) or "bad_alloc" in text:
        return "compiling it takes too much memory: simplify it"
    line = " ".join(_NOISE.sub("", text).split())
    return line[:_MAX_CAUSE_CHARS] or type(error).__name__


class XGrammarMatcher(GrammarMatcher):
    """See `GrammarMatcher`. `steps` are tokens, `spent` CPU seconds of the calling thread."""

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        kind: ConstraintKind,
        limits: GrammarLimits,
    ) -> None:
        self._matcher = matcher
        self._kind = kind
        self._limits = limits
        self._spent = 0.0
        self._steps = 0

    @property
    def failure(self) -> str | None:
        allowed = self._limits.step_burst + self._steps * self._limits.step_cost
        if self._spent <= allowed:
            return None
        return (
            f"{self._kind.value}: matching it took {self._spent:.2f} s for {self._steps} tokens, "
            f"more than the {allowed:.2f} s allowed: make it less ambiguous"
        )

    def accept_token(self, token_id: int) -> bool:
        if self._matcher.is_terminated():
            return False
        start = time.thread_time()
        accepted = bool(self._matcher.accept_token(token_id))
        self._spent += time.thread_time() - start
        self._steps += accepted
        return accepted

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        assert not self._matcher.is_terminated()
        start = time.thread_time()
        self._matcher.fill_next_token_bitmask(bitmask, row)
        self._spent += time.thread_time() - start

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())


class XGrammarGrammar(Grammar):
    """See `Grammar`."""

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        kind: ConstraintKind,
        vocabulary: Vocabulary,
        limits: GrammarLimits,
    ) -> None:
        self._compiled = compiled
        self._kind = kind
        self._vocabulary = vocabulary
        self._limits = limits

    @property
    def size_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def matcher(self, stop_token_ids: Sequence[int] = ()) -> XGrammarMatcher:
        tokens = self._vocabulary.tokens
        ends = set(self._vocabulary.eos_token_ids)
        ends.update(i for i in stop_token_ids if 0 <= i < len(tokens) and not tokens[i])
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=sorted(ends))
        return XGrammarMatcher(matcher, self._kind, self._limits)
