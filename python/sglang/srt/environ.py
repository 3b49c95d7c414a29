"""Environment variables: the one place that reads, writes and documents them.

    envs.MOONCAKE_PROTOCOL.get()             the parsed value, or the one default
    envs.MOONCAKE_PROTOCOL.is_set()          whether the environment has it
    envs.MOONCAKE_PROTOCOL.set("tcp")        for this process and its children
    with envs.MOONCAKE_PROTOCOL.override("tcp"): ...

Every `get()` parses the value again, so that a test or an entry point may change it. For a value
that does not parse, it raises a `ValueError` that names the variable and the valid values.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_SIZE_SHIFT = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})
_OWN_PREFIXES = ("SGLANG_", "HICACHE_")


def parse_size(text: str) -> int:
    """Bytes in `text`: a number with an optional unit (`512mb`, `4gb`, `1.5GiB`, `1048576`).

    Units are powers of 1024, as Mooncake counts them.

    Raises:
        ValueError: `text` is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes or a unit, e.g. 512mb or 4gb")
    return int(float(match[1]) * (1 << _SIZE_SHIFT[match[2].lower()]))


def parse_gigabytes(text: str) -> float:
    """GB (10^9 bytes) in `text`: a number, or one with a unit (`64`, `64G`, `64GB`, `512mb`). Units
    are powers of 1000, those with an i (`64GiB`) powers of 1024.

    Raises:
        ValueError: `text` is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write GB or a unit, e.g. 64, 64GB or 64GiB")
    number, unit = float(match[1]), match[2].lower()
    if not unit:
        return number if text.strip() == match[1] else number / 1e9
    base = 1024 if "i" in text.lower() else 1000
    return number * float(base ** (_SIZE_SHIFT[unit] // 10)) / 1e9


class EnvField(Generic[T]):
    """One environment variable, named like its attribute.

    Args:
        parse: The value that a text means. Raises ValueError for an invalid text.
        expects: The valid texts, for errors.
        render: The inverse of `parse`.
    """

    def __init__(
        self,
        default: T,
        doc: str,
        parse: Callable[[str], T],
        expects: str,
        render: Callable[[T], str] = str,
    ) -> None:
        self.name = ""
        self.default = default
        self.doc = doc
        self.parse = parse
        self.expects = expects
        self.render = render

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def is_set(self) -> bool:
        """True if the process environment has the variable."""
        return self.name in os.environ

    def get(self) -> T:
        """The value, or the default if the variable is not set.

        Raises:
            ValueError: The variable has a value that does not parse.
        """
        text = os.environ.get(self.name)
        if text is None:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise ValueError(
                f"environment variable {self.name}={text!r}: expected {self.expects}; "
                f"unset it for the default ({self.default!r})"
            ) from None

    def set(self, value: T) -> None:
        """Set the variable for this process and for children that it starts later."""
        os.environ[self.name] = self.render(value)

    def clear(self) -> None:
        """Unset the variable."""
        os.environ.pop(self.name, None)

    def export_default(self) -> None:
        """Set the variable to the default unless the environment has it.

        For variables that a C++ library reads and whose default here differs from the library's.
        """
        os.environ.setdefault(self.name, self.render(self.default))

    @contextmanager
    def override(self, value: T) -> Iterator[None]:
        """Set the variable to `value` inside the block; restore or unset it after the block."""
        before = os.environ.get(self.name)
        self.set(value)
        try:
            yield
        finally:
            if before is None:
                self.clear()
            else:
                os.environ[self.name] = before


def _env_str(default: str, doc: str, choices: tuple[str, ...] = ()) -> EnvField[str]:
    """Any text, or one of `choices`."""

    def parse(text: str) -> str:
        if choices and text not in choices:
            raise ValueError(text)
        return text

    expects = f"one of {', '.join(choices)}" if choices else "text"
    return EnvField(default, doc, parse, expects)


def _env_optional_str(doc: str) -> EnvField[str | None]:
    """Text, or `None` if the variable is not set or empty."""
    return EnvField(None, doc, lambda text: text or None, "text", lambda value: value or "")


def _parse_whole(text: str) -> int:
    """A whole number, also in SGLang's spelling of seconds (`5.0`)."""
    return int(text.strip().removesuffix(".0"))


def _env_int(default: int, doc: str) -> EnvField[int]:
    return EnvField(default, doc, _parse_whole, "a whole number")


def _env_size(default: str, doc: str) -> EnvField[int]:
    """A size in bytes; see `parse_size`. The default is text, as a user would write it."""
    expects = "a size in bytes or with a unit, e.g. 512mb or 4gb"
    return EnvField(parse_size(default), doc, parse_size, expects)


def _env_limit(doc: str) -> EnvField[int]:
    """`_env_size`; 0: there is no limit. Less than a megabyte is a number without its unit."""

    def parse(text: str) -> int:
        size = parse_size(text)
        if 0 < size < 1 << 20:
            raise ValueError(text)
        return size

    return EnvField(0, doc, parse, "0, or a size of 1mb at least, e.g. 200gb")


def _parse_share(text: str) -> float:
    share = float(text)
    if not 0.0 <= share <= 1.0:
        raise ValueError(text)
    return share


def _parse_length(text: str) -> float:
    length = float(text)
    if not (length == 0.0 or 1.0 <= length < math.inf):
        raise ValueError(text)
    return length


_SWITCH = "1/true/yes/on or 0/false/no/off"


def _parse_switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _env_bool(default: bool, doc: str) -> EnvField[bool]:
    return EnvField(default, doc, _parse_switch, _SWITCH, lambda value: str(int(value)))


def _env_optional_bool(doc: str) -> EnvField[bool | None]:
    """`None` if the variable is not set or empty."""
    return EnvField(
        None,
        doc,
        lambda text: _parse_switch(text) if text.strip() else None,
        _SWITCH,
        lambda value: "" if value is None else str(int(value)),
    )


class Envs:
    """All variables that the engine reads, with default and meaning."""

    MOONCAKE_MASTER = _env_optional_str("host:port of mooncake_master.")
    MOONCAKE_CLIENT = _env_optional_str("host:port of a stand-alone Mooncake client to attach to.")
    MOONCAKE_STANDALONE_STORAGE = _env_optional_bool(
        "1: attach to that client; 0: do not; unset: attach if its address is set."
    )
    MOONCAKE_LOCAL_HOSTNAME = _env_str(
        "localhost", "Name or address under which other Mooncake clients reach this host."
    )
    MOONCAKE_TE_META_DATA_SERVER = _env_str(
        "P2PHANDSHAKE", "Mooncake metadata server; P2PHANDSHAKE needs none."
    )
    MOONCAKE_GLOBAL_SEGMENT_SIZE = _env_size(
        "4gb", "Memory that each engine lends to the store; 0 if store nodes hold the objects."
    )
    MOONCAKE_LOCAL_BUFFER_SIZE = _env_size(
        "16mb", "Scratch memory of a Mooncake client; page transfers do not go through it."
    )
    MOONCAKE_PROTOCOL = _env_str(
        "rdma", "Mooncake transport: rdma, efa (EFA devices), tcp (no such device), ascend, ..."
    )
    MOONCAKE_DEVICE = _env_str("", "RDMA devices, comma separated; empty lets Mooncake choose.")
    MOONCAKE_ENABLE_SSD_OFFLOAD = _env_bool(
        False, "Write the objects in the memory that a Mooncake store node lends to a disk too."
    )
    MOONCAKE_OFFLOAD_FILE_STORAGE_PATH = _env_optional_str(
        "Folder for that; each node makes one of its own in it."
    )
    MOONCAKE_TENANT_ID = _env_str("default", "Tenant of mooncake_master that owns the objects.")
    MOONCAKE_MASTER_METRICS_PORT = _env_int(9003, "HTTP port of mooncake_master's metrics.")
    MOONCAKE_CHECK_SERVER = _env_bool(
        False, "Ask the master's metrics port for its health before connecting."
    )
    SGLANG_HICACHE_MOONCAKE_CONFIG_PATH = _env_optional_str(
        "JSON file with Mooncake's settings. Precedence: extra config, this file, these variables."
    )
    SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR = _env_str(
        "/tmp/hicache", "Directory of the `file` storage backend."
    )
    SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE = _env_limit(
        "Most bytes of all objects in that directory; 0: any. Those unused for longest go."
    )
    SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE = _env_limit(
        "Bytes of its file system that objects leave free; 0: none."
    )
    SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO = EnvField(
        0.9,
        "Share of the most bytes that stays when objects are removed.",
        _parse_share,
        "a number from 0 to 1",
    )
    SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK = _env_bool(
        False, "Use `tcp` in place of `rdma`, with a warning, if there is no RDMA device."
    )
    SGLANG_MOONCAKE_CUSTOM_MEM_POOL = _env_optional_str(
        "Memory of KV that is transferred: NVLINK, BAREX (Mooncake's allocators) or "
        "INTRA_NODE_NVLINK (plain memory; metadata moves as the pages do)."
    )
    SGLANG_MOONCAKE_SEND_AUX_TCP = _env_optional_bool(
        "1: metadata of prompts comes over the control connection; 0: Mooncake moves it; unset: as "
        "the pool of the last setting says."
    )
    ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE = _env_bool(
        False, "Transfer over Ascend's links, whatever MOONCAKE_PROTOCOL says."
    )
    ASCEND_NPU_PHY_ID = _env_int(-1, "Physical id of this process's NPU; -1: the rank's device.")
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL = _env_optional_str(
        "Protocol of --otlp-traces-endpoint: grpc or http/protobuf; unset: the endpoint says."
    )
    SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS = _env_int(
        500, "Milliseconds between two exports of spans."
    )
    SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE = _env_int(512, "Most spans of one export.")
    HICACHE_HOST_MEMORY_RESERVE_BYTES = _env_size(
        "1gb", "Host memory that the L2 pools leave to everything else."
    )
    SGLANG_TENANT_LABEL_KEY = _env_optional_str(
        "Secret of the labels of tenants in metrics and at /hicache. Servers with the same one "
        "have the same labels; unset, each server draws its own at its start."
    )
    SGLANG_HICACHE_CHECKED_SHARE = EnvField(
        0.0625,
        "Share of the loads from L2, and of the pages between servers, that are compared with "
        "their checksums.",
        _parse_share,
        "a number from 0 to 1",
    )

    SGLANG_SIMULATE_ACC_LEN = EnvField(
        0.0,
        "For benchmarks of speculation on random weights: tokens that a verification gives on "
        "average, whatever was drafted; 0: those that it accepts.",
        _parse_length,
        "0, or a number from 1 on",
    )
    SGLANG_SPECULATE_ALWAYS = _env_bool(
        False,
        "Verify drafts even where plain steps have been measured to be faster.",
    )

    SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT = _env_int(
        300, "Seconds for which a server waits to hear from the other server of a request."
    )
    SGLANG_DISAGGREGATION_UNKNOWN_ROOM_TIMEOUT = _env_int(
        10, "Seconds for which one of the two servers of a request may not know of it yet."
    )
    SGLANG_DISAGGREGATION_WAITING_TIMEOUT = _env_int(
        300, "Seconds for which a decode server waits for the next pages of a prompt."
    )
    SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL = _env_int(
        5, "Seconds that the other server may be silent, times the next setting."
    )
    SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE = _env_int(
        2, "Silent intervals after which the other server counts as gone."
    )
    SGLANG_DISAGGREGATION_SECRET = _env_optional_str(
        "The secret in the file of --disaggregation-secret-file. A server hides it from its "
        "children."
    )
    SGLANG_TEST_DISAGG_FAILURE_PROB = EnvField(
        0.0,
        "For tests: the share of requests that fail on a decode server before they decode.",
        _parse_share,
        "a number from 0 to 1",
    )
    SGLANG_TEST_RAISE_METRIC_ERRORS = _env_bool(
        False, "For tests: a metric that cannot count a value raises instead of logging an error."
    )
    SGLANG_TEST_ROUTER = _env_str(
        "sglang_router",
        "For tests: the package of the router in front of servers.",
        ("sglang_router", "smg"),
    )
    SGLANG_API_KEY = _env_optional_str("The key of --api-key, hidden from other users.")
    SGLANG_ADMIN_API_KEY = _env_optional_str("The key of --admin-api-key, hidden from other users.")
    SGLANG_KERNELS_START_EARLY = _env_bool(
        True,
        "Let kernels of few tokens start before the kernel before them has ended, on Hopper and "
        "later.",
    )
    SGLANG_ENABLE_JIT_DEEPGEMM = _env_bool(
        True, "Let DeepGEMM multiply fp8 weights, where its package is installed."
    )
    SGLANG_TORCH_PROFILER_DIR = _env_str("/tmp", "Folder of the traces of /start_profile.")
    SGLANG_FORWARD_UNKNOWN_TOOLS = _env_bool(
        False, "Return calls of tools that the request did not name; otherwise they stay text."
    )

    ONCE = _env_bool(False, "`make serve` ends after its first answer.")
    MODEL = _env_str(
        "builtin",
        "The model of `make serve` without --model-path: the built-in one, the built-in hybrid, "
        "which has recurrent states, or SmolLM2-135M-Instruct, a real model from PyPI.",
        choices=("builtin", "hybrid", "smollm2"),
    )

    # Torch's OpenMP library reads these.
    GOMP_SPINCOUNT = _env_int(
        1000,
        "Spins of an idle OpenMP thread of a CPU forward before it sleeps. The library's default "
        "(some ms) makes a forward ten times slower if another process needs one of the cores.",
    )
    OMP_NUM_THREADS = _env_optional_str(
        "Threads of a CPU forward; unset: the ranks of a machine share its cores."
    )
    OMP_WAIT_POLICY = _env_optional_str(
        "OpenMP's wait policy; if set, it overrides GOMP_SPINCOUNT."
    )

    # oneDNN and torch's layer above it read these. Each caches 1,024 shapes of matrix products
    # unless told otherwise. A new number of tokens adds five shapes of 0.5 MB each.
    ONEDNN_PRIMITIVE_CACHE_CAPACITY = _env_int(
        96, "Matrix products of a CPU whose compiled code is cached; compiling takes 0.3 ms."
    )
    LRU_CACHE_CAPACITY = _env_int(16, "Descriptions of matrix products that torch caches.")

    GLOO_SOCKET_IFNAME = _env_optional_str(
        "Network interface on which gloo listens; unset: loopback on one machine, else the "
        "one on the way to --dist-init-addr."
    )
    NCCL_SOCKET_IFNAME = _env_optional_str(
        "Network interfaces of NCCL's sockets, in NCCL's notation (`=eth0` is that one alone); "
        "unset: like gloo's."
    )

    # NIXL and UCX read these; `export_default` sets the defaults of this engine.
    NIXL_LOG_LEVEL = _env_str("WARN", "Least severity that NIXL logs: DEBUG, INFO, WARN, ERROR.")
    UCX_NET_DEVICES = _env_str(
        "",
        "Network devices of UCX; unset: the interface of --host, and port 1 of each RDMA device.",
    )
    UCX_TLS = _env_str("", "Transports of UCX; unset: all that this host has.")
    UCX_MODULES = _env_str(
        "", "Modules that UCX loads; unset, on hosts without RDMA devices: all but those for RDMA."
    )
    UCX_PROTO_EMULATION_ENABLE = _env_str(
        "n",
        "`y`: NIXL reads over TCP too. A decode server that dies can then end a prefill server.",
    )
    UCX_LOG_LEVEL = _env_str("error", "Least severity that UCX logs: warn, error, fatal.")

    # Mooncake's C++ code reads these; `export_default` sets the defaults of this engine.
    MC_STORE_CLIENT_SETUP_RETRIES = _env_int(
        1, "Mooncake's attempts to reach the master in `setup`; its own default takes 90 s."
    )
    MC_LOG_LEVEL = _env_str(
        "ERROR",
        "Least severity that Mooncake logs: INFO, WARNING, ERROR. A full store logs a warning for "
        "each call.",
    )
    GLOG_minloglevel = _env_int(
        2, "The severity until Mooncake's engine has started: 0 info, 1 warning, 2 error."
    )
    MC_TCP_PROGRESS_TIMEOUT_SEC = _env_int(
        10, "Seconds without a byte after which Mooncake ends a TCP transfer (its own default: 30)."
    )
    MC_TCP_STATUS_TIMEOUT_SEC = _env_int(
        10, "The same while a peer's answer to a request is awaited."
    )
    MC_TRANSFER_TIMEOUT = _env_int(
        120, "Seconds after which a call of Mooncake's engine gives up (its own default: 30)."
    )
    MC_FORCE_TCP = _env_optional_str("Set: Mooncake's engine uses TCP beside RDMA devices too.")
    MC_FORCE_MNNVL = _env_optional_str("Set: Mooncake's engine uses NVLink between nodes.")
    MC_INTRANODE_NVLINK = _env_optional_str("Set: Mooncake's engine uses NVLink within a node.")
    USE_BAREX = _env_optional_str("1: Mooncake's engine uses Barex on RDMA devices.")

    # Read by torch, not by us.
    TORCH_SYMM_MEM_DISABLE_MULTICAST = _env_str(
        "1",
        "Memory that GPUs share is not told to the switches; nothing here sends to all at once.",
    )
    PYTORCH_CUDA_ALLOC_CONF = _env_str("", "Settings of torch's allocator of GPU memory.")
    PYTORCH_ALLOC_CONF = _env_str("", "The same by its newer name.")

    @classmethod
    def check_own(cls) -> None:
        """Parse every variable that the engine alone reads, to find malformed ones at the start.
        Variables that libraries also read are checked by the libraries.

        Raises:
            ValueError: See `EnvField.get`.
        """
        for name, field in cls.fields().items():
            if name.startswith(_OWN_PREFIXES):
                field.get()

    @classmethod
    def others(cls, prefix: str) -> list[str]:
        """Variables of the process environment with a prefix that are no fields."""
        return sorted(n for n in os.environ if n.startswith(prefix) and n not in cls.fields())

    @classmethod
    def fields(cls) -> Mapping[str, EnvField[object]]:
        """Name to field, in the order above."""
        return {k: v for k, v in vars(cls).items() if isinstance(v, EnvField)}


envs = Envs()


def move_variables() -> None:
    """Copy the variables, as C's functions see them, out of the memory in which the process got
    them, behind its arguments."""
    for name, value in os.environ.items():
        if name:  # C's functions take no empty name, which a process may yet be given.
            os.putenv(name, value)


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of the process environment for a child process; `extra` overrides it."""
    return {**os.environ, **(extra or {})}
