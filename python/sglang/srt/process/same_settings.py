"""Checks that all ranks have the same settings, because each machine of a server has its own
command line."""

from __future__ import annotations

import hashlib
import json
import pprint
from typing import TYPE_CHECKING, Final

from sglang.srt.arg_groups.cli import flag_name
from sglang.srt.arg_groups.extra_config import FLAG, MACHINE_KEYS, without_secrets
from sglang.srt.disaggregation.base.deployment_secret import SOURCES, DeploymentSecret
from sglang.srt.distributed.rank_group import RankGroup, gather_bytes, gather_texts
from sglang.srt.model_loader.weight_files import config_digest

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_MACHINE_FIELDS: Final = frozenset(
    {"model_path", "tokenizer_path", "download_dir", "chat_template", "host", "port", "api_key",
     "api_key_file", "admin_api_key", "admin_api_key_file", "log_level", "log_format",
     "log_requests", "record_trace", "enable_metrics", "node_rank", "dist_init_addr", "base_gpu_id",
     "mem_fraction_static", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password",
     "disaggregation_secret", "disaggregation_secret_file", "disaggregation_ib_device"}
)  # fmt: skip
"""Fields that may differ between machines: paths, addresses, keys, network devices, and the share
of the device's memory. All ranks use the smallest share."""
_SECRET: Final = f"the secret of {SOURCES}"
_SAME_SECRET: Final = "same settings"
_FIRST: Final = ("disaggregation_mode", "hicache_storage_backend", "enable_hierarchical_cache")
"""Fields that imply others or their defaults; they are compared before those."""
_CONFIG: Final = "config.json of the model"
_DIGEST_BYTES: Final = 64
_MAX_VALUE_CHARS: Final = 120
"""Characters of a value that an error shows."""
_ABSENT: Final = ("not set", "")


def check_same_settings(group: RankGroup, server_args: ServerArgs) -> None:
    """Refuse settings that differ between ranks, on which nothing is built yet. A collective.

    Raises:
        ValueError: Settings differ, or a file of settings cannot be read. The message names the
            first difference and both values, and is the same on all ranks.
    """
    mine = json.dumps(_settings(server_args)).encode()
    digests = gather_texts(group, _digest(mine), _DIGEST_BYTES)
    if len(set(digests)) == 1:
        return
    texts = gather_bytes(group, mine)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    known, others = json.loads(texts[0]), json.loads(texts[other])
    name = next(one for one in known | others if known.get(one) != others.get(one))
    first, second = (settings.get(name, _ABSENT)[0] for settings in (known, others))
    how = f"is {first} on rank 0, {second} on rank {other}"
    if first == second:
        how = f"differs between rank 0 and rank {other}"
    raise ValueError(f"{name} {how}: give all machines the same")


def _settings(server_args: ServerArgs) -> dict[str, tuple[str, str]]:
    """For each setting by name: the text that errors show, and a digest of its whole value. The
    order is the same on all ranks. Secrets are only in digests."""
    assert server_args.model_path is not None, "resolved"
    settings = {_CONFIG: _entry(config_digest(server_args.model_path)), _SECRET: _ABSENT}
    if (secret := DeploymentSecret.of(server_args.disaggregation_secret)) is not None:
        # A plain digest would let a listener try many guesses.
        settings[_SECRET] = "set", secret.proof(_SAME_SECRET).hex()
    values = server_args.to_public_dict()
    for field in dict.fromkeys((*_FIRST, *sorted(values))):
        if field in _MACHINE_FIELDS:
            continue
        if flag_name(field) == FLAG:
            settings |= _of_extra_config(server_args)
        else:
            settings[flag_name(field)] = _entry(str(values[field]))
    return settings


def _of_extra_config(server_args: ServerArgs) -> dict[str, tuple[str, str]]:
    """The same for the settings inside the extra config. If it is a file, its content is compared,
    not its path."""
    config = server_args.extra_config()
    shown = without_secrets(config)
    return {
        f"{FLAG} {key}": _entry(json.dumps(shown[key]), pprint.saferepr(value))
        for key, value in sorted(config.items())
        if key not in MACHINE_KEYS
    }


def _entry(shown: str, whole: str | None = None) -> tuple[str, str]:
    """The beginning of `shown`, and the digest of `whole`; None: of `shown`."""
    return shown[:_MAX_VALUE_CHARS], _digest((shown if whole is None else whole).encode())


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
