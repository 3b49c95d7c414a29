"""Reference outputs of transformers for a tiny checkpoint, and comparisons with a `StepDriver`."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rigs.models.tiny_models import StepDriver, save_tiny_checkpoint
from sglang.srt.layers.logits_processor import LogitsProcessorOutput


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that every tiny checkpoint has."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, 160, (length,), generator=generator).tolist()
    return tokens


@torch.inference_mode()
def reference(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """fp32 `[tokens, vocab]`: transformers' logits after each token."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits
    return logits[0].float()


def greedy_words(model: PreTrainedModel, tokens: list[int], got: list[int]) -> list[int]:
    """The likeliest token at each place of `got`, an answer to `tokens`.

    One pass instead of one for each token. If it differs from `got`, `got` is not the model's
    greedy answer; where it does not, it is: each token is the likeliest after those before it.
    """
    logits = reference(model, [*tokens, *got[:-1]])
    likeliest: list[int] = logits[len(tokens) - 1 :].argmax(-1).tolist()
    return likeliest[: len(got)]


class GreedyOracle:
    """A tiny checkpoint in the directory `path`, and transformers' greedy answers."""

    def __init__(self, path: Path, family: str, **overrides: Any) -> None:
        self.path = path
        self.hf = save_tiny_checkpoint(path, family, eos_token_id=None, **overrides)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def words(self, tokens: list[int], count: int) -> list[int]:
        """The first `count` tokens of the answer to `tokens`."""
        known = self._known.get(tuple(tokens), [])
        if len(known) < count:
            generate: Any = self.hf.generate
            ids = generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
            known = self._known[tuple(tokens)] = ids[0, len(tokens) :].tolist()
        return known[:count]

    def assert_words(self, tokens: list[int], got: list[int], count: int) -> None:
        """Assert that `got` is `words(tokens, count)`, in one pass."""
        assert len(got) == count
        if self._known.get(tuple(tokens), [])[:count] != got:
            assert got == greedy_words(self.hf, tokens, got)
            self._known[tuple(tokens)] = got


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to the rounding of fp32 sums in another order."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def assert_logits_of_batches(
    model: PreTrainedModel, driver: StepDriver, cut: int = 37, length: int = 86
) -> None:
    """Compare a chunked prompt beside a short one, which then decode together.

    Args:
        model: The reference model.
        driver: A driver that has run nothing.
        cut: Tokens of the long prompt that the first step computes.
        length: Tokens of the long prompt.
    """
    long, short = prompt(length + 4, 1), prompt(21, 2)
    want_long, want_short = reference(model, long), reference(model, short)
    # A whole prefill beside the first chunk of another prompt, then that prompt's second chunk.
    first = driver.extend([(0, short[:17]), (1, long[:cut])]).next_token_logits
    assert_close(first, torch.stack([want_short[16], want_long[cut - 1]]))
    second = driver.extend([(1, long[cut:length])]).next_token_logits
    assert_close(second, want_long[length - 1 : length])
    # Decoding together: contexts of unlike length, in pages that alternate.
    for step in range(4):
        pairs = [(1, long[length + step]), (0, short[17 + step])]
        got = driver.decode(pairs).next_token_logits
        assert_close(got, torch.stack([want_long[length + step], want_short[17 + step]]))


def assert_logits_in_chunks(
    model: PreTrainedModel, driver: StepDriver, tokens: list[int], chunk: int
) -> None:
    """Compare the logits after each chunk of `chunk` tokens of a prompt, which is row 0."""
    want = reference(model, tokens)
    for begin in range(0, len(tokens), chunk):
        part = tokens[begin : begin + chunk]
        got = driver.extend([(0, part)]).next_token_logits
        assert_close(got, want[begin + len(part) - 1 :][:1])


def assert_logits_around(
    model: PreTrainedModel, driver: StepDriver, length: int, cuts: Sequence[int], words: int = 2
) -> None:
    """Compare a prompt of `length` tokens whole, in chunks that end at `cuts`, and in both rows
    for `words` steps of decoding.

    Args:
        driver: A driver that has run nothing.
        cuts: Lengths at which chunks end; those beyond the prompt count for nothing.
    """
    tokens = prompt(length + words, length)
    want = reference(model, tokens)
    got = driver.extend([(0, tokens[:length])]).next_token_logits
    assert_close(got, want[length - 1 : length])
    ends = [0, *(cut for cut in cuts if cut < length), length]
    for begin, end in itertools.pairwise(ends):
        got = driver.extend([(1, tokens[begin:end])]).next_token_logits
        assert_close(got, want[end - 1 : end])
    for place in range(length, length + words):
        both = driver.decode([(0, tokens[place]), (1, tokens[place])]).next_token_logits
        assert_close(both, want[[place, place]])


def assert_continued(
    model: PreTrainedModel, driver: StepDriver, at: int, whole: int, ends: Sequence[int]
) -> None:
    """Compare requests that continue from a snapshot, which a prefill took amid a batch, and the
    request that it was taken of.

    Args:
        driver: A driver with 19 states or more, which has run nothing.
        at: Tokens before the snapshot.
        whole: Tokens of the prefill that takes it.
        ends: Lengths of the prompts that continue.
    """
    tokens, other = prompt(max(*ends, whole + 1), 5), prompt(90, 6)
    want, want_other = reference(model, tokens), reference(model, other)
    got = driver.extend([(0, other[:80]), (1, tokens[:whole])], {1: (18, at)}).next_token_logits
    assert_close(got, torch.stack([want_other[79], want[whole - 1]]))
    rows = range(2, 2 + len(ends))
    driver.continue_from(18, 1, list(rows), at)
    work = [(row, tokens[at:end]) for row, end in zip(rows, ends, strict=True)]
    got = driver.extend([(0, other[80:]), *work]).next_token_logits
    assert_close(got, torch.stack([want_other[89], *(want[end - 1] for end in ends)]))
    # And the one that it was taken of goes on as if nothing had been.
    assert_close(driver.decode([(1, tokens[whole])]).next_token_logits, want[whole : whole + 1])


def logits_of_batches(driver: StepDriver) -> torch.Tensor:
    """fp32 `[11, vocab]` on the CPU: logits of two chunks of a prompt beside a short one, and of
    steps in which both decode. The driver has run nothing."""
    long, short = prompt(90, 1), prompt(21, 2)
    steps: list[Callable[[], LogitsProcessorOutput]] = [
        partial(driver.extend, [(0, short[:17]), (1, long[:37])]),
        partial(driver.extend, [(1, long[37:86])]),
        *(partial(driver.decode, [(1, long[86 + i]), (0, short[17 + i])]) for i in range(4)),
    ]
    # Copied at once: the next captured step overwrites these logits.
    return torch.cat([step().next_token_logits.cpu().clone() for step in steps])


@torch.inference_mode()
def assert_greedy_words(
    model: PreTrainedModel,
    driver: StepDriver,
    tokens: list[int],
    count: int = 128,
    chunk: int | None = None,
) -> None:
    """Compare the `count` likeliest tokens after `tokens`. The checkpoint has no end token.

    Args:
        chunk: Tokens of the prompt that a step computes; None: all.
    """
    size = chunk or len(tokens)
    for begin in range(0, len(tokens), size):
        step = driver.extend([(0, tokens[begin : begin + size])])
    got = [int(step.next_token_logits[0].argmax())]
    while len(got) < count:
        got.append(int(driver.decode([(0, got[-1])]).next_token_logits[0].argmax()))
    assert got == greedy_words(model, tokens, got)


def assert_errs_like_bf16(
    model: PreTrainedModel, driver: StepDriver, tokens: list[int], cut: int, decoded: int = 24
) -> None:
    """Compare a driver's distance from fp32 logits with the distance of transformers in bf16.

    The two errors have the same size on any CPU, because both sides round equally often; they
    differ by chance only. Rounding decides between two nearly equal experts or tokens. Rows with
    such a choice may be far off, but they are fewer than half, and the median ignores them.

    Args:
        model: The reference model, of any dtype.
        driver: A driver that has run nothing, which computes or keeps something in bf16.
        tokens: A prompt; the driver computes a chunk of `cut` tokens, then all others but the last
            `decoded`, which are decoded one by one.
    """
    whole = len(tokens) - decoded
    steps = [driver.extend([(0, tokens[:cut])]), driver.extend([(0, tokens[cut:whole])])]
    steps += [driver.decode([(0, token)]) for token in tokens[whole:]]
    got = torch.cat([step.next_token_logits for step in steps])
    rows = [cut - 1, *range(whole - 1, len(tokens))]
    exact, rounded = (
        reference(copy.deepcopy(model).to(dtype), tokens)[rows]  # type: ignore[arg-type]
        for dtype in (torch.float32, torch.bfloat16)
    )
    error, theirs = ((logits - exact).norm(dim=-1).median() for logits in (got, rounded))
    assert error < 2 * theirs, f"{error} from fp32, transformers in bf16 {theirs}"
