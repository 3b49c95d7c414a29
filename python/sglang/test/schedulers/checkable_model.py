"""A model whose keys and values can be checked, for tests of everything around a model.

The KV of a position is a running hash of all tokens up to it, with the token and the position. Each
forward reads the whole context of each request from the real pool, layer by layer as attention
does, and checks it against the hash chain. The next token is a function of the hash. So each
forward reveals a page that is wrong, stale, torn, of another request, or read before its load has
landed; the error names layer, position and slot. The output of a prompt is a pure function
(`words`).

The `seed` of a request starts its chain. With one seed for each `extra_key`, KV that leaks between
keys is detected too. CPU only; a step takes about 100 microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.input_logprobs import InputLogprobs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.vocab_logits import VocabLogits
from sglang.srt.managers.scheduler.batch import ModelWorkerBatch
from sglang.srt.mem_cache.allocator import make_allocator
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool, ReqToTokenPool

VOCAB_SIZE: Final = 1009
LAYERS: Final = 3

_MASK: Final = (1 << 64) - 1
_HASH_FACTOR: Final = 6364136223846793005  # Knuth, The Art of Computer Programming 2, MMIX
_TOKEN_FACTOR: Final = 0x9E3779B97F4A7C15
_MARKS: Final = np.random.default_rng(0).integers(0, 1 << 63, (LAYERS, 2, 2), dtype=np.uint64)
"""Values that distinguish layers, and keys from values: `[layer, part, word]`."""
_PARTS: Final = ("keys", "values")

_Words = npt.NDArray[np.uint64]


class WrongContext(AssertionError):
    """A forward got a wrong context or inconsistent metadata."""


# ---- the output of the model: pure functions -----------------------------------------------


def chain(tokens: Sequence[int], seed: int) -> list[int]:
    """The hash at each position of `tokens`."""
    return _extend(_start(seed), tokens)


def words(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    """The `count` tokens that follow `prompt`."""
    at = chain(prompt, seed)[-1]
    said: list[int] = []
    for _ in range(count):
        said.append(_word(at))
        at = _extend(at, said[-1:])[-1]
    return said


def input_logprobs(prompt: Sequence[int], seed: int, start: int) -> list[float]:
    """The logprobs of the prompt tokens after `start`."""
    hashes = chain(prompt, seed)
    return [_logprob(hashes[i], prompt[i + 1]) for i in range(start, len(prompt) - 1)]


def _start(seed: int) -> int:
    return (seed * _HASH_FACTOR + 1) & _MASK


def _extend(at: int, tokens: Sequence[int]) -> list[int]:
    hashes = []
    for token in tokens:
        at = (at * _HASH_FACTOR + token * _TOKEN_FACTOR + 1) & _MASK
        hashes.append(at)
    return hashes


def _word(at: int) -> int:
    return (at >> 33) % (VOCAB_SIZE - 1) + 1


def _logprob(at: int, token: int) -> float:
    """A logprob that is exact in fp32."""
    return -(((at >> 40) ^ token) & 0xFFFF) / 4096


# ---- the worker ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Context:
    """One request of a batch. Arrays have one element for each position."""

    row: int
    seed: int
    slots: npt.NDArray[np.int64]
    num_old: int
    """Positions that the pool has before the step: all, or all but those of `new_tokens`."""
    new_tokens: list[int]

    @property
    def is_whole(self) -> bool:
        """Whether the pool has the request's one new token too, which the step reads and does not
        store."""
        return self.num_old == len(self.slots)


class CheckableWorker:
    """A `ModelWorker` with real pools and a model that checks them. Single-threaded.

    Args:
        page_size: Tokens of a page.
        pool_tokens: Slots of L1, in whole pages.
        max_requests: Rows of the request table.
        context_len: Most tokens of a request.
    """

    def __init__(
        self, page_size: int, pool_tokens: int, max_requests: int, context_len: int = 4096
    ) -> None:
        self.req_to_token_pool = ReqToTokenPool(max_requests, context_len, "cpu")
        # Keys and values are two words of 64 bits each.
        self.token_to_kv_pool = MHATokenToKVPool(
            pool_tokens, page_size, torch.float32, 1, 4, LAYERS, "cpu"
        )
        self.token_to_kv_pool_allocator = make_allocator(self.token_to_kv_pool)
        self.vocab_size = VOCAB_SIZE
        self.context_len = context_len
        self.eos_token_ids: tuple[int, ...] = ()
        self.num_checked = 0
        """Positions checked in all forwards."""
        self.num_whole = 0
        """Contexts that were cached whole, in all forwards."""

    def forward_batch_generation(
        self, batch: ModelWorkerBatch
    ) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """See `ModelWorker`. Raises WrongContext."""
        counter = self.token_to_kv_pool.layer_transfer_counter
        if counter is not None:
            counter.set_consumer(batch.hicache_consumer_index)
        forward = batch.forward
        contexts = self._contexts(forward, batch.seeds.tolist())
        hashes = self._attend(forward, contexts)
        tokens = [_word(one[-1]) for one in hashes]
        output = LogitsProcessorOutput(logits=VocabLogits.of(torch.empty(0)))
        if forward.return_logprob:
            last = [_logprob(one[-1], token) for one, token in zip(hashes, tokens, strict=True)]
            output.next_token_logprobs = torch.tensor(last)
            output.input_logprobs = _input_logprobs_of(forward, hashes)
        return output, torch.tensor(tokens, dtype=torch.int64)

    def _contexts(self, forward: ForwardBatch, seeds: list[int]) -> list[_Context]:
        """Split the batch into requests, and check its tensors for consistency."""
        table = self.req_to_token_pool.req_to_token.numpy()
        rows, lengths = forward.req_pool_indices.tolist(), forward.seq_lens_cpu
        _expect(forward.seq_lens.tolist() == lengths, "seq_lens differs from seq_lens_cpu")
        _expect(len(set(rows)) == len(rows) == len(seeds), f"rows {rows}, seeds {seeds}")
        num_new = forward.extend_seq_lens_cpu or [1] * len(rows)
        tokens = forward.input_ids.tolist()
        page_size = self.token_to_kv_pool.page_size
        stored = forward.out_cache_loc.tolist()
        contexts: list[_Context] = []
        positions: list[int] = []
        done = 0
        for row, length, new, seed in zip(rows, lengths, num_new, seeds, strict=True):
            slots = table[row, :length].astype(np.int64)
            num_old = length - new
            if stored[done : done + new] == [0]:
                _expect(length % page_size == 0, f"row {row}, {length} tokens: cached in part")
                num_old = length
            contexts.append(_Context(row, seed, slots, num_old, tokens[done : done + new]))
            positions += range(length - new, length)
            done += new
        _expect(done == len(tokens), f"{len(tokens)} tokens, {done} of them of a request")
        _expect(forward.positions.tolist() == positions, "positions are not the requests'")
        written = np.concatenate([one.slots[one.num_old :] for one in contexts])
        _expect(
            [slot for slot in stored if slot] == written.tolist(),
            "out_cache_loc are not the slots of the new positions",
        )
        read = np.concatenate([one.slots[: one.num_old] for one in contexts])
        both = np.concatenate([written, np.unique(read)])
        _expect(
            len(np.unique(both)) == len(both), "a slot is written that a context of the batch has"
        )
        smallest = int(both.min())
        _expect(smallest >= page_size, f"slot {smallest} is padding")
        return contexts

    def _attend(self, forward: ForwardBatch, contexts: list[_Context]) -> list[list[int]]:
        """Store the new positions and check all positions in every layer.

        Returns:
            The hashes of the new positions, for each request.
        """
        facts: list[_Words] = []
        hashes: list[list[int]] = []
        slots = np.concatenate([one.slots for one in contexts])
        new_slots = torch.from_numpy(np.concatenate([one.slots[one.num_old :] for one in contexts]))
        for layer in range(LAYERS):
            forward.begin_layer(layer)
            buffers = [
                buffer.view(-1, 4).numpy().view(np.uint64)
                for buffer in self.token_to_kv_pool.get_kv_buffer(layer)
            ]
            if layer == 0:
                for one in contexts:
                    old = buffers[0][one.slots[: one.num_old]] ^ _MARKS[0, 0]
                    _check_chain(one, old)
                    if one.is_whole:
                        _expect_last(one, old)
                        hashes.append([int(old[-1, 0])])
                        facts += [old, old[:0]]
                        continue
                    at = int(old[-1, 0]) if one.num_old else _start(one.seed)
                    hashes.append(_extend(at, one.new_tokens))
                    facts += [old, _facts(hashes[-1], one.num_old, one.new_tokens)]
                wanted = np.concatenate(facts)
                wanted_new = np.concatenate(facts[1::2])
            keys, values = (
                torch.from_numpy((wanted_new ^ _MARKS[layer, part]).view(np.float32)).view(-1, 1, 4)
                for part in range(2)
            )
            self.token_to_kv_pool.set_kv_buffer(layer, new_slots, keys, values)
            for part, buffer in enumerate(buffers):
                found = buffer[slots] ^ _MARKS[layer, part]
                if not np.array_equal(found, wanted):
                    raise _wrong(contexts, layer, part, found, wanted)
        self.num_checked += len(slots)
        self.num_whole += sum(one.is_whole for one in contexts)
        return hashes


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise WrongContext(f"the batch: {what}")


def _expect_last(one: _Context, old: _Words) -> None:
    """Check that the new token of a context that the pool has whole is the pool's last one."""
    token = int(old[-1, 1]) & 0xFFFFFFFF
    _expect(one.new_tokens == [token], f"row {one.row}: {one.new_tokens} instead of {token}")


def _facts(hashes: list[int], begin: int, tokens: list[int]) -> _Words:
    """uint64 `[n, 2]`: hash; position and token."""
    places = [(begin + i) << 32 | token for i, token in enumerate(tokens)]
    return np.array(list(zip(hashes, places, strict=True)), dtype=np.uint64)


def _check_chain(one: _Context, old: _Words) -> None:
    """Check that each hash follows from the last one, from the first position on."""
    hashes, places = old[:, 0], old[:, 1]
    tokens = places & np.uint64(0xFFFFFFFF)
    before = np.concatenate([np.array([_start(one.seed)], dtype=np.uint64), hashes[:-1]])
    follows = before * np.uint64(_HASH_FACTOR) + tokens * np.uint64(_TOKEN_FACTOR) + np.uint64(1)
    position = np.arange(len(old), dtype=np.uint64)
    bad = (follows != hashes) | (places >> np.uint64(32) != position)
    if bad.any():
        at = int(np.argmax(bad))
        raise WrongContext(
            f"row {one.row}, layer 0, keys, position {at} of {len(one.slots)} "
            f"(slot {one.slots[at]}, {int(bad.sum())} such): does not follow from what is before "
            f"it; it holds {_said(old[at])}"
        )


def _wrong(
    contexts: list[_Context], layer: int, part: int, found: _Words, wanted: _Words
) -> WrongContext:
    bad = (found != wanted).any(axis=1)
    first = int(np.argmax(bad))
    at = first
    for one in contexts:
        if at < len(one.slots):
            break
        at -= len(one.slots)
    return WrongContext(
        f"row {one.row}, layer {layer}, {_PARTS[part]}, position {at} of {len(one.slots)} "
        f"(slot {one.slots[at]}, {int(bad.sum())} such in the batch): holds {_said(found[first])} "
        f"and not {_said(wanted[first])}"
    )


def _said(fact: _Words) -> str:
    place = int(fact[1])
    return f"token {place & 0xFFFFFFFF} at position {place >> 32}, hash {int(fact[0]):x}"


def _input_logprobs_of(forward: ForwardBatch, hashes: list[list[int]]) -> InputLogprobs | None:
    starts, wanted = (
        forward.extend_logprob_start_lens_cpu,
        forward.extend_input_logprob_token_ids_cpu,
    )
    if starts is None or wanted is None:
        return None
    values = [
        [_logprob(one[start + i], token) for i, token in enumerate(ids)]
        for one, start, ids in zip(hashes, starts, wanted, strict=True)
    ]
    return InputLogprobs(values, [[] for _ in values])
