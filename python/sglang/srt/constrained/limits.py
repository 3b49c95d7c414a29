"""Limits of time and memory for one grammar, and for all cached grammars."""

from __future__ import annotations

import msgspec


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a grammar backend. Sizes in bytes, times in seconds.

    Compilations have a limit of wall time, after which their process is killed. Matchers have a
    limit of CPU time, so that a busy machine fails no request.
    """

    max_text_bytes: int = 64 << 10
    compile_timeout: float = 10.0
    first_try: float = 1.0
    """Part of `compile_timeout` after which a job gives way to others. Common grammars need
    milliseconds."""
    compile_memory: int = 1 << 30
    """Address space that one compilation may add to the process."""
    idle_process_memory: int = 1 << 30
    """Resident memory above which a compile process is replaced by a fresh one."""
    start_timeout: float = 60.0
    """Time for the compile process to import its libraries; not part of `compile_timeout`."""
    queue_timeout: float = 30.0
    compile_threads: int = 2
    """Most compilations, and most compile processes, at a time."""
    max_compiling: int = 64
    max_grammars: int = 256
    """Cached results, failures included."""
    max_grammar_bytes: int = 64 << 20
    max_cache_bytes: int = 256 << 20
    step_burst: float = 0.25
    """CPU seconds that a matcher may use in addition to `step_cost` for each token."""
    step_cost: float = 0.002
    """CPU seconds per token that a matcher may use on average, without applying masks."""
