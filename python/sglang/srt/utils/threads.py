"""Threads that work beside the one that runs the model."""

from __future__ import annotations

import torch
from threadpoolctl import threadpool_limits


def leave_cores_to_model() -> None:
    """Let torch's operations in the calling thread use that thread alone; call it first there.

    On a CPU every thread that copies would otherwise get an OpenMP team as large as the
    forward's, and each of the forward's parallel regions would wait for a core behind it. The
    forward's own team stays as it is: OpenMP keeps the size of a team for each thread.
    """
    torch.get_num_threads()  # gives the thread its default, which must not come later
    threadpool_limits(1, user_api="openmp")
