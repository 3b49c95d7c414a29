"""The portable tokenizer decodes and encodes like the library's tokenizer."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sglang.srt.constants import BUILTIN_MODEL_DIR
from sglang.srt.managers.detokenizer.detokenizer_manager import make_decoder_factory
from sglang.srt.managers.tokenizer.prompt_encoder import _core_encode
from sglang.srt.utils.hf_tokenizer import get_tokenizer, is_byte_level, special_token_ids
from sglang.srt.utils.portable_tokenizer import PortableTokenizer, tokenizer_data
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="base-a-test-cpu")

LIBRARY = get_tokenizer(str(BUILTIN_MODEL_DIR))
DATA = tokenizer_data(LIBRARY)
assert DATA is not None
PORTABLE = PortableTokenizer(DATA)
IDS = st.lists(st.integers(0, len(LIBRARY) + 3), max_size=30)


@given(IDS, st.booleans())
def test_decoded_texts_are_equal(ids: list[int], skip: bool) -> None:
    ours, theirs = (make_decoder_factory(one)(skip) for one in (PORTABLE, LIBRARY))
    assert ours.feed(ids) + ours.finish() == theirs.feed(ids) + theirs.finish()
    known = [i for i in ids if i < len(LIBRARY)]
    assert PORTABLE.decode(
        known, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    ) == LIBRARY.decode(known, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@given(st.text(max_size=40), st.booleans())
def test_the_core_encodes_like_the_library(text: str, add_special_tokens: bool) -> None:
    encode = _core_encode(LIBRARY)
    assert encode is not None
    for sample in (text, f"<|im_start|>user {text}<|im_end|>"):
        wanted = LIBRARY.encode(sample, add_special_tokens=add_special_tokens)
        assert encode(sample, add_special_tokens) == wanted


def test_special_ids_and_tokens_are_equal() -> None:
    assert is_byte_level(PORTABLE)
    assert special_token_ids(PORTABLE) == special_token_ids(LIBRARY)
    assert PORTABLE.convert_ids_to_tokens(len(LIBRARY) + 3) is None


def test_a_tokenizer_with_own_decoding_is_not_portable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Peculiar(PreTrainedTokenizerFast):
        def _decode(self, *args: object, **kwargs: object) -> str:
            return "something else"

    peculiar = Peculiar(tokenizer_object=PORTABLE.backend_tokenizer)  # type: ignore[no-untyped-call]
    assert tokenizer_data(peculiar) is None


@pytest.mark.parametrize(
    "module",
    ["sglang.srt.managers.detokenizer.detokenizer_manager", "sglang.srt.entrypoints.http_server"],
)
def test_text_processes_do_not_import_torch(module: str) -> None:
    code = (
        f"import sys, {module}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
