"""Notices of AWS, by the instance metadata service, version 2.

`spot/instance-action` says two minutes ahead that a spot instance is terminated, stopped or hibernated (of
the last, when it begins); `events/recommendations/rebalance` that it is at an elevated risk of that. Both
answer 404 while there is nothing to say. Every request shows a session token, which lives for six hours at
most (docs.aws.amazon.com/AWSEC2/latest/UserGuide: spot-instance-termination-notices,
rebalance-recommendations, instance-metadata-v2-how-it-works).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx

from .metadata import Metadata, read_object
from .notice import Countdown, Notice, Reading, Unanswered

_TIMEOUT_S = 2.0
_TOKEN_S = 21_600
_NOTICE_S = 120.0  # more than that is a wall clock that is wrong
_LONGEST_ACTION = 100
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class AwsSource:
    period_s = 1.0

    def __init__(
        self,
        url: str,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metadata = Metadata(url, _TIMEOUT_S)
        self._wall = wall
        self._steady = steady
        self._countdown = Countdown(steady)
        self._token = ""
        self._renew_at = 0.0

    async def read(self) -> Reading:
        action, risk = await self._get(_ACTION), await self._get(_REBALANCE)
        return Reading(self._notice(action) if action is not None else None, risk is not None)

    def _notice(self, value: dict[str, Any]) -> Notice:
        action, at = value.get("action"), value.get("time")
        if not isinstance(action, str) or not isinstance(at, str):
            raise Unanswered(f"{_ACTION}: neither action nor time in {value}")
        left_s = min(_unix(at) - self._wall(), _NOTICE_S)
        return Notice(action[:_LONGEST_ACTION], self._countdown.left_s((action, at), left_s), at)

    async def _get(self, path: str) -> dict[str, Any] | None:
        """The object at `path`; None if there is none now."""
        if self._steady() >= self._renew_at:
            await self._renew()
        response = await self._ask(path)
        if response.status_code == 401:  # the token has run out, or is another service's
            await self._renew()
            response = await self._ask(path)
        return None if response.status_code == 404 else read_object(response)

    async def _ask(self, path: str) -> httpx.Response:
        return await self._metadata.ask("GET", path, headers={"X-aws-ec2-metadata-token": self._token})

    async def _renew(self) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
        response = await self._metadata.ask("PUT", "/latest/api/token", headers=headers)
        if response.status_code != 200:
            raise Unanswered(f"PUT /latest/api/token: HTTP {response.status_code}")
        self._token, self._renew_at = response.text, self._steady() + _TOKEN_S / 2

    async def acknowledge(self, notice: Notice) -> None:
        """AWS does not wait."""

    async def close(self) -> None:
        await self._metadata.close()


def _unix(text: str) -> float:
    """Seconds of a UTC time such as 2017-09-18T08:22:00Z; AWS has written it without the Z as well."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise Unanswered(f"{_ACTION}: time: {text!r}") from error
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
