"""Tells jobs that rent from clouds the current offers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from ...core.events import Event, OffersSeen
from ...providers import Provider, ProviderError
from ...providers.settings import FILE
from ...spec.job_spec import Resources
from ...spec.placement import Offer
from ...threads import CallKind, Threads
from ..effects import Effects
from ..quarantine import Quarantined
from ..runtime import Job

log = logging.getLogger("makara.manager")
_EVERY_S = 300.0  # prices and capacity change
_RETRY_S = 15.0
_LOOK_S = 1.0
_PATIENCE_S = 30.0  # for a provider that neither answers nor fails, before others' offers are told alone


@dataclass(kw_only=True, eq=False)
class OffersWatch:
    """Tells each job that rents from clouds what it may have. Runs on the event loop.

    Each provider is asked by itself: one that fails or hangs keeps no job from what the others offer. A job
    is told first when all have answered or failed, or after a while; and each time which have not answered.
    """

    providers: Mapping[str, Provider]
    jobs: Mapping[str, Job]
    effects: Effects
    threads: Threads
    handle: Callable[[str, Event], Awaitable[None]]
    clock: Callable[[], float]
    manager_url: Callable[[], str]

    def __post_init__(self) -> None:
        self._asked_at: dict[tuple[str, str], float] = {}  # by job and provider
        self._failed: set[tuple[str, str]] = set()  # whose last answer was an error
        self._known: dict[tuple[str, str], Sequence[Offer]] = {}  # the last that was answered
        self._since: dict[str, float] = {}  # when a job's first questions were asked
        self._news: set[str] = set()  # jobs that are to be told

    async def run(self) -> None:
        """Ask for offers that are old, and tell jobs, for ever."""
        async with asyncio.TaskGroup() as group:
            for provider in self.providers:
                group.create_task(self._ask_again_and_again(provider))
            group.create_task(self._tell_again_and_again())

    async def _ask_again_and_again(self, provider: str) -> None:
        while True:
            for job, resources in self._renting():
                if provider in resources.providers and self._is_due(job, provider):
                    self._asked_at[job, provider] = self.clock()
                    self._since.setdefault(job, self.clock())
                    await self._ask(provider, job, resources)
            await asyncio.sleep(_LOOK_S)

    async def _tell_again_and_again(self) -> None:
        while True:
            renting = self._renting()
            self._forget_all_but({job for job, _ in renting})
            for job, resources in renting:
                for provider in set(resources.providers) - self.providers.keys():
                    why = f"{FILE} has no section {provider}: nothing is asked for there"
                    self.effects.trouble.setdefault(job, {})[f"offers/{provider}"] = why
                if job in self._news:
                    await self._tell(job, resources)
            await asyncio.sleep(_LOOK_S)

    def _renting(self) -> list[tuple[str, Resources]]:
        specs = [(name, job.state.spec) for name, job in self.jobs.items() if job.active]
        return [(name, spec.resources) for name, spec in specs if spec is not None and spec.resources.clouds]

    def _is_due(self, job: str, provider: str) -> bool:
        asked_at = self._asked_at.get((job, provider))
        is_known = (job, provider) in self._known and self.jobs[job].observations.offers is not None
        wait_s = _EVERY_S if is_known else _RETRY_S
        return asked_at is None or not 0.0 <= self.clock() - asked_at < wait_s

    async def _ask(self, provider: str, job: str, resources: Resources) -> None:
        """Of a provider that does not answer, what was known before holds."""
        call = self.providers[provider].offers
        trouble = self.effects.trouble.setdefault(job, {})
        try:
            answer = self.threads.run(CallKind.OFFERS, lambda: call(resources), owner=provider)
            self._known[job, provider] = tuple(await answer)
        except ProviderError as error:
            log.warning("job %s: no offers of %s: %s", job, provider, error)
            trouble[f"offers/{provider}"] = f"prices of {provider}: {error}"
            self._failed.add((job, provider))
        else:
            trouble.pop(f"offers/{provider}", None)
            self._failed.discard((job, provider))
        self._news.add(job)

    async def _tell(self, job: str, resources: Resources) -> None:
        asked = [provider for provider in resources.providers if provider in self.providers]
        unanswered = tuple(provider for provider in asked if (job, provider) not in self._known)
        if len(unanswered) == len(asked):
            return
        is_first = self.jobs[job].observations.offers is None
        still_awaited = any((job, provider) not in self._failed for provider in unanswered)
        since = self._since.setdefault(job, self.clock())  # forgotten of a job stopped and resumed meanwhile
        if is_first and still_awaited and 0.0 <= self.clock() - since < _PATIENCE_S:
            return
        self._news.discard(job)
        offers = tuple(offer for provider in asked for offer in self._known.get((job, provider), ()))
        seen = OffersSeen(
            now=self.clock(), offers=offers, unanswered=unanswered, manager_url=self.manager_url()
        )
        with contextlib.suppress(Quarantined):  # it is told again
            await self.handle(job, seen)

    def _forget_all_but(self, jobs: set[str]) -> None:
        for key in [key for key in self._asked_at if key[0] not in jobs]:
            del self._asked_at[key]
            self._known.pop(key, None)
            self._failed.discard(key)
        self._since = {job: at for job, at in self._since.items() if job in jobs}
        self._news &= jobs
