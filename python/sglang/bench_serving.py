"""Load test of a running server: `python -m sglang.bench_serving --help`.

Prints a table of figures, with the usual names, and with `--output-file` appends all figures as one
JSON line. Exit status: 0; 1 if a request failed; 2 if the arguments or the server do not work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from sglang.benchmark.api_backends import (
    BACKENDS,
    ApiBackend,
    RequestOptions,
    Tokens,
    fetch_model_info,
    flush_cache,
    load_tokens,
)
from sglang.benchmark.report import append, provenance, writable_file
from sglang.benchmark.serving_metrics import (
    LoadResult,
    details,
    error_counts,
    generate_load,
    open_session,
    summarize,
    table,
)
from sglang.benchmark.workload import (
    BenchRequest,
    TraceScale,
    Vocabulary,
    arrival_times,
    random_requests,
    read_trace,
    shared_prefix_requests,
    trace_requests,
)
from sglang.srt.utils.progress import progress_bar

_BUSY_CLIENT = 0.8
_WARMUP_SEED_OFFSET = 1_000_003


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Bad flags exit with status 2 and a line that names the cause."""
    parser = argparse.ArgumentParser(prog="python -m sglang.bench_serving", description=__doc__)
    _add_server_flags(parser)
    _add_load_flags(parser)
    _add_dataset_flags(parser)
    args = parser.parse_args(argv)
    if args.num_prompts is not None and args.num_prompts < 1:
        parser.error("--num-prompts: must be 1 or more")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        parser.error("--max-concurrency: must be 1 or more")
    if args.dataset_name == "mooncake" and not args.dataset_path:
        parser.error("--dataset-name mooncake: give the trace with --dataset-path")
    if args.base_url is None:
        args.base_url = f"http://{args.host}:{args.port}"
    args.base_url = args.base_url.rstrip("/")
    args.model = args.served_model_name or args.model
    return args


def _json_object(text: str) -> dict[str, Any]:
    value = None
    with contextlib.suppress(msgspec.DecodeError):
        value = msgspec.json.decode(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", default="sglang", choices=list(BACKENDS))
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=30000)
    group.add_argument("--base-url", help="instead of --host and --port")
    group.add_argument("--model", help="model name in requests; absent: the server's")
    group.add_argument("--served-model-name", help="the same, and wins over --model")
    group.add_argument("--tokenizer", help="directory; absent: the server's")
    group.add_argument("--api-key")
    group.add_argument("--admin-api-key", help="for --flush-cache, if the server needs one")
    group.add_argument("--flush-cache", action="store_true", help="flush before the test")


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--num-prompts", type=int, help="[1000; with a trace: all]")
    group.add_argument(
        "--request-rate",
        type=float,
        help="requests per second of a Poisson process [inf; with a trace: its timestamps]",
    )
    group.add_argument("--max-concurrency", type=int)
    group.add_argument("--warmup-requests", type=int, default=1)
    group.add_argument("--seed", type=int, default=1)
    group.add_argument("--disable-ignore-eos", action="store_true")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument(
        "--extra-request-body", type=_json_object, default={}, help="JSON, added to each body"
    )
    group.add_argument("--output-file", type=writable_file, help="file for one JSON line")
    group.add_argument("--output-details", action="store_true", help="add each request's figures")
    group.add_argument("--disable-tqdm", action="store_true")
    group.add_argument("--tag", help="name in the JSON line")


def _add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset; lengths in tokens")
    group.add_argument(
        "--dataset-name",
        default="random",
        choices=["random", "random-ids", "generated-shared-prefix", "mooncake"],
        help="random-ids: the same as random",
    )
    group.add_argument(
        "--tokenize-prompt", action="store_true", help="implied, except for chats, which are text"
    )
    group.add_argument("--dataset-path", help="a trace in Mooncake's format")
    group.add_argument("--random-input-len", type=int, default=1024)
    group.add_argument("--random-output-len", type=int, default=128)
    group.add_argument("--random-range-ratio", type=float, default=0.0)
    group.add_argument("--gsp-num-groups", type=int, default=64)
    group.add_argument("--gsp-prompts-per-group", type=int, default=16)
    group.add_argument("--gsp-system-prompt-len", type=int, default=2048)
    group.add_argument("--gsp-question-len", type=int, default=128)
    group.add_argument("--gsp-output-len", type=int, default=256)
    group.add_argument(
        "--mooncake-length-scale", type=float, default=1.0, help="multiplies prompt lengths"
    )
    group.add_argument(
        "--mooncake-output-scale", type=float, default=1.0, help="multiplies answer lengths"
    )
    group.add_argument(
        "--mooncake-slowdown-factor", type=float, default=1.0, help="multiplies the timestamps"
    )


def make_requests(args: argparse.Namespace, vocabulary: Vocabulary) -> list[BenchRequest]:
    """The prompts of the chosen dataset. A ValueError names a flag that is wrong."""
    match args.dataset_name:
        case "random" | "random-ids":
            return random_requests(
                vocabulary,
                args.num_prompts or 1000,
                args.seed,
                input_len=args.random_input_len,
                output_len=args.random_output_len,
                range_ratio=args.random_range_ratio,
            )
        case "generated-shared-prefix":
            sizes = {name: value for name, value in vars(args).items() if name.startswith("gsp_")}
            for name, value in sizes.items():
                if value < 1:
                    raise ValueError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
            groups = {name.removeprefix("gsp_"): value for name, value in sizes.items()}
            return shared_prefix_requests(vocabulary, args.seed, **groups)[: args.num_prompts]
        case _:
            scale = TraceScale(
                length=args.mooncake_length_scale,
                output=args.mooncake_output_scale,
                time=args.mooncake_slowdown_factor,
            )
            trace = read_trace(args.dataset_path, args.num_prompts)
            return trace_requests(vocabulary, trace, scale)


async def run(args: argparse.Namespace) -> tuple[dict[str, Any], LoadResult]:
    """Run the whole test; return its figures and the results of all requests. Raises ValueError if
    the server, the tokenizer, a flag or a warm-up request does not work."""
    backend = BACKENDS[args.backend]()
    async with open_session(args.api_key) as session:
        tokens = await _fill_in_names(args, session)
        vocabulary = tokens.printable() if backend.wants_text else tokens.vocabulary
        requests = make_requests(args, vocabulary)
        times = arrival_times(requests, _request_rate(args), args.seed)
        texts = [tokens.as_text(one.prompt_ids) for one in requests] if backend.wants_text else None
        options = RequestOptions(
            base_url=args.base_url,
            model=args.model,
            ignore_eos=not args.disable_ignore_eos,
            temperature=args.temperature,
            extra_body=args.extra_request_body,
        )
        await _warm_up(args, session, backend, options, tokens)
        if args.flush_cache:
            await flush_cache(session, args.base_url, args.admin_api_key or args.api_key)
        with progress_bar(
            functools.partial(print, file=sys.stderr),
            desc="requests",
            total=len(requests),
            unit="req",
            disable=args.disable_tqdm,
        ) as bar:
            load = await generate_load(
                session,
                backend,
                requests,
                options,
                times=times,
                texts=texts,
                max_concurrency=args.max_concurrency,
                on_done=lambda result: bar.update(),
            )
    return {**_describe(args), **summarize(load)}, load


async def _fill_in_names(args: argparse.Namespace, session: aiohttp.ClientSession) -> Tokens:
    """Fill in model and tokenizer, if not given, from the server."""
    if args.model is None or args.tokenizer is None:
        info = await fetch_model_info(session, args.base_url)
        path = info.get("tokenizer_path") or info.get("model_path")
        args.tokenizer = args.tokenizer or path
        args.model = args.model or info.get("served_model_name") or info.get("model_path")
    if args.tokenizer is None:
        raise ValueError("--tokenizer: the server does not say where its tokenizer is; give it")
    args.model = args.model or "default"
    return load_tokens(args.tokenizer)


async def _warm_up(
    args: argparse.Namespace,
    session: aiohttp.ClientSession,
    backend: ApiBackend,
    options: RequestOptions,
    tokens: Tokens,
) -> None:
    """Send requests whose prompts differ from the prompts of the test, which stay uncached."""
    count, seed = max(0, args.warmup_requests), args.seed + _WARMUP_SEED_OFFSET
    sizes = {"input_len": 64, "output_len": 4, "range_ratio": 1}
    for one in random_requests(tokens.vocabulary, count, seed, **sizes):
        result = await backend.send(session, one, options, tokens.decode(one.prompt_ids))
        if not result.success:
            raise ValueError(f"the warm-up request failed: {result.error}")


def _request_rate(args: argparse.Namespace) -> float | None:
    if args.request_rate is None and args.dataset_name != "mooncake":
        return float("inf")
    rate: float | None = args.request_rate
    return rate


def _describe(args: argparse.Namespace) -> dict[str, Any]:
    rate = _request_rate(args)
    shown = "trace" if rate is None else rate
    return {
        **provenance(),
        "tag": args.tag,
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": "inf" if rate == float("inf") else shown,
        "max_concurrency": args.max_concurrency,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_range_ratio": args.random_range_ratio,
        "seed": args.seed,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test of the command line and return the exit status."""
    args = parse_args(argv)
    try:
        figures, load = asyncio.run(run(args))
    except ValueError as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 2
    print(table(figures))
    if figures["client_cpu_share"] > _BUSY_CLIENT:
        print(
            f"bench_serving: this client used {figures['client_cpu_share']:.0%} of a core; the "
            "figures may be its own limit and not the server's",
            file=sys.stderr,
        )
    append(figures | (details(load.results) if args.output_details else {}), args.output_file)
    errors = error_counts(load.results)
    for cause, count in errors.items():
        print(f"bench_serving: {count} requests failed: {cause}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
