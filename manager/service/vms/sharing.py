"""Tells jobs how many VMs each may have where several want them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core import Timing
from ...core.pools.claims import claim_of
from ...core.pools.shares import Claim, Share, shares
from ..runtime import Job
from .watch import ProviderWatch

log = logging.getLogger("makara.manager")


class PoolSharing:
    """Shares out the pools of VMs among jobs, at each tick. Belongs to the event loop."""

    def __init__(self, watches: Mapping[str, ProviderWatch], timing: Timing) -> None:
        self._watches = watches
        self._timing = timing
        self._began_at: float | None = None
        self._leaving = Counter[str]()  # by pool, VMs that are being handed over
        self._freed: dict[str, float] = {}  # by pool, when one of them was last gone

    def share(self, jobs: Sequence[Job], now: float) -> None:
        """Note each job's share; its next tick brings it to the job.

        A job that is set aside, or that cannot be looked at, keeps the VMs that it has.
        """
        self._began_at = now if self._began_at is None else self._began_at
        claims = [claim for job in jobs if (claim := self._claim(job, now)) is not None]
        found: dict[str, Share] = {}
        if len(claims) > 1:
            self._note_freed(claims, now)
            may_grow = now - self._began_at < self._timing.join_grace_s
            found = shares(claims, self._capacity(), self._freed, may_grow=may_grow)
        for job in jobs:
            job.share = found.get(job.job, Share())

    def _claim(self, job: Job, now: float) -> Claim | None:
        if job.state.spec is None:
            return None
        try:
            claim = claim_of(job.state, job.observations, self._timing, now)
        except Exception:
            log.exception("job %s: what it claims of the pools of VMs is not known", job.job)
            return None
        return replace(claim, is_active=False) if job.set_aside else claim

    def _note_freed(self, claims: Sequence[Claim], now: float) -> None:
        leaving = Counter[str]()
        for claim in claims:
            leaving.update(claim.leaving)
            for pool in claim.refused:  # what was handed over before this manager began, it does not know
                self._freed.setdefault(pool, self._began_at or now)
        for pool in self._leaving - leaving:
            self._freed[pool] = now
        self._leaving = leaving

    def _capacity(self) -> dict[str, int]:
        """How many VMs each pool can have, as far as that is known."""
        return {name: watch.capacity for name, watch in self._watches.items() if watch.capacity is not None}
