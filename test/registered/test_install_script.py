"""`scripts/install.py` with a fake uv; a real pip reads the settings."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang.srt.environ import child_environment
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=4, suite="base-b-test-cpu")

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`scripts/install.py`, with a fake uv and a fake `pip install`, which write their arguments.
    pip has the settings of the test alone."""
    spec = importlib.util.spec_from_file_location("install", CHECKOUT / "scripts" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in child_environment():
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    pip = tmp_path / "pip"
    pip.write_text(
        f"""#!/bin/bash
        [ "$1" != config ] || exec {sys.executable} -m pip "$@"
        echo "pip $*" >>{tmp_path}/calls
        """
    )
    uv = tmp_path / "uv"
    uv.write_text(
        f"""#!/bin/bash
        [ "${{UV_SYSTEM_CERTS:-}}" = 1 ] || exit 1
        echo "uv $* ${{SSL_CERT_FILE:-}}" >>{tmp_path}/calls
        """
    )
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for one in (pip, uv):
        one.chmod(0o755)
    monkeypatch.setattr(module, "PIP", (str(pip),))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return module


def installations(install: ModuleType, folder: Path, *arguments: str) -> list[str]:
    """The calls of uv and pip, without the options that all have."""
    assert install.main(list(arguments)) == 0
    best = f"pip install --python {folder}/python --index-strategy unsafe-best-match"
    calls = (folder / "calls").read_text().splitlines()
    return [call.replace(best, "BEST").rstrip() for call in calls]


def test_uv_installs(install: ModuleType, tmp_path: Path) -> None:
    assert installations(install, tmp_path, "a==1", "--no-deps") == ["uv BEST a==1 --no-deps"]


def test_uv_gets_the_settings_of_pip(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable goes before a file, and there a command's section before the global one."""
    settings = tmp_path / "pip.conf"
    settings.write_text(
        "[global]\nindex-url = https://a/simple\ntimeout = 9\n"
        "extra-index-url =\n    https://b/simple\n    https://c/simple\n"
        "trusted-host = a\nfind-links = /others\n"
        "[install]\nfind-links = /wheels\n[freeze]\nuser = true\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_INDEX_URL", "https://d/simple")
    monkeypatch.setenv("PIP_CERT", "/ca.pem")
    monkeypatch.setenv("PIP_CONSTRAINT", "/most.txt")
    (call,) = installations(install, tmp_path, "a")
    words = call.removeprefix("uv BEST ").split()
    assert words[-2:] == ["a", "/ca.pem"]
    assert sorted(zip(words[:-2:2], words[1:-2:2], strict=True)) == [
        ("--allow-insecure-host", "a"),
        ("--constraint", "/most.txt"),
        ("--default-index", "https://d/simple"),
        ("--find-links", "/wheels"),
        ("--index", "https://b/simple"),
        ("--index", "https://c/simple"),
    ]


def test_an_index_of_the_call_replaces_those_of_the_settings(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://d/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://e/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    calls = installations(install, tmp_path, "--index-url", "https://cuda", "a")
    assert calls == ["uv BEST --find-links /wheels --index-url https://cuda a"]


def test_pip_installs_where_uv_cannot(
    install: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    by_pip = "pip install --progress-bar off --no-compile a"
    monkeypatch.setenv("PIP_ONLY_BINARY", ":all:")
    assert installations(install, tmp_path, "a") == [by_pip]
    assert capfd.readouterr().out == (
        "pip installs: pip's setting 'only-binary' has no counterpart\n"
    )
    monkeypatch.delenv("PIP_ONLY_BINARY")
    (tmp_path / "uv").write_text("#!/bin/bash\nexit 1\n")
    assert installations(install, tmp_path, "a") == [by_pip, by_pip]
    assert capfd.readouterr().out == "uv failed: pip installs\n"
    (tmp_path / "uv").unlink()
    assert installations(install, tmp_path, "a") == [by_pip] * 3
    assert capfd.readouterr().out == "pip installs: there is no uv\n"
