"""Route to a rank of a prefill server, and how both sides prove the deployment's secret.

The question has `Authorization: Proof NONCE MAC`, the answer `Proof: MAC`; nonce and MACs are hex.
Needs no torch.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

ROUTE_PATH: Final = "/route"
PROOF_SCHEME: Final = "Proof"
"""Scheme of the question's `Authorization`, and name of the answer's header."""
OF_QUESTION: Final = "question to a bootstrap server"
"""Purpose of a proof about nonce and target of the request."""
OF_ANSWER: Final = "answer of a bootstrap server"
"""Purpose of a proof about the question's nonce and the body of the answer."""
MAX_RANKS: Final = 1024
"""Most ranks of a server."""
MAX_RANK: Final = MAX_RANKS - 1

Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Address and identity of one rank of a prefill server, for decode servers."""

    rank: Rank
    endpoint: Text
    """Address in ZMQ's form: `tcp://HOST:PORT`."""
    instance_id: Text
    """Id drawn at the server's start: a different id at the same address is another server."""
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    """Number of ranks of the server."""
    attn_tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    """Number of ranks over which the heads of attention are split; see `RankGroup`."""


ROUTE_DECODER: Final = msgspec.json.Decoder(Route)
