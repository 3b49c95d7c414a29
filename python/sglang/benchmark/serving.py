"""The load test at SGLang's newer path: `python -m sglang.benchmark.serving --help`."""

from __future__ import annotations

from sglang.bench_serving import main

if __name__ == "__main__":
    raise SystemExit(main())
