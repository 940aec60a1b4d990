"""Notes recent changes that EC2's lists may not show yet. A manager without these notes only waits longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from ...spec.placement import Attempt
from .. import Ended, NoCapacity, NotAllowed, QuotaExceeded, Throttled, Unauthenticated

LAG_S = 300.0  # absence from lists counts only after this
_END_AGAIN_S = 30.0
_NOTHING_DONE = (Ended, NoCapacity, NotAllowed, QuotaExceeded, Throttled, Unauthenticated)


@dataclass(frozen=True, slots=True)
class Made:
    region: str
    id: str
    attempt: int
    at: float


class RecentChanges:
    """Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._lock = threading.Lock()
        self._made: dict[str, dict[str, Made]] = {}  # {VM: {id: what was created}}
        self._unknown: dict[tuple[str, str], float] = {}  # {(VM, attempt): when it was last tried}
        self._ended: dict[str, float] = {}  # {id: when AWS was last told to end it}
        self._told: set[str] = set()  # ids created by this process that AWS was told to end

    @contextmanager
    def trying(self, attempt: Attempt) -> Generator[None]:
        """A context for a creation: if its outcome stays unknown, the VM may appear later."""
        key = (attempt.vm, attempt.name)
        with self._lock:
            before = self._unknown.get(key)
            self._unknown[key] = self._clock()
        try:
            yield
        except _NOTHING_DONE as error:
            self._known(key, None if isinstance(error, Ended) else before)
            raise
        self._known(key, None)

    def made(self, attempt: Attempt, region: str, identity: str) -> None:
        with self._lock:
            known = self._made.setdefault(attempt.vm, {})
            known.setdefault(identity, Made(region, identity, attempt.number, self._clock()))

    def made_in(self, vm: str, region: str) -> list[Made]:
        with self._lock:
            return [made for made in self._made.get(vm, {}).values() if made.region == region]

    def regions_of(self, vm: str) -> set[str]:
        """The regions where this process created something for a VM."""
        with self._lock:
            return {made.region for made in self._made.get(vm, {}).values()}

    def never_ended(self, vm: str, region: str) -> list[str]:
        """Ids that this process created for a VM there, and that AWS was never told to end."""
        with self._lock:
            made = self._made.get(vm, {}).values()
            return [one.id for one in made if one.region == region and one.id not in self._told]

    def end_is_due(self, identity: str) -> bool:
        """Whether to tell AWS (again) to end this one."""
        with self._lock:
            told_at = self._ended.get(identity)
        return told_at is None or not 0.0 <= self._clock() - told_at < _END_AGAIN_S

    def ended(self, identity: str) -> None:
        now = self._clock()
        with self._lock:
            self._ended = {one: at for one, at in self._ended.items() if now - at < _END_AGAIN_S}
            self._ended[identity] = now
            self._told |= {identity} & {one for made in self._made.values() for one in made}

    def may_appear(self, vm: str) -> bool:
        """Whether something of a VM may exist though no list has it.

        True for a while after the start, since the previous manager's last calls are unknown.
        """
        now = self._clock()
        with self._lock:
            tried = [at for (name, _), at in self._unknown.items() if name == vm]
        return any(now - at < LAG_S for at in (self._started, *tried))

    def forget(self, vm: str) -> None:
        """All of it is gone."""
        with self._lock:
            self._told.difference_update(self._made.pop(vm, {}))
            for key in [key for key in self._unknown if key[0] == vm]:
                del self._unknown[key]

    def _known(self, key: tuple[str, str], before: float | None) -> None:
        with self._lock:
            if before is None:
                self._unknown.pop(key, None)
            else:
                self._unknown[key] = before  # the outcome of an earlier try is still unknown
