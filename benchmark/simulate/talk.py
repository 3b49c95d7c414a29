"""Conversations of many clients without a server: the order of their requests, and their cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from benchmark.command import Refused
from rigs.bench.multiturn import ReadyQueuePolicy
from rigs.bench.state_simulation import Running, SimulatedStateCache
from sglang.srt.mem_cache.tree.radix_key import TokenArray

SEEDS: Final = (5, 6, 7)
"""Seeds of the random orders that figures are means over."""
_PER_TOKEN_S: Final = 2.10e-5
_PER_TOKEN_PAIR_S: Final = 1.10e-9
_PER_REQUEST_S: Final = 0.004
_LOAD_TOKENS_PER_S: Final = 50e9 / 147456


class Talk:
    """The requests of the conversations as (client, round), in the order of service.

    Args:
        order: Requests under way, a colon, and the policy of the ready queue: "4:random".
        barrier: True if no client runs ahead of the others.

    Raises:
        Refused: `order` is something else.
    """

    def __init__(
        self, order: str, seed: int, *, clients: int, rounds: int, barrier: bool = False
    ) -> None:
        count, _, policy = order.partition(":")
        if not count.isdecimal() or int(count) < 1 or policy not in list(ReadyQueuePolicy):
            raise Refused(f"order {order}: it is a number, a colon, and random or fifo")
        self._parallel, self._is_random = int(count), policy == ReadyQueuePolicy.RANDOM
        self._rounds, self._barrier = rounds, barrier
        self._rng = np.random.default_rng(seed)
        self._ready = [(client, 0) for client in range(clients)]
        self._resting: list[tuple[int, int]] = []
        self.waiting: list[tuple[int, int]] = []
        """Requests in the server's queue, the next one first."""

    def send(self) -> list[tuple[int, int]]:
        """Fill the server's queue. Returns the new requests."""
        if not self._ready and not self.waiting:
            self._ready, self._resting = self._resting, []
        sent = []
        while self._ready and len(self.waiting) < self._parallel:
            index = int(self._rng.integers(len(self._ready))) if self._is_random else 0
            sent.append(self._ready.pop(index))
            self.waiting.append(sent[-1])
        return sent

    def served(self, place: int = 0) -> None:
        """Note that the request at `place` of the queue was answered."""
        client, turn = self.waiting.pop(place)
        if turn + 1 < self._rounds:
            (self._resting if self._barrier else self._ready).append((client, turn + 1))


class Exchange(NamedTuple):
    """A prompt that was served; numbers are tokens."""

    turn: int
    """Its round, from 0."""
    prompt: int
    device: int
    """Found in L1."""
    host: int
    """Found in L2."""


def replay_talk(
    cache: SimulatedStateCache,
    talk: Talk,
    texts: TokenArray,
    question: int,
    answer: int,
    room: int = 0,
) -> Iterator[Exchange]:
    """Serve all requests of a talk in their order: one, or as many at once as `room` tokens hold
    with their answers.

    Args:
        texts: A row is a client's whole conversation.
        question: New tokens of a round.
        answer: Tokens of an answer.
    """
    turn, arrivals = question + answer, 0

    def prompt_of(client: int, at: int) -> TokenArray:
        prompt: TokenArray = texts[client][: at * turn + question]
        return prompt

    while True:
        for client, at in talk.send():
            cache.arrive(f"{client}-{at}", arrivals, prompt_of(client, at))
            arrivals += 1
        if not talk.waiting:
            return
        wave: list[Running] = []
        used = 0
        for client, at in talk.waiting:
            used += (at + 1) * turn
            if wave and used > room:
                break
            prompt = prompt_of(client, at)
            words = texts[client][len(prompt) : (at + 1) * turn]
            wave.append(cache.admit(prompt, words, rid=f"{client}-{at}", reserve=bool(room)))
        for running in wave:
            cache.finish(running)
            _, at = talk.waiting[0]
            talk.served()
            yield Exchange(at, at * turn + question, running.device, running.host)


def request_seconds(cached: int, total: int, loaded: int) -> float:
    """Seconds of one prompt on an H200, if computing overlaps with loading from L2.

    Each new token has a fixed cost, and one for each token before it. Both were measured with
    Qwen3-8B's shape: 8,192 tokens in 0.214 s, 32,768 in 1.28 s.
    """
    pairs = (total**2 - cached**2) / 2
    computing = _PER_TOKEN_S * (total - cached) + _PER_TOKEN_PAIR_S * pairs
    return max(computing, loaded / _LOAD_TOKENS_PER_S) + _PER_REQUEST_S
