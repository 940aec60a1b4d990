"""Notices of AWS, by the instance metadata service, version 2.

`spot/instance-action` says two minutes ahead that a spot instance is terminated, stopped or hibernated (of
the last, when it begins); `events/recommendations/rebalance` that it is at an elevated risk of that. Both
answer 404 while there is nothing to say (docs.aws.amazon.com/AWSEC2/latest/UserGuide:
spot-instance-termination-notices, rebalance-recommendations).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from .aws_metadata import AwsMetadata
from .metadata import read_object
from .notice import Countdown, Notice, Reading, Source, Unanswered

log = logging.getLogger("makara.agent")

_NOTICE_S = 120.0  # a longer notice means that the wall clock is wrong
_LONGEST_ACTION = 100
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class AwsSource(Source):
    period_s = 1.0

    def __init__(
        self,
        url: str,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metadata = AwsMetadata(url, steady)
        self._wall = wall
        self._countdown = Countdown(steady)
        self._at_risk = False
        self._trouble = False

    async def read(self) -> Reading:
        action = await self._get(_ACTION)
        notice = self._notice(action) if action is not None else None
        await self._ask_risk()
        return Reading(notice, self._at_risk)

    async def _ask_risk(self) -> None:
        """Ask whether the VM is at risk; without an answer, that stays as it was."""
        try:
            self._at_risk = await self._get(_REBALANCE) is not None
            self._trouble = False
        except Unanswered as error:
            if not self._trouble:
                log.warning("whether this VM is at risk cannot be asked: %s", error)
            self._trouble = True

    def _notice(self, value: dict[str, Any]) -> Notice:
        action, at = value.get("action"), value.get("time")
        if not isinstance(action, str) or not isinstance(at, str):
            raise Unanswered(f"{_ACTION}: neither action nor time in {value}")
        left_s = min(_unix(at) - self._wall(), _NOTICE_S)
        return Notice(action[:_LONGEST_ACTION], self._countdown.left_s((action, at), left_s), at)

    async def _get(self, path: str) -> dict[str, Any] | None:
        """The object at `path`; None if there is none now."""
        response = await self._metadata.get(path)
        return None if response is None else read_object(response)

    async def close(self) -> None:
        await self._metadata.close()


def _unix(text: str) -> float:
    """Unix seconds of a UTC time such as 2017-09-18T08:22:00Z; AWS sometimes omits the Z."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise Unanswered(f"{_ACTION}: time: {text!r}") from error
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
