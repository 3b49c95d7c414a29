"""Helpers that know nothing of the engine, and one name that SGLang has here."""

from sglang.srt.utils import network


def is_port_available(port: int) -> bool:
    """True if a server could listen on TCP port `port` of all addresses now."""
    return network.is_port_available("0.0.0.0", port)
