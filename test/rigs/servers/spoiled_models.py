"""Faulty copies of the built-in model, and starts of a server on them (row F7 of
docs/faults.md)."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - makes the hostile file; nothing is unpickled here
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from rigs.servers.forked_servers import ForkedProcess
from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.utils.network import get_free_port
from sglang.srt.utils.process import kill_process_tree

WEIGHTS: Final = "model.safetensors"
TIMEOUT_S: Final = 120.0


def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / WEIGHTS)


def perturbed_model(folder: Path) -> Path:
    """The built-in model with one number of one weight changed."""
    copy = folder / "perturbed"
    shutil.copytree(BUILTIN_MODEL_DIR, copy)
    weights = load_file(copy / "model.safetensors")
    first = next(iter(sorted(weights)))
    weights[first] = weights[first].clone()
    weights[first].view(-1)[0] += torch.tensor(0.5, dtype=weights[first].dtype)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def change_config(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def pickled(model: Path) -> None:
    """Replace the weights by a pickled state dict."""
    torch.save(weights(model), model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()


class Bomb:
    """Unpickling it creates a directory."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def booby_trapped(model: Path) -> None:
    (model / WEIGHTS).unlink()
    torch.save({"model.embed_tokens.weight": Bomb(model / "ran")}, model / "pytorch_model.bin")


def plainly_booby_trapped(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(model / "ran")))


def emptied(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()


def huge_header(model: Path) -> None:
    (model / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def cut_short(model: Path) -> None:
    """Cut the weights in half, like an interrupted download."""
    raw = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def offsets_outside(model: Path) -> None:
    raw = (model / WEIGHTS).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    name = next(key for key in header if key != "__metadata__")
    header[name]["data_offsets"] = [0, 1 << 50]
    text = json.dumps(header).encode()
    (model / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def without_a_tensor(model: Path) -> None:
    tensors = weights(model)
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, model / WEIGHTS)


def of_another_shape(model: Path) -> None:
    tensors = weights(model)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, model / WEIGHTS)


def remote_code(model: Path) -> None:
    (model / "trap.py").write_text(f"import os\nos.mkdir({str(model / 'ran')!r})\n")
    change_config(
        model,
        architectures=["TrapForCausalLM"],
        model_type="trap",
        auto_map={"AutoConfig": "trap.Trap", "AutoModelForCausalLM": "trap.Trap"},
    )


def remote_config(model: Path) -> None:
    remote_code(model)
    change_config(model, architectures=["Qwen3ForCausalLM"])


@dataclass(frozen=True)
class Case:
    """A change to a copy of the built-in model, and the words of the expected error."""

    name: str
    spoil: Callable[[Path], object]
    words: tuple[str, ...]
    flags: tuple[str, ...] = ()


CASES: Final = (
    Case("empty-directory", emptied, ("config.json",)),
    Case("architecture", lambda m: change_config(m, architectures=["GPT2"]), ("GPT2", "Qwen3")),
    Case("config-missing", lambda m: (m / "config.json").unlink(), ("config.json",)),
    Case("config-torn", lambda m: (m / "config.json").write_text('{"a": '), ("config.json",)),
    Case("config-no-object", lambda m: (m / "config.json").write_text("[]"), ("config.json",)),
    Case("config-impossible", lambda m: change_config(m, num_attention_heads=7), ("num_",)),
    Case("config-wrong-type", lambda m: change_config(m, hidden_size="wide"), ("hidden_size",)),
    Case("config-of-a-larger-model", lambda m: change_config(m, hidden_size=4096), (WEIGHTS,)),
    Case("config-more-layers", lambda m: change_config(m, num_hidden_layers=99), ("layers",)),
    Case("weights-missing", lambda m: (m / WEIGHTS).unlink(), ("safetensors", "missing")),
    Case("weights-empty", lambda m: (m / WEIGHTS).write_bytes(b""), (WEIGHTS,)),
    Case("weights-cut-short", cut_short, (WEIGHTS,)),
    Case("weights-huge-header", huge_header, (WEIGHTS,)),
    Case("weights-offsets-outside", offsets_outside, (WEIGHTS,)),
    Case("weights-without-a-tensor", without_a_tensor, ("down_proj",)),
    Case("weights-of-another-shape", of_another_shape, ("down_proj",)),
    Case("pickled", pickled, ("pickled", "--load-format pt")),
    Case("booby-trapped", booby_trapped, ("pytorch_model.bin",), ("--load-format", "pt")),
    Case("plain-pickle", plainly_booby_trapped, ("pytorch_model.bin",), ("--load-format", "pt")),
    Case("tokenizer-torn", lambda m: (m / "tokenizer.json").write_text("{"), ("tokenizer",)),
    Case("remote-code", remote_code, ("TrapForCausalLM",)),
    Case("remote-config", remote_config, ("model_type='trap'", "--trust-remote-code")),
    Case("unknown-field", lambda m: change_config(m, logit_scale=0.5), ("logit_scale=0.5",)),
)


@dataclass(frozen=True)
class Refusal:
    """The result of a refused start."""

    status: int
    output: str
    ran_code: bool
    """True if code of the checkpoint ran."""

    def check(self, case: Case) -> None:
        """Assert that the error is one clear line."""
        assert self.status == 1, self.output
        assert not self.ran_code, "code of the checkpoint was run"
        assert "Traceback" not in self.output, self.output
        line = [line for line in self.output.splitlines() if line.strip()][-1]
        assert line.startswith("error: "), self.output
        for word in case.words:
            assert word in line, line


def start_refused(case: Case, folder: Path) -> Refusal:
    """Start a server on the faulty model, and return how it ended."""
    model = folder / case.name
    shutil.copytree(BUILTIN_MODEL_DIR, model)
    case.spoil(model)
    log = folder / "log"
    flags = (
        "--port", str(get_free_port()), "--model-path", str(model), "--max-total-tokens", "4096",
    )  # fmt: skip
    process = ForkedProcess([*flags, *case.flags], log)
    try:
        status = process.wait(TIMEOUT_S)
    finally:
        if process.poll() is None:
            kill_process_tree(process.pid)
    return Refusal(status, log.read_text(), (model / "ran").exists())
