"""Records the lengths, block hashes and times of requests for `sglang.hicache_plan --trace`.

No text and no token: a block's id is a hash of all tokens up to its end, with a key that is drawn
at the start and never leaves the process, so that nobody can test guesses of a prompt. Requests are
sampled by their first block, so that those which share a prefix are recorded together or not at
all. Source: Waldspurger et al., "Efficient MRC construction with SHARDS" (2015), where single
blocks are sampled.

The format is Mooncake's, see `sglang.benchmark.workload`. A thread writes; lines that it is too
slow for are lost, and counted in the log. A file that cannot be written, or is full, ends the
record, and no request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import secrets
import threading
import time
from typing import TYPE_CHECKING, Final

from sglang.srt.constants import MIB, TRACE_BLOCK_TOKENS
from sglang.srt.utils.logging_utils import RateLimitedLogger

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

_MOST_WAITING: Final = 1024
_ID_BITS: Final = 52
"""Numbers of so many bits are exact in every reader of JSON."""
_DIGEST_BYTES: Final = 8
_CLOSE_S: Final = 2.0


class TraceRecorder:
    """Writes a trace. Event loop thread only; its thread is called `trace-recorder`.

    Args:
        path: A file that does not exist.
        share: Share of the prompts that are recorded.
        most_mb: MiB of the file.

    Raises:
        ValueError: The file exists, or cannot be made.
    """

    def __init__(self, path: str, share: float, most_mb: int) -> None:
        self._share, self._most_bytes = share, most_mb * MIB
        self._key = secrets.token_bytes(32)
        self._begin = time.monotonic()
        self._log = RateLimitedLogger(logger)
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._has_ended = False
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise ValueError(f"--record-trace {path}: the file exists: name another") from None
        except OSError as error:
            raise ValueError(f"--record-trace {path}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._write, name="trace-recorder", daemon=True)
        self._thread.start()

    def blocks(self, tokens: npt.NDArray[np.uint32], key: str | None) -> list[int] | None:
        """Ids of the blocks of a prompt; None: the request is not recorded.

        Args:
            tokens: The prompt.
            key: The key of `combine_extra_key`: other keys have other ids.
        """
        if self._has_ended:
            return None
        before = b"" if key is None else key.encode(errors="surrogatepass")
        found: list[int] = []
        for begin in range(0, len(tokens), TRACE_BLOCK_TOKENS):
            block = tokens[begin : begin + TRACE_BLOCK_TOKENS].tobytes()
            made = hashlib.blake2b(before, key=self._key, digest_size=_DIGEST_BYTES)
            made.update(block)
            before = made.digest()
            number = int.from_bytes(before, "little") >> (8 * _DIGEST_BYTES - _ID_BITS)
            if not found and number >= self._share * 2.0**_ID_BITS:
                return None
            found.append(number)
        return found

    def record(
        self, arrival: float, prompt_tokens: int, output_tokens: int, blocks: list[int]
    ) -> None:
        """Record a request that has ended; `arrival` in seconds of `time.monotonic()`."""
        if self._has_ended:
            return
        line: dict[str, float | list[int]] = {
            "timestamp": round(1e3 * (arrival - self._begin)),
            "input_length": prompt_tokens,
            "output_length": output_tokens,
            "hash_ids": blocks,
        }
        if self._share < 1:
            line["share"] = self._share
        try:
            self._lines.put_nowait(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except queue.Full:
            self._log.warning("lost", "--record-trace: the disk is too slow for a request's line")

    def close(self) -> None:
        """Write what waits, for two seconds at most. Idempotent."""
        self._has_ended = True
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_CLOSE_S)

    def _write(self) -> None:
        written = 0
        try:
            while (line := self._lines.get()) is not None:
                if written + len(line) > self._most_bytes:
                    mib = self._most_bytes // MIB
                    logger.info("--record-trace: the file has its %d MiB, and ends", mib)
                    break
                while line:
                    done = os.write(self._file, line)
                    written, line = written + done, line[done:]
        except OSError as error:
            logger.warning("--record-trace ends: %s", error.strerror)
        finally:
            self._has_ended = True
            os.close(self._file)
