"""A model with a third kind of state, added as docs/extending.md says: a spec, and its layers.

The model is a Qwen3-Next that also keeps a checksum of all tokens so far, one for each prefix, and
outputs the words that the checksum demands. Its words are thus a function of the prompt. Every
lost, stale or misplaced checksum shows as a wrong word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from rigs.schedulers.scheduler_rig import SchedulerRig, prompt, stored_in_files
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.device.state_pool import StatePool
from sglang.srt.mem_cache.device.state_spec import (
    ItemKind,
    PoolHitPolicy,
    PoolName,
    StateBuffer,
    StateSpec,
)
from sglang.srt.model_loader import loader
from sglang.srt.models.qwen3_next import Qwen3NextForCausalLM
from sglang.srt.models.registry import MODEL_CLASSES
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="base-a-test-cpu")

VOCAB_SIZE = 160
NEW_TOKENS = 12
SUMS = PoolName.INDEXER
"""A name that no other state of this model has."""
SUM_LAYER = 1


def advanced(checksum: int, token: int) -> int:
    """The checksum with one more token; of no tokens it is 0."""
    return (checksum * 31 + token + 1) % 1_000_003


def words_after(tokens: list[int], count: int = NEW_TOKENS) -> list[int]:
    """The words of the model."""
    checksum = 0
    for token in tokens:
        checksum = advanced(checksum, token)
    said = []
    for _ in range(count):
        said.append(checksum % VOCAB_SIZE)
        checksum = advanced(checksum, said[-1])
    return said


class SummingForCausalLM(Qwen3NextForCausalLM):
    """Qwen3-Next whose words follow its checksums."""

    def state_specs(self, kv_dtype: torch.dtype) -> tuple[StateSpec, ...]:
        sums = StateSpec(
            name=SUMS,
            layers=(SUM_LAYER,),
            buffers=(StateBuffer("sum", (1,), torch.int64),),
            item=ItemKind.STATE,
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
            indices_from_pool=PoolName.MAMBA,
        )
        return (*super().state_specs(kv_dtype), sums)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        output = super().forward(input_ids, positions, forward_batch)
        for row, checksum in enumerate(_advance(input_ids.tolist(), forward_batch)):
            output.next_token_logits[row, checksum % VOCAB_SIZE] = 1e4
        return output


def _advance(tokens: list[int], batch: ForwardBatch) -> list[int]:
    """Move the checksums of a step on; those of its requests after it."""
    assert batch.pools is not None and batch.states is not None
    pool, states = batch.pools[SUMS], batch.states
    assert isinstance(pool, StatePool)
    sums = pool.buffers[0][pool.wait_for_layer(SUM_LAYER)]
    counts = batch.extend_seq_lens_cpu or [1] * len(states.slots)
    lens = states.track_lens_cpu or [0] * len(counts)
    ended = []
    for row, count in enumerate(counts):
        checksum = int(sums[states.read_slots[row]])
        mine, tokens = tokens[:count], tokens[count:]
        for place, token in enumerate(mine, 1):
            checksum = advanced(checksum, token)
            if states.track_slots is not None and place == lens[row]:
                sums[states.track_slots[row]] = checksum
        sums[states.slots[row]] = checksum
        ended.append(checksum)
    return ended


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {**MODEL_CLASSES, "Qwen3NextForCausalLM": SummingForCausalLM}
    monkeypatch.setattr(loader, "MODEL_CLASSES", MappingProxyType(classes))


@pytest.fixture(scope="module", name="model")
def make_model(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen3_next", mlp_only_layers=[1], eos_token_id=None)


@pytest.fixture(name="make_rig")
def rig_maker(model: Path) -> Iterator[Any]:
    made = []

    def make(**args: Any) -> SchedulerRig:
        settings = {"page_size": 4, "num_states": 12, "chunked_prefill_size": 16, **args}
        made.append(SchedulerRig(model, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


PROMPTS = [prompt(1, 37), prompt(2, 21), prompt(1, 37)[:24] + prompt(3, 9)]
WORDS = [words_after(tokens) for tokens in PROMPTS]


def reused(rig: SchedulerRig) -> dict[str, int]:
    """Cached tokens of all requests so far, by tier."""
    found = {"device": 0, "host": 0, "storage": 0}
    for result in rig.results.values():
        assert result.last is not None
        for tier in found:
            found[tier] += getattr(result.last.cached_tokens_details, tier)
    return found


def test_words_are_right_cold_and_from_l1(make_rig: Any) -> None:
    rig = make_rig()
    assert [rig.generate([tokens], NEW_TOKENS)[0] for tokens in PROMPTS] == WORDS
    assert rig.generate(PROMPTS * 2, NEW_TOKENS) == WORDS * 2
    follow = [PROMPTS[0] + WORDS[0], [*PROMPTS[1][:17], 5, 6]]
    assert rig.generate(follow) == [words_after(tokens, 8) for tokens in follow]
    assert reused(rig)["device"] > 100


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_words_are_right_from_l2_and_l3(make_rig: Any, layout: str) -> None:
    settings = {
        **stored_in_files(4),
        "hicache_mem_layout": layout,
        "hicache_ratio": 3.0,
    }
    rig = make_rig(**settings)
    assert rig.generate(PROMPTS, NEW_TOKENS) == WORDS
    rig.settle()
    rig.tree.evict(EvictParams(num_tokens=10_000))
    assert rig.generate(PROMPTS, NEW_TOKENS) == WORDS
    assert reused(rig)["host"] > 60
    rig.settle()
    other = make_rig(**settings)
    assert other.generate(PROMPTS, NEW_TOKENS) == WORDS
    assert reused(other)["storage"] > 60


def test_words_are_right_after_retractions_and_where_slots_are_short(make_rig: Any) -> None:
    rig = make_rig(
        pool_tokens=120, num_states=6, schedule_conservativeness=0.1, mamba_track_interval=8
    )
    for _ in range(3):
        assert rig.generate(PROMPTS, 40) == [words_after(tokens, 40) for tokens in PROMPTS]
    assert rig.scheduler.state.counters.retractions > 0
