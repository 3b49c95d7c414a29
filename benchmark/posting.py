"""Requests to a server as fast as it answers, with little work for the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import aiohttp

from sglang.benchmark.serving_metrics import open_session


def post_all(
    url: str,
    bodies: Iterable[bytes],
    concurrency: int,
    check: Callable[[bytes], object] = lambda answer: None,
) -> int:
    """Post each body to `/generate`, `concurrency` at a time. Returns how many there were.

    Args:
        check: Called with each whole answer, whose status is 200.
    """
    return asyncio.run(_post_all(url, bodies, concurrency, check))


async def _post_all(
    url: str, bodies: Iterable[bytes], concurrency: int, check: Callable[[bytes], object]
) -> int:
    left = iter(bodies)
    headers = {"Content-Type": "application/json"}

    async def client(session: aiohttp.ClientSession) -> int:
        count = 0
        for body in left:
            async with session.post(f"{url}/generate", data=body, headers=headers) as response:
                answer = await response.read()
                assert response.status == 200, answer[:300]
            check(answer)
            count += 1
        return count

    async with open_session() as session:
        return sum(await asyncio.gather(*(client(session) for _ in range(concurrency))))
