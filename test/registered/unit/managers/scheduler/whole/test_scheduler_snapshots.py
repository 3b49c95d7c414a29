"""Requests of models with recurrent states over the prefix cache: hits, snapshots, evictions."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from rigs.models.model_oracle import GreedyOracle
from rigs.schedulers.scheduler_rig import SchedulerRig, greedy, prompt
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.hardware_backend.cpu.runtime import CpuRuntime
from sglang.srt.layers.forward_batch_info import ForwardBatch
from sglang.srt.layers.linear_attention.extend_plan import CHUNK
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.tree.radix_key import RadixKey
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=22, suite="base-a-test-cpu")

PAGE = 4
NO_CACHE: dict[str, Any] = {"disable_radix_cache": True}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> GreedyOracle:
    return GreedyOracle(tmp_path_factory.mktemp("hybrid"), "qwen3_5")


def rig_of(oracle: GreedyOracle, **args: Any) -> SchedulerRig:
    settings: dict[str, Any] = {
        "page_size": PAGE,
        "num_states": 32,
        **args,
    }
    if "mamba_scheduler_strategy" not in args:
        settings.setdefault("mamba_track_interval", 4 * PAGE)
    return SchedulerRig(oracle.path, **settings)


def run(rig: SchedulerRig, oracle: GreedyOracle, rid: str, tokens: list[int], count: int) -> int:
    """Run one request, check its words; how many of its tokens came from the cache."""
    rig.run(rig.request(rid, tokens, greedy(count)))
    result = rig.results[rid]
    oracle.assert_words(tokens, result.output_ids, count)
    assert result.last is not None
    details = result.last.cached_tokens_details
    return details.device + details.host + details.storage


def test_a_prompt_continues_from_the_last_snapshot_before_its_end(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle)
    tokens = prompt(1, 43)
    assert run(rig, oracle, "cold", tokens, 5) == 0
    assert run(rig, oracle, "warm", tokens, 5) == 40
    assert run(rig, oracle, "longer", [*tokens, *prompt(2, 9)], 5) == 40
    assert run(rig, oracle, "again", [*tokens, *prompt(2, 9)], 5) == 48
    # The state at its end has its last token already, which must be computed again.
    assert run(rig, oracle, "shorter", tokens[:40], 5) == 0
    assert run(rig, oracle, "shorter again", tokens[:40], 5) == 36
    rig.assert_clean()


def test_all_numbers_of_a_prefill_come_in_one_upload(
    oracle: GreedyOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each upload costs a GPU's host 15 us before the launch."""
    rig = rig_of(oracle)
    tokens = prompt(1, 43)
    run(rig, oracle, "cold", tokens, 1)
    uploads: list[int] = []
    batches: list[tuple[list[int], ForwardBatch]] = []
    stage, forward = CpuRuntime.stage_to_device, ModelRunner.forward

    def counting(runtime: CpuRuntime, tensor: torch.Tensor) -> torch.Tensor:
        uploads.append(tensor.numel())
        return stage(runtime, tensor)

    def noting(runner: ModelRunner, batch: ForwardBatch) -> Any:
        batches.append((uploads.copy(), batch))
        return forward(runner, batch)

    monkeypatch.setattr(CpuRuntime, "stage_to_device", counting)
    monkeypatch.setattr(ModelRunner, "forward", noting)
    longer = [*tokens, *prompt(2, 10)]
    rig.run(rig.request("known", longer, greedy(1)), rig.request("new", prompt(3, 5), greedy(1)))
    ((seen, batch),) = batches
    # 13 and 5 tokens, their positions, 5 numbers and 3 slots of each request.
    assert seen == [2 * 18 + 2 * 8]
    assert batch.positions.tolist() == [*range(40, 53), *range(5)]
    assert batch.last_rows_in is not None and batch.last_rows_in.tolist() == [12, 17]
    states = batch.states
    assert states is not None and states.track_slots is not None and states.copied is None
    known, new = states.slots.tolist()
    read, own = states.read_slots.tolist()
    assert own == new != known != read
    begin = batch.input_ids.data_ptr()
    for tensor in (batch.last_rows_in, states.slots, states.read_slots, states.track_slots):
        assert (tensor.data_ptr() - begin) % 16 == 0
    assert states.track_lens_cpu == [12, 4]
    for rid, ids in (("known", longer), ("new", prompt(3, 5))):
        oracle.assert_words(ids, rig.results[rid].output_ids, 1)


def test_a_prompt_that_ends_where_snapshots_may_leaves_its_last_state(oracle: GreedyOracle) -> None:
    """Its repeat starts a page earlier, a prompt that continues it where it ends."""
    rig = rig_of(oracle)
    tokens = prompt(1, 40)
    assert run(rig, oracle, "cold", tokens, 3) == 0
    assert run(rig, oracle, "warm", tokens, 3) == 36
    assert run(rig, oracle, "longer", [*tokens, *prompt(2, 9)], 3) == 40
    # A snapshot of decoding is behind more tokens, and takes its place.
    assert run(rig, oracle, "decoded", prompt(3, 40), 12) == 0
    answer = rig.results["decoded"].output_ids
    assert run(rig, oracle, "next turn", [*prompt(3, 40), *answer, 7], 3) == 48
    assert run(rig, oracle, "beside", [*prompt(3, 40), 8, 9], 3) == 36
    rig.assert_clean()


def test_a_state_behind_a_prompt_takes_no_other_states_place(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle, num_states=3, max_requests=1)
    known, tokens = prompt(2, 43), prompt(1, 40)
    assert run(rig, oracle, "known", known, 3) == 0
    assert run(rig, oracle, "cold", tokens, 3) == 0
    assert run(rig, oracle, "warm", tokens, 3) == 36
    assert run(rig, oracle, "known again", known, 3) == 40
    rig.assert_clean()


def test_decoding_leaves_snapshots_for_the_next_turn(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle)
    tokens = prompt(3, 10)
    assert run(rig, oracle, "first", tokens, 40) == 0
    assert rig.tree.mamba_evictable_size() == 2, "of the prompt, and the last of the answer"
    turn = [*tokens, *oracle.words(tokens, 40), *prompt(4, 5)]
    assert run(rig, oracle, "next", turn, 5) == 48
    rig.assert_clean()


def test_the_step_after_an_unforeseen_end_leaves_no_state(oracle: GreedyOracle) -> None:
    """Overlapping steps launch the next step before the CPU learns that the request has stopped.
    The snapshot of that step, and the running state, are then one token too far."""
    rig = rig_of(oracle, num_states=128)
    ends: set[int] = set()
    for length in range(17, 17 + 8 * PAGE):
        tokens = prompt(100 + length, length)
        words = oracle.words(tokens, 12)
        at = max(index for index, word in enumerate(words) if words.index(word) == index)
        stops = greedy(24, ignore_eos=False, stop_token_ids=[words[at]])
        rig.run(rig.request(f"stops {length}", tokens, stops))
        assert rig.results[f"stops {length}"].output_ids == words[: at + 1]
        # The last token was not computed, except by the step whose result was not awaited.
        end = length + at
        ends.add(end % (4 * PAGE))
        of_prompt, of_answer = length // PAGE * PAGE, end - end % (4 * PAGE)
        turn = [*tokens, *words[: at + 1], *prompt(99, 3)]
        reused = run(rig, oracle, f"next {length}", turn, 4)
        assert reused == (of_answer if of_answer > length else of_prompt)
    rig.assert_clean()
    assert ends == set(range(4 * PAGE)), "ends of all kinds, one before a snapshot included"


def test_no_buffer_takes_snapshots_of_prompts_alone(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle, mamba_scheduler_strategy="no_buffer")
    tokens = prompt(3, 10)
    run(rig, oracle, "first", tokens, 30)
    assert run(rig, oracle, "next", [*tokens, *oracle.words(tokens, 30), 7], 5) == 8


def test_the_second_that_turns_off_leaves_a_snapshot_for_the_third(oracle: GreedyOracle) -> None:
    """Two prompts share 27 tokens, where no request had reason to leave a snapshot."""
    rig = rig_of(oracle)
    shared = prompt(5, 27)
    assert run(rig, oracle, "1", [*shared, *prompt(6, 20)], 3) == 0
    assert run(rig, oracle, "2", [*shared, *prompt(7, 20)], 3) == 0
    assert run(rig, oracle, "3", [*shared, *prompt(8, 20)], 3) == 24
    rig.assert_clean()


@pytest.mark.parametrize("chunk", [12, 20, 64])
def test_chunks_that_end_anywhere_change_nothing(oracle: GreedyOracle, chunk: int) -> None:
    """Snapshots at multiples of 8, in pages of 4."""
    rig = rig_of(oracle, chunked_prefill_size=chunk, snapshot_alignment=8)
    tokens = prompt(9, 90)
    assert run(rig, oracle, "cold", tokens, 6) == 0
    assert run(rig, oracle, "warm", tokens, 6) == 88
    ends = [end // 8 * 8 for end in range(chunk, 50, chunk)]
    assert run(rig, oracle, "part", [*tokens[:50], *prompt(10, 20)], 6) == max([0, *ends])
    assert run(rig, oracle, "again", [*tokens[:50], *prompt(11, 20)], 6) == 48
    rig.assert_clean()


@pytest.mark.parametrize("length", [100, 128, 177])
def test_leaving_a_snapshot_changes_no_bit_of_a_prompt(oracle: GreedyOracle, length: int) -> None:
    """Why snapshots stand at multiples of the kernel's chunk, and not only of a shorter page: the
    prompt's tokens are computed in the same chunks with a snapshot and without."""
    tokens, logprobs = prompt(14, length), []
    for args in ({"snapshot_alignment": CHUNK, "mamba_track_interval": CHUNK}, NO_CACHE):
        rig = SchedulerRig(oracle.path, page_size=16, num_states=4, **args)
        rig.run(rig.request("cold", tokens, greedy(4), return_logprob=True))
        logprobs.append(rig.results["cold"].logprobs)
        assert bool(rig.tree.mamba_evictable_size()) is (args is not NO_CACHE)
    assert logprobs[0] == logprobs[1]


def test_ten_continue_from_one_snapshot_at_once(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle, max_requests=10)
    shared = prompt(12, 41)
    run(rig, oracle, "first", shared, 4)
    prompts = [[*shared, *prompt(20 + i, 1 + i)] for i in range(10)]
    for tokens, got in zip(prompts, rig.generate(prompts, 20), strict=True):
        oracle.assert_words(tokens, got, 20)
    for result in list(rig.results.values())[1:]:
        assert result.last is not None
        assert result.last.cached_tokens_details.device == 40
    rig.assert_clean()


def test_samples_of_a_prompt_share_its_snapshot(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle)
    tokens = prompt(13, 30)
    rig.run(
        *[rig.request(str(n), tokens, greedy(6), sample_of="0" if n else None) for n in range(4)]
    )
    assert [rig.results[str(n)].output_ids for n in range(4)] == [oracle.words(tokens, 6)] * 4
    last = rig.results["3"].last
    assert last is not None
    assert last.cached_tokens_details.device == 28


def test_without_room_for_snapshots_requests_run_all_the_same(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle, num_states=2, max_requests=2)
    prompts = [prompt(30 + i, 20 + i) for i in range(5)]
    for tokens, got in zip(prompts, rig.generate(prompts, 20), strict=True):
        oracle.assert_words(tokens, got, 20)
    rig.assert_clean()


def test_a_request_that_runs_takes_the_slot_of_the_oldest_snapshot(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle, num_states=3, max_requests=1)
    old, new = prompt(40, 20), prompt(41, 20)
    for rid, tokens in (("old", old), ("new", new)):
        run(rig, oracle, rid, tokens, 3)
    # One slot runs, one takes the snapshot: the oldest of two in the tree goes.
    run(rig, oracle, "third", prompt(42, 20), 3)
    assert run(rig, oracle, "new again", new, 3) == 16
    assert run(rig, oracle, "old again", old, 3) == 0


def test_slots_for_snapshots_go_to_requests_that_want_to_run(oracle: GreedyOracle) -> None:
    """Six slots: three requests decode, and hold a snapshot each beside their running states.
    Three more want to run."""
    rig = rig_of(oracle, num_states=6, max_requests=6, mamba_track_interval=PAGE)
    long, late = [prompt(70 + i, 21) for i in range(3)], [prompt(80 + i, 4) for i in range(3)]
    rig.step(*[rig.request(f"long {i}", ids, greedy(60)) for i, ids in enumerate(long)])
    pool = rig.scheduler.state.pools.req_to_token_pool.mamba_pool
    assert pool is not None
    for _ in range(20):
        rig.step()
    assert pool.available_size() + rig.tree.mamba_evictable_size() == 0, "they hold all of them"
    rig.step(*[rig.request(f"late {i}", ids, greedy(4)) for i, ids in enumerate(late)])
    ticks = 1
    while rig.scheduler.state.queues.num_holders + len(rig.scheduler.state.queues.waiting) > 3:
        rig.step()
        rig.check()
        ticks += 1
    assert ticks <= 8, "not when a request of the first three ends"
    rig.run()
    for i, ids in enumerate(long):
        oracle.assert_words(ids, rig.results[f"long {i}"].output_ids, 60)
    for i, ids in enumerate(late):
        oracle.assert_words(ids, rig.results[f"late {i}"].output_ids, 4)
    rig.assert_clean()


def test_a_request_that_decodes_holds_one_spare_state_between_snapshots(
    oracle: GreedyOracle,
) -> None:
    rig = rig_of(oracle, num_states=9, max_requests=9, mamba_track_interval=PAGE)
    tokens = prompt(46, 20)
    rig.step(rig.request("one", tokens, greedy(60)))
    pool = rig.scheduler.state.pools.req_to_token_pool.mamba_pool
    assert pool is not None
    held: list[int] = []
    for _ in range(4 * PAGE):
        rig.step()
        held.append(9 - pool.available_size() - rig.tree.mamba_evictable_size())
    assert max(held) <= 3
    assert held.count(3) <= PAGE < held.count(2), "three while a step writes the next snapshot"
    rig.run()
    oracle.assert_words(tokens, rig.results["one"].output_ids, 60)


def test_snapshots_of_one_batch_make_room_for_the_next(oracle: GreedyOracle) -> None:
    """Nine slots and as many requests: the first of them leave snapshots of their prompts."""
    rig = rig_of(oracle, num_states=9, max_requests=9)
    prompts = [prompt(90 + i, 12) for i in range(9)]
    rig.step(*[rig.request(str(i), ids, greedy(40)) for i, ids in enumerate(prompts)])
    for _ in range(8):
        rig.step()
        rig.check()
    assert rig.scheduler.state.queues.num_holders == 9, "not at the sixteenth tick"
    rig.run()
    for i, ids in enumerate(prompts):
        oracle.assert_words(ids, rig.results[str(i)].output_ids, 40)


def test_a_snapshot_is_not_evicted_before_the_step_that_reads_it(oracle: GreedyOracle) -> None:
    """One of two slots runs a request. The other holds the snapshot from which the next request
    continues. The next request waits, because its own snapshot holds the only slot left for it."""
    rig = rig_of(oracle, num_states=2, max_requests=2, mamba_scheduler_strategy="no_buffer")
    tokens = prompt(43, 30)
    run(rig, oracle, "first", tokens, 2)
    runs, continues = prompt(45, 3), [*tokens, *prompt(44, 10)]
    rig.step(rig.request("runs", runs, greedy(12)))
    rig.step(rig.request("continues", continues, greedy(6)))
    queues = rig.scheduler.state.queues
    while queues.find("runs") is not None:
        assert [req.rid for req in queues.waiting] == ["continues"]
        rig.step()
    rig.run()
    oracle.assert_words(runs, rig.results["runs"].output_ids, 12)
    oracle.assert_words(continues, rig.results["continues"].output_ids, 6)
    last = rig.results["continues"].last
    assert last is not None
    assert last.cached_tokens_details.device == 28


def test_retraction_changes_no_word(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle, pool_tokens=120, schedule_conservativeness=0.1)
    prompts = [prompt(50 + i, 25) for i in range(4)]
    for tokens, got in zip(prompts, rig.generate(prompts, 30), strict=True):
        oracle.assert_words(tokens, got, 30)
    assert rig.scheduler.state.counters.retractions > 0
    rig.assert_clean()


def test_a_probe_leaves_nothing(oracle: GreedyOracle) -> None:
    rig = rig_of(oracle)
    tokens = prompt(60, 30)
    rig.run(rig.request(HEALTH_CHECK_RID_PREFIX, tokens, greedy(20)))
    oracle.assert_words(tokens, rig.results[HEALTH_CHECK_RID_PREFIX].output_ids, 20)
    match = rig.tree.match_prefix(MatchPrefixParams(RadixKey([*tokens, 1])))
    assert not len(match.device_indices)
    assert rig.tree.evict(EvictParams(mamba_num=1)).mamba_num_evicted == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_work_gives_the_words_of_transformers(oracle: GreedyOracle, seed: int) -> None:
    """Families of prompts over small pools: hits, retractions, aborts and evictions mixed."""
    random = Random(seed)
    page = random.choice([1, 4])
    rig = rig_of(
        oracle,
        page_size=page,
        mamba_track_interval=page * random.choice([4, 8]),
        num_states=random.choice([4, 6, 12]),
        pool_tokens=200,
        max_requests=4,
        chunked_prefill_size=random.choice([8, 12, 64]),
        schedule_conservativeness=0.1,
        radix_eviction_policy=random.choice(["lru", "lfu"]),
    )
    stems = [prompt(900 + i, 40) for i in range(3)]
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(24):
        stem = random.choice(stems)
        tail = prompt(1000 * seed + number, random.randint(1, 12))
        tokens = [*stem[: random.randint(0, len(stem))], *tail]
        rid, count = str(number), random.randint(1, 24)
        asked[rid] = tokens, count
        rig.step(rig.request(rid, tokens, greedy(count)))
        for _ in range(random.randint(0, 6)):
            rig.step()
            rig.check()
        if random.random() < 0.15:
            rig.step(rig.abort(rid))
    rig.run()
    for rid, (tokens, count) in asked.items():
        output = rig.results[rid].output_ids
        reason = rig.results[rid].finish_reason
        is_whole = reason is not None and reason.type != "abort"
        oracle.assert_words(tokens, output, count if is_whole else len(output))
    rig.assert_clean()
