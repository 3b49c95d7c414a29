#!/usr/bin/env bash
# torch 2.13.0, gloo: beside one NaN, MIN of an all_reduce is a NaN in some places of the tensor, and
# a number that is not the least in others.
#
# Expected: one rule for all elements that hold the same values, as torch.minimum has: a NaN of any
# rank gives NaN. At least: the least of the numbers. A check that reduces a flag or a loss over the
# ranks relies on it.
# Seen: four ranks fill a tensor with NaN, 2, 3 and 4, and all get the same result: a quarter of NaN,
# a quarter of 2, a quarter of 3, a quarter of 4. The NaN does not only vanish, it hides the 2 that is
# less. A tensor of one element is NaN if the first rank has the NaN, and a number if another has it.
# MAX does the same. SUM is NaN everywhere. Nothing is raised.
#
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/reduce.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

RANKS = 4


def reduced(rank, holder, elements, operation):
    """How often each value is in the result; `holder` is the rank with the NaN."""
    mine = float("nan") if rank == holder else rank + 1.0
    values = torch.full((elements,), mine)
    dist.all_reduce(values, operation)
    texts = [str(value) for value in values.tolist()]
    of_ranks = [None] * RANKS
    dist.all_gather_object(of_ranks, texts)
    assert all(one == texts for one in of_ranks), "otherwise now: ranks differ"
    return {text: texts.count(text) for text in dict.fromkeys(texts)}


def work(rank, file):
    assert torch.minimum(torch.tensor(1.0), torch.tensor(float("nan"))).isnan()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    least, most, total = dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM
    seen = {
        "MIN, 1000 elements, NaN of rank 0": reduced(rank, 0, 1000, least),
        "MIN, 1 element, NaN of rank 0": reduced(rank, 0, 1, least),
        "MIN, 1 element, NaN of rank 1": reduced(rank, 1, 1, least),
        "MAX, 1000 elements, NaN of rank 3": reduced(rank, 3, 1000, most),
        "SUM, 1000 elements, NaN of rank 3": reduced(rank, 3, 1000, total),
    }
    if rank == 0:
        print("torch", torch.__version__)
        for name, counts in seen.items():
            print(f"{name}: {counts}")
        assert list(seen.values()) == [
            {"nan": 250, "2.0": 250, "3.0": 250, "4.0": 250},
            {"nan": 1},
            {"1.0": 1},
            {"3.0": 750, "nan": 250},
            {"nan": 1000},
        ], "otherwise now"
    dist.destroy_process_group()


multiprocessing.start_processes(work, args=(sys.argv[1],), nprocs=RANKS, start_method="fork")
PYTHON
"$folder/venv/bin/python" "$folder/reduce.py" "$folder/rendezvous"
