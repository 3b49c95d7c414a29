"""Grammars of the `xgrammar` library: limits, vocabulary, matchers, tickets."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

import msgspec
import torch
import xgrammar
from transformers import PreTrainedTokenizerBase

from sglang.srt.constrained.constraint import (
    MAX_CONSTRAINT_BYTES,
    Constraint,
    ConstraintKind,
    GrammarError,
)
from sglang.srt.constrained.schema_check import json_schema_nodes
from sglang.srt.function_call.gpt_oss_detector import HEADER_MARKS
from sglang.srt.hardware_backend.device_runtime import device_runtime
from sglang.srt.utils.hf_tokenizer import special_token_ids

_BITS = 32


def allocate_bitmask(batch_size: int, vocab_size: int) -> torch.Tensor:
    """A mask that allows everything, for logits of that batch and vocabulary: int32 [batch_size,
    ceil(vocab_size / 32)] on the CPU; bit i % 32 of word i // 32 is token i."""
    shape = (batch_size, -(-vocab_size // _BITS))
    return torch.full(shape, -1, dtype=torch.int32)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int]) -> None:
    """Set the logits of the tokens that a row's mask forbids to minus infinity, in place.

    Args:
        logits: float32, float16 or bfloat16 [batch, vocab], any device.
        bitmask: Result of `allocate_bitmask` for the same batch and vocabulary; on the CPU or on
            the device of the logits.
        rows: Distinct rows to mask; the other rows do not change.

    Raises:
        ValueError: The shape of the mask does not fit the logits.
    """
    if not rows:
        return
    batch, vocab = logits.shape
    if bitmask.shape != (batch, -(-vocab // _BITS)):
        raise ValueError(
            f"bitmask of shape {tuple(bitmask.shape)} does not belong to logits of shape "
            f"{(batch, vocab)}: allocate it with allocate_bitmask({batch}, {vocab})"
        )
    bitmask = device_runtime(logits.device).stage_to_device(bitmask)
    xgrammar.apply_token_bitmask_inplace(logits, bitmask, vocab_size=vocab, indices=list(rows))


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a grammar backend. Sizes in bytes, times in seconds.

    Compilations have a limit of wall time, after which their process is killed. Matchers have a
    limit of CPU time, so that a busy machine fails no request.
    """

    max_text_bytes: int = MAX_CONSTRAINT_BYTES
    compile_timeout: float = 10.0
    first_try: float = 1.0
    """Part of `compile_timeout` after which a job gives way to others. Common grammars need
    milliseconds."""
    compile_memory: int = 1 << 30
    """Address space that one compilation may add to the process."""
    idle_process_memory: int = 1 << 30
    """Resident memory above which a compile process is replaced by a fresh one."""
    start_timeout: float = 60.0
    """Time for the compile process to import its libraries; not part of `compile_timeout`."""
    queue_timeout: float = 30.0
    compile_threads: int = 2
    """Most compilations, and most compile processes, at a time."""
    max_compiling: int = 64
    max_grammars: int = 256
    """Cached results, failures included."""
    max_grammar_bytes: int = 64 << 20
    max_cache_bytes: int = 256 << 20
    step_burst: float = 0.25
    """CPU seconds that a matcher may use in addition to `step_cost` for each token."""
    step_cost: float = 0.002
    """CPU seconds per token that a matcher may use on average, without applying masks."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Plain data, so that the engine can send it to a compile process.

    `tokens[i]` are the bytes of token id i. They are empty for ids that no grammar allows: special
    tokens, whose text would vanish from the answer, and ids that only pad the logits. A token of
    `marks` has bytes that no text has, so that a grammar allows it only where it names its id.
    """

    tokens: list[bytes]
    eos_token_ids: list[int]
    add_prefix_space: bool
    marks: dict[str, int] = {}
    """Ids of the special tokens before a constrained answer of gpt-oss, by name."""

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> Vocabulary:
        """Args and errors as in `XGrammarBackend`."""
        ends = sorted(set(eos_token_ids))
        if not ends:
            raise ValueError(
                "the model names no end-of-sequence token, so a grammar could never end: set "
                "eos_token_id in generation_config.json"
            )
        if not 0 <= ends[0] <= ends[-1] < vocab_size:
            raise ValueError(f"eos_token_id {ends} is outside the vocabulary of {vocab_size}")
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=ends
        )
        tokens = [bytes(token) for token in info.decoded_vocab]
        for token_id in special_token_ids(tokenizer) | set(ends):
            if token_id < vocab_size:
                tokens[token_id] = b""
        ids = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        marks = {name: ids[name] for name in HEADER_MARKS if name in ids}
        marks = {name: i for name, i in marks.items() if i < vocab_size and i not in ends}
        for name, token_id in marks.items():
            tokens[token_id] = _NO_TEXT + name.encode()
        return cls(
            tokens=tokens,
            eos_token_ids=ends,
            add_prefix_space=bool(info.add_prefix_space),
            marks=marks,
        )

    def tokenizer_info(self) -> xgrammar.TokenizerInfo:
        return xgrammar.TokenizerInfo(
            self.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(self.tokens),
            stop_token_ids=self.eos_token_ids,
            add_prefix_space=self.add_prefix_space,
        )


_NO_TEXT: Final = b"\xff"
"""A byte that no UTF-8 text has."""
_MAX_DEPTH: Final = 1000
"""Deepest nesting for the library's recursive passes; its own default needs a larger stack."""
_MAX_WHITESPACE: Final = 40
"""Most blanks in a row between JSON tokens; without a limit, weak models write only blanks."""
_BOUNDED_STRING_CHARACTER: Final = (r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]")
"""The characters of a string with a length, and their repair."""
_KEY_RULE: Final = re.compile(r"^\w*_key_\d+ ::= .*$", re.MULTILINE)
"""Rules for the rest of a further property's name that has begun as a named one does."""
_KEY_ESCAPE: Final = r' | ("\\" basic_escape basic_string_sub)'
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
    Schemas and structural tags must have been checked.

    Args:
        any_whitespace: True if JSON may have whitespace between its tokens. If false, JSON looks
            like the output of `json.dumps`: one blank after each comma and colon, no line breaks.

    Raises:
        GrammarError: The text is not a grammar of its kind, or needs too much memory.
    """
    kind, text = constraint.kind, constraint.text
    try:
        if kind is ConstraintKind.JSON_SCHEMA:
            return compiler.compile_grammar(json_ebnf(text, any_whitespace=any_whitespace))
        if kind is ConstraintKind.REGEX:
            return compiler.compile_regex(text)
        if kind is ConstraintKind.STRUCTURAL_TAG:
            tag = msgspec.json.decode(text)
            for node in json_schema_nodes(tag):
                if node.keys() == {"type", "json_schema"}:
                    schema = msgspec.json.encode(node.pop("json_schema")).decode()
                    node["type"] = "grammar"
                    node["grammar"] = json_ebnf(schema, any_whitespace=any_whitespace)
            return compiler.compile_structural_tag(msgspec.json.encode(tag).decode())
        return compiler.compile_grammar(text)
    except (RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise GrammarError(f"{kind.value}: {cause_of(error)}") from error


def json_ebnf(schema: str, *, any_whitespace: bool) -> str:
    """The library's grammar of a checked schema, with two repairs, in the library's EBNF.

    The repairs: strings with `minLength` or `maxLength` may not have control characters, which are
    no JSON; and a further property may not write a named one's name with escapes.
    """
    if any_whitespace:
        made = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=_MAX_WHITESPACE)
    else:
        made = xgrammar.Grammar.from_json_schema(schema, any_whitespace=False)
    ebnf = str(made).replace(*_BOUNDED_STRING_CHARACTER)
    return _KEY_RULE.sub(lambda rule: rule[0].replace(_KEY_ESCAPE, ""), ebnf)


def cause_of(error: Exception) -> str:
    """One line for the client: the library's message without its timestamps and source lines."""
    text = str(error)
    if isinstance(error, MemoryError) or "bad_alloc" in text:
        return "compiling it takes too much memory: simplify it"
    line = " ".join(_NOISE.sub("", text).split())
    return line[:_MAX_CAUSE_CHARS] or type(error).__name__


class GrammarMatcher:
    """The position of one request in its grammar. Scheduler thread only.

    A retracted request keeps its matcher, because it keeps the output tokens that the matcher has
    accepted. `steps` are tokens, `spent` CPU seconds of the calling thread.
    """

    def __init__(
        self, matcher: xgrammar.GrammarMatcher, kind: ConstraintKind, limits: GrammarLimits
    ) -> None:
        self._matcher = matcher
        self._kind = kind
        self._limits = limits
        self._spent = 0.0
        self._steps = 0

    @property
    def failure(self) -> str | None:
        """Why the engine must end this request: its grammar takes too much time for each token.

        One line for the client; None if the grammar is fast enough. It depends on a clock, so one
        rank decides for all.
        """
        allowed = self._limits.step_burst + self._steps * self._limits.step_cost
        if self._spent <= allowed:
            return None
        return (
            f"{self._kind.value}: matching it took {self._spent:.2f} s for {self._steps} tokens, "
            f"more than the {allowed:.2f} s allowed: make it less ambiguous"
        )

    def accept_token(self, token_id: int) -> bool:
        """Advance by one sampled token. False: the grammar does not allow the token or has ended,
        and nothing changes."""
        if self._matcher.is_terminated():
            return False
        start = time.thread_time()
        accepted = bool(self._matcher.accept_token(token_id))
        self._spent += time.thread_time() - start
        self._steps += accepted
        return accepted

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, row: int) -> None:
        """Write the tokens allowed next into `bitmask[row]`; see `allocate_bitmask`. If the grammar
        is complete, the end tokens are allowed too, or only they. The matcher must not be
        terminated."""
        assert not self._matcher.is_terminated()
        start = time.thread_time()
        self._matcher.fill_next_token_bitmask(bitmask, row)
        self._spent += time.thread_time() - start

    def is_terminated(self) -> bool:
        """True if the matcher has accepted an end token; no token can follow."""
        return bool(self._matcher.is_terminated())


class Grammar:
    """A compiled constraint. Immutable and shared; any thread may create matchers."""

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

    def matcher(self, stop_token_ids: Sequence[int] = ()) -> GrammarMatcher:
        """A matcher at the start of the grammar. The model's end-of-sequence ids end the grammar,
        and special tokens among the request's `stop_token_ids`. A stop token that is also text
        remains text here; the request stops at it, as it does without a grammar."""
        tokens, marks = self._vocabulary.tokens, self._vocabulary.marks.values()
        ends = set(self._vocabulary.eos_token_ids)
        ends.update(
            i for i in stop_token_ids if 0 <= i < len(tokens) and (not tokens[i] or i in marks)
        )
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=sorted(ends))
        return GrammarMatcher(matcher, self._kind, self._limits)


class GrammarTicket(Future[Grammar]):
    """The grammar of one constraint, which may still be compiling. Raises `GrammarError`.

    All requests with the constraint share the ticket. Any thread may read it. If there are several
    ranks, one of them reads it and tells the others, because each rank finishes compiling at
    another time.
    """

    def __init__(self, constraint: Constraint) -> None:
        super().__init__()
        self.constraint = constraint

    def fail(self, message: str) -> None:
        """Set the reason of a failure: one line for the client."""
        self.set_exception(GrammarError(message))
