"""The metadata service of AWS, version 2: every request shows a session token, which lives for six hours at
most (docs.aws.amazon.com/AWSEC2/latest/UserGuide: instance-metadata-v2-how-it-works)."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from .metadata import Metadata
from .notice import Unanswered

_TIMEOUT_S = 2.0
_TOKEN_S = 21_600


class AwsMetadata(Metadata):
    """All methods raise `Unanswered`."""

    def __init__(self, url: str, steady: Callable[[], float] = time.monotonic) -> None:
        super().__init__(url, _TIMEOUT_S)
        self._steady = steady
        self._token = ""
        self._renew_at = 0.0

    async def get(self, path: str) -> httpx.Response | None:
        """What is at `path`, whatever its status; None if there is nothing now."""
        if self._steady() >= self._renew_at:
            await self._renew()
        response = await self._ask(path)
        if response.status_code == 401:  # the token has run out, or is another service's
            await self._renew()
            response = await self._ask(path)
        return None if response.status_code == 404 else response

    async def _ask(self, path: str) -> httpx.Response:
        return await self.ask("GET", path, headers={"X-aws-ec2-metadata-token": self._token})

    async def _renew(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        response = await self.ask("PUT", "/latest/api/token", headers=headers)
        if response.status_code != 200:
            raise Unanswered(f"PUT /latest/api/token: HTTP {response.status_code}")
        self._token, self._renew_at = response.text, self._steady() + _TOKEN_S / 2
