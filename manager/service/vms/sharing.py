"""Tells jobs how many VMs each may have where several want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core import Timing
from ...core.pools.claims import claim_of
from ...core.pools.shares import Claim, Share, shares
from ..runtime import Job
from .watch import ProviderWatch


def share_pools(
    jobs: Sequence[Job], watches: Mapping[str, ProviderWatch], timing: Timing, now: float
) -> None:
    """Note each job's share of the pools of VMs; its next tick brings it to the job.

    A job that is set aside cannot be decided about: it keeps the VMs that it has.
    """
    capacity = {name: watch.capacity for name, watch in watches.items() if watch.capacity is not None}
    known = [job for job in jobs if job.state.spec is not None]
    found = shares([_claim(job, timing, now) for job in known], capacity) if len(known) > 1 else {}
    for job in jobs:
        job.share = found.get(job.job, Share())


def _claim(job: Job, timing: Timing, now: float) -> Claim:
    claim = claim_of(job.state, job.observations, timing, now)
    return replace(claim, is_active=False) if job.set_aside else claim
