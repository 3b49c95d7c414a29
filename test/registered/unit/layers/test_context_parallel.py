"""The runs that a prefill is cut into, and what ranks give each other of a layer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rigs.caches.memory_ranks import MemoryExchange, MemoryTensorGroup, PlaceInGroup
from sglang.srt.layers.context_parallel import Run, SplitHidden, plan_runs, split_context
from sglang.srt.layers.forward_batch_info import (
    ContextShare,
    ForwardBatch,
    ForwardMode,
    compute_extend_positions,
)
from sglang.srt.mem_cache.device.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.device.state_spec import PoolName
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")

PAGE = 4
SLOTS = 256
HEADS = 2
HEAD_DIM = 3


def work_of(run: Run) -> int:
    """Pairs of a query and a key."""
    return sum(range(run.begin + 1, run.end + 1))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_runs_cover_each_prompt_once_and_share_its_work(size: int) -> None:
    lens = [4000, 2 * size * 16, 2 * size * 16 - 1, 1, 1237]
    plan = plan_runs(lens, size)
    assert plan is not None
    for request, length in enumerate(lens):
        runs = sorted(
            (run for own in plan for run in own if run.request == request),
            key=lambda run: run.begin,
        )
        assert [run.begin for run in runs] == [0, *(run.end for run in runs[:-1])]
        assert runs[-1].end == length and all(run.length > 0 for run in runs)
    assert [len([run for own in plan for run in own if run.request == one]) for one in (2, 3)] == [
        1,
        1,
    ]
    loads = [sum(work_of(run) for run in own if run.request == 0) for own in plan]
    assert max(loads) <= 1.01 * min(loads)
    assert all(own == sorted(own, key=lambda run: (run.request, run.begin)) for own in plan)


def test_short_prompts_alone_are_not_split() -> None:
    assert plan_runs([63, 1], 2) is None
    assert plan_runs([64], 2) == [[Run(0, 0, 16), Run(0, 48, 64)], [Run(0, 16, 48)]]


def test_short_prompts_go_where_the_fewest_tokens_are() -> None:
    plan = plan_runs([64, 40, 30, 5, 63], 2)
    assert plan is not None
    whole = [[(run.request, run.length) for run in own if run.request] for own in plan]
    assert whole == [[(1, 40)], [(2, 30), (3, 5), (4, 63)]]


def make_pool(dtype: torch.dtype) -> MHATokenToKVPool:
    return MHATokenToKVPool(SLOTS, PAGE, dtype, HEADS, HEAD_DIM, 2, "cpu")


def make_batch(
    pool: MHATokenToKVPool, prefix_lens: list[int], new_lens: list[int], slots: list[int]
) -> ForwardBatch:
    total = [prefix + new for prefix, new in zip(prefix_lens, new_lens, strict=True)]
    rows = list(range(3, 3 + len(new_lens)))
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.arange(sum(new_lens)) + 1000,
        positions=compute_extend_positions(prefix_lens, new_lens, "cpu"),
        req_pool_indices=torch.tensor(rows),
        req_pool_indices_cpu=rows,
        seq_lens=torch.tensor(total),
        seq_lens_cpu=total,
        out_cache_loc=torch.tensor(slots),
        req_to_token_pool=ReqToTokenPool(8, SLOTS, "cpu"),
        token_to_kv_pool=pool,
        pools={PoolName.KV: pool},
        extend_prefix_lens_cpu=prefix_lens,
        extend_seq_lens_cpu=new_lens,
    )


def test_a_run_is_a_request_that_reaches_to_its_end() -> None:
    """Two ranks, a prompt of 67 new tokens after 10, and a short one after 3."""
    pool = make_pool(torch.float32)
    parts = []
    for rank in range(2):
        batch = make_batch(pool, [10, 3], [67, 2], list(range(8, 77)))
        part = split_context(batch, PlaceInGroup(rank, 2))
        assert part is not None
        parts.append(part)
    first, second = parts
    # The short prompt is with the rank that has fewer tokens.
    assert (first.extend_prefix_lens_cpu, first.extend_seq_lens_cpu) == ([10, 60, 3], [16, 17, 2])
    assert (first.seq_lens_cpu, first.seq_lens.tolist()) == ([26, 77, 5], [26, 77, 5])
    assert (first.req_pool_indices_cpu, first.req_pool_indices.tolist()) == ([3, 3, 4], [3, 3, 4])
    assert first.positions.tolist() == [*range(10, 26), *range(60, 77), 3, 4]
    assert first.input_ids.tolist() == [*range(1000, 1016), *range(1050, 1069)]
    assert first.out_cache_loc.tolist() == [*range(8, 24), *range(58, 77)]
    # The runs in the middle follow one another: they are one.
    assert (second.extend_prefix_lens_cpu, second.extend_seq_lens_cpu) == ([26], [34])
    assert (second.seq_lens_cpu, second.req_pool_indices_cpu) == ([60], [3])
    assert second.positions.tolist() == [*range(26, 60)]
    shares = [part.context_share for part in parts]
    assert shares[0] is not None and shares[1] is not None
    # 35 tokens and 34: one of padding.
    assert shares[0].here.tolist() == first.out_cache_loc.tolist()
    assert shares[1].here.tolist() == [*second.out_cache_loc.tolist(), 0]
    for share in (shares[0], shares[1]):
        assert share.everywhere.tolist() == [*shares[0].here.tolist(), *shares[1].here.tolist()]
        assert share.num_places == 2
    assert (shares[0].rows.tolist(), shares[0].places.tolist()) == ([1, 2], [0, 1])
    assert (shares[1].rows.tolist(), shares[1].places.tolist()) == ([], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_ranks_store_each_others_tokens_byte_for_byte(dtype: torch.dtype) -> None:
    """Tokens of pages that begin before them, and some whose keys and values are stored already."""
    size, new_lens = 2, [67, 2]
    slots = [0] * 5 + list(range(PAGE + 3, PAGE + 67))
    assert len(slots) == sum(new_lens)
    exchange = MemoryExchange(size)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn((2, len(slots), HEADS, HEAD_DIM), generator=generator).to(dtype)

    def work(rank: int) -> tuple[MHATokenToKVPool, ContextShare]:
        pool = make_pool(dtype)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.view(torch.uint8).fill_(7)
        part = split_context(
            make_batch(pool, [10, 3], new_lens, slots), MemoryTensorGroup(exchange, rank)
        )
        assert part is not None and part.context_share is not None and part.pools is not None
        own = part.input_ids - 1000
        pool.set_kv_buffer(1, part.out_cache_loc, values[0][own], values[1][own])
        part.context_share.share_stored(1, part.pools)
        return pool, part.context_share

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(work, range(size)))
    whole = make_pool(dtype)
    for buffer in (*whole.k_buffer, *whole.v_buffer):
        buffer.view(torch.uint8).fill_(7)
    whole.set_kv_buffer(1, torch.tensor(slots), values[0], values[1])
    for pool, _ in found:
        for buffers, wanted in ((pool.k_buffer, whole.k_buffer), (pool.v_buffer, whole.v_buffer)):
            for buffer, want in zip(buffers, wanted, strict=True):
                # The first page is padding.
                got = buffer[PAGE:].view(torch.uint8)
                assert torch.equal(got, want[PAGE:].view(torch.uint8))


def test_rows_that_the_step_wants_are_on_every_rank_where_the_step_has_them() -> None:
    size = 2
    exchange = MemoryExchange(size)
    hidden = torch.randn((69, 5), generator=torch.Generator().manual_seed(2))

    def work(rank: int) -> list[torch.Tensor]:
        pool, group = make_pool(torch.float32), MemoryTensorGroup(exchange, rank)
        gathered = []
        for wants_logprobs in (False, True):
            batch = make_batch(pool, [10, 3], [67, 2], list(range(8, 77)))
            if wants_logprobs:
                batch.extend_logprob_start_lens_cpu = [3, 2]
            part = split_context(batch, group)
            assert part is not None and part.context_share is not None
            own = hidden[part.input_ids - 1000]
            rows = part.rows_for_logits()
            left = own if rows is None else own[rows]
            gathered.append(part.context_share.gather_hidden(left))
        return gathered

    with ThreadPoolExecutor(size) as threads:
        for last, every in threads.map(work, range(size)):
            assert torch.equal(last, hidden[[66, 68]])
            assert torch.equal(every, hidden)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("wants_logprobs", [False, True])
def test_each_token_has_the_hidden_state_before_it(size: int, wants_logprobs: bool) -> None:
    """Long prompts, some too short to split, and of one token; some after others in the cache."""
    prefix_lens, new_lens = [10, 0, 0, 3, 16, 0], [300, 1, 777, 2, 1, 256]
    count = sum(new_lens)
    generator = torch.Generator().manual_seed(size)
    hidden = torch.randn((count, 5), generator=generator)
    before_step = torch.randn((len(new_lens), 5), generator=generator)
    ends = torch.tensor(new_lens).cumsum(0)
    want = hidden.roll(1, dims=0)
    want[ends - torch.tensor(new_lens)] = before_step
    exchange = MemoryExchange(size)

    def work(rank: int) -> tuple[torch.Tensor, SplitHidden]:
        group = MemoryTensorGroup(exchange, rank)
        pool = MHATokenToKVPool(2048, PAGE, torch.float32, HEADS, HEAD_DIM, 1, "cpu")
        batch = make_batch(pool, prefix_lens, new_lens, list(range(8, 8 + count)))
        batch.capture_hidden = True
        if wants_logprobs:
            batch.extend_logprob_start_lens_cpu = [0] * len(new_lens)
        part = split_context(batch, group)
        assert part is not None and part.context_share is not None
        share, tokens = part.context_share, part.input_ids - 1000
        gathered = share.gather_hidden(hidden[tokens])
        for_logits = hidden if wants_logprobs else hidden[ends - 1]
        assert torch.equal(gathered[: share.num_wanted], for_logits)
        assert share.edges is not None and not share.whole.capture_hidden
        return tokens, SplitHidden(part, hidden[tokens], gathered, share.edges)

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(work, range(size)))
    assert torch.equal(torch.cat([tokens for tokens, _ in found]).sort()[0], torch.arange(count))
    for tokens, split in found:
        assert torch.equal(split.before_tokens(before_step), want[tokens])
        assert torch.equal(split.at_last_tokens(), hidden[ends - 1])
