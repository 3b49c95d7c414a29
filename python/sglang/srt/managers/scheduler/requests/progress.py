"""Progress of a request: its tokens, and which of them are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.mem_cache.tree.radix_key import TokenArray, token_array

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMatcher, GrammarTicket
    from sglang.srt.managers.messages.io_struct import FinishReason, TopLogprobs
    from sglang.srt.managers.scheduler.requests.stop_finder import StopFinder


@dataclass(slots=True, eq=False)
class RequestProgress:
    """Progress of a request. Counts are tokens."""

    prompt_ids: TokenArray
    """The prompt, which never changes."""
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    output_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    """Logprobs of the prompt's tokens after `logprob_start_len` that are computed so far."""
    input_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    turn: int = 0
    """See `policy.Arrival`; set by `RequestQueues`."""
    cached_on_arrival: int = 0
    """Tokens of the prompt that L1 and L2 had on arrival."""
    kv_committed_len: int = 0
    """Tokens whose keys and values are in the pool."""
    num_in_flight: int = 0
    """Tokens after the committed ones that decode steps in flight compute. They have slots; the CPU
    does not know yet whether the request ends before them."""
    finish_reason: FinishReason | None = None
    """Reason why it ended; set by `RequestQueues`."""
    to_abort: FinishReason | None = None
    """Reason why it ends before the next step; set by `RequestQueues`."""
    stop_finder: StopFinder | None = None
    """Search for stop strings and patterns, up to the end of `output_ids`; None: the request has
    none, or no output yet."""
    grammar_ticket: GrammarTicket | None = None
    """Set while its grammar compiles: it cannot be scheduled."""
    matcher: GrammarMatcher | None = None
    """Matcher of its grammar, which has accepted `output_ids`; a retracted request keeps it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far. A prefill computes all of them."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def uncommitted_tokens(self) -> int:
        """Tokens of prompt and output that a prefill still has to compute."""
        return self.num_tokens - self.kv_committed_len

    @property
    def next_seq_len(self) -> int:
        """Context length before the next decode step."""
        return self.kv_committed_len + self.num_in_flight

    def ids_between(self, begin: int, end: int) -> TokenArray:
        """Tokens `[begin, end)` of prompt and output. A range inside the prompt is a view."""
        prompt_len = len(self.prompt_ids)
        if end <= prompt_len:
            return self.prompt_ids[begin:end]
        output = token_array(self.output_ids[max(0, begin - prompt_len) : end - prompt_len])
        if begin >= prompt_len:
            return output
        return np.concatenate([self.prompt_ids[begin:], output])
