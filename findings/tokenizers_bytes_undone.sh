#!/usr/bin/env bash
# tokenizers 0.23.3: half a character takes the valid bytes before it from the text, and ends a
# stream.
#
# Expected: of a line break and the first byte of a longer character, both as byte tokens, the line
# break stays and the other byte becomes the replacement character. sentencepiece 0.2.3, whose
# vocabularies have these tokens, decodes so, and the description of ByteFallback promises the
# replacement for bytes that cannot be converted.
# Seen: ByteFallback judges a whole run of byte tokens at once. The line break, which is valid and
# which DecodeStream has given out already, becomes a replacement character too. The next token makes
# DecodeStream raise "Invalid prefix", as does each one after it: a server that streams sent a line
# break that the whole text lacks, and gets no more text of that answer.
#
# Exit status 0: as described. 1: these versions behave otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    tokenizers==0.23.3 sentencepiece==0.2.3
"$folder/venv/bin/python" - <<'PYTHON'
import io

import sentencepiece
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

PIECES = ["▁a", "<0x0A>", "<0xE2>", "b", "b"]

model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["a b ab ba"] * 20),
    model_writer=model,
    model_type="bpe",
    byte_fallback=True,
    vocab_size=270,
    hard_vocab_limit=False,
    minloglevel=2,
)
reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
ids = reference.piece_to_id(PIECES)
expected = reference.decode(ids)

vocabulary = {reference.id_to_piece(one): one for one in range(reference.get_piece_size())}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.decoder = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
whole = tokenizer.decode(ids)
stream, steps = DecodeStream(skip_special_tokens=True), []
for one in ids:
    try:
        steps.append(stream.step(tokenizer, one))
    except Exception as error:
        steps.append(str(error).partition(" encountered")[0])

print("pieces:", PIECES)
print(f"sentencepiece, all at once: {expected!r}")
print(f"tokenizers, all at once: {whole!r}")
print(f"tokenizers, as a stream: {steps}")
assert expected == "a\n\ufffdbb", "otherwise now"
assert whole == "a\ufffd\ufffdbb", "otherwise now"
assert steps == ["a", "\n", None, "Invalid prefix", "Invalid prefix"], "otherwise now"
PYTHON
