"""HTTP client of a seed. All requests have timeouts."""

from __future__ import annotations

import http.client
import time
from typing import Final
from urllib.parse import urlencode

import msgspec

from sglang.srt.arg_groups.remote_weights import SEED_PATH, START_SEED
from sglang.srt.constants import MIB
from sglang.srt.model_loader.seed_answer import ANSWER_DECODER, SeedAnswer, WeightsDigest
from sglang.srt.model_loader.weight_source import SeedAddress
from sglang.srt.utils.background_call import BackgroundCall
from sglang.srt.utils.error_answers import error_text

ANSWER_TIMEOUT_S: Final = 20.0
"""Timeout of one answer, in seconds. The seed's scheduler answers between two forwards."""
DIGEST_TIMEOUT_S: Final = 600.0
"""Seconds for the seed to hash all its weights while it serves."""
_POLL_S: Final = 0.1
_MOST_BYTES: Final = 64 * MIB
"""Most bytes of an answer. A tensor takes about 300 bytes."""


class SeedClient:
    """Asks one seed for the answers of its ranks. Errors name the remedy."""

    def __init__(self, seed: SeedAddress, *, answer_timeout: float = ANSWER_TIMEOUT_S) -> None:
        self._seed = seed
        self._timeout = answer_timeout

    def ask_all(self) -> list[SeedAnswer]:
        """Ask for the current answers of all the seed's ranks, in the order of ranks.

        Raises:
            ValueError: The answers are not from the same server; or as `ask`.
        """
        first = self.ask(0)
        answers = [first, *(self.ask(rank) for rank in range(1, first.weights.ranks))]
        for rank, answer in enumerate(answers):
            if (answer.rank, answer.weights.ranks) != (rank, len(answers)):
                raise ValueError(
                    f"asked for rank {rank} of {len(answers)}, it answers as rank {answer.rank} of "
                    f"{answer.weights.ranks}: it has been started again meanwhile, start this one "
                    "again too"
                )
        return answers

    def ask(self, rank: int) -> SeedAnswer:
        """Ask for the current answer of one of the seed's ranks. Blocks for at most the timeout.

        Raises:
            ValueError: There is no answer, or it is not that of a seed; with the cause.
        """
        path = f"{SEED_PATH}?{urlencode({'rank': rank})}"
        call = BackgroundCall(
            "ask-seed", lambda: self._get(path), expected=(OSError, http.client.HTTPException)
        )
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

    def await_digests(self, num_ranks: int, deadline: float) -> list[WeightsDigest]:
        """Wait for the digests of all ranks.

        Args:
            num_ranks: Number of the seed's ranks.
            deadline: `time.monotonic()` seconds.

        Raises:
            ValueError: The deadline has passed; or as `ask`.
        """
        return [self._await_digest(rank, deadline) for rank in range(num_ranks)]

    def _await_digest(self, rank: int, deadline: float) -> WeightsDigest:
        while (digest := self.ask(rank).weights.digest) is None:
            if time.monotonic() >= deadline:
                raise ValueError(
                    "it has not computed the checksums of its weights in time: start again when "
                    "it is less busy"
                )
            time.sleep(_POLL_S)
        return digest

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(
            self._seed.host, self._seed.port, timeout=self._timeout
        )
        key = self._seed.api_key
        try:
            connection.request(
                "GET", path, headers={"Authorization": f"Bearer {key}"} if key else {}
            )
            response = connection.getresponse()
            return response.status, response.read(_MOST_BYTES)
        finally:
            connection.close()


def _parse(status: int, body: bytes) -> SeedAnswer:
    """Raises ValueError: the answer is not that of a seed."""
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
        return ANSWER_DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"its answer is not understood ({error}): start both with the same release, the seed "
            f"with {START_SEED}"
        ) from None
