"""The secret of a deployment, which prefill and decode servers prove to each other."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

SOURCES: Final = "--disaggregation-secret-file or SGLANG_DISAGGREGATION_SECRET"
"""The settings that give a server its secret, for errors."""
NONCE_BYTES: Final = 32
_SALT: Final = b"sglang deployment secret"
_ROUNDS: Final = 100_000
"""Makes guessing a secret from a proof slow; 0.05 s at the start."""


class DeploymentSecret:
    """The secret that all prefill and decode servers of a deployment have: proofs that their maker
    knows it. The secret itself is never sent. Any thread."""

    def __init__(self, text: str) -> None:
        self._key = hashlib.pbkdf2_hmac("sha256", text.encode(), _SALT, _ROUNDS)

    @classmethod
    def of(cls, text: str | None) -> DeploymentSecret | None:
        return None if text is None else cls(text)

    def proof(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes that only holders of the secret can compute.

        Args:
            purpose: Names the kind of proof, so that no proof passes for another kind.
            parts: Contents that the proof covers. A nonce of the other side makes each proof new.
        """
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            mac.update(len(part).to_bytes(8, "big") + part)
        return mac.digest()

    def is_proof(self, given: bytes, purpose: str, *parts: bytes) -> bool:
        """True if `given` is `proof(purpose, *parts)`. Takes the same time for each wrong one."""
        return hmac.compare_digest(given, self.proof(purpose, *parts))

    def is_hex_proof(self, given: str, purpose: str, *parts: bytes) -> bool:
        """Like `is_proof`, for a proof in hex digits, or any other text."""
        try:
            return self.is_proof(bytes.fromhex(given), purpose, *parts)
        except ValueError:
            return False
