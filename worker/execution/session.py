"""One generation as one of its members trains in it: the plan, and the process groups that it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...pipeline.operations import Kind
from ...pipeline.plan import Plan
from ...protocol.messages import GenerationOrder
from ..progress import ProgressCounters
from .buckets import Bucket
from .communicator import Communicator
from .gloo import Listener, ProcessGroup


class Session(Communicator):
    """Ranks below `plan.num_workers` train; the others are donors, which hand over what they hold.

    `plan` is known once `rendezvous` returns.
    """

    plan: Plan

    def __init__(
        self,
        order: GenerationOrder,
        worker: str,
        listener: Listener | None,
        link_timeout_s: float = 10.0,
        progress: ProgressCounters | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        """See `Communicator`."""
        super().__init__(order, worker, listener, link_timeout_s, progress, on_lost)
        self.checkpoints = order.checkpoints
        self.saves_only = order.saves_only
        self.void_until = order.void_until
        self.channels: dict[Kind, ProcessGroup] = {}
        self.everyone: ProcessGroup | None = None
        self.bits: list[str] = []
        """Of each member, `ModelState.bits`: exchanged while they join."""
        self.origins: list[dict[int, str]] = []
        """For each member, `ModelState.origins`: exchanged while they join."""
        self._hosts: dict[tuple[int, ...], ProcessGroup] = {}

    def _take_plan(self, plan: dict[str, Any]) -> None:
        self.plan = Plan.from_json(plan)

    @property
    def trains(self) -> bool:
        return self.rank < self.plan.num_workers

    @property
    def wanted(self) -> range:
        """The sections that this member must hold when the generation has formed; a donor needs none."""
        return self.plan.ranges[self.rank].sections if self.trains else range(0)

    def open_groups(self, buckets: Sequence[Bucket]) -> None:
        """The plan's groups, in one order on every worker."""
        if not self.trains:
            return
        workers = range(self.plan.num_workers)
        self.everyone = self.group("everyone", workers)
        self.channels = {
            Kind.FORWARD: self.group("activations", workers),
            Kind.BACKWARD: self.group("gradients", workers),
        }
        for hosts in dict.fromkeys(bucket.hosts for bucket in buckets):
            if self.rank in hosts:
                self._hosts[hosts] = self.group("hosts/" + "-".join(map(str, hosts)), hosts)

    def hosts(self, bucket: Bucket) -> ProcessGroup:
        return self._hosts[bucket.hosts]
