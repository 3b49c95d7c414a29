"""Questions to a seed's HTTP server, each answered or given up in bounded time."""

from __future__ import annotations

import http.client
import time
from typing import Final
from urllib.parse import urlencode

import msgspec

from sglang.srt.arg_groups.remote_weights import SEED_PATH, START_SEED
from sglang.srt.constants import MIB
from sglang.srt.model_loader.load_config import SeedAddress
from sglang.srt.model_loader.weight_offer import SeedAnswer, WeightsDigest
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.error_answers import error_text

ANSWER_TIMEOUT_S: Final = 20.0
"""For one answer. The seed's scheduler gives it between two forward passes."""
DIGEST_TIMEOUT_S: Final = 600.0
"""Until the seed has read all its weights once, beside what it serves."""
_POLL_S: Final = 0.1
_MOST_BYTES: Final = 64 * MIB
"""Of an answer; a tensor takes about 300."""


class SeedClient:
    """Asks one seed about one rank. Errors name the seed and the remedy."""

    def __init__(
        self, seed: SeedAddress, rank: int, *, answer_timeout: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._seed = seed
        self._path = f"{SEED_PATH}?{urlencode({'rank': rank})}"
        self._timeout = answer_timeout

    def ask(self) -> SeedAnswer:
        """What the seed tells now. Blocks for at most the timeout.

        Raises:
            ValueError: There is no answer, or it is not a seed's; says what there is.
        """
        call = BackgroundCall("ask-seed", self._get, expected=(OSError, http.client.HTTPException))
        # The connection's own timeout may come first.
        if not call.wait(self._timeout) or isinstance(call.error, TimeoutError):
            raise ValueError(
                f"it has not answered for {self._timeout:g} s: it is stopped or overloaded, or its "
                "host is away; wait until it answers /health_generate, then start again"
            )
        if isinstance(call.error, OSError):
            raise ValueError(
                f"it does not answer ({call.error or type(call.error).__name__}): check that it "
                "runs, and --remote-instance-weight-loader-seed-instance-ip and -service-port"
            )
        if call.error is not None:
            raise ValueError(
                f"it does not speak HTTP ({type(call.error).__name__}): give the port of its HTTP "
                "server"
            )
        return _parse(*call.result)

    def await_digest(self, deadline: float) -> WeightsDigest:
        """The seed's digest, once it is computed.

        Args:
            deadline: On the clock of `time.monotonic`.

        Raises:
            ValueError: As `ask`, or the time is up.
        """
        while (digest := self.ask().weights.digest) is None:
            if time.monotonic() >= deadline:
                raise ValueError(
                    "it has not computed the checksums of its weights in time: start again when "
                    "it is less busy"
                )
            time.sleep(_POLL_S)
        return digest

    def _get(self) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(
            self._seed.host, self._seed.port, timeout=self._timeout
        )
        key = self._seed.api_key
        try:
            connection.request(
                "GET", self._path, headers={"Authorization": f"Bearer {key}"} if key else {}
            )
            response = connection.getresponse()
            return response.status, response.read(_MOST_BYTES)
        finally:
            connection.close()


def _parse(status: int, body: bytes) -> SeedAnswer:
    """Raises ValueError: It is no seed's answer."""
    if status in (401, 403):
        raise ValueError(
            f"it refuses this server's key (status {status}): start this one with the seed's "
            "--api-key"
        )
    if status == 404:
        raise ValueError(
            f"it has no {SEED_PATH}: it is another program or another release; name a server "
            "of this release"
        )
    if status != 200:
        raise ValueError(f"it answers with status {status}: {error_text(body)}")
    try:
        return msgspec.json.decode(body, type=SeedAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"its answer is not understood ({error}): start both with the same release, the seed "
            f"with {START_SEED}"
        ) from None
