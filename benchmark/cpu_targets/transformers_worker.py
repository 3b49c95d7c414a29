"""transformers on the same model in a process of its own: a JSON question a line, an answer a line.

    {"do": "prefill", "prompts": [[ids]]}                  -> {"seconds": s, "tokens": [id]}
    {"do": "generate", "prompts": [[ids], ...], "new": n}  -> {"seconds": s, "tokens": [last ids]}

Usage: MODEL_DIRECTORY. It uses torch's default number of threads and the checkpoint's dtype, as the
engine does, and asks for the last token's logits alone.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def prefill(model: Any, prompts: torch.Tensor) -> list[int]:
    logits = model(prompts, use_cache=True, logits_to_keep=1).logits
    tokens: list[int] = logits[:, -1].argmax(-1).tolist()
    return tokens


def generate(model: Any, prompts: torch.Tensor, new_tokens: int) -> list[int]:
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    assert output.shape[1] == prompts.shape[1] + new_tokens
    tokens: list[int] = output[:, -1].tolist()
    return tokens


def main() -> int:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
    model.eval()  # type: ignore[no-untyped-call]
    about = {"dtype": str(model.dtype), "threads": torch.get_num_threads()}
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        prompts = torch.tensor(question["prompts"])
        started = time.perf_counter()
        with torch.inference_mode():
            if question["do"] == "prefill":
                tokens = prefill(model, prompts)
            else:
                tokens = generate(model, prompts, question["new"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
