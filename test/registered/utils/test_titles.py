"""Titles of processes, and the environment whose memory long ones take."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="base-b-test-cpu")

SET: Final = """
import ctypes, json, os, subprocess, sys
paths, names = json.loads(sys.argv[1])
sys.path[:0] = paths
from sglang.srt.utils.process import set_title
shown = []
for title in ("short", "x" * 100_000, "again"):
    set_title("role", title)
    with open("/proc/self/cmdline", "rb") as file:
        shown.append(file.read().rstrip(b"\\0").decode())
with open("/proc/self/comm") as file:
    shown.append(file.read())
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
in_c = [(getenv(name.encode()) or b"").decode() for name in names]
child = subprocess.run(["/usr/bin/env"], stdout=subprocess.PIPE, check=True).stdout.decode()
print(json.dumps([shown, in_c, [os.environ[name] for name in names], child.splitlines()]))
"""


@pytest.mark.parametrize(
    "variables",
    [{}, {"NAME": "worth"}, {"FIRST": "1", "": "odd", "NAME": "worth", "EMPTY": ""}],
    ids=["none", "one", "odd"],
)
def test_a_title_is_shown_and_the_environment_stays(variables: dict[str, str]) -> None:
    names = [name for name in variables if name]
    arguments = json.dumps([sys.path, names])
    done = subprocess.run(
        [sys.executable, "-c", SET, arguments],
        env=variables,
        stdout=subprocess.PIPE,
        check=True,
    )
    (first, longest, last, name), in_c, in_python, of_child = json.loads(done.stdout)
    assert (first, last) == ("sglang::role short", "sglang::role again")
    assert name == "sglang::role ag\n"
    # A title ends with the memory of the arguments and the environment.
    assert len(longest) > len(arguments)
    assert longest.removeprefix("sglang::role x").strip("x") == ""
    assert in_c == in_python == [variables[name] for name in names]
    assert {f"{name}={variables[name]}" for name in names} <= set(of_child)
