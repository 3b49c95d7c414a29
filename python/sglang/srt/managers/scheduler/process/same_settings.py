"""Checks that all ranks have the same settings: each machine of a server has a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import xxhash

from sglang.srt.arg_groups.cli import flag_name
from sglang.srt.distributed.rank_group import RankGroup, gather_texts
from sglang.srt.model_loader.weights_identity import config_digest

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_OF_A_MACHINE: Final = frozenset(
    {"model_path", "tokenizer_path", "chat_template", "host", "port", "api_key", "api_key_file",
     "admin_api_key", "admin_api_key_file", "log_level", "log_requests", "enable_metrics",
     "node_rank", "dist_init_addr", "base_gpu_id", "mem_fraction_static"}
)  # fmt: skip
"""Fields that may differ between machines: paths, addresses, keys, and the share of the device's
memory, of which the ranks take the least."""
_CONFIG: Final = "config.json of the model"
_DIGEST_BYTES: Final = 32
_MAX_BYTES: Final = 32768
_MAX_VALUE_CHARS: Final = 120


def check_same_settings(group: RankGroup, server_args: ServerArgs) -> None:
    """Refuse settings that differ between ranks. A collective.

    Args:
        group: The ranks; nothing is built on them yet.
        server_args: Resolved arguments of this rank.

    Raises:
        ValueError: Settings differ. The message is the same on all ranks; it names the first
            difference and both values.
    """
    mine = "\n".join(_lines(server_args))
    digests = gather_texts(group, xxhash.xxh3_128_hexdigest(mine.encode()), _DIGEST_BYTES)
    if len(set(digests)) == 1:
        return
    texts = gather_texts(group, mine, _MAX_BYTES)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    pairs = zip(texts[0].split("\n"), texts[other].split("\n"), strict=False)
    what, first, second = next(
        (
            (name, value, line.partition("\t")[2])
            for known, line in pairs
            if known != line
            for name, _, value in [known.partition("\t")]
        ),
        ("some setting", "one value", "another"),
    )
    raise ValueError(
        f"{what} is {first} on rank 0, {second} on rank {other}: give all machines the same"
    )


def _lines(server_args: ServerArgs) -> list[str]:
    """Name and value of each setting, in an order that is the same everywhere."""
    assert server_args.model_path is not None, "resolved"
    public = server_args.to_public_dict()
    return [
        f"{_CONFIG}\t{config_digest(server_args.model_path)}",
        *(
            f"{flag_name(name)}\t{str(value)[:_MAX_VALUE_CHARS]}"
            for name, value in sorted(public.items())
            if name not in _OF_A_MACHINE
        ),
    ]
