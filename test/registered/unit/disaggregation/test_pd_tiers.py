"""Conversations of several turns before a decode server with tiers.

Each turn moves only new pages, and gives the words of one cold server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rigs.disaggregation.pd_rig import LocalMover, PdRig
from rigs.models.letters import Letters
from rigs.schedulers.random_checks import assert_unpinned
from rigs.schedulers.scheduler_rig import RIG_DEVICE, SchedulerRig, greedy, prompt, stored_in_files
from sglang.srt.distributed.device_context import mark_device_set
from sglang.srt.environ import envs
from sglang.srt.mem_cache.storage.object_files import ObjectFiles
from sglang.srt.messages.io_struct import FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PAGE: Final = 16
TURNS: Final = 4
NEW_TOKENS: Final = 20
"""Tokens that the user adds each turn; answers have as many."""
ARGS: Final[dict[str, Any]] = {"page_size": PAGE, "max_requests": 8, "tokenizer": Letters()}
TIERS: Final[dict[str, Any]] = {
    "enable_hierarchical_cache": True,
    "hicache_write_policy": "write_through",
    "hicache_ratio": 8.0,
    "pool_tokens": 320,
}
"""L1 of the decode server has room for one conversation; L2 for all."""
L3: Final = stored_in_files(PAGE)
OFFLOAD: Final[dict[str, Any]] = {
    "disaggregation_mode": "decode",
    "disaggregation_decode_enable_offload_kvcache": True,
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {},
    "deepseek_v3": {},
    "deepseek_v32": {"index_topk": 12},
    "qwen3_next": {"mlp_only_layers": [1]},
    "gpt_oss": {},
    "ministral": {},
    "deepseek_v4": {},
    "glm5_next": {},
}
"""Keys and values; latent rows; these with indexer keys; a hybrid; windows with sinks, without;
windows beside compressed rows; latent rows with keys of groups, beside recurrent states."""


@pytest.fixture(autouse=True)
def one_device() -> Iterator[None]:
    torch.set_num_threads(1)
    mark_device_set(RIG_DEVICE)
    with envs.SGLANG_HICACHE_CHECKED_SHARE.override(1.0):
        yield


@pytest.fixture
def made(tiny_model: Callable[..., Path], request: pytest.FixtureRequest) -> Path:
    family = getattr(request, "param", "qwen3")
    return tiny_model(family, eos_token_id=None, **FAMILIES[family])


class Talk:
    """A conversation, and the pages that its turns move between the servers."""

    def __init__(self, pair: PdRig, alone: SchedulerRig, name: str, ids: list[int]) -> None:
        self.ids = ids
        self._pair, self._alone, self._name = pair, alone, name
        self._turn = 0

    def say(self, num: int = NEW_TOKENS) -> int:
        """One turn. Returns the pages that crossed."""
        rid, before = f"{self._name} {self._turn}", pages_read(self._pair)
        self._pair.run(self._pair.request(rid, self.ids, greedy(num)))
        (want,) = self._alone.generate([self.ids], num)
        answer = self._pair.result(rid).output_ids
        assert answer == want
        self._turn += 1
        self.ids = [*self.ids, *answer, *prompt(1000 + self._turn, NEW_TOKENS)]
        return pages_read(self._pair) - before


def pages_read(pair: PdRig) -> int:
    """Pages of the first pool that the decode server has read."""
    (address, *_), (size, *_), (page_bytes, *_) = pair.decode.pools[0].get_contiguous_buf_infos()
    assert isinstance(pair.engine, LocalMover)
    blocks = [block for one in pair.engine.begun for block in one.blocks]
    ours = [block for block in blocks if address <= block.local < address + size]
    return sum(block.length for block in ours) // page_bytes


def settle(pair: PdRig) -> None:
    for rig in pair.rigs:
        rig.settle()
        assert_unpinned(rig.tree)


def push_out(pair: PdRig, number: int) -> None:
    """Let other prompts take all of the decode server's L1."""
    for n in range(2):
        ids = prompt(5000 + 10 * number + n, 250)
        pair.run(pair.request(f"other {number} {n}", ids, greedy(2)))
    settle(pair)


@pytest.mark.parametrize("made", FAMILIES, indirect=True)
def test_each_turn_moves_what_is_new(made: Path) -> None:
    with PdRig(made, LocalMover(), **ARGS, prefill={"pool_tokens": 2048}, decode=TIERS) as pair:
        alone = SchedulerRig(made, **ARGS, pool_tokens=2048, disable_radix_cache=True)
        talk = Talk(pair, alone, "talk", prompt(1, 100))
        moved = [talk.say()]
        for turn in range(TURNS - 1):
            push_out(pair, turn)
            moved.append(talk.say())
        assert moved[0] == -(-100 // PAGE)
        # A turn has 20 new tokens and the last one of the answer, in two or three pages.
        assert all(pages <= 3 for pages in moved[1:]), moved
        state = pair.decode.scheduler.state
        assert state.metrics.num_cached["host"] > 0
        assert state.counters.prefill_tokens == 0, "nothing is computed twice"
        settle(pair)


@pytest.mark.parametrize("made", FAMILIES, indirect=True)
def test_a_new_decode_server_reads_l3(made: Path, tmp_path: Path) -> None:
    """Pages of a hybrid come from L3 without a snapshot."""
    decode = {**TIERS, **L3}
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        PdRig(made, LocalMover(), **ARGS, prefill={"pool_tokens": 2048}, decode=decode) as pair,
    ):
        alone = SchedulerRig(made, **ARGS, pool_tokens=2048, disable_radix_cache=True)
        talk = Talk(pair, alone, "talk", prompt(1, 100))
        talk.say()
        for _ in range(2):
            settle(pair)
            pair.decode.step(FlushCacheReqInput(req_id="flush"))
            assert talk.say() <= 3
        assert pair.decode.scheduler.state.metrics.num_cached["storage"] > 0
        settle(pair)


@pytest.mark.parametrize("made", ["qwen3", "qwen3_next"], indirect=True)
def test_no_page_is_read_from_l3_that_l2_has(made: Path, tmp_path: Path) -> None:
    """Pages of a hybrid count without a snapshot, also on arrival."""
    decode = {**TIERS, **L3}
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        PdRig(made, LocalMover(), **ARGS, prefill={"pool_tokens": 2048}, decode=decode) as pair,
    ):
        alone = SchedulerRig(made, **ARGS, pool_tokens=2048, disable_radix_cache=True)
        talk = Talk(pair, alone, "talk", prompt(1, 100))
        for turn in range(2):
            assert talk.say() <= 7
            push_out(pair, turn)
        state = pair.decode.scheduler.state
        assert state.metrics.num_cached["host"] > 0
        assert state.token_counts()["read"] == 0
        pair.decode.step(FlushCacheReqInput(req_id="flush"))
        talk.say()
        assert state.token_counts()["read"] > 0


@pytest.mark.parametrize("flags", [{}, OFFLOAD], ids=["implied", "offload"])
def test_a_page_is_written_to_l3_once(
    made: Path, tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are read, answers are computed, and both come back from lower tiers."""
    written: Counter[Path] = Counter()
    write = ObjectFiles.write

    def count(files: ObjectFiles, path: Path, *args: Any) -> None:
        if ".notes" not in path.parts:
            written[path] += 1
        write(files, path, *args)

    monkeypatch.setattr(ObjectFiles, "write", count)
    decode = {**TIERS, **L3, **flags}
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path)),
        PdRig(made, LocalMover(), **ARGS, prefill={"pool_tokens": 2048}, decode=decode) as pair,
    ):
        alone = SchedulerRig(made, **ARGS, pool_tokens=2048, disable_radix_cache=True)
        talk = Talk(pair, alone, "talk", prompt(1, 100))
        for turn in range(3):
            talk.say()
            push_out(pair, turn)
            if turn == 1:
                pair.decode.step(FlushCacheReqInput(req_id="flush"))
    # The last answer but its last token, and the six other prompts with a token of theirs.
    length = len(talk.ids) - NEW_TOKENS - 1
    assert len(written) == length // PAGE + 6 * (251 // PAGE)
    assert set(written.values()) == {1}
