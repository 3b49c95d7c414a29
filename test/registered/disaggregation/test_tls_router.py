"""Prefill and decode servers that speak https, behind the real router, which trusts their
authority."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

import httpx

from rigs.disaggregation.pd_servers import ROUTER, TCP
from rigs.servers.tls_server import Certificates, tls_server
from sglang.embedded_router import Router
from sglang.srt.environ import envs
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-b-test-cpu")

SAMPLING: Final = {"max_new_tokens": 4, "ignore_eos": True}


def test_a_router_reaches_both_kinds_of_servers_over_https(tmp_path: Path) -> None:
    certificates = Certificates.make(tmp_path)
    env = {**TCP, envs.SGLANG_DISAGGREGATION_SECRET.name: secrets.token_hex(32)}
    bootstrap = get_free_port()
    port_flags = ("--disaggregation-bootstrap-port", str(bootstrap))
    prefill_flags = ("--disaggregation-mode", "prefill", *port_flags)
    decode_flags = ("--disaggregation-mode", "decode")
    with (
        tls_server(certificates, tmp_path / "prefill", *prefill_flags, env=env) as prefill,
        tls_server(certificates, tmp_path / "decode", *decode_flags, env=env) as decode,
    ):
        router = Router(
            [(prefill, bootstrap)],
            [decode],
            port=get_free_port(),
            log_dir=tmp_path,
            flags=("--ca-cert-paths", str(certificates.authority), "--disable-retries"),
            package=ROUTER,
        )
        try:
            # Ready when it has seen healthy servers of both kinds.
            router.start(120)
            body = {"text": "The code of heron is", "sampling_params": SAMPLING}
            answer = httpx.post(f"{router.url}/generate", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert answer.json()["meta_info"]["completion_tokens"] == 4
        finally:
            router.kill()
