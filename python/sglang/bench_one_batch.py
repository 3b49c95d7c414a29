"""Latency of one static batch, in this process: `python -m sglang.bench_one_batch --help`.

No server and no scheduler: the model runner of a server prefills prompts of random tokens in one
step and decodes them together. Each figure is printed with its share of the limit that follows from
the device's measured copy and matrix rates. Exit status: 0; 2 if the arguments or the machine do
not work.
"""

from __future__ import annotations

from sglang.srt.utils.process import spin_briefly

if __name__ == "__main__":
    spin_briefly()  # before torch is imported

import argparse
import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from sglang.benchmark.one_batch import (
    BatchTimes,
    Limits,
    continue_greedily,
    decode_work,
    least_seconds,
    measure_limits,
    prefill_work,
    time_batch,
)
from sglang.benchmark.report import append, provenance
from sglang.srt.arg_groups.checks import mistakes_of, without_effect
from sglang.srt.arg_groups.cli import (
    flag_name,
    parse_flags,
    raise_errors,
    tool_parser,
    warn_of_ignored,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.local_model import with_local_model
from sglang.srt.hardware_backend.device_runtime import detect_device, device_runtime
from sglang.srt.managers.scheduler.launched_step import TpModelWorker
from sglang.srt.managers.tokenizer.chat_template import ChatTemplate
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_sizing import size_kv_pool
from sglang.srt.process.build import (
    memory_beside,
    on_this_machine,
    runner_config,
)
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import get_tokenizer
from sglang.srt.utils.logging_utils import configure_logger

PROMPTS: Final = (
    "The capital of France is",
    "The code of heron is 7391. The code of otter is 4402. What is the code of heron?",
    "Today is a sunny day, and",
)
"""The prompts of `--correctness-test`."""

_WARM_UP_STEPS: Final = 8
_USED: Final = frozenset(
    """model_path revision download_dir tokenizer_path load_format dtype kv_cache_dtype
    quantization context_length trust_remote_code random_seed log_level device
    mem_fraction_static max_running_requests max_total_tokens page_size attention_backend
    disable_cuda_graph cuda_graph_max_bs chat_template json_model_override_args""".split()
)
"""Fields of `ServerArgs` that have an effect without a server."""
_REFUSED: Final = {
    "--profile": "it writes no traces; run this command under a profiler",
    "--prompt-filename": "prompts are random, or fixed with --correctness-test",
    "--cut-len": "--correctness-test cuts each prompt in the middle",
}


def parse_args(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, ServerArgs]:
    """Parse the tool's own flags and the engine's, and resolve the engine's.

    Raises:
        ValueError: One line that names the flag and the remedy.
        SystemExit: `--help` was given and has been printed.
    """
    parser = _own_parser()
    own, rest = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if own.help:
        parser.print_help()
        print("\nand of the engine's:\n")
    for name in (word.split("=", 1)[0] for word in rest if word.startswith("--")):
        for refused, reason in _REFUSED.items():
            if name == refused or name.startswith(refused + "-"):
                raise ValueError(f"{name}: SGLang has it, this tool does not: {reason}")
    parsed = parse_flags(
        ServerArgs,
        ["--help"] if own.help else rest,
        prog="python -m sglang.bench_one_batch",
        description="Flags of the engine that have no meaning without a server are refused.",
    )
    lines = list(parsed.lines)
    for name in ("batch_size", "input_len", "output_len"):
        if min(getattr(own, name)) < 1:
            lines.append(f"{flag_name(name)} {min(getattr(own, name))}: must be at least 1")
    if own.log_decode_step < 0:
        lines.append(f"--log-decode-step {own.log_decode_step}: must be 0 (never) or more")
    args = ServerArgs(**parsed.values)
    for field in dataclasses.fields(args):
        if field.name not in _USED and getattr(args, field.name) != field.default:
            lines.append(f"{flag_name(field.name)} has no effect here: there is no server")
    raise_errors([*lines, *mistakes_of(args, parsed.malformed)])
    configure_logger(args.log_level)
    warn_of_ignored([*parsed.ignored, *without_effect(args)])
    return own, on_this_machine(with_local_model(args.resolve()), detect_device())


def _own_parser() -> argparse.ArgumentParser:
    parser = tool_parser("sglang.bench_one_batch", __doc__)
    add = parser.add_argument
    add("--run-name", default="default", help="name in the JSON line [%(default)s]")
    sizes: dict[str, Any] = {"type": int, "nargs": "+"}
    add("--batch-size", "--batch", **sizes, default=[1], help="one or several [1]")
    add("--input-len", **sizes, default=[1024], help="tokens, one or several [1024]")
    add("--output-len", **sizes, default=[16], help="tokens, one or several [16]")
    add(
        "--result-filename",
        default="result.jsonl",
        help="file for a JSON line for each setting; empty: none [%(default)s]",
    )
    add(
        "--correctness-test",
        action="store_true",
        help="print greedy answers to fixed prompts, formatted by the chat template",
    )
    add("--log-decode-step", type=int, default=0, help="print each n-th decode step; 0: none [0]")
    return parser


def make_worker(args: ServerArgs, requests: int, tokens_each: int) -> TpModelWorker:
    """Load the model and create pools for `requests` contexts of `tokens_each` tokens; `args` are
    resolved for this machine. Raises ValueError if the model or a setting does not work, or there
    is too little memory."""
    assert args.model_path is not None and args.page_size is not None, "resolved"
    most = args.max_running_requests
    if most is not None and most < requests:
        raise ValueError(f"--max-running-requests {most}: the largest batch has {requests}")
    config = ModelConfig.from_args(args)
    if tokens_each > config.context_len:
        raise ValueError(
            f"--input-len and --output-len: {tokens_each} tokens do not fit into the model's "
            f"context of {config.context_len}"
        )
    runner = ModelRunner(runner_config(args, config))
    need = requests * -(-tokens_each // args.page_size) * args.page_size
    is_sized = args.max_total_tokens is not None or args.mem_fraction_static is not None
    size = size_kv_pool(
        memory_beside(runner, args),
        kv_bytes_per_token=runner.kv_bytes_per_token(),
        page_size=args.page_size,
        max_total_tokens=args.max_total_tokens if is_sized else need,
    )
    if size.amount < need:
        raise ValueError(
            f"the KV pool holds {size.amount} tokens ({size.reason}) and the largest batch needs "
            f"{need}: lower --batch-size, --input-len or --output-len"
        )
    runner.init_memory_pool(size.amount, most or requests)
    return TpModelWorker(runner)


def run(own: argparse.Namespace, args: ServerArgs) -> None:
    """Time every combination of the sizes. Raises as `make_worker`; or OSError, before the
    measurements, if the result file cannot be written."""
    if own.result_filename:
        Path(own.result_filename).open("ab").close()
    config = ModelConfig.from_args(args)
    device_name = device_runtime(args.device).device_name()
    limits = measure_limits(args.device, config.dtype)
    print(
        f"{device_name}: copies {limits.copy_bytes_per_s / 1e12:.3f} TB/s, multiplies "
        f"{limits.product_flop_per_s / 1e12:.3f} TFLOP/s"
    )
    longest = max(own.input_len) + max(own.output_len) - 1
    worker = make_worker(args, max(own.batch_size), longest)
    random = torch.Generator().manual_seed(args.random_seed)
    for count, new, out in itertools.product(own.batch_size, own.input_len, own.output_len):
        prompts = torch.randint(0, worker.vocab_size, (count, new), generator=random).tolist()
        time_batch(worker, prompts, min(out, _WARM_UP_STEPS), args.device)
        print(f"batch size {count}, input {new} tokens, output {out} tokens")
        log_step = functools.partial(_log_step, own.log_decode_step, count)
        times = time_batch(worker, prompts, out, args.device, log_step)
        record = {
            "run_name": own.run_name,
            **times.figures(),
            **_against_limits(times, config, limits, worker),
        }
        _print(record)
        facts = {"device": device_name, "attention_backend": args.attention_backend}
        append({**record, **facts, **provenance()}, own.result_filename or None)


def _log_step(every: int, batch_size: int, number: int, seconds: float) -> None:
    if every and number % every == 0:
        rate = batch_size / seconds
        print(f"  decode step {number}: {seconds * 1e3:.3f} ms, {rate:.1f} token/s")


def _against_limits(
    times: BatchTimes, config: ModelConfig, limits: Limits, worker: TpModelWorker
) -> dict[str, Any]:
    """The least seconds that the device's rates allow, and their share of the measured time."""
    pool = worker.token_to_kv_pool
    kv_bytes = 2 * config.num_key_value_heads * config.head_dim * pool.dtype.itemsize
    prefill_s = least_seconds(config, prefill_work(times.batch_size, times.input_len), limits)
    found: dict[str, Any] = {
        "prefill_limit": prefill_s,
        "prefill_of_limit": prefill_s / times.prefill,
        "median_decode_limit": None,
        "median_decode_of_limit": None,
    }
    median = times.figures()["median_decode_latency"]
    if median is not None:
        middle = times.input_len + times.output_len // 2
        work = decode_work(times.batch_size, middle, kv_bytes * config.num_hidden_layers)
        decode_s = least_seconds(config, work, limits)
        found |= {"median_decode_limit": decode_s, "median_decode_of_limit": decode_s / median}
    return {
        **found,
        "copy_bytes_per_s": limits.copy_bytes_per_s,
        "product_flop_per_s": limits.product_flop_per_s,
    }


def _print(record: dict[str, Any]) -> None:
    rows = [("prefill", "prefill_latency", "prefill_throughput", "prefill_of_limit")]
    if record["median_decode_latency"] is not None:
        rows.append(
            ("decode, median step", "median_decode_latency", "median_decode_throughput",
             "median_decode_of_limit")
        )  # fmt: skip
    for what, latency, throughput, share in rows:
        print(
            f"  {what}: {record[latency] * 1e3:.3f} ms, {record[throughput]:.1f} token/s, "
            f"{record[share]:.1%} of the limit"
        )
    print(
        f"  total: {record['total_latency']:.4f} s, {record['overall_throughput']:.1f} token/s",
        flush=True,
    )


def answer_prompts(own: argparse.Namespace, args: ServerArgs) -> None:
    """Print the model's answer to each of `PROMPTS` as one line of JSON. The chat template formats
    the prompts; a model without a template continues the plain text. Raises as `make_worker`."""
    path = args.tokenizer_path or args.model_path
    assert path is not None, "resolved arguments name the model"
    tokenizer: Any = get_tokenizer(path, trust_remote_code=args.trust_remote_code)
    template = ChatTemplate(tokenizer, args.chat_template)
    prompts = [_encode(tokenizer, template, prompt) for prompt in PROMPTS]
    longest = max(map(len, prompts)) + own.output_len[0] - 1
    worker = make_worker(args, len(prompts), longest)
    outputs = continue_greedily(worker, prompts, own.output_len[0], args.device)
    for prompt, ids in zip(PROMPTS, outputs, strict=True):
        answer = {"prompt": prompt, "output_ids": ids, "text": tokenizer.decode(ids)}
        print(json.dumps(answer, ensure_ascii=False))


def _encode(tokenizer: Any, template: ChatTemplate, prompt: str) -> Any:
    """Token ids of `prompt`, as the first message of a chat if there is a template."""
    if not template.exists:
        return tokenizer.encode(prompt)
    question = [{"role": "user", "content": prompt}]
    text = template.render(question, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark of the command line and return the exit status."""
    try:
        own, args = parse_args(argv)
        (answer_prompts if own.correctness_test else run)(own, args)
    except (ValueError, OSError) as error:
        print(f"bench_one_batch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
