"""Prefill and decode servers of several ranks: the words of one rank, and one mind on each side."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from rigs.disaggregation.control_proxy import ControlProxy
from rigs.disaggregation.pd_ranks import PdRanks
from rigs.drafts.guesses import recorded
from rigs.models.tiny_models import save_tiny_checkpoint
from rigs.nightly_cases import nightly
from rigs.schedulers.rank_rigs import RankRigs
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.disaggregation.common.metadata_reader import ROW_BYTES
from sglang.srt.disaggregation.decode import DecodeRole
from sglang.srt.distributed.device_communicators.transfer_types import PeerUnreachable
from sglang.srt.environ import envs
from sglang.srt.mem_cache.device.state_spec import ItemKind
from sglang.srt.utils.metrics import counts_by_label
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=28, suite="base-a-test-cpu")
pytestmark = pytest.mark.usefixtures("short_repeats")

PAGE: Final = 16
LENGTHS: Final = (1, 16, 17, 64, 90)
PROMPTS: Final = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
HEADS: Final[dict[str, Any]] = {"num_attention_heads": 8, "eos_token_id": None}
DELTA: Final[dict[str, Any]] = {**HEADS, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "qwen3": HEADS,
    "qwen3_moe": HEADS,
    "deepseek_v32": {**HEADS, "num_key_value_heads": 8, "index_topk": 12},
    "kimi_k25_vision": {**HEADS, "num_key_value_heads": 8},
    "kimi_linear": {**HEADS, "num_key_value_heads": 8},
    "qwen3_next": DELTA,
    "qwen3_5": DELTA,
    "minimax_m2": HEADS,
    "nemotron_h": HEADS,
    "ministral": HEADS,
    "gpt_oss": HEADS,
    "deepseek_v4": HEADS,
    "glm5_next": {**HEADS, "num_key_value_heads": 8},
}
LONG: Final = PROMPTS[4]
ARGS: Final[dict[str, Any]] = {
    "page_size": PAGE,
    "chunked_prefill_size": 48,
    "pool_tokens": 1024,
    "max_requests": 8,
}


@pytest.fixture(scope="module")
def models(tiny_model: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda family: tiny_model(family, **MODELS[family])


def check_output(pair: PdRanks, alone: SchedulerRig, turn: str) -> None:
    """Assert that both servers together answer the prompts as one scheduler does."""
    fields: dict[str, Any] = {"return_logprob": True}
    messages = [
        pair.request(f"{turn} {n}", ids, greedy(12), **fields) for n, ids in enumerate(PROMPTS)
    ]
    pair.run(*messages)
    alone.run(
        *(alone.request(f"{turn} {n}", ids, greedy(12), **fields) for n, ids in enumerate(PROMPTS))
    )
    for number in range(len(PROMPTS)):
        got, want = pair.result(f"{turn} {number}"), alone.results[f"{turn} {number}"]
        assert got.output_ids == want.output_ids, f"{turn} {number}"
        assert got.finish_reason == want.finish_reason
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)


CASES: Final = [
    ("qwen3", 2, 2, 1),
    nightly("qwen3", 2, 1, 1),
    nightly("qwen3", 4, 2, 1),
    ("qwen3", 1, 4, 1),
    ("qwen3", 2, 1, 2),
    ("qwen3", 4, 2, 2),
    ("qwen3_moe", 2, 1, 1),
    ("deepseek_v32", 2, 2, 1),
    nightly("deepseek_v32", 2, 1, 1),
    nightly("deepseek_v32", 1, 2, 1),
    ("deepseek_v32", 2, 1, 2),
    ("kimi_k25_vision", 2, 1, 1),
    nightly("kimi_linear", 1, 1, 1),
    nightly("kimi_linear", 2, 1, 1),
    ("kimi_linear", 1, 2, 1),
    nightly("qwen3_next", 1, 1, 1),
    ("qwen3_next", 2, 2, 1),
    nightly("qwen3_next", 2, 1, 1),
    nightly("qwen3_next", 1, 2, 1),
    ("qwen3_5", 4, 2, 1),
    ("minimax_m2", 2, 1, 1),
    nightly("nemotron_h", 1, 1, 1),
    ("nemotron_h", 2, 1, 1),
    nightly("ministral", 1, 1, 1),
    ("ministral", 4, 2, 1),
    ("gpt_oss", 2, 1, 1),
    ("deepseek_v4", 1, 1, 1),
    ("deepseek_v4", 2, 1, 1),
    nightly("deepseek_v4", 1, 2, 1),
    ("glm5_next", 1, 1, 1),
    ("glm5_next", 2, 1, 1),
    nightly("glm5_next", 1, 2, 1),
]
"""Family, ranks of prefill, ranks of decode, over how many of prefill's prompts are split."""


@pytest.mark.parametrize(("family", "prefill", "decode", "cp_size"), CASES)
def test_the_output_is_that_of_one_rank(
    models: Callable[[str], Path], family: str, prefill: int, decode: int, cp_size: int
) -> None:
    path = models(family)
    alone = SchedulerRig(path, **ARGS)
    with PdRanks(path, prefill, decode, cp_size=cp_size, **ARGS) as pair:
        for turn in ("cold", "cached on both sides"):
            check_output(pair, alone, turn)
        for rig in pair.decode.rigs:
            assert rig.scheduler.state.counters.prefill_tokens == 0, "nothing is computed twice"


@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [("qwen3", 1, 2), ("deepseek_v32", 2, 2), ("qwen3_next", 2, 2)],
)
def test_ranks_of_a_decode_server_load_alike(
    models: Callable[[str], Path], family: str, prefill: int, decode: int
) -> None:
    """L1 has room for few prompts; L2 gives the others back."""
    path = models(family)
    alone = SchedulerRig(path, **ARGS)
    tiers = {"enable_hierarchical_cache": True, "hicache_ratio": 8.0, "pool_tokens": 160}
    with PdRanks(path, prefill, decode, **ARGS, decode_args=tiers) as pair:
        for turn in ("cold", "warm", "again"):
            check_output(pair, alone, turn)
        for rig in pair.decode.rigs:
            state = rig.scheduler.state
            assert state.metrics.num_cached["host"] > 0
            assert state.counters.prefill_tokens == 0, "nothing is computed twice"


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v32", "qwen3_next"])
def test_ranks_back_up_and_load_retracted_requests_alike(
    models: Callable[[str], Path], family: str
) -> None:
    path = models(family)
    alone = SchedulerRig(path, **ARGS)
    tight = {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 8.0,
        "hicache_write_policy": "write_back",
        "pool_tokens": 160,
        "schedule_conservativeness": 0.01,
        "disaggregation_decode_retraction_backup": "host_pool",
    }
    ids = [prompt(seed, 30) for seed in range(20, 24)]
    with PdRanks(path, 2, 2, **ARGS, decode_args=tight) as pair:
        pair.run(*(pair.request(f"{n}", one, greedy(40)) for n, one in enumerate(ids)))
        assert [pair.result(f"{n}").output_ids for n in range(4)] == alone.generate(ids, 40)
        for rig in pair.decode.rigs:
            kept = counts_by_label(rig.scheduler.state.metrics.backed_up)
            assert kept["kept"] > 0 == kept["l2_full"]


def test_drafts_after_a_prefill_that_ranks_split_are_those_of_one_rank(tmp_path: Path) -> None:
    """Which have the prompt's last hidden state from all ranks of the prefill server alike."""
    save_tiny_checkpoint(tmp_path, "deepseek_v32", mtp=True, **MODELS["deepseek_v32"])
    drafts: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3}
    args = {**ARGS, **drafts, "chunked_prefill_size": 96}
    alone = SchedulerRig(tmp_path, disable_radix_cache=True, **args)
    with PdRanks(tmp_path, 2, 1, cp_size=2, **args) as pair:
        for ids in (PROMPTS[0], prompt(9, 201)):
            with recorded() as want:
                (words,) = alone.generate([ids], 8)
            for turn in ("cold", "cached"):
                rid = f"{turn} {len(ids)}"
                with recorded() as found:
                    pair.run(pair.request(rid, ids, greedy(8)))
                assert pair.result(rid).output_ids == words
                assert found == want


@pytest.mark.parametrize(
    ("family", "prefill", "decode"), [("qwen3", 2, 1), ("deepseek_v32", 1, 2), ("qwen3_next", 1, 2)]
)
def test_metadata_in_rows_give_the_output_of_one_scheduler(
    models: Callable[[str], Path], family: str, prefill: int, decode: int
) -> None:
    """Each rank reads them of its own peers; where the recurrent state is, is in them too."""
    path = models(family)
    alone = SchedulerRig(path, **ARGS)
    with (
        envs.SGLANG_MOONCAKE_SEND_AUX_TCP.override(False),
        PdRanks(path, prefill, decode, **ARGS) as pair,
    ):
        check_output(pair, alone, "in rows")
        for mover in pair.movers:
            rows = [one for one in mover.begun if [b.length for b in one.blocks] == [ROW_BYTES]]
            assert len(rows) == len(PROMPTS) * len(pair.prefill.rigs)


@pytest.mark.parametrize(
    ("family", "prefill", "decode"), [("qwen3", 2, 1), ("deepseek_v32", 1, 2), ("qwen3_next", 2, 2)]
)
def test_the_output_is_that_of_one_rank_where_pages_are_packed(
    models: Callable[[str], Path], family: str, prefill: int, decode: int
) -> None:
    """Pages of ranks with other heads are packed too."""
    path = models(family)
    alone = SchedulerRig(path, **ARGS)
    with PdRanks(path, prefill, decode, unit_bytes=40_000, **ARGS) as pair:
        check_output(pair, alone, "cold")
        pools = [
            range(address, address + size)
            for rig in pair.decode.rigs
            for pool in rig.pools
            if pool.spec.item is not ItemKind.STATE
            for address, size in zip(*pool.get_contiguous_buf_infos()[:2], strict=True)
        ]
        blocks = [block for mover in pair.movers for one in mover.begun for block in one.blocks]
        assert blocks and not any(block.local in pool for block in blocks for pool in pools)


def test_states_are_those_behind_the_prompt_while_steps_overlap(
    models: Callable[[str], Path],
) -> None:
    """Prompts of many requests are computed one after the other while earlier ones are read."""
    path = models("qwen3_next")
    alone = SchedulerRig(path, **ARGS)
    with PdRanks(path, 2, 1, overlap=True, **ARGS) as pair:
        messages = [
            pair.request(f"{turn} {n}", ids, greedy(12))
            for turn in range(4)
            for n, ids in enumerate(PROMPTS)
        ]
        pair.run(*messages)
        wanted = alone.generate(PROMPTS, 12)
        for turn in range(4):
            assert [pair.result(f"{turn} {n}").output_ids for n in range(len(PROMPTS))] == wanted


def test_a_prefix_with_its_state_on_the_decode_server_is_not_read_again(
    models: Callable[[str], Path],
) -> None:
    """Though the state at its end is: that of the whole prompt is another one."""
    path = models("qwen3_next")
    args = {**ARGS, "mamba_track_interval": 32}
    alone = SchedulerRig(path, **args)
    with PdRanks(path, 2, 2, **args) as pair:
        pair.run(pair.request("first", LONG, greedy(60)))
        longer = [*LONG, *pair.result("first").output_ids, 7, 8, 9]
        for mover in pair.movers:
            mover.begun.clear()
        pair.run(pair.request("longer", longer, greedy(20)))
        assert pair.result("longer").output_ids == alone.generate([longer], 20)[0]
        pages = -(-len(longer) // PAGE)
        for rig, mover in zip(pair.decode.rigs, pair.movers, strict=True):
            kv, states = rig.pools
            read = sum(block.length for one in mover.begun for block in one.blocks)
            page_bytes = sum(kv.get_contiguous_buf_infos()[2])
            num_pages, rest = divmod(read - states.spec.num_bytes, page_bytes)
            assert rest == 0 and num_pages == pages - 128 // PAGE


# ---- one mind ----------------------------------------------------------------------------------


@pytest.fixture
def pair(models: Callable[[str], Path]) -> Iterator[PdRanks]:
    """Two ranks on each side, of the dense model."""
    with PdRanks(models("qwen3"), 2, 2, **ARGS) as pair:
        yield pair


def words(models: Callable[[str], Path], ids: list[int], number: int = 12) -> list[int]:
    """Output of one scheduler."""
    (said,) = SchedulerRig(models("qwen3"), **ARGS).generate([ids], number)
    return said


def why(server: RankRigs, rid: str) -> str:
    """Reason why a request failed; the same on all ranks."""
    reason = server.results[rid].finish_reason
    assert reason is not None and reason.type == "abort"
    return reason.message or ""


def test_a_request_starts_when_all_ranks_have_their_part(
    pair: PdRanks, models: Callable[[str], Path]
) -> None:
    slow = pair.movers[1]
    slow.hold = True
    message = pair.request("a", LONG, greedy(12))
    pair.until(lambda: bool(slow.begun), message)
    role = pair.decode.rigs[0].scheduler._role
    assert isinstance(role, DecodeRole)
    receivers = [coming.receiver for coming in role._transferring.values()]
    while not all(one.get_transfer_metric().transfer_latency_s for one in receivers):
        pair.step()
    for _ in range(20):
        pair.step()
    assert "a" not in pair.decode.results
    for rig in pair.prefill.rigs:
        assert rig.scheduler.state.queues.num_holders == 1, "rank 1's pages are still to be read"
    slow.release()
    pair.until(pair.is_idle)
    assert pair.result("a").output_ids == words(models, LONG)
    pair.assert_clean()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_read_that_fails_on_one_rank_fails_on_all(pair: PdRanks, rank: int) -> None:
    pair.movers[rank].fails = lambda blocks: PeerUnreachable("p", "ended during a transfer")
    pair.run(pair.request("a", LONG))
    failure = "reading from the prefill server failed: peer p ended during a transfer"
    assert failure in why(pair.decode, "a")
    assert "the decode server gave it up: " in why(pair.prefill, "a")
    pair.movers[rank].fails = lambda blocks: None
    pair.run(pair.request("b", LONG))
    assert len(pair.result("b").output_ids) == 8


def test_slots_of_an_aborted_request_linger_on_all_ranks(pair: PdRanks) -> None:
    """While one rank still reads, the other does not use them either."""
    slow = pair.movers[1]
    slow.hold = True
    pair.until(lambda: bool(slow.begun), pair.request("a", LONG))
    abort = [pair.decode.rigs[0].abort("a")]
    pair.step(abort, abort)
    for _ in range(5):
        pair.step()
        for rig in pair.decode.rigs:
            state = rig.scheduler.state
            assert (state.queues.num_holders, state.free_tokens()) == (1, 1024 - 96)
    slow.release()
    pair.until(pair.is_idle)
    pair.assert_clean()


@pytest.mark.usefixtures("short_heartbeats")
def test_a_rank_of_prefill_that_is_silent_fails_the_request_on_all(pair: PdRanks) -> None:
    silent: list[bool] = []
    proxy = ControlProxy(pair.routes[1].endpoint, lambda *_: () if silent else (0.0,))
    with proxy:
        pair.endpoints[1] = proxy.endpoint
        pair.movers[1].hold = True
        pair.until(lambda: bool(pair.movers[1].begun), pair.request("a", LONG))
        silent.append(True)
        pair.until(lambda: "a" in pair.decode.results)
        assert "has not answered for 2 s" in why(pair.decode, "a")
        pair.until(lambda: "a" in pair.prefill.results)
        pair.movers[1].release()
        pair.until(pair.is_idle)
        pair.assert_clean()


def test_what_decode_refuses_ends_on_all_ranks_of_prefill(models: Callable[[str], Path]) -> None:
    """Rank 0 alone tells rank 0 of it."""
    with PdRanks(models("qwen3"), 2, 2, decode_args={"pool_tokens": 64}, **ARGS) as pair:
        pair.run(pair.request("long", LONG, room=5))
        found = "the decode server gave it up: the prompt has 90 tokens"
        assert found in why(pair.prefill, "long")
        again = pair.request("again", PROMPTS[1], room=5)
        pair.step([again])
        assert "bootstrap_room 5 belongs to another request" in why(pair.prefill, "again")
        pair.until(pair.is_idle)


def test_a_collective_a_tick_while_prompts_are_on_their_way_and_none_otherwise(
    pair: PdRanks,
) -> None:
    message = pair.request("a", LONG, greedy(300), stream=True)
    pair.step([message], [message])
    for server in (pair.prefill, pair.decode):
        before = server.threads.ranks.num_calls
        server.step()
        assert server.threads.ranks.num_calls == before + 1
    pair.until(lambda: "a" in pair.decode.results)
    pair.until(lambda: "a" in pair.prefill.results)
    for server in (pair.prefill, pair.decode):
        before = server.threads.ranks.num_calls
        for _ in range(5):
            server.step()
        assert server.threads.ranks.num_calls == before
    assert pair.result("a").finish_reason is None, "it still decodes"
    pair.until(pair.is_idle)


NAMED: Final = (
    "injected by SGLANG_TEST_DISAGG_FAILURE_PROB",
    "reading from the prefill server failed: peer p is gone by injection",
    "the prefill server ended the request",
    "the prefill server let go of the pages while they were read",
    "reading the metadata from the prefill server failed: the row is ",
    "abort",
)


@pytest.mark.parametrize(("family", "prefill", "decode"), [("qwen3", 2, 2), ("qwen3_next", 2, 1)])
def test_random_failures_leave_right_output_and_exact_ownership(
    models: Callable[[str], Path], family: str, prefill: int, decode: int
) -> None:
    """Prompts fail by injection on single ranks, reads hang and fail, requests are aborted."""
    rng = random.Random(5)
    path = models(family)
    alone = SchedulerRig(path, **ARGS)
    prompts = [prompt(100 + n, rng.randint(1, 100)) for n in range(12)]
    wanted = [alone.generate([ids], 10)[0] for ids in prompts]
    with (
        envs.SGLANG_TEST_DISAGG_FAILURE_PROB.override(0.15),
        PdRanks(path, prefill, decode, decode_args={"pool_tokens": 384}, **ARGS) as pair,
    ):
        reads = random.Random(6)
        for mover in pair.movers:
            mover.fails = lambda blocks: (
                PeerUnreachable("p", "is gone by injection") if reads.random() < 0.03 else None
            )
        rids: list[tuple[str, int]] = []
        for number in range(60):
            chosen = rng.randrange(len(prompts))
            rids.append((f"r{number}", chosen))
            message = pair.request(f"r{number}", prompts[chosen], greedy(10))
            pair.step([message], [message])
            if rng.random() < 0.15:
                abort = [pair.decode.rigs[0].abort(rng.choice(rids)[0])]
                pair.step(*rng.choice(((abort, []), ([], abort), (abort, abort))))
            rng.choice(pair.movers).hold = rng.random() < 0.1
            if rng.random() < 0.3:
                for mover in pair.movers:
                    mover.release()
        for mover in pair.movers:
            mover.release()
        pair.until(pair.is_idle)
        pair.assert_clean()
        num_right = 0
        for rid, chosen in rids:
            got = pair.result(rid)
            reason = got.finish_reason
            assert reason is not None
            if reason.type == "abort":
                assert any(named in (reason.message or "") for named in NAMED), reason
                continue
            assert got.output_ids == wanted[chosen], rid
            num_right += 1
        assert 10 < num_right < len(rids), "some fail, and some do not"
