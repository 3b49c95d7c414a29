"""Sampling parameters of one request, as clients send them and as messages carry them.

Plain values, without tensors or a tokenizer. The server process decodes and `verify`s the
parameters of a request and sends a `normalize`d copy of them; the other processes rely on both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from sglang.srt.constrained.constraint import Constraint, ConstraintKind, Reasoning

GREEDY_TEMPERATURE = 1e-6
"""Temperatures below this mean greedy decoding, because dividing by them would overflow fp32."""

MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY = 1e-3
"""Keeps logits finite in fp32, like `MAX_TEMPERATURE`. Infinite logits become NaN, which no mask
removes."""
MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 4096
MAX_LOGIT_BIASES = 4096
MAX_SAMPLES = 128
_NO_TEXTS: Final = (None,) * len(ConstraintKind)
NO_DEFAULTS: Final[Mapping[str, float]] = MappingProxyType({})
"""Values of fields that a request does not name: those of `SamplingParams`."""


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of one request, and when to stop.

    Decode it from a client's JSON with `msgspec.convert(obj, SamplingParams)`, whose errors name
    the field; then check the values with `verify`.
    """

    max_new_tokens: int = 128
    """0 computes only the prompt, for its logprobs or for the cache."""
    min_new_tokens: int = 0
    """End-of-sequence and stop tokens are masked until the output has this many tokens."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 means the whole vocabulary, 1 means greedy."""
    min_p: float = 0.0
    """Drops tokens that are less probable than `min_p` times the most probable token."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Counts prompt and output tokens; the other two penalties count only output tokens."""
    stop: str | list[str] | None = None
    """Strings that end the output, none of them empty. An empty list means None."""
    stop_regex: str | list[str] | None = None
    """Patterns that end the output as `stop` does; see `stop_regex.py`."""
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    """Outputs of one prompt."""
    json_schema: str | None = None
    """Schema of the output, as JSON text. At most one of this and the next three is set."""
    regex: str | None = None
    ebnf: str | None = None
    """Grammar in the notation of the `xgrammar` library, with a rule `root`."""
    structural_tag: str | None = None
    """Free text with constrained parts, as JSON text; see `constrained/schema_check.py`."""
    reasoning: Reasoning = Reasoning.NONE
    """Reasoning before the constrained output. Chats set it; `structural_tag` has its own."""
    sampling_seed: int | None = None
    """Seed of the sampling. If None, the server draws a seed when the request arrives."""
    logit_bias: dict[str, float] | None = None
    """Token id, as a decimal string (JSON's only kind of key), to the value added to its logit."""

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )

    @property
    def is_greedy(self) -> bool:
        """True if every token is the argmax of the (penalised, biased) logits."""
        return self.top_k == 1 or self.temperature < GREEDY_TEMPERATURE

    @property
    def has_constraint(self) -> bool:
        """True if the output is constrained, maybe by several texts, which `verify` refuses."""
        return (self.json_schema, self.regex, self.ebnf, self.structural_tag) != _NO_TEXTS

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the output, or None. Raises ValueError if there are several."""
        texts = (self.json_schema, self.regex, self.ebnf, self.structural_tag)
        if texts == _NO_TEXTS:
            return None
        given = [
            Constraint(kind, text, self.reasoning)
            for kind, text in zip(ConstraintKind, texts, strict=True)
            if text is not None
        ]
        if len(given) > 1:
            names = " and ".join(constraint.kind.value for constraint in given)
            raise ValueError(f"{names} are given together: keep one of them")
        return given[0]

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, which may be empty."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def stop_patterns(self) -> list[str]:
        """`stop_regex` as a list, which may be empty."""
        if self.stop_regex is None:
            return []
        return [self.stop_regex] if isinstance(self.stop_regex, str) else self.stop_regex

    @property
    def has_text_stops(self) -> bool:
        """True if the text of the output may end it."""
        return self.stop is not None or self.stop_regex is not None

    def verify(self, vocab_size: int) -> None:
        """Check every value against its range; `vocab_size` is in tokens. A ValueError names field,
        value and range."""
        if not 1 <= self.n <= MAX_SAMPLES:
            raise ValueError(f"n={self.n} must be from 1 to {MAX_SAMPLES}")
        _ = self.constraint
        _require_float("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _require_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _require_float("min_p", self.min_p, 0.0, 1.0)
        _require_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_float("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 2.0)
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be -1 (the whole vocabulary) or at least 1")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 0")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} must be between 0 and "
                f"max_new_tokens={self.max_new_tokens}"
            )
        if self.sampling_seed is not None and not 0 <= self.sampling_seed <= MAX_SEED:
            raise ValueError(f"sampling_seed={self.sampling_seed} must be between 0 and 2^63 - 1")
        if self.stop is not None or self.stop_token_ids is not None:
            self._verify_stops(vocab_size)
        if self.stop_regex is not None and self.stop_patterns:
            # Imported here: few requests have patterns, and not every process needs the library.
            from sglang.srt.sampling.stop_regex import verify_stop_regexes

            verify_stop_regexes(self.stop_patterns)
        if self.logit_bias is not None:
            self._verify_logit_bias(self.logit_bias, vocab_size)

    def normalize(self) -> None:
        """Give equivalent parameters the same values, in place.

        `stop` and `stop_regex` become lists or None, and greedy decoding becomes `top_k` 1.
        """
        self.stop = self.stop_strings or None
        self.stop_regex = self.stop_patterns or None
        self.stop_token_ids = sorted(set(self.stop_token_ids or ())) or None
        if self.is_greedy:
            self.temperature = 1.0
            self.top_k = 1

    def _verify_stops(self, vocab_size: int) -> None:
        strings = self.stop_strings
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(
                f"stop has {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed"
            )
        if any(len(text) > MAX_STOP_CHARS for text in strings):
            raise ValueError(f"stop has a string of more than {MAX_STOP_CHARS} characters")
        if "" in strings:
            which = "stop" if isinstance(self.stop, str) else f"stop[{strings.index('')}]"
            raise ValueError(
                f"{which} is empty, which every text contains: give it a character or leave it out"
            )
        ids = self.stop_token_ids or ()
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        _require_token_ids("stop_token_ids", ids, vocab_size)

    def _verify_logit_bias(self, biases: dict[str, float], vocab_size: int) -> None:
        if len(biases) > MAX_LOGIT_BIASES:
            raise ValueError(
                f"logit_bias has {len(biases)} entries, at most {MAX_LOGIT_BIASES} are allowed"
            )
        for key, value in biases.items():
            # One spelling for each token, so that this check and the sampler read the same id.
            if not (key.isascii() and key.isdigit()) or (key[0] == "0" and key != "0"):
                raise ValueError(
                    f"logit_bias key {key[:32]!r} must be a token id in decimal digits, without "
                    "zeros in front"
                )
            _require_token_ids("logit_bias", (int(key[:20]),), vocab_size)
            _require_float(f"logit_bias[{key}]", value, -1e6, 1e6)


read_params: Final = functools.partial(msgspec.convert, type=SamplingParams)
"""Makes parameters from a dict. Raises msgspec.ValidationError, which names the field."""
read_params({})  # Threads that use a type for the first time get in each other's way.


def _require_float(
    name: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    fits = math.isfinite(value) and low <= value <= high and not (open_low and value == low)
    if not fits:
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        raise ValueError(f"{name}={value} must be {bound} and at most {high:g}")


def _require_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name} has token id {token_id}, the vocabulary has ids 0 to {vocab_size - 1}"
            )
