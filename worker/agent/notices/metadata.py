"""Requests to a cloud's metadata service: bounded in time, without proxies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx

from .notice import Unanswered


class Metadata:
    """The metadata service at one address. All methods raise `Unanswered`."""

    def __init__(self, url: str, timeout_s: float) -> None:
        # No proxies from the environment: the service answers only the VM itself.
        self._client = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)
        self.timeout_s = timeout_s

    async def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        params: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """The answer, whatever its status; `timeout_s` bounds the whole exchange."""
        content = json.dumps(body).encode() if body is not None else None
        bound_s = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(bound_s):
                return await self._client.request(
                    method, path, headers=dict(headers), params=params, content=content
                )
        except TimeoutError as error:
            raise Unanswered(f"{method} {path}: no answer in {bound_s:g} s") from error
        except httpx.HTTPError as error:
            raise Unanswered(f"{method} {path}: {error!r}") from error

    async def close(self) -> None:
        await self._client.aclose()


def read_object(response: httpx.Response) -> dict[str, Any]:
    """The JSON object in the answer. Raises `Unanswered`."""
    where = f"{response.request.method} {response.request.url.path}"
    if response.status_code != 200:
        raise Unanswered(f"{where}: HTTP {response.status_code}: {response.text[:200]}")
    try:
        value: Any = response.json()
    except (ValueError, RecursionError) as error:
        raise Unanswered(f"{where}: no JSON: {response.text[:200]!r}") from error
    if not isinstance(value, dict):
        raise Unanswered(f"{where}: not an object: {response.text[:200]!r}")
    return value  # pyright: ignore[reportUnknownVariableType]  (its keys are JSON's)
