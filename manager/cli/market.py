"""A small spot market for the demo: preempts and adds VMs, in step with the job.

The events are those of an availability trace, in order. Each happens once the job has trained for a while on
exactly the VMs that the one before left, so that a slow machine shows as much as a fast one; at the latest
when the job's progress reaches the event's place in the trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from typing import Any

from ...simulator import NodeChange, TraceEvent
from .client import Client, RequestRefused
from .progress import counted

NOTICE_S = 8.0
SEEN_S, SEEN_STEPS = 4.0, 3  # a shape is shown for at least so long before the next event
TRACE_PART = 0.9  # the progress of the job that corresponds to the trace's last event


class TracePlayer:
    """Plays an availability trace against the local provider.

    The trace's nodes are bound to VMs as these come up; the provider's capacity bounds how many live. The
    first removal has a notice of `NOTICE_S` seconds (traces hold none), the others have none.
    """

    def __init__(
        self,
        api: Client,
        events: Sequence[TraceEvent],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._say = say
        self._show = _Show(clock)
        first = [event for event in events if event.time_ms == events[0].time_ms]
        self._pending = list(events[len(first) :])
        self._span_ms = events[-1].time_ms
        self._nodes = [event.node for event in first]
        self._vm_of: dict[str, str] = {}
        self._noticed = False

    def open(self) -> None:
        """Offer as many VMs as the trace begins with."""
        self._offer()

    def play(self, job: dict[str, Any]) -> None:
        """Apply the events that are due, given the job's current view."""
        self._bind(job)
        seen = self._has_answered(job) and self._show.is_over(job)
        if not self._pending or job["status"] != "running":
            return
        due_ms = self._pending[0].time_ms
        if seen or job["step"] >= TRACE_PART * job["steps"] * due_ms / self._span_ms:
            self._happen([event for event in self._pending if event.time_ms == due_ms], _vms_in(job))
            self._pending = [event for event in self._pending if event.time_ms > due_ms]

    def _has_answered(self, job: dict[str, Any]) -> bool:
        """Whether the job trains on exactly the VMs offered."""
        return len(self._vm_of) == len(self._nodes) and _vms_in(job) == set(self._vm_of.values())

    def _bind(self, job: dict[str, Any]) -> None:
        live = [vm["vm"] for vm in job["vms"] if vm["status"] == "joined"]
        self._vm_of = {node: vm for node, vm in self._vm_of.items() if vm in live}
        free = [vm for vm in live if vm not in self._vm_of.values()]
        for node in self._nodes:
            if node not in self._vm_of and free:
                self._vm_of[node] = free.pop(0)

    def _happen(self, events: Sequence[TraceEvent], taking_part: Set[str]) -> None:
        added = [event.node for event in events if event.change is NodeChange.ADD]
        removed = [event.node for event in events if event.change is NodeChange.REMOVE]
        self._nodes = [node for node in [*self._nodes, *added] if node not in removed]
        self._prefer(removed, taking_part)
        self._offer()
        if added:
            self._say(f"the market offers {counted(len(added), 'more VM')}")
        vms = [self._vm_of.pop(node) for node in removed if node in self._vm_of]
        if vms:  # VMs that never came up are merely no longer offered
            self._take(vms)

    def _prefer(self, removed: Sequence[str], taking_part: Set[str]) -> None:
        """Bind nodes to be removed to VMs that the plan uses: losing a spare one would show nothing."""
        for node in removed:
            used = (other for other in self._nodes if self._vm_of.get(other) in taking_part)
            if node in self._vm_of and self._vm_of[node] not in taking_part and (other := next(used, None)):
                self._vm_of[node], self._vm_of[other] = self._vm_of[other], self._vm_of[node]

    def _take(self, vms: Sequence[str]) -> None:
        if not self._noticed:
            self._noticed = True
            self._say(f"the market takes {', '.join(vms)}, with {NOTICE_S:g} s of notice")
            for vm in vms:
                self._harm(vm, "notice", NOTICE_S)
            return
        self._say(f"the market takes {' and '.join(vms)} without a word")
        for vm in vms:
            self._harm(vm, "kill")

    def _offer(self) -> None:
        self._api.post("/providers/local/capacity", json={"vms": len(self._nodes)})

    def _harm(self, vm: str, kind: str, deadline_s: float = 0.0) -> None:
        try:
            self._api.post(f"/vms/{vm}/fault", json={"kind": kind, "deadline_s": deadline_s})
        except RequestRefused as refusal:
            if refusal.status != 404:
                raise
            self._say(f"{vm} was gone already")


def _vms_in(job: dict[str, Any]) -> set[str]:
    """The VMs of the running plan."""
    return {seat["vm"] for seat in job["placement"]}


class _Show:
    """Measures how long the newest shape has been running."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: tuple[int, float, int] | None = None  # generation, when and at which step first seen

    def is_over(self, job: dict[str, Any]) -> bool:
        """Whether the job has trained for `SEEN_S` and `SEEN_STEPS` in the shape that it has now."""
        newest = job["morphs"][-1] if job["morphs"] else None
        if newest is None or "first_step" not in newest["phases_s"]:
            return False
        if self._began is None or self._began[0] != newest["generation"]:
            self._began = (newest["generation"], self._clock(), job["step"])
        _, since, step = self._began
        return self._clock() - since >= SEEN_S and job["step"] - step >= SEEN_STEPS
