"""The configuration of a model, read from a local directory in Hugging Face's format.

Reads `config.json` and, if present, `generation_config.json`. `model_loader` reads the weights.
Nothing here uses the network.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from sglang.srt.configs.config_fields import FIELDS, TEXT_CONFIG
from sglang.srt.configs.config_file import is_remote_config, read_config
from sglang.srt.configs.generation_config import GENERATION_CONFIG
from sglang.srt.configs.quantization_config import QuantizationConfig, quantization_of
from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.utils.json_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_MAX_SIZE: Final = (1 << 31) - 1
_STATE_CHUNKS: Final = (16, 32, 64, 128)
"""Values of `chunk_size` that the kernels take."""
RING_BYTES: Final = 8 << 20
"""Most bytes of a prefix's windows: the keys and values of all layers with a window, over all
ranks. Each snapshot is a copy of them, and so is each object of L3."""
_ALL_WINDOWED: Final = frozenset({"deepseek_v4"})
"""Model types whose layers all have a window, beside what else they attend to."""
_ATTENTION: Final = frozenset({"full_attention", "indexed_attention"})
"""Names in `layer_types` of layers that cache something for each token."""
_LAYER_LISTS: Final = ("layers_block_type", "hybrid_override_pattern")
"""Other names of `layer_types`."""
_PARTIAL: Final = frozenset({"glm4_moe", "minimax_m2", "deepseek_v4"})
"""Model types that rotate a part of a head's dimensions."""
_ROPE_PARTS: Final = {"deepseek_v4": "main"}
"""Settings in `rope_parameters` of the layers without compressed rows."""
_UNROTATED: Final = frozenset({"nemotron_h", "glm5_next_text"})
"""Model types whose attention knows no positions."""
_HEAD_DIM_OF_TYPE: Final = {"glm5_next_text": "qk_nope_head_dim"}
"""Field with the size of a head, where `head_dim` is the rotated part."""
_EPS_OF_TYPE: Final = {"nemotron_h": "layer_norm_epsilon"}
"""Field with the norms' epsilon, where it has another name."""
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape, dtype and limits of one model. Made by `from_path`."""

    model_path: str
    architecture: str
    model_type: str
    """Model type of the whole checkpoint; `architecture` is the whole checkpoint's too."""
    hf_config: PretrainedConfig
    """Settings of the text model: config.json, or the part of it that `TEXT_CONFIG` names."""
    dtype: torch.dtype
    """Dtype of weights and activations."""
    context_len: int
    """Most tokens of a request, prompt and output together."""
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    """Ascending, and in the vocabulary. Any of them ends a generation. See `with_end_of`."""
    linear_attention_layers: tuple[int, ...] = ()
    """Layers whose state is recurrent."""
    state_chunk: int | None = None
    """Tokens that these layers compute at once, if config.json says it. Snapshots are at multiples
    of it."""
    sliding_window: int | None = None
    """Tokens that a token of the `sliding_window_layers` sees, itself included."""
    sliding_window_layers: tuple[int, ...] = ()
    """Layers with a window that is shorter than `context_len`, or beside compressed rows."""
    ssm_dtype: torch.dtype = torch.float32
    """Dtype of recurrent states in the pool."""
    quantization: QuantizationConfig | None = None
    """Format of the weights in the files; None: they are not quantized."""
    has_draft_layer: bool = False
    """True if the checkpoint's layer that predicts the token after next is loaded, as layer
    `num_hidden_layers`."""

    @property
    def num_layers(self) -> int:
        """All layers that are loaded: `num_hidden_layers`, and the draft layer if there is one."""
        return self.num_hidden_layers + self.has_draft_layer

    @property
    def has_experts(self) -> bool:
        """True if some layers have experts, of which a token uses a few."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return any(getattr(self.hf_config, name, None) for name in names)

    @property
    def state_noun(self) -> str:
        """Name, for messages, of the state that stands for a whole prefix, in models with one."""
        return "recurrent state" if self.linear_attention_layers else "window"

    def with_end_of(self, tokenizer: PreTrainedTokenizerBase) -> ModelConfig:
        """A copy whose end tokens include the tokenizer's: some checkpoints name the end of a turn
        only in the tokenizer."""
        found = tokenizer.eos_token_id
        ids = [*self.eos_token_ids, *([found] if isinstance(found, int) else ())]
        return replace(self, eos_token_ids=_in_vocabulary(ids, self.vocab_size))

    @classmethod
    def from_args(cls, args: ServerArgs) -> ModelConfig:
        """Read the model that resolved arguments name. Raises as `from_path`."""
        assert args.model_path is not None, "resolved arguments name the model"
        return cls.from_path(
            args.model_path,
            dtype=args.dtype,
            context_length=args.context_length,
            ssm_dtype=args.mamba_ssm_dtype,
            trust_remote_code=args.trust_remote_code,
            quantization=args.quantization,
            has_draft_layer=args.speculative_algorithm is not None,
        )

    @classmethod
    def from_path(
        cls,
        model_path: str,
        *,
        dtype: str = "auto",
        context_length: int | None = None,
        ssm_dtype: str = "float32",
        trust_remote_code: bool = False,
        quantization: str | None = None,
        has_draft_layer: bool = False,
    ) -> ModelConfig:
        """Read the model in the directory `model_path`.

        Args:
            model_path: Directory with `config.json`.
            dtype: A key of `DTYPES`, or "auto" for the checkpoint's dtype.
            context_length: Tokens; None means the length that config.json has.
            ssm_dtype: A key of `DTYPES`, for recurrent states.
            trust_remote_code: True if a config class of the checkpoint may run.
            quantization: Name of the weight format; None: what the checkpoint says.
            has_draft_layer: True if the layer that drafts is loaded.

        Raises:
            ValueError: Something is missing or not supported. One line with the remedy.
        """
        directory = Path(model_path)
        architecture, raw = read_config(
            model_path, trust_remote_code=trust_remote_code, quantization=quantization
        )
        whole = _parse_hf_config(directory, raw, architecture)
        hf = whole if FIELDS[architecture].text is None else getattr(whole, TEXT_CONFIG)
        if has_draft_layer:
            _check_draft_layer(hf, architecture)
        num_heads = positive_int(hf, "num_attention_heads")
        hidden_size = positive_int(hf, "hidden_size")
        kv_heads = _positive_int_or(hf, "num_key_value_heads", num_heads)
        dim_name = _HEAD_DIM_OF_TYPE.get(hf.model_type, "head_dim")
        head_dim = _positive_int_or(hf, dim_name, hidden_size // num_heads)
        if num_heads % kv_heads or head_dim % 2:
            raise ValueError(
                f"config.json: num_attention_heads={num_heads} must be a multiple of "
                f"num_key_value_heads={kv_heads}, and head_dim={head_dim} must be even"
            )
        linear_layers = _linear_attention_layers(hf, raw)
        may_be_partial = bool(linear_layers) or hf.model_type in _PARTIAL
        if hf.model_type in _UNROTATED:
            rope = RopeConfig(rope_type="none")
        else:
            part = _ROPE_PARTS.get(hf.model_type)
            rope = RopeConfig.from_hf(hf, may_be_partial=may_be_partial, part=part)
        if rope.rotary_dim(head_dim) not in range(2, head_dim + 1, 2):
            raise ValueError(
                f"config.json: partial_rotary_factor={rope.partial_rotary_factor} of "
                f"head_dim={head_dim} must be an even number of dimensions, at least 2"
            )
        context_len = _resolve_context_len(context_length, hf, rope)
        windowed_layers = _sliding_window_layers(hf, context_len)
        own_dtype = _resolve_dtype(dtype, (hf, whole), directory)
        if windowed_layers:
            # Keys of DeepSeek-V4 are values.
            parts = 1 if hf.model_type in _ALL_WINDOWED else 2
            _check_rings(hf, len(windowed_layers), kv_heads * head_dim * parts, own_dtype)
        vocab_size = positive_int(hf, "vocab_size")
        return cls(
            model_path=str(directory),
            architecture=architecture,
            model_type=whole.model_type,
            hf_config=hf,
            dtype=own_dtype,
            context_len=context_len,
            hidden_size=hidden_size,
            intermediate_size=positive_int(hf, _name_of_intermediate_size(hf)),
            num_hidden_layers=positive_int(hf, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            rms_norm_eps=float(getattr(hf, _EPS_OF_TYPE.get(hf.model_type, "rms_norm_eps"))),
            tie_word_embeddings=_is_head_tied(raw, whole),
            rope=rope,
            eos_token_ids=_in_vocabulary(_eos_token_ids((hf, whole), directory), vocab_size),
            linear_attention_layers=linear_layers,
            state_chunk=_state_chunk(hf),
            sliding_window=hf.sliding_window if windowed_layers else None,
            sliding_window_layers=windowed_layers,
            ssm_dtype=DTYPES[ssm_dtype],
            quantization=quantization_of(raw, asked=quantization),
            has_draft_layer=has_draft_layer,
        )


def _is_head_tied(raw: dict[str, Any], whole: PretrainedConfig) -> bool:
    """`tie_word_embeddings` of the whole checkpoint, else of its text model, else the class's."""
    field = "tie_word_embeddings"
    said = (raw.get(field), (raw.get(TEXT_CONFIG) or {}).get(field), getattr(whole, field))
    return bool(next(value for value in said if value is not None))


def _parse_hf_config(directory: Path, raw: dict[str, Any], architecture: str) -> PretrainedConfig:
    try:
        # transformers would ask on the terminal if this argument were missing. Code of the
        # checkpoint runs only if transformers has none.
        config = AutoConfig.from_pretrained(
            str(directory),
            local_files_only=True,
            trust_remote_code=is_remote_config(raw, architecture),
        )
    # An invalid config can raise any of these in the library; they mean the same to the user.
    except (
        StrictDataclassError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        OSError,
    ) as error:
        cause = " ".join(str(error).split())[:300]
        raise ValueError(f"{directory}/config.json is not valid: {cause}") from error
    assert isinstance(config, PretrainedConfig)
    return config


def _check_draft_layer(hf: PretrainedConfig, architecture: str) -> None:
    """Log how many of the checkpoint's layers that draft tokens are left out.

    Raises:
        ValueError: The architecture or the checkpoint has no such layer, or it has an embedding of
            its own. One line with the remedy.
    """
    remedy = "remove --speculative-algorithm"
    field = FIELDS[architecture].of_text.num_draft_layers
    if field is None:
        able = [name for name, fields in FIELDS.items() if fields.of_text.num_draft_layers]
        raise ValueError(
            f"--speculative-algorithm: {architecture} has no layer that drafts tokens; supported "
            f"are {', '.join(able)}: {remedy}"
        )
    # A checkpoint without the field may have one such layer: the loader misses its tensors.
    count = getattr(hf, field, None)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError(
            f"config.json: {field}={count!r}: the checkpoint has no layer that drafts tokens: "
            f"{remedy}"
        )
    if getattr(hf, "mtp_use_dedicated_embeddings", False):
        raise ValueError(
            "config.json: mtp_use_dedicated_embeddings=True is not supported for a layer that "
            f"drafts tokens, which shares the model's embedding: {remedy}"
        )
    if count is not None and count > 1:
        logger.info(
            "config.json: %s=%d: the first layer that drafts tokens is loaded, and drafts all",
            field,
            count,
        )


def _linear_attention_layers(hf: PretrainedConfig, raw: dict[str, Any]) -> tuple[int, ...]:
    """Layers with a recurrent state.

    Raises:
        ValueError: `layer_types` does not fit the layers, or no layer has full attention.
    """
    types = getattr(hf, "layer_types", None) or []
    linear = tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
    # Some classes of transformers count the list, and ignore the number.
    count = raw.get("num_hidden_layers") or hf.num_hidden_layers
    if linear and (len(types) != count or _ATTENTION.isdisjoint(types)):
        name = next((name for name in _LAYER_LISTS if raw.get(name)), "layer_types")
        raise ValueError(
            f"config.json: {name} {raw.get(name, types)} must name all {count} layers, and at "
            "least one with full_attention"
        )
    return linear


def _state_chunk(hf: PretrainedConfig) -> int | None:
    """See `ModelConfig.state_chunk`.

    Raises:
        ValueError: `chunk_size` is not one of `_STATE_CHUNKS`.
    """
    chunk = getattr(hf, "chunk_size", None)
    if chunk is not None and chunk not in _STATE_CHUNKS:
        words = ", ".join(map(str, _STATE_CHUNKS))
        raise ValueError(
            f"config.json: chunk_size={chunk!r} must be one of {words}: set it to 128, which "
            "changes no result"
        )
    return chunk


def _sliding_window_layers(hf: PretrainedConfig, context_len: int) -> tuple[int, ...]:
    """Layers with a window that is shorter than the longest context, and those that have one
    beside what else they attend to.

    Raises:
        ValueError: The window is no positive integer, or all layers have it.
    """
    if hf.model_type in _ALL_WINDOWED:
        positive_int(hf, "sliding_window")
        return tuple(range(hf.num_hidden_layers))
    types = getattr(hf, "layer_types", None) or []
    if hf.model_type == "mistral" and hf.sliding_window is not None:
        types = ["sliding_attention"] * hf.num_hidden_layers
    windowed = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if not windowed or context_len <= positive_int(hf, "sliding_window"):
        return ()
    if len(windowed) == len(types):
        raise ValueError(
            f"config.json: all layers have a window of {hf.sliding_window} tokens, and at least "
            f"one layer with full attention is needed: give --context-length {hf.sliding_window}, "
            "up to which windows change nothing"
        )
    return windowed


def _check_rings(hf: PretrainedConfig, num_layers: int, features: int, dtype: torch.dtype) -> None:
    """Raise ValueError: a prefix's windows take more than `RING_BYTES`.

    Args:
        num_layers: Layers with a window.
        features: Elements of the keys and values of one token and layer.
    """
    elements = num_layers * hf.sliding_window * features
    found = elements * dtype.itemsize
    if found <= RING_BYTES:
        return
    remedy = f"--context-length {hf.sliding_window}, up to which windows change nothing"
    if hf.model_type in _ALL_WINDOWED:
        remedy = "a checkpoint with a smaller window"
    if elements * 2 <= RING_BYTES:
        remedy = "--dtype bfloat16"
    raise ValueError(
        f"config.json: sliding_window={hf.sliding_window} in {num_layers} layers takes {found} "
        f"bytes for each prefix, more than the {RING_BYTES} that are supported: give {remedy}"
    )


def _name_of_intermediate_size(hf: PretrainedConfig) -> str:
    """A model with experts in all layers may lack the width of a dense layer."""
    name = "intermediate_size"
    return name if getattr(hf, name, None) is not None else f"moe_{name}"


def positive_int(hf: PretrainedConfig, name: str) -> int:
    """The field `name`, at most 2^31 - 1.

    Raises:
        ValueError: It is missing, or no such integer.
    """
    value = getattr(hf, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
        raise ValueError(
            f"config.json: {name}={value!r} must be a positive integer, at most {_MAX_SIZE}"
        )
    return value


def _positive_int_or(hf: PretrainedConfig, name: str, default: int) -> int:
    """The field `name`, which may be missing or null. Raises as `positive_int`."""
    return default if getattr(hf, name, None) is None else positive_int(hf, name)


def _resolve_dtype(dtype: str, configs: Iterable[PretrainedConfig], directory: Path) -> torch.dtype:
    """The first of `configs` that has a dtype counts."""
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ValueError(f"dtype {dtype!r} must be one of auto, {', '.join(DTYPES)}")
    said = (getattr(config, "dtype", None) for config in configs)
    found = next(filter(None, said), None) or _dtype_of_weights(directory) or torch.float32
    if isinstance(found, str):
        found = DTYPES.get(found.removeprefix("torch."), found)
    if found not in DTYPES.values():
        raise ValueError(
            f"the checkpoint's dtype {found} is not supported: give one of "
            f"{', '.join(DTYPES)} as dtype"
        )
    assert isinstance(found, torch.dtype)
    return found


def _dtype_of_weights(directory: Path) -> torch.dtype | None:
    """Dtype of the first weight that is not quantized, for configs without a dtype."""
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    found = _SAFETENSORS_DTYPES.get(file.get_slice(name).get_dtype())
                    if found is not None:
                        return found
        except (SafetensorError, OSError):
            # The loader reports a torn file, with the name of the tensor.
            return None
    return None


def _resolve_context_len(requested: int | None, hf: PretrainedConfig, rope: RopeConfig) -> int:
    """Tokens of the longest context: `requested`, or the length in config.json."""
    field = "max_position_embeddings"
    longest = stated = positive_int(hf, field)
    if rope.rope_type == "linear":
        longest = stated = int(stated * rope.factor)
    elif rope.rope_type == "yarn":
        # Model cards switch YaRN on beside a `max_position_embeddings` of before.
        extended = int(rope.original_max_position_embeddings * rope.factor)
        if extended > stated:
            longest = extended
            field = "YaRN's factor times original_max_position_embeddings"
    if requested is None:
        return stated
    if not 1 <= requested <= longest:
        raise ValueError(
            f"--context-length {requested}: must be between 1 and {longest}, the limit in the "
            f"model's config.json ({field})"
        )
    return requested


def _eos_token_ids(configs: Iterable[PretrainedConfig], directory: Path) -> list[int]:
    """The end tokens of both files: chat models have the end of a turn only in the second."""
    generation = read_json(directory / GENERATION_CONFIG) or {}
    found: list[int] = []
    said = [("config.json", getattr(config, "eos_token_id", None)) for config in configs]
    for file, value in (*said, (GENERATION_CONFIG, generation.get("eos_token_id"))):
        ids = value if isinstance(value, list) else [value] if value is not None else []
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ValueError(
                f"{directory / file}: eos_token_id={str(value)[:80]} must be token ids: correct it"
            )
        found += ids
    return found


def _in_vocabulary(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The different ids that the model can choose, ascending."""
    return tuple(sorted({i for i in ids if 0 <= i < vocab_size}))
