"""Notices of Azure, by Scheduled Events of the instance metadata service.

A document lists the events of this VM and, in an availability set or scale set, of its neighbours; only those
that name this VM count. `Preempt` (eviction, at least 30 s ahead), `Terminate` (deletion), `Reboot` and
`Redeploy` lose memory and are notices; `Freeze`, a pause of seconds, loses nothing and is not. An event that
has begun has no `NotBefore`; one that is over or cancelled is no longer listed. The first request turns the
service on for this VM, which may take two minutes
(learn.microsoft.com/azure/virtual-machines/linux/scheduled-events).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from .metadata import Metadata, read_object
from .notice import Countdown, Notice, Reading, Source, Unanswered

_TIMEOUT_S, _FIRST_TIMEOUT_S = 5.0, 150.0
_EVENTS, _EVENTS_VERSION = "/metadata/scheduledevents", "2020-07-01"
_COMPUTE, _COMPUTE_VERSION = "/metadata/instance/compute", "2021-02-01"
_HEADERS = {"Metadata": "true"}
_NOTICES = ("Preempt", "Terminate", "Reboot", "Redeploy")
# A longer notice means that the wall clock is wrong: Azure promises 30 s of the first kind, and lets users
# choose up to 15 minutes of the second. The others may come days ahead.
_LONGEST_S = {"Preempt": 120.0, "Terminate": 900.0}


@dataclass(frozen=True, slots=True)
class _Event:
    id: str
    type: str
    resources: tuple[str, ...]  # the VMs that it names
    not_before: float | None  # Unix seconds; None: it has begun


class AzureSource(Source):
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
        self._name: str | None = None  # of this VM, as events name it
        self._on = False  # whether the service has answered once
        self._events: list[_Event] = []  # notices for this VM
        self._countdowns: dict[str, Countdown] = {}

    async def read(self) -> Reading:
        if self._name is None:
            self._name = await self._own_name()
        document = read_object(
            await self._metadata.ask(
                "GET",
                _EVENTS,
                headers=_HEADERS,
                params={"api-version": _EVENTS_VERSION},
                timeout_s=None if self._on else _FIRST_TIMEOUT_S,
            )
        )
        # The whole document is read each time, so its `DocumentIncarnation` does not matter.
        self._events, self._on = self._of_this_vm(document), True
        ids = {event.id for event in self._events}
        self._countdowns = {id: each for id, each in self._countdowns.items() if id in ids}
        notices = [self._notice(event) for event in self._events]
        return Reading(min(notices, key=lambda notice: notice.left_s, default=None))

    async def _own_name(self) -> str:
        params = {"api-version": _COMPUTE_VERSION}
        response = await self._metadata.ask("GET", _COMPUTE, headers=_HEADERS, params=params)
        name = read_object(response).get("name")
        if not isinstance(name, str) or not name:
            raise Unanswered(f"{_COMPUTE}: no name")
        return name.casefold()

    def _of_this_vm(self, document: dict[str, Any]) -> list[_Event]:
        try:
            events = [_event(value) for value in document["Events"]]
        except (KeyError, TypeError, ValueError) as error:
            raise Unanswered(f"{_EVENTS}: {error!r} in {str(document)[:500]}") from error
        return [event for event in events if event.type in _NOTICES and self._name in event.resources]

    def _notice(self, event: _Event) -> Notice:
        countdown = self._countdowns.setdefault(event.id, Countdown(self._steady))
        first_left_s = event.not_before - self._wall() if event.not_before is not None else 0.0
        first_left_s = min(first_left_s, _LONGEST_S.get(event.type, math.inf))
        return Notice(event.type, countdown.left_s(event.not_before, first_left_s), event.id)

    async def acknowledge(self, notice: Notice) -> None:
        """Let the event begin now, unless it names other VMs: it would begin for all of them."""
        event = next((event for event in self._events if event.id == notice.id), None)
        if event is None or event.resources != (self._name,):
            return
        response = await self._metadata.ask(
            "POST",
            _EVENTS,
            headers=_HEADERS,
            params={"api-version": _EVENTS_VERSION},
            body={"StartRequests": [{"EventId": notice.id}]},
        )
        if response.status_code != 200:
            raise Unanswered(f"POST {_EVENTS}: HTTP {response.status_code}: {response.text[:200]}")

    async def close(self) -> None:
        await self._metadata.close()


def _event(value: Any) -> _Event:
    """Raises `KeyError`, `TypeError` or `ValueError`."""
    begun = value["EventStatus"] == "Started" or not value["NotBefore"]
    return _Event(
        id=str(value["EventId"]),
        type=str(value["EventType"]),
        resources=tuple(str(name).casefold() for name in value["Resources"]),
        not_before=None if begun else parsedate_to_datetime(value["NotBefore"]).timestamp(),
    )
