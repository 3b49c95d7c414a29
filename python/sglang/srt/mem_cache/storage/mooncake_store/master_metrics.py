"""Usage of a Mooncake Store, from the HTTP metrics of its master."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from sglang.srt.mem_cache.storage.types import StorageUnavailable, StorageUsage

_TIMEOUT_S: Final = 1.5
_MAX_BYTES: Final = 1 << 20
_USED: Final = "master_allocated_bytes"
_TOTAL: Final = "master_total_capacity_bytes"
_OBJECTS: Final = "master_key_count"
_EVICTED: Final = "master_evicted_key_count"
_SEGMENT: Final = "segment_total_capacity_bytes"
_DETAIL: Final = "/get_segments_detail"


class _Segment(msgspec.Struct):
    """Memory that a node lends."""

    segment_name: str
    protocol: str = ""


class _Segments(msgspec.Struct):
    segments: list[_Segment]


_SEGMENTS_DECODER: Final = msgspec.json.Decoder(_Segments)


def read_usage(host: str, port: int, protocol: str | None = None) -> StorageUsage:
    """Ask the master at `host`, whose metrics are on `port`. Blocks for a few seconds at most.

    Args:
        protocol: Protocol of the client that asks, which `unlike_nodes` do not have; None: any.

    Raises:
        StorageUnavailable: It does not answer, or with something else.
    """
    bracketed = f"[{host}]" if ":" in host else host
    address = f"http://{bracketed}:{port}"
    url = f"{address}/metrics"
    try:
        families = list(text_string_to_metric_families(_read(url).decode()))
        samples = [sample for family in families for sample in family.samples]
        values = {sample.name: int(sample.value) for sample in samples if not sample.labels}
        nodes = {one.labels.get("segment", "") for one in samples if one.name == _SEGMENT}
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise StorageUnavailable(
            f"no metrics of mooncake_master at {url} ({error}): check --metrics_host and "
            "--metrics_port of mooncake_master, and MOONCAKE_MASTER_METRICS_PORT"
        ) from None
    if _USED not in values or _TOTAL not in values:
        raise StorageUnavailable(f"{url} has no metrics of mooncake_master")
    # A counter's name may get `_total` from the parser.
    evicted = values.get(_EVICTED, values.get(f"{_EVICTED}_total"))
    return StorageUsage(
        values[_USED],
        values[_TOTAL],
        values.get(_OBJECTS),
        evicted,
        nodes=tuple(sorted(nodes)),
        unlike_nodes=() if protocol is None else _unlike_nodes(f"{address}{_DETAIL}", protocol),
    )


def _unlike_nodes(url: str, protocol: str) -> tuple[str, ...]:
    """Nodes with another protocol; empty if the master does not tell."""
    try:
        found = _SEGMENTS_DECODER.decode(_read(url))
    except (OSError, msgspec.DecodeError):
        return ()
    unlike = {f"{one.segment_name} ({one.protocol})" for one in found.segments
              if one.protocol not in ("", protocol)}  # fmt: skip
    return tuple(sorted(unlike))


def _read(url: str) -> bytes:
    """The first MiB of an answer. Raises OSError."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
        text: bytes = answer.read(_MAX_BYTES)
    return text
