"""`make serve`: a Mooncake store and the server on this machine, and the answer to one question.

Starts `mooncake_master`, a store node of 512 MB and the server with all three tiers. Asks it a
question over HTTP, prints the answer and a command for the next question, and runs until Ctrl-C
(with `ONCE=1` until the answer). Arguments are those of the server; without `--model-path` it
serves the built-in model, with `MODEL=hybrid` the built-in hybrid, with `MODEL=smollm2` a real
model from PyPI. All processes are children and end by their handles, the server first, so that it
can still write to the store.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # The handler comes before the other imports: Ctrl-C during them would print a traceback.
    signal.signal(signal.SIGINT, lambda sig, frame: os._exit(128 + sig))

import json
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from sglang.embedded_mooncake import ChildStartError, ManagedProcess, MooncakeMaster, StoreNode
from sglang.smollm2 import installed_smollm2
from sglang.srt.constants import (
    BUILTIN_HYBRID_MODEL_DIR,
    BUILTIN_HYBRID_MODEL_NAME,
    BUILTIN_MODEL_DIR,
    MIB,
)
from sglang.srt.entrypoints.local_model import with_local_model
from sglang.srt.entrypoints.start_checks import check_model
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.network import base_url, check_port_available, is_healthy

STORE_BYTES: Final = 512 * MIB
STORAGE_FLAGS: Final = (
    "--enable-hierarchical-cache",
    "--hicache-storage-backend",
    "mooncake",
    "--enable-cache-report",
)
# The starts of the questions are longer than a page, so that the cache has that of the next one.
FACTS: Final = (
    "The code of heron is 7391. The code of otter is 2846. The code of badger is 5027. "
    "The code of falcon is 1684. The code of raven is 9310. The code of tiger is 4275."
)
QUESTION: Final = f"{FACTS} What is the code of heron?"
NEXT_QUESTION: Final = f"{FACTS} What is the code of otter?"
_PUPIL: Final = (
    "Here is a question about geography from a pupil of the fourth class, who has just begun to "
    "learn the countries of the world and their capitals. Please answer the question briefly. "
)
_CAPITALS: Final = tuple(f"{_PUPIL}What is the capital of {one}?" for one in ("France", "Japan"))
QUIET_S: Final = 15.0
"""Longest time without a line until the first answer."""
_MODEL_FLAGS: Final = ("--model-path", "--model")
_START_TIMEOUT: Final = 300.0
_DRAIN_TIMEOUT: Final = 60.0


def with_model(argv: Sequence[str]) -> list[str]:
    """`argv` with the flags of the model that the environment variable `MODEL` names.

    Raises:
        ValueError: `MODEL` names no model, or `argv` names another one.
        RuntimeError: The model could not be had from PyPI. One line.
    """
    model = envs.MODEL.get()
    if envs.MODEL.is_set() and any(word.partition("=")[0] in _MODEL_FLAGS for word in argv):
        raise ValueError(f"MODEL={model} has no effect with --model-path; unset one of them")
    if model == "hybrid":
        path, name = BUILTIN_HYBRID_MODEL_DIR, BUILTIN_HYBRID_MODEL_NAME
        flags = ("--speculative-algorithm", "NEXTN")
    elif model == "smollm2":
        path, name = installed_smollm2(), model
        # A CPU without bf16 computes twenty times as fast in fp32.
        flags = ("--dtype", "float32")
    else:
        return [*argv]
    return ["--model-path", str(path), "--served-model-name", name, *flags, *argv]


def questions_for(args: ServerArgs) -> tuple[str, str]:
    """Two questions that the model of these resolved arguments can answer: the built-in models
    recall facts of the prompt, and small real ones know capitals better than that."""
    assert args.model_path is not None, "resolved"
    if Path(args.model_path).resolve() in (BUILTIN_MODEL_DIR, BUILTIN_HYBRID_MODEL_DIR):
        return QUESTION, NEXT_QUESTION
    first, second = _CAPITALS
    return first, second


def chat_body(question: str) -> dict[str, Any]:
    """A greedy chat request for `question` that reports cached tokens by tier."""
    return {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 32,
        "return_cached_tokens_details": True,
    }


def curl_line(base_url: str, question: str, has_key: bool) -> str:
    """A command that asks `question` in a POSIX shell."""
    body = json.dumps(chat_body(question)).replace("'", "'\\''")
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if has_key else ""
    return (
        f"curl -s {base_url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{body}'"
    )


def describe_answer(answer: dict[str, Any]) -> str:
    """The text of a chat completion, and the number of prompt tokens from each tier, or from all
    where the answer does not tell them apart."""
    text = answer["choices"][0]["message"]["content"]
    usage = answer["usage"]
    details = (answer.get("sglext") or {}).get("cached_tokens_details") or {}
    cached = ", ".join(f"{tier} {count}" for tier, count in details.items())
    if not details and usage.get("prompt_tokens_details"):
        cached = f"{usage['prompt_tokens_details']['cached_tokens']} tokens"
    return (
        f"  {text!r}\n  {usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} "
        f"answered; cached: {cached or 'none'}"
    )


def ask(base_url: str, question: str, api_key: str | None, timeout: float = 120.0) -> str:
    """Ask the server; returns the answer as `describe_answer` formats it. Raises RuntimeError if
    the server refused or did not answer; in one line with its response."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions", json.dumps(chat_body(question)).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return describe_answer(json.load(response))
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise RuntimeError(f"the server answered {error.code}: {said}") from None
    except (OSError, ValueError, KeyError) as error:
        raise RuntimeError(f"no answer from the server: {error!r}") from None


def server_url(args: ServerArgs) -> str:
    """URL under which clients on this machine reach the server."""
    return base_url("127.0.0.1" if args.host == "0.0.0.0" else args.host, args.port)


def make_log_dir(title: str, stack: ExitStack) -> Path:
    """A new folder for the logs of children. `stack` removes it, unless an error leaves the stack:
    its message may name a log."""
    log_dir = Path(tempfile.mkdtemp(prefix=f"sglang-{title}-"))

    def remove(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, Exception):
            shutil.rmtree(log_dir, ignore_errors=True)
        else:
            print(f"{title}: the logs stay in {log_dir}", file=sys.stderr)

    stack.push(remove)
    return log_dir


def _start_all(stack: ExitStack, args: ServerArgs, argv: Sequence[str]) -> list[ManagedProcess]:
    """Start master, node and server, in this order; `stack` ends them in reverse order."""
    log_dir = make_log_dir("serve", stack)
    master = MooncakeMaster(log_dir)
    node = StoreNode(master, log_dir, segment_bytes=STORE_BYTES)
    url = server_url(args)
    server = ManagedProcess(
        "the server",
        [sys.executable, "-m", "sglang.launch_server", *STORAGE_FLAGS, *argv],
        ready=lambda: is_healthy(url, args.api_key),
        log_dir=None,
        env=master.engine_env(),
    )
    start_in_order("serve", stack, (master, node), (server,))
    return [master, node, server]


@contextmanager
def telling(title: str, what: str) -> Iterator[None]:
    """Print every `QUIET_S` seconds that `what` still goes on, until the block ends; `title` begins
    each line."""
    began, is_done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_done.wait(QUIET_S):
            print(f"{title}: ... {what}, for {time.monotonic() - began:.0f} s", flush=True)

    teller = threading.Thread(target=tell, name="telling", daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_done.set()
        teller.join()


def start_in_order(
    title: str, stack: ExitStack, quick: Sequence[ManagedProcess], servers: Sequence[ManagedProcess]
) -> None:
    """Start the children one after another, first the quick ones, and print the progress.

    Args:
        stack: Ends them in reverse order.
        quick: Children that serve within seconds.
        servers: Children that load a model, and finish their requests before they end.

    Raises:
        ChildStartError: One of them did not start.
    """
    for process in (*quick, *servers):
        is_quick = process in quick
        stack.callback(process.stop, 10.0 if is_quick else _DRAIN_TIMEOUT)
        with telling(title, f"starting {process.name}"):
            process.start(30.0 if is_quick else _START_TIMEOUT)
        print(f"{title}: {process.name} runs", flush=True)


def _stay(processes: Sequence[ManagedProcess]) -> None:
    """Wait for Ctrl-C. Raises ChildStartError if a child ended by itself."""
    while all(process.is_running() for process in processes):
        time.sleep(0.3)
    gone = next(process for process in processes if not process.is_running())
    raise ChildStartError(gone.last_words())


def answer_and_stay(
    title: str, url: str, args: ServerArgs, processes: Sequence[ManagedProcess]
) -> None:
    """Ask the server with these arguments a question, print the next one, and wait for Ctrl-C
    unless `ONCE=1`.

    Raises:
        ChildStartError: A child ended by itself.
        RuntimeError: The first question was not answered. One line.
    """
    once = envs.ONCE.get()
    question, next_question = questions_for(args)
    print(f"{title}: asking {url}\n  {question!r}", flush=True)
    with telling(title, "waiting for the answer"):
        answer = ask(url, question, args.api_key)
    print(answer, flush=True)
    follow_up = curl_line(url, next_question, args.api_key is not None)
    print(f"{title}: ask the next one, whose start is cached now:\n\n{follow_up}\n", flush=True)
    if not once:
        print(f"{title}: Ctrl-C ends it", flush=True)
        _stay(processes)


def serve(argv: Sequence[str]) -> None:
    """Run until Ctrl-C, SIGTERM, or with `ONCE=1` until the first answer.

    Raises:
        ValueError: Flags or environment are wrong. One line.
        ChildStartError: A process did not start, or ended. One line.
        RuntimeError: The first question was not answered. One line.
        KeyboardInterrupt: A signal came, and all processes have ended.
    """
    args = prepare_server_args([*STORAGE_FLAGS, *argv])
    check_port_available(args.host, args.port)
    check_model(with_local_model(args))
    with ExitStack() as stack:
        processes = _start_all(stack, args, argv)
        answer_and_stay("serve", server_url(args), args, processes)


def run(title: str, serve: Callable[[Sequence[str]], None]) -> int:
    """Call `serve` with the process's arguments, and print how it ended.

    Args:
        serve: Raises like the function `serve` above. The model that `MODEL` names is added to its
            arguments.

    Returns:
        Exit status: 0 after Ctrl-C or, with `ONCE=1`, the answer; 1 after an error, with one line
        about it.
    """
    # Ctrl-C and a supervisor's SIGTERM now end all started processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with telling(title, f"preparing the model {envs.MODEL.get()}"):
            argv = with_model(sys.argv[1:])
        serve(argv)
    except KeyboardInterrupt:
        print(f"{title}: ended", flush=True)
    except (ValueError, RuntimeError) as error:
        for line in str(error).splitlines():
            print(f"{title}: error: {line}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(run("serve", serve))
