"""Plays a market to local VMs, by the clock: offers VMs, announces removals and kills."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from makara.manager.cli.client import RequestRefused
from makara.simulator import NodeChange

from .market import Spot

POLL_S = 0.25


class Manager(Protocol):
    """What the market asks of the manager (`service_process.ServiceProcess`)."""

    def job(self, job: str) -> dict[str, Any]: ...

    def set_capacity(self, vms: int) -> None: ...

    def fault(self, vm: str, kind: str, deadline_s: float = 0.0) -> None: ...


@dataclass
class Played:
    """When what was done to which VM, Unix seconds."""

    killed_at: dict[str, float] = field(default_factory=dict[str, float])
    """By VM: when it was killed without a word."""
    offered_at: dict[str, float] = field(default_factory=dict[str, float])
    """By VM: when the node that it runs on came; not of the first nodes."""
    noticed_at: dict[str, float] = field(default_factory=dict[str, float])


@dataclass
class Player:
    """Binds each node of the market to the oldest VM that has none, as a replay does."""

    manager: Manager
    job: str
    spot: Spot
    clock: Callable[[], float] = time.time
    pause: Callable[[float], None] = time.sleep
    played: Played = field(default_factory=Played)

    def __post_init__(self) -> None:
        self._offered: dict[str, float | None] = dict.fromkeys(self.spot.first)  # nodes, and since when
        self._vm_of: dict[str, str] = {}

    def play(self, began: float, window_s: float) -> dict[str, Any]:
        """All that happens in the window, which began when the job trained on the first nodes; the job's view
        at its end."""
        for at_s, act in self._acts():
            if at_s >= window_s:
                break
            self._wait_until(began + at_s)
            act()
        self._wait_until(began + window_s)
        return self.manager.job(self.job)

    def _acts(self) -> Sequence[tuple[float, Callable[[], None]]]:
        acts: list[tuple[float, Callable[[], None]]] = []
        for event in self.spot.later:
            at_s = event.time_ms / 1000
            if event.change is NodeChange.ADD:
                acts.append((at_s, lambda node=event.node: self._come(node)))
            elif event.node in self.spot.noticed:
                acts.append((at_s - self.spot.notice_s, lambda node=event.node: self._announce(node)))
            else:
                acts.append((at_s, lambda node=event.node: self._take(node)))
        return sorted(acts, key=lambda act: act[0])

    def _wait_until(self, at: float) -> None:
        while (left_s := at - self.clock()) > 0:
            self._bind()
            self.pause(min(POLL_S, left_s))
        self._bind()

    def _bind(self) -> None:
        view = self.manager.job(self.job)
        assert view["status"] not in ("failed", "stopped", "waiting"), view["reason"]
        live = [vm["vm"] for vm in view["vms"] if vm["status"] in ("joined", "noticed")]
        self._vm_of = {node: vm for node, vm in self._vm_of.items() if vm in live}
        free = [vm for vm in live if vm not in self._vm_of.values() and vm not in self.played.noticed_at]
        for node, since in self._offered.items():
            if node not in self._vm_of and free:
                self._vm_of[node] = vm = free.pop(0)
                if since is not None:
                    self.played.offered_at[vm] = since

    def _come(self, node: str) -> None:
        self._offered[node] = self.clock()
        self.manager.set_capacity(len(self._offered))

    def _announce(self, node: str) -> None:
        vm = self._leave(node)
        if vm is not None and self._harm(vm, "notice", self.spot.notice_s):
            self.played.noticed_at[vm] = self.clock()

    def _take(self, node: str) -> None:
        vm = self._leave(node)
        if vm is not None:
            at = self.clock()
            if self._harm(vm, "kill"):
                self.played.killed_at[vm] = at

    def _leave(self, node: str) -> str | None:
        """The node is offered to nobody any more; the VM that runs on it, if one is up."""
        del self._offered[node]
        self.manager.set_capacity(len(self._offered))
        return self._vm_of.pop(node, None)

    def _harm(self, vm: str, kind: str, deadline_s: float = 0.0) -> bool:
        """False if the VM was gone already."""
        try:
            self.manager.fault(vm, kind, deadline_s)
        except RequestRefused as refusal:
            if refusal.status != 404:
                raise
            return False
        return True
