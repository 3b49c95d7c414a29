"""Requests of all kinds to a server, and their results, which equivalent servers have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

from rigs.schedulers.scheduler_rig import prompt
from rigs.servers.engine_server import EngineServer

Results = dict[str, list[Any]]

SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"enum": ["heron", "stork"]}, "flies": {"type": "boolean"}},
    "required": ["name", "flies"],
    "additionalProperties": False,
}
GREEDY: Final[Mapping[str, Any]] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
_SHARED: Final = prompt(1, 200)
_TIMEOUT_S: Final = 60.0


def battery(server: EngineServer) -> Results:
    """Results by kind of request: only words and log probabilities, nothing that depends on time.
    Several requests run at once, and some others are aborted."""
    bodies: dict[str, dict[str, Any]] = {
        "shared prefixes": {
            "input_ids": [_SHARED[:length] + prompt(seed, 30) for seed, length in _BRANCHES],
            "sampling_params": dict(GREEDY),
        },
        "samples": {
            "input_ids": prompt(2, 70),
            "sampling_params": {**GREEDY, "temperature": 0.9, "n": 3, "sampling_seed": 5},
        },
        "seeded": {
            "input_ids": [prompt(seed, 40) for seed in (3, 4)],
            "sampling_params": {
                **GREEDY, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "sampling_seed": 9
            },
        },
        "penalties": {
            "input_ids": prompt(6, 50),
            "sampling_params": {**GREEDY, "frequency_penalty": 0.5, "min_new_tokens": 3},
        },
        "log probabilities": {
            "input_ids": prompt(5, 90),
            "sampling_params": dict(GREEDY),
            "return_logprob": True,
            "logprob_start_len": 20,
            "top_logprobs_num": 3,
        },
        "schema": {
            "text": "name a bird",
            "sampling_params": {
                "temperature": 0, "max_new_tokens": 60, "json_schema": json.dumps(SCHEMA)
            },
        },
        "stop": {
            "text": "the code",
            "sampling_params": {
                "temperature": 0.8, "sampling_seed": 3, "max_new_tokens": 80, "stop": ["e", "a"]
            },
        },
    }  # fmt: skip
    with ThreadPoolExecutor(len(bodies) + 2) as pool:
        asked = {name: pool.submit(_answers, server, body) for name, body in bodies.items()}
        aborted = [pool.submit(_leave_early, server, seed) for seed in (20, 21)]
        results = {name: one.result() for name, one in asked.items()}
        for one in aborted:
            one.result()
    return results


_BRANCHES: Final = ((7, 200), (8, 160), (9, 96), (10, 200), (11, 0), (12, 33))
"""Seeds of the prompts' ends, and the numbers of tokens that prompts share before them."""


def _answers(server: EngineServer, body: dict[str, Any]) -> list[Any]:
    reply = server.request("POST", "/generate", body)
    assert reply.status == 200, reply
    answers = reply.body if isinstance(reply.body, list) else [reply.body]
    return [_content(answer) for answer in answers]


def _content(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of an answer that must be equal: log probabilities, and the bit-equal others."""
    meta = answer["meta_info"]
    logprobs = [entry for key in _LOGPROBS for entry in _flat(meta.get(key) or [])]
    return {
        "text": answer["text"],
        "ids": answer["output_ids"],
        "end": meta["finish_reason"],
        "logprob_ids": [entry[1] for entry in logprobs],
        "logprobs": [entry[0] for entry in logprobs if entry[0] is not None],
    }


_LOGPROBS: Final = (
    "input_token_logprobs",
    "output_token_logprobs",
    "input_top_logprobs",
    "output_top_logprobs",
)


def _flat(entries: Sequence[Any]) -> list[Any]:
    """Entries `[logprob, id, ...]`, flattened from the lists of alternatives of each token."""
    if entries and all(one is None or isinstance(one[0], list) for one in entries):
        return [entry for one in entries if one is not None for entry in one]
    return list(entries)


def _leave_early(server: EngineServer, seed: int) -> None:
    """A client that reads one event of a long answer and goes."""
    body = {
        "input_ids": prompt(seed, 120),
        "stream": True,
        "sampling_params": {**GREEDY, "max_new_tokens": 250},
    }
    url = f"{server.url}/generate"
    with httpx.stream("POST", url, json=body, timeout=_TIMEOUT_S) as response:
        assert next(response.iter_lines()).startswith("data: {"), "the answer has begun"


def differences(found: Results, expected: Results, tolerance: float) -> list[str]:
    """Differences, one line each; log probabilities may differ by `tolerance`."""
    lines = []
    for name, answers in expected.items():
        for number, (got, want) in enumerate(zip(found[name], answers, strict=True)):
            lines += [
                f"{name} {number}: {key}: {got[key]} instead of {want[key]}"
                for key in want
                if key != "logprobs" and got[key] != want[key]
            ]
            pairs = zip(got["logprobs"], want["logprobs"], strict=False)
            if (most := max((abs(a - b) for a, b in pairs), default=0.0)) > tolerance:
                lines.append(f"{name} {number}: log probabilities differ by {most}")
    return lines
