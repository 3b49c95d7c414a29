"""Clients under chaos: they ask for codes that they know, until each question is answered.

A question follows one of some books of facts, so that prompts share prefixes. The books are more
than L1 and L2 hold together.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sglang.test.chaos.agenda import TIERS, Attempt, Event, Outcome, Span, Tiers

DEADLINE_S: Final = 60.0
"""Seconds for a request, on a machine that is busy with starting servers."""
PATIENCE_S: Final = 240.0
"""Seconds until a question that is asked again and again counts as lost."""
_PAUSE_S: Final = 0.5
"""Seconds between two requests of a client, in which servers that start get the CPU."""
_NUM_BOOKS: Final = 40
_FRESH_RATE: Final = 0.1
_REFUSALS: Final = (502, 503)
_STREAM_TOKENS: Final = 64
_LEAST_READ: Final = 256
"""Tokens: L3 is not asked for fewer (`prefetch_threshold`)."""
_NAMES: Final = """
heron otter badger falcon raven eagle owl fox wolf bear tiger lion panda koala zebra giraffe camel
horse donkey goat sheep cow pig dog cat mouse rat rabbit hare squirrel beaver hedgehog mole bat deer
moose elk bison buffalo monkey gorilla sloth penguin parrot pigeon sparrow robin swan goose duck
""".split()


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt for the built-in model, and the right answer."""

    prompt: str
    answer: str


def question(seed: int, book: int, rng: random.Random) -> Question:
    """A question about a book; `rng` chooses which. A book has 15 to 50 facts of ten tokens."""
    writer = random.Random(f"{seed} {book}")
    names = writer.sample(_NAMES, writer.randint(15, len(_NAMES)))
    codes = {name: f"{writer.randrange(10000):04}" for name in names}
    facts = " ".join(f"The code of {name} is {code}." for name, code in codes.items())
    name = rng.choice(names)
    return Question(f"{facts} What is the code of {name}?", codes[name])


@dataclass(frozen=True, slots=True)
class Reply:
    """How a request ended: the outcome, what was said if it is not the answer, the cached tokens by
    tier and more about the tiers, if the server tells them."""

    outcome: Outcome
    detail: str = ""
    cached: Mapping[str, int] = field(default_factory=dict)
    tiers: Tiers = field(default_factory=Tiers)


def ask(url: str, asked: Question, streams: bool) -> Reply:
    """Send a question to `/v1/chat/completions`."""
    body = {
        "messages": [{"role": "user", "content": asked.prompt}],
        "temperature": 0,
        # A stream goes on behind its answer, so that faults come in its middle.
        "max_tokens": _STREAM_TOKENS if streams else 16,
        "ignore_eos": streams,
        "stream": streams,
        "return_cached_tokens_details": not streams,
        "return_cache_report": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            if streams:
                return _streamed(response, asked.answer, began)
            reply = json.load(response)
            text = reply["choices"][0]["message"]["content"]
            told = reply.get("sglext") or {}
            cached = told.get("cached_tokens_details") or {}
            return Reply(*_judged(text.strip(), asked.answer), cached, _tiers(told))
    except urllib.error.HTTPError as error:
        return Reply(*_refused(error))
    except TimeoutError:
        return Reply(Outcome.HUNG, f"no byte for {DEADLINE_S:.0f} s")
    except urllib.error.URLError as error:
        is_late = isinstance(error.reason, TimeoutError)
        is_refused = isinstance(error.reason, ConnectionRefusedError)
        kind = Outcome.HUNG if is_late else Outcome.REFUSED if is_refused else Outcome.CUT
        return Reply(kind, repr(error.reason))
    except (OSError, http.client.HTTPException) as error:
        return Reply(Outcome.CUT, repr(error))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return Reply(Outcome.UNNAMED, f"no chat completion: {error!r}")


def _tiers(told: Mapping[str, Any]) -> Tiers:
    """The part of an answer's `sglext` that is about the tiers."""
    report, stages = told.get("cache_report"), told.get("stages")
    asks_l3 = report and report["prompt_tokens"] - report["on_arrival"] >= _LEAST_READ
    return Tiers(asks_l3, stages and (stages.get("l3_wait") or 0.0))


def _judged(text: str, answer: str) -> tuple[Outcome, str]:
    if text == answer:
        return Outcome.RIGHT, ""
    return Outcome.WRONG, f"{text!r} in place of {answer!r}"


def _refused(error: urllib.error.HTTPError) -> tuple[Outcome, str]:
    """Judge an error's status and message."""
    try:
        raw = error.read()
    except (OSError, http.client.HTTPException) as cut:
        return Outcome.CUT, f"{error.code}, then {cut!r}"
    said = raw.decode(errors="replace")[:300]
    is_named = error.code in _REFUSALS and bool(message_of(raw))
    return Outcome.REFUSED if is_named else Outcome.UNNAMED, f"{error.code} {said}"


def message_of(raw: bytes) -> str:
    """The message of an error's JSON body, which engine and router write differently, or ""."""
    try:
        body = json.loads(raw)
    except ValueError:
        return ""
    found = body.get("error", body) if isinstance(body, dict) else body
    return str(found.get("message") or "") if isinstance(found, dict) else str(found)


def _streamed(response: http.client.HTTPResponse, answer: str, began: float) -> Reply:
    """Read a stream that was asked for at `began` to its end. `[DONE]` must end it; an event with
    an error cuts it."""
    deadline = time.monotonic() + DEADLINE_S
    text, tiers = "", Tiers()
    for line in response:
        if time.monotonic() > deadline:
            return Reply(Outcome.HUNG, f"the stream has not ended after {DEADLINE_S:.0f} s")
        if not line.endswith(b"\n"):
            break  # In the middle of an event.
        event = line.removeprefix(b"data:").strip()
        if event == b"[DONE]":
            return Reply(*_judged(text.strip()[: len(answer)], answer), tiers=tiers)
        if not event:
            continue
        chunk: dict[str, Any] = json.loads(event)
        if "error" in chunk:
            said = message_of(event)
            kind = Outcome.CUT if said else Outcome.UNNAMED
            return Reply(kind, f"event: {event.decode()[:300]}")
        piece: str = chunk["choices"][0]["delta"].get("content") or "" if chunk["choices"] else ""
        if piece and tiers.first is None:
            tiers = replace(tiers, first=time.monotonic() - began)
        if told := chunk.get("sglext"):
            tiers = replace(_tiers(told), first=tiers.first)
        text += piece
    return Reply(Outcome.CUT, f"the stream ends after {text!r}")


class Load:
    """Context manager: threads that each ask one question after another, through doors at random,
    half of them in streams. At its end each gets the answer to its last question."""

    def __init__(self, doors: Mapping[str, str], seed: int, num_clients: int) -> None:
        """Describe the load.

        Args:
            doors: Name of each door to its URL.
        """
        self._doors = dict(doors)
        self._seed = seed
        self._ends = threading.Event()
        self._fresh_books = iter(range(_NUM_BOOKS, 10**9))
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._clients = [
            threading.Thread(target=self._run, args=(number,), name=f"client {number}")
            for number in range(num_clients)
        ]
        self.attempts: list[Attempt] = []
        self.spans: list[Span] = []
        self.lost: list[str] = []
        self.cached: Counter[str] = Counter()
        """Prompt tokens by tier."""

    def __enter__(self) -> Load:
        self._began = time.monotonic()
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for client in self._clients:
            client.join()

    def now(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self._began

    @contextmanager
    def span(self, event: Event) -> Iterator[None]:
        """The time of an event, until its target serves again."""
        one = Span(event, self.now())
        self.spans.append(one)
        yield
        one.ended = self.now()

    def fresh_question(self, rng: random.Random) -> Question:
        """A question about a book that nobody has asked about. Any thread."""
        with self._lock:
            book = next(self._fresh_books)
        return question(self._seed, book, rng)

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self._seed} client {number}")
        while not self._ends.wait(_PAUSE_S):
            if rng.random() < _FRESH_RATE:
                asked = self.fresh_question(rng)
            else:
                asked = question(self._seed, rng.randrange(_NUM_BOOKS), rng)
            self.ask_until_answered(asked, list(self._doors), rng, rng.random() < 0.5)

    def ask_until_answered(
        self, asked: Question, doors: Sequence[str], rng: random.Random, streams: bool
    ) -> Mapping[str, int]:
        """Ask through one of `doors` after another until there is an answer. Any thread; returns
        the cached tokens by tier."""
        patience = time.monotonic() + PATIENCE_S
        while True:
            door = rng.choice(doors)
            began = self.now()
            reply = ask(self._doors[door], asked, streams)
            attempt = Attempt(door, began, self.now(), reply.outcome, reply.detail, reply.tiers)
            with self._lock:
                self.attempts.append(attempt)
                self.cached.update({tier: reply.cached.get(tier, 0) for tier in TIERS})
            if reply.outcome in (Outcome.RIGHT, Outcome.WRONG):
                return reply.cached
            if time.monotonic() > patience:
                with self._lock:
                    self.lost.append(f"{door}: {asked.prompt[-40:]!r}, at last {reply.detail}")
                return {}
            time.sleep(_PAUSE_S)
