"""A prefill scheduler becomes a decode scheduler, and back: the words and the caches stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.disaggregation.pd_ranks import PdRanks
from rigs.disaggregation.pd_rig import LocalMover, PdRig
from rigs.schedulers.random_checks import assert_unpinned
from rigs.schedulers.random_setup import speculation
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.arg_groups.disaggregation import DisaggregationMode
from sglang.srt.disaggregation.common.room_server import RoomServer
from sglang.srt.messages.io_struct import ShutdownReq
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")
pytestmark = pytest.mark.usefixtures("short_repeats")

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
NEW: Final = 12
ARGS: Final[dict[str, Any]] = {
    "page_size": 16,
    "pool_tokens": 512,
    "max_requests": 8,
    "enable_pd_role_switch": True,
    "admin_api_key": "operator",
}
TIERS: Final[dict[str, Any]] = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
EVENTS: Final[list[object]] = []
"""KV events of both schedulers of `pair`."""
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3": {},
    "deepseek_v32": {"index_topk": 12},
    "qwen3_next": {"mlp_only_layers": [1]},
}


@pytest.fixture
def pair(model: Path) -> Iterator[PdRig]:
    EVENTS.clear()
    with PdRig(model, LocalMover(), publish_events=EVENTS.extend, **ARGS, **TIERS) as made:
        yield made


def ask(pair: PdRig | PdRanks, alone: SchedulerRig, name: str, *seeds: int) -> None:
    """Send prompts to both, and compare with the words of one scheduler."""
    prompts = [prompt(seed, 20 + 9 * seed) for seed in seeds]
    rids = [f"{name} {seed}" for seed in seeds]
    pair.run(*(pair.request(rid, ids, greedy(NEW)) for rid, ids in zip(rids, prompts, strict=True)))
    assert [pair.result(rid).output_ids for rid in rids] == alone.generate(prompts, NEW)


@pytest.mark.half
@pytest.mark.parametrize("tiers", [{}, TIERS], ids=["L1", "tiers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_servers_give_the_same_words(
    tiny_model: Callable[..., Path], family: str, tiers: dict[str, Any]
) -> None:
    path = tiny_model(family, eos_token_id=None, **FAMILIES[family])
    alone = SchedulerRig(path, page_size=16)
    with PdRig(path, LocalMover(), **ARGS, **tiers) as pair:
        for turn in range(3):
            ask(pair, alone, f"{turn} old", 1, 2, 3)
            ask(pair, alone, f"{turn} new", 10 + turn, 20 + turn)
            for rig in pair.rigs:
                rig.settle()
                assert_unpinned(rig.tree)
            assert pair.decode.scheduler.state.counters.prefill_tokens == 0 or turn
            pair.swap()


def test_drafts_go_on(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("deepseek_v3", eos_token_id=None, mtp=True)
    alone = SchedulerRig(path, page_size=16)
    with PdRig(path, LocalMover(), **ARGS, **speculation(3)) as pair:
        for turn in range(3):
            ask(pair, alone, f"{turn}", 1, 2 + turn)
            pair.swap()


def test_l1_and_l2_stay(pair: PdRig) -> None:
    """No page leaves L1 or L2, so there are no KV events."""
    ids = prompt(1, 200)
    pair.run(pair.request("first", ids, greedy(NEW)))
    for rig in pair.rigs:
        rig.settle()
    told = len(EVENTS)
    assert told
    l1 = [rig.tree.evictable_size() for rig in pair.rigs]
    l2 = [rig.tree.host_use() for rig in pair.rigs]  # type: ignore[attr-defined]
    pair.swap()
    pair.swap()
    pair.swap()
    assert len(EVENTS) == told
    assert [rig.tree.evictable_size() for rig in reversed(pair.rigs)] == l1
    assert [rig.tree.host_use() for rig in reversed(pair.rigs)] == l2  # type: ignore[attr-defined]
    pair.run(pair.request("again", ids, greedy(NEW)))
    # Two servers have the prompt: the last token is computed, and no page crosses.
    assert pair.prefill.results["again"].last.cached_tokens_details.device == 192  # type: ignore[union-attr]
    assert pair.decode.results["again"].output_ids == pair.prefill.results["first"].output_ids


def test_a_busy_server_keeps_its_role(pair: PdRig) -> None:
    message = pair.request("here", prompt(1, 40), greedy(NEW))
    for rig, other in zip(pair.rigs, (DECODE, PREFILL), strict=True):
        rig.step(message)
        answer = rig.switch(other)
        assert answer["role"] != other
        assert answer["busy"].startswith("busy: ") and " 1" in answer["busy"]
        # Its own role again is no change.
        own = DECODE if other == PREFILL else PREFILL
        assert rig.switch(own) == {"role": own}
    pair.run()
    assert len(pair.result("here").output_ids) == NEW


def test_a_server_that_ends_keeps_its_role(pair: PdRig) -> None:
    pair.prefill.step(pair.prefill.request("here", prompt(1, 40), greedy(200)))
    pair.prefill.step(ShutdownReq(timeout=60.0))
    with pytest.raises(ValueError, match=r"^the server is shutting down$"):
        pair.prefill.switch(DECODE)


def test_a_server_that_cannot_listen_keeps_its_role(
    pair: PdRig, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ValueError("no address is free")

    with monkeypatch.context() as failing:
        failing.setattr(RoomServer, "__init__", refuse)
        with pytest.raises(ValueError, match="for decode servers: no address is free"):
            pair.decode.switch(PREFILL)
    ask(pair, SchedulerRig(model, page_size=16), "old role", 1, 2)
    pair.swap()
    ask(pair, SchedulerRig(model, page_size=16), "new role", 1, 3)


def test_the_old_role_is_closed(pair: PdRig) -> None:
    rooms, servers = pair.prefill.rooms, pair.decode.prefill_servers
    instance = rooms.instance_id
    pair.run(pair.request("first", prompt(1, 40), greedy(NEW)))
    pair.swap()
    assert not rooms._thread.is_alive() and servers._asking._closed
    assert pair.prefill.rooms.instance_id != instance


def test_metrics_and_views_name_the_role(pair: PdRig) -> None:
    def shown(number: int) -> tuple[str, list[str]]:
        rig = (first, second)[number]
        state = rig.scheduler.state
        text = state.metrics.render(state.load())
        lines = [line for line in text.splitlines() if line.startswith("sglang:pd_role{")]
        mode = rig.scheduler._control._public_args["disaggregation_mode"]
        return mode, sorted(lines)

    first, second = pair.rigs
    assert shown(0) == (PREFILL, ['sglang:pd_role{role="prefill"} 1.0'])
    pair.run(pair.request("first", prompt(1, 40), greedy(NEW)))
    pair.swap()
    lines = ['sglang:pd_role{role="decode"} 1.0', 'sglang:pd_role{role="prefill"} 0.0']
    assert shown(0) == (DECODE, lines)
    pair.swap()
    assert shown(1)[0] == DECODE
    # Counters go on: nothing is registered twice, and nothing is lost.
    state = second.scheduler.state
    assert "sglang:kv_transfer_total_mb_count 1.0" in state.metrics.render(state.load())


# ---- several ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "prefill", "decode"), [("qwen3", 2, 2), ("deepseek_v32", 2, 1)])
def test_ranks_change_together(
    tiny_model: Callable[..., Path], family: str, prefill: int, decode: int
) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8 if family != "qwen3" else 2}
    path = tiny_model(family, eos_token_id=None, **{**FAMILIES[family], **heads})
    alone = SchedulerRig(path, page_size=16)
    with PdRanks(path, prefill, decode, **ARGS, **TIERS) as pair:
        for turn in range(3):
            ask(pair, alone, f"{turn}", 1, 2, 10 + turn)
            pair.swap()


def test_no_rank_changes_if_one_cannot(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("qwen3", eos_token_id=None, num_attention_heads=8)
    listen = RoomServer.__init__

    def refuse_second(room_server: RoomServer, *args: Any, **kwargs: Any) -> None:
        if kwargs["unknown_s"] == float("inf"):
            raise ValueError("no address is free")
        listen(room_server, *args, **kwargs)

    with PdRanks(path, 1, 2, **ARGS) as pair:
        with monkeypatch.context() as failing:
            failing.setattr(RoomServer, "__init__", refuse_second)
            answers = pair.switch(pair.decode, PREFILL)
        for one in answers:
            assert not one.success and one.message.startswith("rank 1 of 2: ")
        ask(pair, SchedulerRig(path, page_size=16), "old role", 1, 2)
