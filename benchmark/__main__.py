"""Runs a benchmark: `python -m benchmark COMMAND [PART] [options]`, in the root of a checkout."""

from __future__ import annotations

from sglang.srt.utils.process import spin_briefly

if __name__ == "__main__":
    spin_briefly()  # before torch is imported

import argparse
import sys
from collections.abc import Sequence

from benchmark.command import (
    COMMANDS,
    Command,
    Failed,
    Refused,
    description,
    load_command,
    module_name,
)
from benchmark.report import Report
from sglang.benchmark.report import writable_file

_PROGRAM = "python -m benchmark"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 1 if a measurement failed, 2 if refused."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = _choose(words, _PROGRAM, "COMMAND", {name: _line(name, None) for name in COMMANDS})
    parts = COMMANDS[command]
    part = None
    if parts:
        lines = {name: _line(command, name) for name in parts}
        part = _choose(words, f"{_PROGRAM} {command}", "PART", lines)
    name = command if part is None else f"{command} {part}"
    module = module_name(command, part)
    measurement = load_command(module)
    args = parse_options(measurement, f"{_PROGRAM} {name}", description(module), words)
    try:
        device = _device_name(measurement, args.device)
        options = {key: value for key, value in vars(args).items() if key != "output_file"}
        measurement.run(args, Report(name, options, device, args.output_file))
    except Refused as refusal:
        print(f"benchmark {name}: {refusal}", file=sys.stderr)
        return 2
    except Failed as failure:
        print(f"benchmark {name}: {failure}", file=sys.stderr)
        return 1
    return 0


def parse_options(
    measurement: Command, program: str, about: str, words: Sequence[str]
) -> argparse.Namespace:
    """The options of a measurement: its own, and those that all have."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if measurement.add_options is not None:
        measurement.add_options(parser)
    if measurement.repeats is not None:
        parser.add_argument(
            "--repeats",
            type=int,
            default=measurement.repeats,
            help=f"times that each figure is measured [{measurement.repeats}]",
        )
    devices = measurement.devices
    if len(devices) > 1:
        parser.add_argument("--device", choices=devices, default=devices[0], help=f"[{devices[0]}]")
    parser.set_defaults(device=devices[0])
    parser.add_argument(
        "--quick", action="store_true", help="a small run, to see that it works; no evidence"
    )
    parser.add_argument("--output-file", type=writable_file, help="append JSON lines to this file")
    if "--quick" in words:
        parser.set_defaults(**measurement.quick)
    return parser.parse_args(words)


def _choose(words: list[str], program: str, what: str, lines: dict[str, str]) -> str:
    """Take a name of `lines` from the front of `words`. Exits with help if there is none."""
    width = max(map(len, lines)) + 2
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} {what} [options]",
        description="\n".join(f"  {name:<{width}}{line}" for name, line in lines.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"`{program} {what} --help` has its options.",
    )
    parser.add_argument("name", metavar=what, choices=lines, help=argparse.SUPPRESS)
    name: str = parser.parse_args(words[:1]).name
    words.pop(0)
    return name


def _line(command: str, part: str | None) -> str:
    return description(module_name(command, part)).splitlines()[0]


def _device_name(measurement: Command, device: str) -> str:
    """The name of the device that is measured. Raises Refused if it is not there."""
    if device == "cpu":
        return device
    import torch  # Slow, and not needed for help.

    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if count < measurement.gpus:
        needed = "a CUDA GPU" if measurement.gpus == 1 else f"{measurement.gpus} CUDA GPUs"
        raise Refused(f"needs {needed}; this host has {count or 'none'}")
    gpu: str = torch.get_device_module("cuda").get_device_name()
    return gpu


if __name__ == "__main__":
    sys.exit(main())
