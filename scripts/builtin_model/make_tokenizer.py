"""Writes the built-in model's tokenizer: python scripts/builtin_model/make_tokenizer.py [DIR]

A byte-level vocabulary without merges. A piece of text (see `recall_text.piece_pattern`) that is a
word of the vocabulary is one token. Any other piece is spelled in bytes, so that every text
round-trips.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rigs.recall.recall_names import CAPITALISED, NAMES
from rigs.recall.recall_text import (
    ACKNOWLEDGEMENT,
    ROLES,
    UNKNOWN,
    opening_words,
    piece_pattern,
    template_words,
)

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 2176
CONTEXT_TOKENS = 16384
PACKAGE_DIR = Path(__file__).resolve().parents[2] / "python" / "sglang" / "builtin_model"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}
{%- if part['type'] != 'text' -%}
{{- raise_exception('this model reads text only') -}}
{%- endif -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def vocabulary() -> dict[str, int]:
    """Return piece (in the byte-level alphabet) to id: specials, bytes, template words, names."""
    words = template_words()
    opening = opening_words()
    bare = (*opening, *ROLES, ACKNOWLEDGEMENT, UNKNOWN, *(word.capitalize() for word in opening))
    tokens = [
        *(PAD, TURN_START, TURN_END),
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(f"\u0120{word}" for word in words),  # U+0120 stands for a space
        *(word for word in bare if len(word) > 1),
        *NAMES,
        *CAPITALISED.values(),
    ]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    if len(vocab) > VOCAB_SIZE:
        raise ValueError(f"{len(vocab)} tokens do not fit; shorten recall_names or VOCAB_SIZE")
    return vocab


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer with its special tokens and chat template."""
    core = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(piece_pattern()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([PAD, TURN_START, TURN_END])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        eos_token=TURN_END,
        pad_token=PAD,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=PACKAGE_DIR)
    directory = parser.parse_args().directory
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(directory)
    print(f"{len(tokenizer)} tokens of {VOCAB_SIZE} written to {directory}")


if __name__ == "__main__":
    main()
