"""A small client for `/v1/chat/completions`: greedy answers and their token counts."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ChatReply:
    """An answer with its token counts.

    Attributes:
        cached_tokens: Prompt tokens that came from a cache; None if not reported.
        cached_tokens_details: Tier name to tokens; empty if not reported.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    cached_tokens_details: dict[str, int] = field(default_factory=dict)


class ChatClient:
    """Sends chat messages at temperature 0; safe to use from several threads.

    Raises (constructor and `chat`):
        OSError: The server cannot be reached, or did not answer within `timeout` seconds.
        RuntimeError: It answered with an error, or with something other than a completion.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        max_tokens: int = 16,
        cached_tokens_details: bool = False,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {base_url!r}")
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._timeout = timeout
        self._options: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens}
        if cached_tokens_details:
            self._options["return_cached_tokens_details"] = True
        self._options["model"] = model or self._first_model()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> ChatReply:
        """Return the server's answer to `messages`."""
        body = self._request("/v1/chat/completions", {"messages": list(messages), **self._options})
        try:
            text = body["choices"][0]["message"]["content"] or ""
            usage = body.get("usage") or {}
            details = (body.get("sglext") or {}).get("cached_tokens_details") or {}
            prompt_details = usage.get("prompt_tokens_details") or {}
            return ChatReply(
                text=text,
                prompt_tokens=usage.get("prompt_tokens", 0),
                completion_tokens=usage.get("completion_tokens", 0),
                cached_tokens=prompt_details.get("cached_tokens"),
                cached_tokens_details={
                    tier: tokens for tier, tokens in details.items() if isinstance(tokens, int)
                },
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RuntimeError(f"the answer is not a chat completion: {body!r:.300}") from error

    def _first_model(self) -> str:
        try:
            return str(self._request("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise RuntimeError("/v1/models names no model; give --model") from error

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base_url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            raise RuntimeError(f"{path} answered {error.code}: {answer:.300}") from error
        except json.JSONDecodeError as error:
            raise RuntimeError(f"{path} answered something that is not JSON") from error
