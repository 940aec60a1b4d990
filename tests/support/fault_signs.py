"""By what the system shows that it noticed a fault, and within what.

The bounds are those of docs/generations.md and docs/faults.md, in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from fault_scene import Noticed, Scene, Sign

REPORTED_S = 2.0  # a trainer's end: its agent reports at once, and reads its last words for a second before
REQUEST_S = 30.0  # a store that is silent for so long has not answered
LISTED_S = 1.0  # the provider's list is looked at every 0.25 s
LEFT_S = 2.0  # an agent that is told to end waits a second for its trainers, and then is listed no more
TRAINER_LEASE_S = 10.0
VM_LEASE_S = 15.0
LINK_S = 10.0
PROGRESS_S = 60.0


@dataclass(frozen=True)
class Played:
    """A fault that was done `at` (Unix seconds): noticed when `sign` shows it, within `bound_s`. `then` is
    what must be done when it was noticed, before steps can come."""

    at: float
    sign: Sign
    bound_s: float
    then: Callable[[], None] = lambda: None


Play = Callable[[Scene], AbstractContextManager[Played]]


def worker_failed(worker: str | None, kind: str) -> Sign:
    def sign(scene: Scene) -> Noticed | None:
        for fact in scene.facts():
            named = worker is None or fact.get("worker") == worker
            if fact["fact"] == "worker_failed" and fact["kind"] == kind and named:
                return Noticed(fact["at"], f"worker_failed: {kind}: {fact['message'].splitlines()[0][:50]}")
        return None

    return sign


def vm_ended(vm: str, *reasons: str) -> Sign:
    def sign(scene: Scene) -> Noticed | None:
        for fact in scene.facts():
            if fact["fact"] == "vm_ended" and fact["vm"] == vm and fact["reason"] in reasons:
                return Noticed(fact["at"], f"vm_ended: {fact['reason']}: {fact['detail']}")
        return None

    return sign


def first_of(*signs: Sign) -> Sign:
    def sign(scene: Scene) -> Noticed | None:
        found = [noticed for one in signs if (noticed := one(scene)) is not None]
        return min(found, key=lambda noticed: noticed.at, default=None)

    return sign


def silent(vm: str) -> Sign:
    """A plan is made without it; or, as steps go on, the page calls it silent."""

    def sign(scene: Scene) -> Noticed | None:
        for fact in scene.facts():
            if fact["fact"] == "generation_closed" and f"{vm}.0" in fact["reason"]:
                return Noticed(fact["at"], f"generation_closed: {fact['reason']}")
        shown = next(one for one in scene.view()["vms"] if one["vm"] == vm)
        return Noticed(time.time(), "page: VM silent") if shown["detail"] == "silent" else None

    return sign


def stalled_by(worker: str) -> Sign:
    def sign(scene: Scene) -> Noticed | None:
        for fact in scene.facts():
            if fact["fact"] == "generation_stalled" and worker in fact["suspects"]:
                return Noticed(fact["at"], f"generation_stalled: {fact['standing'][worker]}")
        return None

    return sign


def generation_closed(scene: Scene) -> Noticed | None:
    for fact in scene.facts():
        if fact["fact"] == "generation_closed":
            return Noticed(fact["at"], f"generation_closed: {fact['reason']}")
    return None


def peer_lost(one: str, other: str, at: float) -> Sign:
    """The generation is closed for it; or, where a newcomer's has taken over just then, a trainer's log says
    so."""

    def logged(scene: Scene) -> Noticed | None:
        lines = [line for vm in (one, other) for line in scene.lines(vm, r"generation \d+: lost ranks")]
        return min((line for line in lines if line.at > at), key=lambda line: line.at, default=None)

    return first_of(generation_closed, logged)


def store_trouble(scene: Scene) -> Noticed | None:
    """The job's status says in the store's own words what cannot be saved, or deleted."""
    told = [line for line in scene.view()["trouble"] if "_checkpoint: " in line]
    return Noticed(time.time(), f"status: {told[0]}") if told else None


def agent_lost_manager(vm: str, at: float) -> Sign:
    """Its agent's log says so."""

    def sign(scene: Scene) -> Noticed | None:
        lines = scene.lines(vm, "connection to the manager closed|cannot reach the manager")
        return next((line for line in lines if line.at > at), None)

    return sign


def isolation_shown(scene: Scene) -> Noticed | None:
    """The page says so."""
    told = scene.view()["isolated"]
    return Noticed(time.time(), f"page: {told}") if told else None
