#!/usr/bin/env bash
# transformers 5.24.0: AutoTokenizer takes vocabulary and merges from tokenizer.json, and splits text
# by rules of its own.
#
# Expected: the ids that the tokenizers library gives for the same file. A tokenizer.json has the rules
# that were used in training: how text is normalized, and cut into parts before merges apply.
# PreTrainedTokenizerFast in tokenizer_config.json asks for just that file.
# Seen: some classes replace these rules by their own. With model_type qwen2 or qwen3_5 it happens
# whichever class the checkpoint names, also PreTrainedTokenizerFast or TokenizersBackend. With qwen3
# PreTrainedTokenizerFast reads the file. The file here cuts numbers into groups of three digits, as
# Llama 3 does; Qwen's rules cut single digits. With a file like Llama 2's, LlamaTokenizer loses a
# leading space: " Hello" gets the ids of "Hello". There is no error and no warning. The model gets
# splits that it has not seen in training, and a router that reads the file itself sees other ids
# than the server behind it.
#
# transformers issues 45812 and 45920 report other families, which are mended in this version.
# Exit status 0: as described. 1: these versions behave otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    transformers==5.24.0 tokenizers==0.23.3
cat > "$folder/load.py" <<'PYTHON'
import json
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

TEXTS = ["2024", "x 12345", "Hello", " Hello"]


def trained(alphabet):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    special, quiet = ["<unk>", "<s>", "</s>"], {"show_progress": False}
    return tokenizer, trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, **quiet)


groups, trainer = trained(pre_tokenizers.ByteLevel.alphabet())
cut = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|\s+"), "isolated")
groups.pre_tokenizer = pre_tokenizers.Sequence(
    [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
)
groups.decoder = decoders.ByteLevel()
groups.train_from_iterator(["Hello 2024 x 12345"] * 20, trainer)

pieces, trainer = trained([])
marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
pieces.normalizer = normalizers.Sequence(marks)
pieces.decoder = decoders.Metaspace()
pieces.train_from_iterator([" Hello", "Hello", "x 12345", "2024"] * 20, trainer)

FAST = "PreTrainedTokenizerFast"
# A file, the model_type, the class, and the texts whose ids differ.
CASES = [
    (groups, "qwen3", FAST, []),
    (groups, "qwen2", FAST, ["2024", "x 12345"]),
    (groups, "qwen2", "TokenizersBackend", ["2024", "x 12345"]),
    (groups, "qwen3_5", FAST, ["2024", "x 12345"]),
    (pieces, "llama", FAST, []),
    (pieces, "llama", "LlamaTokenizer", [" Hello"]),
]
print("transformers 5.24.0")
for number, (file, model_type, name, expected) in enumerate(CASES):
    folder = Path(sys.argv[1], str(number))
    folder.mkdir()
    file.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": name, "unk_token": "<unk>", "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = AutoTokenizer.from_pretrained(folder)
    differ = []
    for text in TEXTS:
        by_file = file.encode(text)
        ids = loaded.encode(text, add_special_tokens=False)
        if ids != by_file.ids:
            differ.append(text)
            tokens = loaded.convert_ids_to_tokens(ids)
            print(f"{model_type}, {name}: {text!r}: {tokens}, by tokenizer.json {by_file.tokens}")
    assert differ == expected, f"otherwise now: {model_type}, {name}: {differ}"
    print(f"{model_type}, {name}: {len(differ)} of {len(TEXTS)} texts differ")
PYTHON
"$folder/venv/bin/python" "$folder/load.py" "$folder" 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }
