"""Several outputs of one prompt (`n`): one request each, the first ahead of the others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from sglang.srt.managers.messages.io_struct import MAX_ROOM, Bootstrap
from sglang.srt.managers.tokenizer.generate_request import GenerateRequest, InvalidRequest
from sglang.srt.sampling.sampling_params import MAX_SAMPLES, MAX_SEED

MAX_OUTPUTS: Final = 1024
"""Limit of the outputs of one body: prompts times samples."""

_SEED_STEP: Final = 0x9E3779B97F4A7C15
"""Distance between the seeds of two samples; odd, so that all seeds differ (modulo 2^63)."""


def expand_samples(
    requests: Sequence[GenerateRequest], rooms: Sequence[Bootstrap | None] = ()
) -> list[GenerateRequest]:
    """Replace each request by its `n` samples, in order.

    The first sample has the request's own id and seed, so it answers as the request alone would.
    The others wait for it, to find its prompt in the cache. If the client named a seed, each sample
    gets a seed of its own, derived from it. Rooms are derived in the same way: a prefill and a
    decode server get the same rooms for the same body.

    Args:
        requests: One request for each prompt.
        rooms: Rooms of all samples, if the client named more than one for each prompt.

    Raises:
        InvalidRequest: `n` is out of range, there are too many samples, or they do not match
            `rooms`.
    """
    counts = [request.sampling_params.n for request in requests]
    for n in counts:
        if not 1 <= n <= MAX_SAMPLES:
            raise InvalidRequest(f"n={n} must be from 1 to {MAX_SAMPLES}", field="n")
    if sum(counts) > MAX_OUTPUTS:
        raise InvalidRequest(
            f"n: {len(requests)} prompts ask for {sum(counts)} outputs, at most {MAX_OUTPUTS} are "
            "allowed in one body: split it",
            field="n",
        )
    has_all_rooms = len(rooms) > len(requests)
    if has_all_rooms and len(rooms) != sum(counts):
        raise InvalidRequest(
            f"bootstrap_room has {len(rooms)} values for {sum(counts)} outputs: give one value, "
            "or one for each",
            field="bootstrap_room",
        )
    if counts == [1]:
        return list(requests)
    samples = [
        _sample(request, index, sum(counts))
        for request, n in zip(requests, counts, strict=True)
        for index in range(n)
    ]
    if not has_all_rooms:
        return samples
    return [
        msgspec.structs.replace(sample, bootstrap=room)
        for sample, room in zip(samples, rooms, strict=True)
    ]


def _sample(request: GenerateRequest, index: int, num_outputs: int) -> GenerateRequest:
    if index == 0:
        return msgspec.structs.replace(request, num_outputs=num_outputs)
    params = copy.copy(request.sampling_params)
    if params.sampling_seed is not None:
        params.sampling_seed = (params.sampling_seed + index * _SEED_STEP) & MAX_SEED
    bootstrap = request.bootstrap
    if bootstrap is not None:
        key = bootstrap.room.to_bytes(8, "little") + index.to_bytes(8, "little")
        room = xxhash.xxh3_64_intdigest(key) & MAX_ROOM
        bootstrap = msgspec.structs.replace(bootstrap, room=room)
    return msgspec.structs.replace(
        request,
        rid=f"{request.rid}-{index}",
        sample_of=request.rid,
        sampling_params=params,
        bootstrap=bootstrap,
        num_outputs=num_outputs,
    )
