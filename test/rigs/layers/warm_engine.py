"""Starts an engine of a small model, sends it random traffic, and compares the kernels of both."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from rigs.layers.recorded_kernels import Key, recorded_kernels
from rigs.models import tiny_models
from rigs.schedulers.scheduler_rig import SchedulerRig
from sglang.srt.messages.io_struct import TokenizedGenerateReqInput
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_config import ModelRunnerConfig
from sglang.srt.sampling.sampling_params import SamplingParams

_CONTEXT: Final = 10_000
_CHUNK: Final = 2048
_TOKENS: Final = 20480
_LONGEST: Final = (20, 80, 300, 700, 1500, 3000, 5000)
"""Upper bounds of lengths of drawn prompts."""
_TOGETHER: Final = (1, 1, 1, 2, 3, 5, 8, 9, 20, 33)
_WAYS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.05},
    {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
)


class _Rig(SchedulerRig):
    device = "cpu"
    captures_graphs = True

    def make_runner(self, config: ModelRunnerConfig) -> ModelRunner:
        return ModelRunner(replace(config, load_format="dummy"))


class _Traffic:
    """Prompts of many lengths, alone and together, cold and cached, sampled in all ways."""

    def __init__(self, rig: SchedulerRig, rng: random.Random) -> None:
        self._rig, self._rng = rig, rng
        self._known: list[list[int]] = []
        self._count = 0

    def run(self, rounds: int) -> None:
        """Send as many batches of requests, each after the last has ended."""
        # Many tokens without a snapshot: prompts are shorter than a page.
        self._rig.run(*(self._request(self._prompt(60)) for _ in range(30)))
        self._known.clear()
        for _ in range(rounds):
            messages = self._messages()
            first = self._rng.randint(0, len(messages))
            self._rig.step(*messages[:first])
            self._rig.run(*messages[first:])

    def _messages(self) -> list[TokenizedGenerateReqInput]:
        rng, room = self._rng, _TOKENS * 3 // 4
        messages, mixed = [], rng.random() < 0.5
        longest = rng.choice(_LONGEST)
        for _ in range(rng.choice(_TOGETHER)):
            ids = self._prompt(rng.choice(_LONGEST) if mixed else longest)
            if len(ids) > room:
                continue
            room -= len(ids)
            messages.append(self._request(ids))
        self._known = self._known[-40:]
        return messages

    def _prompt(self, longest: int) -> list[int]:
        rng, begin = self._rng, list[int]()
        if self._known and rng.random() < 0.5:
            begin = rng.choice(self._known)
            begin = begin[: rng.choice((len(begin), rng.randint(0, len(begin))))]
        length = rng.randint(1, longest)
        ids = (begin + [rng.randrange(1, 150) for _ in range(length)])[: _CONTEXT - 1000]
        self._known.append(ids)
        return ids

    def _request(self, ids: list[int]) -> TokenizedGenerateReqInput:
        rng, fields = self._rng, dict[str, Any]()
        params = SamplingParams(
            max_new_tokens=rng.choice((1, 2, 3, 6)), ignore_eos=True, **rng.choice(_WAYS)
        )
        params.normalize()
        if rng.random() < 0.1:
            fields["return_logprob"] = True
            fields["logprob_start_len"] = rng.choice((0, -1, len(ids) // 2))
            fields["top_logprobs_num"] = rng.choice((0, 3))
        self._count += 1
        return self._rig.request(str(self._count), ids, params, **fields)


def late_kernels(
    family: str, fields: Mapping[str, Any], rounds: int, **args: Any
) -> tuple[list[Key], int]:
    """Kernels that traffic uses and that the engine has not run at its start, and the number of
    those that it has run.

    Args:
        fields: Of the configuration of a family of `tiny_models.py`.
        rounds: Batches of requests.
        args: Fields of `ServerArgs`.
    """
    with (
        recorded_kernels() as recorded,
        tempfile.TemporaryDirectory() as directory,
        torch.inference_mode(),
    ):
        config = tiny_models.tiny_config(
            family, **{"max_position_embeddings": _CONTEXT, "eos_token_id": None, **fields}
        )
        config.architectures = [tiny_models._CLASSES[family][1].__name__]
        config.dtype = "bfloat16"
        config.save_pretrained(directory)
        settings: dict[str, Any] = {
            "page_size": 64,
            "max_total_tokens": _TOKENS,
            "max_running_requests": 40,
            # Often there is none for a snapshot.
            "max_mamba_cache_size": 41,
            "mem_fraction_static": 0.9,
            "chunked_prefill_size": _CHUNK,
        }
        rig = _Rig(Path(directory), pool_tokens=None, **{**settings, **args})
        known = set(recorded.keys)
        _Traffic(rig, random.Random(5)).run(rounds)
        rig.close()
        return [key for key in recorded.keys if key not in known], len(known)
