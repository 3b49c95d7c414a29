"""Installs packages with uv, in a third of pip's time; with pip where uv cannot replace it.

It takes arguments of `pip install`, and installs into the environment of its interpreter. uv reads
no configuration of pip's, so it gets the settings that both have. pip installs if there is another
setting, if there is no uv, or if uv fails.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PIP = (sys.executable, "-m", "pip")
INDEXES = {"index-url": "--default-index", "extra-index-url": "--index"}
"""Settings of pip that `--index-url` among the arguments replaces, and uv's options for them."""
OPTIONS = {
    **INDEXES,
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
OF_PIP_ALONE = frozenset(
    "cache-dir config-file default-timeout disable-pip-version-check no-cache-dir no-color "
    "no-compile no-input progress-bar quiet retries root-user-action timeout verbose".split()
)
"""Settings that do not decide what is installed."""


class OnlyPip(Exception):
    """Why uv cannot install."""


def read_settings() -> dict[str, str]:
    """pip's settings for `pip install`, from files and variables, by name."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    sections = ("global", "install", ":env:")
    found: dict[str, dict[str, str]] = {section: {} for section in sections}
    for line in listed.stdout.splitlines():
        place, _, value = line.partition("=")
        section, _, name = place.rpartition(".")
        if section in found:
            found[section][name] = str(ast.literal_eval(value))
    # The later section goes before the earlier one.
    return {name: value for section in sections for name, value in found[section].items()}


def uv_command(settings: dict[str, str], arguments: list[str]) -> list[str]:
    """uv's command, with variables of its environment.

    Raises:
        OnlyPip: uv is missing, or lacks one of the settings.
    """
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        raise OnlyPip("there is no uv")
    variables = ["UV_SYSTEM_CERTS=1"]
    # The best version of all indexes, as pip chooses.
    options = ["--python", sys.executable, "--index-strategy", "unsafe-best-match"]
    for name, value in settings.items():
        if name == "cert":
            variables.append(f"SSL_CERT_FILE={value}")
        elif name in OPTIONS:
            if name in INDEXES and "--index-url" in arguments:
                continue
            options += [word for one in value.split() for word in (OPTIONS[name], one)]
        elif name not in OF_PIP_ALONE:
            raise OnlyPip(f"pip's setting {name!r} has no counterpart")
    return ["env", *variables, str(uv), "pip", "install", *options, *arguments]


def main(arguments: list[str]) -> int:
    """Install. Returns the exit status."""
    try:
        command = uv_command(read_settings(), arguments)
    except OnlyPip as error:
        print(f"pip installs: {error}", flush=True)
    else:
        if subprocess.run(command, check=False).returncode == 0:
            return 0
        print("uv failed: pip installs", flush=True)
    options = ["--progress-bar", "off", "--no-compile"]
    return subprocess.run([*PIP, "install", *options, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
