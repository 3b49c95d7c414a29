"""What one grammar may cost, and what all of them may keep."""

from __future__ import annotations

import msgspec


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a grammar backend. Sizes in bytes, times in seconds.

    Compiling is bounded by wall time, because it is a process that is killed; a matcher's steps
    are counted in CPU time, so that a busy machine fails no request.
    """

    max_text_bytes: int = 64 << 10
    compile_timeout: float = 10.0
    first_try: float = 1.0
    """Of that, before it is asked whether others wait. Common grammars take milliseconds."""
    compile_memory: int = 1 << 30
    """Address space that one compilation may add to its process."""
    idle_process_memory: int = 1 << 30
    """Resident memory above which a compile process is replaced by a fresh one."""
    start_timeout: float = 60.0
    """For the compile process to import its libraries; not part of `compile_timeout`."""
    queue_timeout: float = 30.0
    compile_threads: int = 2
    """Compilations at a time, and the most compile processes there are."""
    max_compiling: int = 64
    max_grammars: int = 256
    """Results kept, failures included."""
    max_grammar_bytes: int = 64 << 20
    max_cache_bytes: int = 256 << 20
    step_burst: float = 0.25
    """CPU seconds a matcher may use beyond `step_cost` for each of its tokens."""
    step_cost: float = 0.002
    """CPU seconds a token may take on average in the matcher, without the applying of masks."""
