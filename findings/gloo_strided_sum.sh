#!/usr/bin/env bash
# torch 2.13.0, gloo: all_reduce of some columns of a matrix sums other elements than these.
#
# Expected: the columns' sum, or an error. NCCL refuses such a tensor ("Tensors must be contiguous"),
# and so do gloo's send and all_to_all_single. gloo's all_gather takes it and is right.
# Seen: gloo takes as many numbers as the view has from the place where the view begins, as if they
# lay side by side. The first two columns of a 3 x 4 matrix are six numbers, so row 0 is summed and
# half of row 1: two numbers that are not in the view are changed, and three of the view are not
# summed. broadcast does the same. Nothing is raised. torch's functional all_reduce copies the view
# first and is right. A CPU test of code that sums part of a tensor over the ranks gets other numbers
# without an error, where the GPU gets the error.
#
# pytorch issue 192920 reports broadcast, reduce and scatter.
# Exit status 0: as described. 1: this version behaves otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
cat > "$folder/columns.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as multiprocessing

RANKS = 2


def matrix(rank):
    return torch.arange(12.0).reshape(3, 4) + 100 * rank


def gather(view):
    rows = [torch.empty(3, 2) for _ in range(RANKS)]
    dist.all_gather(rows, view)
    return torch.stack(rows).sum(0)


def work(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    whole = sum(matrix(one) for one in range(RANKS))
    columns = whole[:, :2]

    summed = matrix(rank)
    dist.all_reduce(summed[:, :2])
    expected = matrix(rank)
    expected.view(-1)[:6] = whole.view(-1)[:6]
    same = matrix(1)
    dist.broadcast(same[:, :2] if rank else matrix(0)[:, :2], 0)
    copied = matrix(1)
    copied.view(-1)[:6] = matrix(0).view(-1)[:6]
    seen = [
        torch.equal(summed, expected),
        not torch.equal(summed[:, :2], columns),
        torch.equal(gather(matrix(rank)[:, :2]), columns),
        torch.equal(functional.all_reduce(matrix(rank)[:, :2], "sum", dist.group.WORLD), columns),
        rank == 0 or torch.equal(same, copied),
    ]
    dist.barrier()
    if rank == 1:
        print("torch", torch.__version__)
        print("sum of columns 0 and 1:", columns.tolist())
        print("rank 1 before all_reduce:", matrix(1).tolist())
        print("rank 1 after all_reduce of columns 0 and 1:", summed.tolist())
        print("rank 1 after broadcast of columns 0 and 1:", same.tolist())
    assert all(seen), f"otherwise now: {seen}"
    dist.destroy_process_group()


multiprocessing.start_processes(work, args=(sys.argv[1],), nprocs=RANKS, start_method="fork")
PYTHON
"$folder/venv/bin/python" "$folder/columns.py" "$folder/rendezvous"
