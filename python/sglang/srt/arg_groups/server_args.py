"""The settings of a server: its flags, checked and resolved.

`ServerArgs` uses neither disk (except config.json and an `@file` extra config), network nor
hardware. `None` means "determined later": by `resolve()` if that needs neither machine nor model,
otherwise by the code that sizes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from typing import Any, ClassVar

from sglang.srt.arg_groups.api_keys import resolve_key
from sglang.srt.arg_groups.checks import (
    check_device,
    mistakes_of,
    num_dp_groups,
    without_effect,
)
from sglang.srt.arg_groups.cli import (
    add_flags,
    explain_foreign,
    field_of,
    flag_name,
    raise_errors,
    warn_of_ignored,
)
from sglang.srt.arg_groups.disaggregation import (
    may_decode,
    read_secret,
)
from sglang.srt.arg_groups.extra_config import public_text
from sglang.srt.arg_groups.foreign_flags import SAME_VALUES
from sglang.srt.arg_groups.model_pages import cache_and_page_size
from sglang.srt.arg_groups.server_flags import ServerFlags
from sglang.srt.constants import (
    BUILTIN_MODEL_DIR,
    BUILTIN_MODEL_NAME,
)
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_kinds import device_kind

logger = logging.getLogger(__name__)


# Not only the base: a constructor calls `__post_init__` if its class has one when it is made.
@dataclasses.dataclass(kw_only=True)
class ServerArgs(ServerFlags):
    """The settings of one engine. `resolve()` returns the copy that the engine uses."""

    grpc_mode: ClassVar[bool] = False
    """True if servers speak gRPC; `sglang_router.launch_server` asks."""

    def __post_init__(self) -> None:
        for name, values in SAME_VALUES.items():
            value = getattr(self, name)
            if isinstance(value, str) and value in values:
                setattr(self, name, values[value])

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_is_resolved"):
            raise dataclasses.FrozenInstanceError(f"{name}: resolved settings do not change")
        super().__setattr__(name, value)

    @property
    def keeps_pages_alone(self) -> bool:
        """True if cached pages are of use without the recurrent state behind them: a decode server
        with tiers gets the states from prefill servers."""
        return may_decode(self) and self.enable_hierarchical_cache

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add the flags to the parser of another program, `sglang_router.launch_server`."""
        add_flags(parser, ServerArgs)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """The settings that a parser with `add_cli_args` found."""
        shown = [field for field in dataclasses.fields(cls) if field.metadata["is_shown"]]
        return cls(**{field.name: getattr(args, field.name) for field in shown})

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """Like the constructor, but judges names of other flags as the command line does: raises
        FlagErrors."""
        known = {field.name for field in dataclasses.fields(cls)}
        named = {field_of(name, cls): value for name, value in kwargs.items()}
        foreign = [(flag_name(name), named[name]) for name in named if name not in known]
        judged = explain_foreign(foreign, cls)
        raise_errors(judged.lines)
        own = {name: value for name, value in named.items() if name in known}
        args = cls(**{**own, **judged.settings})
        warn_of_ignored([*judged.ignored, *without_effect(args)])
        return args

    def with_keys(self) -> ServerArgs:
        """A copy with the keys from files and the environment. Called once, before `resolve`;
        raises as `resolve_key`."""
        return dataclasses.replace(
            self,
            api_key=resolve_key(self.api_key, self.api_key_file, "--api-key", envs.SGLANG_API_KEY),
            admin_api_key=resolve_key(
                self.admin_api_key,
                self.admin_api_key_file,
                "--admin-api-key",
                envs.SGLANG_ADMIN_API_KEY,
            ),
            disaggregation_secret=read_secret(self),
        )

    def resolve(self) -> ServerArgs:
        """Check every value; fill in those that need neither machine nor model.

        If `device` is "auto", values that depend on the device stay unset until `on_device`.

        Idempotent: resolving a resolved copy gives an equal copy.

        Raises:
            FlagErrors: A line for each mistake, with the flag and the remedy.
        """
        raise_errors(mistakes_of(self))
        hierarchical, page_size = cache_and_page_size(self)
        if hierarchical and not self.enable_hierarchical_cache:
            logger.info(
                "--hicache-storage-backend %s implies --enable-hierarchical-cache",
                self.hicache_storage_backend,
            )
        model_path = self.model_path or str(BUILTIN_MODEL_DIR)
        args = dataclasses.replace(
            self,
            model_path=model_path,
            enable_hierarchical_cache=hierarchical,
            page_size=page_size,
            enable_prefill_context_parallel=self.attn_cp_size > 1,
            attn_dp_size=num_dp_groups(self),
            dp_size=num_dp_groups(self),
            enable_dp_attention=num_dp_groups(self) > 1,
            disaggregation_decode_enable_radix_cache=(
                may_decode(self) and not self.disable_radix_cache
            ),
            tokenizer_path=self.tokenizer_path or model_path,
            served_model_name=self.served_model_name or self.model_path or BUILTIN_MODEL_NAME,
        )
        return args._settled() if args.device == "auto" else args.on_device(args.device)

    def on_device(self, device: str) -> ServerArgs:
        """Fill in the values of a resolved copy that depend on the device, one of `DEVICE_KINDS`,
        and check them. Raises FlagErrors, a line for each mistake."""
        kind = device_kind(device)
        raise_errors(check_device(self, kind))
        assert self.page_size is not None, "resolved arguments have a page size"
        chunk = self.chunked_prefill_size
        if chunk is None:
            chunk = max(kind.prefill_chunk_tokens // self.page_size, 1) * self.page_size
        args = dataclasses.replace(
            self,
            device=device,
            attention_backend=self.attention_backend or kind.attention_backends[0],
            chunked_prefill_size=chunk,
        )
        # The command line's warning has named the others.
        warn_of_ignored([one for one in without_effect(args) if one not in without_effect(self)])
        return args._settled()

    def in_role(self, mode: str) -> ServerArgs:
        """A resolved copy for the other role of a server with `--enable-pd-role-switch`."""
        return dataclasses.replace(self, disaggregation_mode=mode)._settled()

    def _settled(self) -> ServerArgs:
        """Freeze this object, because threads share it, and return it."""
        self._is_resolved = True
        return self

    def to_public_dict(self) -> dict[str, Any]:
        """Field name to value for `/server_info` and the log, with secret values hidden."""
        values = dataclasses.asdict(self)
        for field in dataclasses.fields(self):
            if field.metadata["secret"] and values[field.name] is not None:
                values[field.name] = "***"
        extra_config = public_text(self.hicache_storage_backend_extra_config)
        values["hicache_storage_backend_extra_config"] = extra_config
        return values
