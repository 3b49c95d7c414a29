"""Checks a machine for a server: `python -m sglang.check_env [--json] [flags of the server]`.

Prints versions, devices, links, transports, limits and ports, and what a server with these flags
would refuse, with the remedy. Needs no GPU. Imports torch only for Mooncake's CUDA wheels, whose
libraries it brings. Exit status: 0: a server would start; 1: something is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang.diagnosis.findings import Finding, State
from sglang.diagnosis.machine_facts import (
    find_gpus,
    installed_versions,
    limit_findings,
    mooncake_wheels,
    package_findings,
    rdma_findings,
)
from sglang.diagnosis.start_findings import (
    environment_findings,
    flag_findings,
    protocols_of_wheel,
    transport_findings,
)
from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    IB_PROTOCOLS,
    list_rdma_devices,
)
from sglang.srt.environ import envs


def find_all(argv: Sequence[str], root: Path = Path("/")) -> list[Finding]:
    """All findings, for a server with the flags `argv`. `root`: where /dev, /proc and /sys are."""
    versions = installed_versions()
    is_locking = envs.MOONCAKE_PROTOCOL.is_set() and envs.MOONCAKE_PROTOCOL.get() in IB_PROTOCOLS
    devices = list_rdma_devices(root / "sys" / "class" / "infiniband")
    return [
        *package_findings(versions),
        *find_gpus(versions, root),
        *rdma_findings(root),
        *transport_findings(devices, protocols_of_wheel(mooncake_wheels(versions))),
        *limit_findings(root, needs_locked=is_locking),
        *environment_findings(),
        *flag_findings(argv),
    ]


def to_text(findings: Sequence[Finding]) -> str:
    """The findings by section, and how many are refused."""
    width = max(len(one.name) for one in findings)
    lines: list[str] = []
    section = ""
    for one in findings:
        if one.section != section:
            section = one.section
            lines += ["", section] if lines else [section]
        mark = {State.OK: " ", State.ABSENT: "-", State.REFUSED: "!"}[one.state]
        lines.append(f" {mark} {one.name.ljust(width)}  {one.value}")
        if one.remedy:
            lines.append(f"   {' ' * width}  {one.remedy}")
    refused = sum(one.state is State.REFUSED for one in findings)
    verdict = "a server would start" if not refused else f"{refused} refused (!)"
    return "\n".join([*lines, "", verdict])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.check_env",
        usage="%(prog)s [--json] [flags of the server]",
        description=(__doc__ or "").split("\n\n", 1)[1].strip(),
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    own, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    findings = find_all(rest)
    is_fine = all(one.state is not State.REFUSED for one in findings)
    if own.json:
        found = {"ok": is_fine, "findings": [dataclasses.asdict(one) for one in findings]}
        print(json.dumps(found))
    else:
        print(to_text(findings))
    return 0 if is_fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
