"""Facts about the machine: packages, devices, links, memory limits, ports. Imports no torch.

Each function reads what its arguments name, so that tests can plant a machine.
"""

from __future__ import annotations

import platform
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from sglang.diagnosis.findings import Finding, State
from sglang.srt.constants import GB, VERSION
from sglang.srt.distributed.device_communicators.mooncake_protocol import list_rdma_devices
from sglang.srt.utils.network import is_port_available
from sglang.srt.utils.process import host_memory

_PACKAGES: Final = (
    "torch", "triton", "torch-npu", "transformers", "safetensors", "xgrammar", "flashinfer-python",
    "sglang-router",
)  # fmt: skip
MOONCAKE_WHEEL: Final = "mooncake-transfer-engine"
"""Begin of the names of Mooncake's wheels, which all install the package `mooncake`."""
CPU_WHEELS: Final = frozenset((f"{MOONCAKE_WHEEL}-non-cuda", f"{MOONCAKE_WHEEL}-efa-non-cuda"))
_QUERY: Final = "name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max"
_COMMAND_SECONDS: Final = 20
_HUGE_PAGES: Final = ("HugePages_Total", "HugePages_Free", "Hugepagesize")
_LEAST_FILES: Final = 4096


def installed_versions() -> dict[str, str]:
    """Version by the name of every installed distribution, in lower case."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        name = str(one.metadata["Name"] or "").lower().replace("_", "-")
        found.setdefault(name, one.version)
    return found


def package_findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Versions of this engine, of Python and of packages; `versions` as `installed_versions`."""
    yield Finding(section="versions", name="sglang", value=VERSION)
    yield Finding(section="versions", name="python", value=platform.python_version())
    yield Finding(section="versions", name="kernel", value=platform.release())
    for name in _PACKAGES:
        version = versions.get(name)
        if version is None:
            yield Finding(
                section="versions", name=name, value="not installed", state=State.ABSENT,
                remedy=f"pip install {name}, if it is needed",
            )  # fmt: skip
        else:
            yield Finding(section="versions", name=name, value=version)
    wheels = mooncake_wheels(versions)
    yield Finding(
        section="versions",
        name="mooncake",
        value=", ".join(f"{one} {versions[one]}" for one in wheels) or "not installed",
        state=State.OK if len(wheels) == 1 else State.REFUSED if wheels else State.ABSENT,
        remedy=""
        if len(wheels) == 1
        else "all of them install the same files: uninstall all, then install one"
        if wheels
        else f"pip install {MOONCAKE_WHEEL}-non-cuda, for a store or prefill and decode servers",
    )


def mooncake_wheels(versions: Mapping[str, str]) -> list[str]:
    """Names of the installed wheels of Mooncake."""
    return sorted(name for name in versions if name.startswith(MOONCAKE_WHEEL))


def run_command(*words: str) -> str | None:
    """Standard output of a command; None: it is not there, or it fails."""
    if shutil.which(words[0]) is None:
        return None
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def gpu_findings(
    versions: Mapping[str, str], listed: str | None, topology: str | None, *, has_node: bool
) -> Iterator[Finding]:
    """GPUs and their links, and the packages that do not fit them.

    Args:
        versions: Result of `installed_versions`.
        listed: Answer of `nvidia-smi` to `QUERY`, a line for each GPU; None: it does not run.
        topology: Answer of `nvidia-smi topo -m`.
        has_node: True if the driver's device file is there.
    """
    lines = [line for line in (listed or "").splitlines() if line.strip()]
    if not lines:
        state = State.REFUSED if has_node else State.ABSENT
        remedy = (
            "nvidia-smi finds no GPU beside a loaded driver: see its message" if has_node else ""
        )
        yield Finding(section="devices", name="gpu", value="none", state=state, remedy=remedy)
        return
    for number, line in enumerate(lines):
        name, memory, driver, generation, width = (part.strip() for part in line.split(","))
        yield Finding(
            section="devices",
            name=f"gpu {number}",
            value=f"{name}, {memory}, driver {driver}, PCIe {generation} x{width}",
        )
    links = sorted(set(re.findall(r"\bNV\d+\b", topology or "")))
    yield Finding(
        section="devices",
        name="nvlink",
        value=", ".join(links) or "none",
        state=State.OK if links else State.ABSENT,
    )
    torch = versions.get("torch", "")
    if "+cpu" in torch:
        yield Finding(
            section="devices", name="torch", value=torch, state=State.REFUSED,
            remedy="torch's CPU build does not use the GPU: run scripts/setup.sh again, or install "
            "torch's CUDA build",
        )  # fmt: skip
    for wheel in mooncake_wheels(versions):
        if wheel in CPU_WHEELS:
            yield Finding(
                section="devices", name="mooncake", value=wheel, state=State.REFUSED,
                remedy="this wheel cannot move memory of GPUs: uninstall it, then install the "
                "extra cuda (EFA: efa-cuda)",
            )  # fmt: skip


def find_gpus(versions: Mapping[str, str], root: Path) -> Iterator[Finding]:
    """`gpu_findings` of this machine, and its NPUs. `root`: where /dev is."""
    yield from gpu_findings(
        versions,
        run_command("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"),
        run_command("nvidia-smi", "topo", "-m"),
        has_node=(root / "dev" / "nvidiactl").exists(),
    )
    npus = sorted(one.name for one in (root / "dev").glob("davinci[0-9]*"))
    yield Finding(
        section="devices",
        name="npu",
        value=", ".join(npus) or "none",
        state=State.OK if npus else State.ABSENT,
    )


def rdma_findings(root: Path) -> Iterator[Finding]:
    """RDMA and EFA devices. `root`: where /sys is."""
    devices = list_rdma_devices(root / "sys" / "class" / "infiniband")
    for name, own in (
        ("rdma", [one for one in devices if not one.is_efa]),
        ("efa", [one for one in devices if one.is_efa]),
    ):
        yield Finding(
            section="devices",
            name=name,
            value=", ".join(f"{one.name} ({one.driver or 'no driver'})" for one in own) or "none",
            state=State.OK if own else State.ABSENT,
        )


def limit_findings(root: Path, *, needs_locked: bool) -> Iterator[Finding]:
    """Limits of memory and files.

    Args:
        root: Directory with /proc and /sys.
        needs_locked: True if the chosen transport locks memory.
    """
    available, total = host_memory()
    yield Finding(
        section="limits",
        name="host memory",
        value=f"{available / GB:.1f} GB available of {total / GB:.1f} GB",
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield locked_finding(soft, needs_locked=needs_locked)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = files == resource.RLIM_INFINITY or files >= _LEAST_FILES
    yield Finding(
        section="limits",
        name="open files (ulimit -Hn)",
        value=_limit(files),
        state=State.OK if is_enough else State.REFUSED,
        remedy="" if is_enough else f"raise it to {_LEAST_FILES} or more: it bounds connections",
    )
    yield _huge_pages(root)
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    enabled = re.search(r"\[(\w+)\]", _read(path))
    yield Finding(
        section="limits",
        name="transparent huge pages",
        value=enabled[1] if enabled else "none",
        state=State.OK if enabled and enabled[1] != "never" else State.ABSENT,
        remedy=""
        if enabled and enabled[1] != "never"
        else f"echo madvise > {path}: L2 starts faster",
    )


def locked_finding(limit: int, *, needs_locked: bool) -> Finding:
    """The limit of locked memory, in bytes, as `getrlimit` gives it."""
    is_unlimited = limit == resource.RLIM_INFINITY
    return Finding(
        section="limits",
        name="locked memory (ulimit -l)",
        value=_limit(limit),
        state=State.REFUSED if needs_locked and not is_unlimited else State.OK,
        remedy=""
        if is_unlimited or not needs_locked
        else "rdma and efa lock L2 and the pools: "
        "ulimit -l unlimited, in a container the capability IPC_LOCK",
    )


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _huge_pages(root: Path) -> Finding:
    found = dict(re.findall(r"^(\w+):\s+(\d+)", _read(root / "proc/meminfo"), re.MULTILINE))
    total, free, size = (int(found.get(name, 0)) for name in _HUGE_PAGES)
    return Finding(
        section="limits",
        name="huge pages",
        value=f"{free} free of {total}, {size} kB each",
        state=State.OK if total else State.ABSENT,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def port_finding(name: str, host: str, port: int, flag: str) -> Finding:
    """A port that a server with these flags listens on; `flag` chooses another."""
    is_free = is_port_available(host, port)
    return Finding(
        section="ports",
        name=name,
        value=f"{host}:{port} is {'free' if is_free else 'in use'}",
        state=State.OK if is_free else State.ABSENT,
        remedy="" if is_free else f"choose another with {flag}",
    )
