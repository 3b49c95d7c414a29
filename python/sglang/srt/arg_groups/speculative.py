"""Settings of speculative decoding: the part of `ServerArgs` that changes how tokens are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from sglang.srt.arg_groups.cli import Heading, flag

ALGORITHMS: Final = ("NEXTN", "EAGLE")
"""Two names of one algorithm: the checkpoint's own layer drafts."""
MOST_STEPS: Final = 8
"""Most drafted tokens a step; each later one is accepted less often."""
_DEFAULT_STEPS: Final = 3


@dataclasses.dataclass(kw_only=True)
class SpeculativeArgs:
    """Fields of `ServerArgs`."""

    speculative_algorithm: str | None = flag(
        None,
        "Draft tokens with the checkpoint's own layer (MTP), and verify them together.",
        choices=ALGORITHMS,
        aliases=("--speculative-algo",),
        heading=Heading.SPECULATION,
    )
    speculative_num_steps: int | None = flag(
        None, f"Tokens drafted a step; absent: {_DEFAULT_STEPS}."
    )
    speculative_eagle_topk: int | None = flag(None, "Drafts side by side; only 1 is supported.")
    speculative_num_draft_tokens: int | None = flag(
        None, "Tokens verified a step: one more than are drafted."
    )


def num_draft_tokens(args: SpeculativeArgs) -> int:
    """Tokens that a decode step verifies for each request; 1 without speculation. The arguments
    have passed `check_speculative`."""
    if args.speculative_algorithm is None:
        return 1
    return (args.speculative_num_steps or _DEFAULT_STEPS) + 1


def check_speculative(args: SpeculativeArgs, attention_backend: str | None) -> Iterator[str]:
    """Refuse settings that contradict each other: a line for each, with the remedy."""
    settings = {
        "--speculative-num-steps": args.speculative_num_steps,
        "--speculative-eagle-topk": args.speculative_eagle_topk,
        "--speculative-num-draft-tokens": args.speculative_num_draft_tokens,
    }
    if args.speculative_algorithm is None:
        for name, value in settings.items():
            if value is not None:
                yield f"{name} {value} has no effect without --speculative-algorithm NEXTN"
        return
    steps, topk = args.speculative_num_steps, args.speculative_eagle_topk
    if steps is not None and not 1 <= steps <= MOST_STEPS:
        yield f"--speculative-num-steps {steps} must be from 1 to {MOST_STEPS}"
        return
    if topk not in (None, 1):
        yield f"--speculative-eagle-topk {topk}: only chains are supported, so give 1"
    asked, needed = args.speculative_num_draft_tokens, num_draft_tokens(args)
    if asked not in (None, needed):
        yield (
            f"--speculative-num-draft-tokens {asked} must be one more than "
            f"--speculative-num-steps: give {needed}, or leave it out"
        )
    if attention_backend == "ascend":
        yield (
            "--speculative-algorithm with --attention-backend ascend: it reads whole pages, and "
            "the draft layer's contexts begin inside one: use torch_native"
        )
