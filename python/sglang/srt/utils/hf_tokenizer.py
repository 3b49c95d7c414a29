"""Tokenizers from local files, and the bytes of a token."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.utils.json_files import refuse_lfs_pointer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
_SAMPLES: Final = (" Hello", " 1234 56", " I'M  here\n\n", " e\u0301")
"""Texts that tokenizers split by different rules. They begin with a space: a prefix space that
tokenizer_config.json asks for makes no difference."""


def check_tokenizer_files(path: str) -> None:
    """Check that the directory `path` has the files of a tokenizer. Needs no transformers. Raises
    ValueError, in one line with the remedy, if they are missing."""
    directory = Path(path)
    # `Path.is_dir` raises OSError for a name that is too long.
    if not os.path.isdir(directory):
        raise ValueError(
            f"tokenizer path {path!r} is not a directory: give a local directory with the "
            "tokenizer's files, or a name on the hub (OWNER/NAME)"
        )
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"{path} has no tokenizer ({', '.join(_TOKENIZER_FILES)}): copy its files there or "
            "give another directory with --tokenizer-path"
        )
    for name in _TOKENIZER_FILES:
        refuse_lfs_pointer(directory / name)


def get_tokenizer(
    path: str, *, trust_remote_code: bool = False, is_known: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer in the directory `path`, without downloads.

    Args:
        trust_remote_code: True if code that comes with the tokenizer may run.
        is_known: Another process of this server has loaded it too, and logs the warnings.

    Raises:
        ValueError: Files are missing or broken, or the tokenizer needs such code. One line with
            the remedy.
    """
    check_tokenizer_files(path)
    # Imported here, because it takes seconds and imports torch.
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    library = logging.getLogger("transformers")
    level = library.level
    if is_known:
        library.setLevel(logging.ERROR)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
        text = None if is_known else _text_split_otherwise(tokenizer, path)
    # For damaged files the libraries raise types of their own, some of them bare Exception.
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(
                f"the tokenizer in {path} needs code that comes with it (auto_map): if you trust "
                "that code, start with --trust-remote-code"
            ) from error
        cause = " ".join(str(error).split())[:300]
        raise ValueError(f"the tokenizer in {path} cannot be loaded: {cause}") from error
    finally:
        library.setLevel(level)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if text is not None:
        logger.warning(
            "the tokenizer in %s: the class %s splits text by rules of its own, so %r gets other "
            "tokens than by tokenizer.json. If the model needs the tokens of that file, give "
            "--tokenizer-path a copy of the directory without config.json and with "
            '"tokenizer_class": "TokenizersBackend" in tokenizer_config.json',
            path,
            type(tokenizer).__name__,
            text,
        )
    return tokenizer


def _text_split_otherwise(tokenizer: Any, path: str) -> str | None:
    """A text that `tokenizer` encodes otherwise than the tokenizer.json in `path` says, if known.

    Some classes of transformers read only the vocabulary and the merges from that file
    (findings/transformers_splits_by_class.sh).
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    file = Path(path) / "tokenizer.json"
    if type(tokenizer) is PreTrainedTokenizerFast or not file.exists():  # It reads the whole file.
        return None
    try:
        own = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 (the library raises bare ones)
        cause = " ".join(str(error).split())[:300]
        logger.warning(
            "%s cannot be read (%s): the class %s has not needed it. Copy it again, or remove it",
            file,
            cause,
            type(tokenizer).__name__,
        )
        return None

    def differs(text: str) -> bool:
        ids = own.encode(text, add_special_tokens=False).ids
        return bool(ids != tokenizer.encode(text, add_special_tokens=False))

    return next(filter(differs, _SAMPLES), None)


def is_byte_level(tokenizer: object) -> bool:
    """True if each token has bytes independent of its neighbours, as in byte-level BPE."""
    # Imported here, so that checking files does not load the library.
    from tokenizers import decoders

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(backend, "decoder", None), decoders.ByteLevel)


def token_bytes(token: str) -> bytes:
    """The bytes of one token of a byte-level vocabulary.

    Added tokens are plain text. If all characters of one are in the byte alphabet, both readings
    give the same bytes.
    """
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:
        return token.encode("utf-8", errors="replace")


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (Radford et al., GPT-2): each byte as a visible character.

    Printable Latin-1 characters stand for themselves, the other bytes for 256, 257, ...
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return table


def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that `skip_special_tokens` removes from the text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {int(token_id) for token_id, token in added.items() if token.special}
    return frozenset(special | {int(i) for i in tokenizer.all_special_ids})
