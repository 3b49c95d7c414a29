"""All mistakes of a server's arguments that can be known without the machine and the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.checks import (
    cache_and_page_size,
    check_device,
    check_not_empty,
    check_numbers,
    check_pages,
    check_parallelism,
    refuse_ignored,
)
from sglang.srt.arg_groups.cli import check_choices, flag_name, lines_of
from sglang.srt.arg_groups.disaggregation import check_disaggregation
from sglang.srt.arg_groups.extra_config import FLAG, check_extra_config_keys
from sglang.srt.arg_groups.remote_weights import check_remote_weights
from sglang.srt.hardware_backend.device_kinds import device_kind

if TYPE_CHECKING:
    from sglang.srt.arg_groups.server_args import ServerArgs


def mistakes_of(args: ServerArgs, malformed: Sequence[str] = ()) -> list[str]:
    """A line for each mistake, with the flag and the remedy.

    Args:
        malformed: Fields with their defaults because their flags are malformed.
    """
    wrong: dict[str, str] = {}
    for find in (check_choices, check_numbers, check_not_empty):
        for field, line in find(args):
            wrong.setdefault(field, line)
    # The other fields are checked against each other too, with stand-ins for the wrong ones.
    others = dataclasses.replace(args, **{name: _stand_in(args, name) for name in wrong})
    checks = (check_remote_weights, check_parallelism, check_disaggregation, _check_cache)
    lines = [line for check in checks for line in lines_of(check, others)]
    if others.device != "auto":
        lines += check_device(others, device_kind(others.device))
    flags = [flag_name(field) for field in (*wrong, *malformed)]
    return [*wrong.values(), *(line for line in lines if not any(f in line for f in flags))]


def _stand_in(args: ServerArgs, name: str) -> Any:
    """A value in place of a wrong one: the default, or a choice if the default is None."""
    field = next(one for one in dataclasses.fields(args) if one.name == name)
    choices = field.metadata["choices"]
    return choices[0] if field.default is None and choices else field.default


def _check_cache(args: ServerArgs) -> Iterator[str]:
    """Refuse settings of the cache that have no effect or contradict each other."""
    hierarchical, page_size = cache_and_page_size(args)
    if args.disable_radix_cache:
        if hierarchical:
            yield (
                "--disable-radix-cache contradicts the hierarchical cache, whose tiers are "
                "indexed by the radix tree; drop one of them"
            )
        for field in (
            "schedule_policy",
            "radix_eviction_policy",
            "radix_cache_backend",
            "mamba_scheduler_strategy",
            "mamba_track_interval",
        ):
            yield from refuse_ignored(args, field, "with --disable-radix-cache")
    if args.mamba_scheduler_strategy == "no_buffer":
        where = "with --mamba-scheduler-strategy no_buffer"
        yield from refuse_ignored(args, "mamba_track_interval", where)
    for field in (f.name for f in dataclasses.fields(args) if f.name.startswith("hicache_")):
        if not hierarchical:
            yield from refuse_ignored(args, field, "without --enable-hierarchical-cache")
        elif args.hicache_storage_backend is None and flag_name(field) == FLAG:
            yield from refuse_ignored(args, field, "without --hicache-storage-backend")
    if args.disable_cuda_graph:
        yield from refuse_ignored(args, "cuda_graph_max_bs", "with --disable-cuda-graph")
    yield from check_pages(args, page_size)
    if args.hicache_storage_backend is not None:
        check_extra_config_keys(args.hicache_storage_backend, args.extra_config())
