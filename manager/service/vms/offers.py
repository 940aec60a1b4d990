"""Tells jobs that rent from clouds the current offers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

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


class OffersWatch:
    """Tells each job that rents from clouds their current offers. Runs on the event loop.

    Each provider is asked separately: one that fails or hangs does not delay the offers of others.
    """

    def __init__(
        self,
        *,
        providers: Mapping[str, Provider],
        jobs: Mapping[str, Job],
        effects: Effects,
        threads: Threads,
        handle: Callable[[str, Event], Awaitable[None]],
        clock: Callable[[], float],
        manager_url: Callable[[], str],
    ) -> None:
        self._manager_url = manager_url
        self._providers = providers
        self._jobs = jobs
        self._effects = effects
        self._threads = threads
        self._handle = handle
        self._clock = clock
        self._asked_at: dict[tuple[str, str], float] = {}  # by job and provider
        self._known: dict[tuple[str, str], Sequence[Offer]] = {}  # likewise; the last answer

    async def run(self) -> None:
        """Refresh outdated offers, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for provider in self._providers:
                group.create_task(self._follow(provider))
            group.create_task(self._tell_lacking())

    async def _follow(self, provider: str) -> None:
        while True:
            for name, resources in self._renting():
                if provider in resources.providers and self._is_due(name, provider):
                    self._asked_at[name, provider] = self._clock()
                    await self._ask(provider, name, resources)
            await asyncio.sleep(_LOOK_S)

    async def _tell_lacking(self) -> None:
        while True:
            renting = self._renting()
            for name, resources in renting:
                for provider in set(resources.providers) - self._providers.keys():
                    why = f"{FILE} has no section {provider}: nothing is asked for there"
                    self._effects.trouble.setdefault(name, {})[f"offers/{provider}"] = why
            names = {name for name, _ in renting}
            for key in [key for key in self._asked_at if key[0] not in names]:
                del self._asked_at[key]
                self._known.pop(key, None)
            await asyncio.sleep(_LOOK_S)

    def _renting(self) -> list[tuple[str, Resources]]:
        specs = [(name, job.state.spec) for name, job in self._jobs.items() if job.active]
        return [(name, spec.resources) for name, spec in specs if spec is not None and spec.resources.clouds]

    def _is_due(self, job: str, provider: str) -> bool:
        asked_at = self._asked_at.get((job, provider))
        is_known = (job, provider) in self._known and self._jobs[job].observations.offers is not None
        wait_s = _EVERY_S if is_known else _RETRY_S
        return asked_at is None or not 0.0 <= self._clock() - asked_at < wait_s

    async def _ask(self, provider: str, job: str, resources: Resources) -> None:
        """Get offers; if the provider does not answer, its previous ones stay valid."""
        call = self._providers[provider].offers
        trouble = self._effects.trouble.setdefault(job, {})
        try:
            answer = self._threads.run(CallKind.OFFERS, lambda: call(resources), owner=provider)
            self._known[job, provider] = tuple(await answer)
        except ProviderError as error:
            log.warning("job %s: no offers of %s: %s", job, provider, error)
            trouble[f"offers/{provider}"] = f"prices of {provider}: {error}"
            return
        trouble.pop(f"offers/{provider}", None)
        offers = [offer for name in resources.providers for offer in self._known.get((job, name), ())]
        seen = OffersSeen(now=self._clock(), offers=tuple(offers), manager_url=self._manager_url())
        with contextlib.suppress(Quarantined):  # it is told again later
            await self._handle(job, seen)
