"""Checks of a start that take a second or two, before torch is imported or a process is started.

Each raises ValueError with one line that names the flag, file or variable, and the remedy. They
only report errors early: the users of a file, a store or a variable check it again.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from sglang.srt.arg_groups.cli import flag_name
from sglang.srt.arg_groups.disaggregation import (
    BOOTSTRAP_PORT_FLAG,
    DisaggregationMode,
    moves_pages,
    moves_pages_by_mooncake,
    overruled_variables,
    variables_of,
)
from sglang.srt.arg_groups.foreign_variables import warnings_about_variables
from sglang.srt.arg_groups.remote_weights import (
    START_SEED,
    offers_weights,
    reads_weights,
    seed_host_port,
)
from sglang.srt.configs.config_file import read_config
from sglang.srt.distributed.device_communicators.mooncake_library import (
    MOONCAKE_MISSING,
    STORE_USER,
)
from sglang.srt.distributed.device_communicators.mooncake_mem_pool import (
    check_mooncake_custom_mem_pool_enabled,
)
from sglang.srt.distributed.device_communicators.mooncake_protocol import (
    ENGINE_FIELD,
    IB_PROTOCOLS,
    choose_devices,
    list_rdma_devices,
    parse_ib_device_config,
    resolve_mooncake_protocol,
)
from sglang.srt.distributed.device_communicators.nixl_library import (
    NIXL_MISSING,
    NIXL_USER,
    PACKAGES,
)
from sglang.srt.environ import envs
from sglang.srt.hardware_backend.device_kinds import DEVICE_KINDS
from sglang.srt.managers.tokenizer.chat_template import read_template
from sglang.srt.mem_cache.host.host_layout import AUTO, check_layout_and_io
from sglang.srt.mem_cache.l3.storage_settings import OnUnreachable, StorageSettings
from sglang.srt.mem_cache.storage.class_lookup import check_findable, dynamic_class
from sglang.srt.mem_cache.storage.mooncake_store.config import (
    DEVICE_FIELD,
    MooncakeStoreConfig,
    check_engine_offloads_nothing,
    check_reachable,
    check_store_protocol,
)
from sglang.srt.mem_cache.storage.types import StorageUnreachable
from sglang.srt.model_loader.weight_files import weight_files
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_tokenizer import check_tokenizer_files
from sglang.srt.utils.network import base_url, can_connect, check_port_available, tls_context

logger = logging.getLogger(__name__)

_SEED_TIMEOUT_S = 2.0


def check_start(args: ServerArgs) -> None:
    """Check the environment, and the device, the files and the store that resolved `args` name."""
    envs.check_own()
    for line in (*warnings_about_variables(), *overruled_variables(args)):
        logger.warning(line)
    with variables_of(args):
        for check in CHECKS:
            check(args)


def check_tracing(args: ServerArgs) -> None:
    """Check the packages of `--enable-trace`, and its endpoint."""
    if not args.enable_trace:
        return
    try:
        from sglang.srt.observability import tracing

        tracing.make_exporter(args.otlp_traces_endpoint).shutdown()
    except ImportError as error:
        raise ValueError(
            f"--enable-trace needs a package that is not installed ({error.name}): run "
            ".venv/bin/pip install 'sglang[trace]'"
        ) from None


def check_device(args: ServerArgs) -> None:
    """Check that the packages are installed that the device and its features need."""
    for kind in DEVICE_KINDS.values():
        for field, value in kind.package_flags:
            if getattr(args, field) != value:
                continue
            missing = kind.missing_package()
            if missing is not None:
                raise ValueError(f"{flag_name(field)} {value}: {missing}")


def check_tls(args: ServerArgs) -> None:
    """Check that the certificate and its key can be read and fit each other."""
    if args.ssl_certfile is not None and args.ssl_keyfile is not None:
        tls_context(args.ssl_certfile, args.ssl_keyfile, args.ssl_keyfile_password)


def check_host_layout(args: ServerArgs) -> None:
    """Check that L2's layout and its I/O backend work on the device, if the arguments name a
    device."""
    if args.enable_hierarchical_cache and args.device != AUTO:
        check_layout_and_io(args.device, args.hicache_io_backend, args.hicache_mem_layout)


def check_model(args: ServerArgs) -> None:
    """Check the files of the model: config, weights, tokenizer, chat template."""
    assert args.model_path is not None, "resolved arguments name the model"
    read_config(
        args.model_path,
        trust_remote_code=args.trust_remote_code,
        quantization=args.quantization,
    )
    if args.load_format != "dummy" and not reads_weights(args):
        weight_files(Path(args.model_path), args.load_format)
    check_tokenizer_files(args.tokenizer_path or args.model_path)
    if args.chat_template is not None:
        read_template(args.chat_template)


def check_seed(args: ServerArgs) -> None:
    """Check that Mooncake works here where weights are read or offered, and that a server listens
    at the seed's address."""
    if not offers_weights(args):
        return
    _check_transfer_engine("weights from a running server", envs.MOONCAKE_DEVICE.get())
    if reads_weights(args) and not can_connect(*seed_host_port(args), timeout=_SEED_TIMEOUT_S):
        raise ValueError(
            f"no server accepts connections at the seed's address "
            f"{base_url(*seed_host_port(args))}: start it there with {START_SEED}, or name another "
            "with --remote-instance-weight-loader-seed-instance-ip and -service-port"
        )


def check_disaggregation(args: ServerArgs) -> None:
    """Check the requirements of a prefill or decode server: Mooncake or NIXL, and on the first
    machine of a prefill server a free port."""
    mode = args.disaggregation_mode
    if not moves_pages(args):
        return
    pool = check_mooncake_custom_mem_pool_enabled()
    envs.SGLANG_MOONCAKE_SEND_AUX_TCP.get()
    if moves_pages_by_mooncake(args):
        devices = args.disaggregation_ib_device or envs.MOONCAKE_DEVICE.get()
        _check_transfer_engine(f"--disaggregation-mode {mode}", devices)
    else:
        _check_nixl()
        if pool is not None:
            raise ValueError(
                f"SGLANG_MOONCAKE_CUSTOM_MEM_POOL={pool} does not go with {NIXL_USER}, which reads "
                "memory of the CPU: unset it"
            )
    if mode == DisaggregationMode.PREFILL and args.node_rank == 0:
        check_port_available(args.host, args.disaggregation_bootstrap_port, BOOTSTRAP_PORT_FLAG)


def check_storage(args: ServerArgs) -> None:
    """Check that the store of L3 answers, unless the settings allow a start without it."""
    if args.hicache_storage_backend is None:
        return
    config = args.extra_config()
    settings = StorageSettings.from_extra_config(config)
    if args.hicache_storage_backend == "dynamic":
        check_findable(dynamic_class(config))
    if args.hicache_storage_backend != "mooncake":
        return
    store = MooncakeStoreConfig.load_from_extra_config(config)
    _check_package(STORE_USER)
    check_store_protocol(store)
    check_engine_offloads_nothing(store)
    _check_protocol(store.protocol, store.device_name, DEVICE_FIELD)
    if settings.on_unreachable is OnUnreachable.EXIT:
        try:
            check_reachable(store)
        except StorageUnreachable as error:
            raise ValueError(str(error)) from None


CHECKS: Final[tuple[Callable[[ServerArgs], None], ...]] = (
    check_tracing,
    check_device,
    check_tls,
    check_host_layout,
    check_model,
    check_seed,
    check_disaggregation,
    check_storage,
)
"""The checks of resolved arguments, in their order at a start."""


def _check_package(user: str, module: str = "") -> None:
    """Check the package `mooncake`; `module`: a module that it must have. Imports neither."""
    package = importlib.util.find_spec("mooncake")
    cause = None
    if package is None:
        cause = "there is no package 'mooncake'"
    elif module and not PathFinder.find_spec(module, package.submodule_search_locations):
        cause = f"the package 'mooncake' has no module '{module}'"
    if cause is not None:
        raise ValueError(MOONCAKE_MISSING.format(user=user, cause=cause))


def _check_nixl() -> None:
    """Check that NIXL's package is there. Imports nothing; each rank checks its plugin."""
    if not any(importlib.util.find_spec(name) for name in PACKAGES):
        cause = f"there is no package {' or '.join(PACKAGES)}"
        raise ValueError(NIXL_MISSING.format(user=NIXL_USER, cause=cause))


def _check_transfer_engine(user: str, devices: str) -> None:
    """Check the Transfer Engine of `user`; `parse_ib_device_config` describes `devices`."""
    _check_package(user, "mooncake.engine")
    if not envs.ENABLE_ASCEND_TRANSFER_WITH_MOONCAKE.get():
        _check_protocol(envs.MOONCAKE_PROTOCOL.get(), devices, ENGINE_FIELD)


def _check_protocol(requested: str, chosen: str, field: str) -> None:
    """Check a protocol and the devices that `field` gives for it. Each rank's process checks which
    of them its GPU uses."""
    devices = list_rdma_devices()
    by_gpu = parse_ib_device_config(chosen, field=field)
    if by_gpu is None and requested in IB_PROTOCOLS:
        devices = choose_devices(chosen, devices, field=field)
    resolve_mooncake_protocol(
        requested,
        allow_tcp_fallback=envs.SGLANG_MOONCAKE_ALLOW_TCP_FALLBACK.get(),
        devices=devices,
    )
