"""The commands of `python -m benchmark`: what each module of a measurement has to say of itself."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmark.report import Report

COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "cpu-targets": (),
    "cpu-costs": ("tree", "scheduler", "http-path", "first-token", "unused", "kv-events"),
    "simulate": (
        "trace",
        "turns",
        "rounds",
        "states",
        "snapshots",
        "store",
        "buffer",
        "groups",
        "agents",
        "agents-runs",
    ),
    "storage": ("backends", "buffer", "keys", "full"),
    "multiturn": (),
    "words-by-tier": ("same", "recall"),
    "ranks": ("collectives", "context-parallel", "dp-steps"),
    "remote-weights": ("tcp", "nvlink"),
    "transfer": ("engine", "heads", "limits", "nixl", "tickets"),
    "gpu-forward": ("steps", "attention", "kernels"),
    "gpu-server": ("ttft", "load", "scheduler", "idle"),
    "gpu-hicache": ("unused", "turns", "agents", "copies"),
    "gpu-hybrid": (
        "steps",
        "many",
        "server",
        "turns",
        "experts",
        "speculation",
        "transformers",
        "unused",
    ),
    "gpu-pd": ("servers", "turns", "pages"),
    "gpu-ranks": ("sums", "forward", "ttft", "unused", "kernels", "groups"),
    "gpu-eight": (),
}
"""Commands and their parts. A command without parts is a measurement itself."""


class Refused(Exception):
    """The measurement cannot be made as asked; the message names the cause. Exit status 2."""


class Failed(Exception):
    """The measurement was made, but not all of it succeeded. Exit status 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A measurement: the `COMMAND` of its module, whose docstring is its help."""

    run: Callable[[argparse.Namespace, Report], None]
    """Measures, and gives each figure to the report. Raises Refused or Failed."""
    add_options: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds the command's own options."""
    repeats: int | None = None
    """Default of `--repeats`; without one, there is no such option."""
    quick: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of options with `--quick`: a run of seconds that shows that it works."""
    devices: tuple[str, ...] = ("cpu",)
    """Devices on which the command runs, the default first. `--device` chooses among several."""
    gpus: int = 1
    """CUDA GPUs that the command needs on "cuda"."""


def module_name(command: str, part: str | None) -> str:
    """The module that has the `COMMAND`."""
    names = ["benchmark", command] if part is None else ["benchmark", command, part]
    return ".".join(names).replace("-", "_")


def description(module: str) -> str:
    """The docstring of a module, which is not imported: some need libraries of GPU hosts."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    source = Path(spec.origin).read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def load_command(module: str) -> Command:
    """The `COMMAND` of a module."""
    found = importlib.import_module(module).COMMAND
    assert isinstance(found, Command), module
    return found
