"""The simulated world of a seeded history: a manager that crashes, a cloud that fails, VMs and trainers that
exchange every message with the core. All follows from the seed; invariants are checked as it goes.
"""

from __future__ import annotations

import math
import random
from typing import Any

import world_faults
from deaths import Deaths
from makara.manager.core import Decision, Observations, Timing
from makara.manager.core.commands import Command
from makara.manager.core.events import (
    ConnectionClosed,
    Event,
    JobSubmitted,
    ManagerStarted,
    OffersSeen,
    ReportReceived,
    Tick,
    VmTerminated,
)
from makara.manager.core.facts import Fact
from makara.manager.core.fold import fold
from makara.manager.core.orders import Leases, orders
from makara.manager.core.state import JobState
from makara.manager.core.strikes.table import Kind
from makara.manager.world import World
from makara.protocol.messages import Failure, Report
from makara.simulator import to_ns
from rented_script import OFFER
from world_checks import Broken, check_end, check_facts, check_heard
from world_effects import perform
from world_machines import Group, Meeting, SimTrainer, SimVm
from world_protocol import die, obey

TIMING = Timing(
    vm_lease_s=6.0,
    request_timeout_s=20.0,
    unused_s=15.0,
    grow_again_s=20.0,
    settle_s=1.0,
    drift_s=2.0,
    drift_steps=3,
    recalibrate_s=4.0,
    least_morph_s=0.5,
    suspect_grace_s=1.0,
    planning_timeout_s=8.0,
    replan_s=5.0,
    prepare_timeout_s=10.0,
    form_timeout_s=12.0,
    progress_floor_s=6.0,
    first_step_factor=2.0,
    stacks_s=1.0,
    start_wait_s=20.0,
    profile_wait_s=20.0,
    left_out_s=8.0,
    stop_timeout_s=40.0,
    delete_after_s=5.0,
    leases=Leases(orphan_timeout_s=12.0, orphan_save_s=2.0),
    sweep_s=9.0,
)
TIMING = TIMING.with_row(Kind.CUT, first_s=8.0).with_row(Kind.SLOW, first_s=5.0)
TIMING = TIMING.with_row(Kind.LIMITED, first_s=8.0).with_row(Kind.NOT_JOINED, limit=1000)
for _kind in (Kind.BREAK, Kind.REQUEST, Kind.REFUSED, Kind.UNFIT_VM, Kind.WORN_VM):
    TIMING = TIMING.with_row(_kind, first_s=1.0, longest_s=8.0)


class Crash(Exception):
    """The manager dies here."""


class FaultyWorld(World[tuple[int, ...]]):
    """One history. `run` plays it to its end and raises `Broken` when an invariant fails."""

    def __init__(self, seed: int) -> None:
        super().__init__(TIMING, epoch_s=1000.0)
        self.random = random.Random(seed)
        self.person = random.Random(f"{seed}: what a person does")
        self.cloud = random.Random(f"{seed}: what a cloud says")
        self.rents = random.Random(f"{seed}: where its VMs are from").random() < 0.4
        pick = self.random
        self.num_steps, self.interval, self.step_s = pick.randint(3, 18), pick.randint(1, 4), 0.5
        self.max_nodes = pick.randint(1, 5)
        self.min_nodes = pick.randint(1, self.max_nodes)
        self.workers_per_node = 1 if self.max_nodes > 3 or pick.random() < 0.7 else 2
        self.needs_all = pick.random() > 0.8  # of `min_nodes` the planner wants each worker
        self.keep_latest_k = pick.randint(1, 3)
        # Steps are then predicted to take so long that they are worth interrupting.
        self.seems_slow = random.Random(f"{seed}: how long steps seem").random() < 0.3
        self.pace = pick.choice((1.0, 1.2, 1.7))
        self.surveys = pick.random() < 0.5
        self.zombies_publish = pick.random() < 0.5
        self.store_down_until = 0.0
        self.vms: dict[str, SimVm] = {}
        self.released: set[str] = set()
        self.groups: dict[int, Group] = {}
        self.profiles: dict[int, Meeting] = {}
        self.faults_until = self.now + pick.uniform(0.0, 30.0)
        self.facts: list[Fact] = []
        self.pending: dict[str, Command] = {}
        self.manager_up = True
        self.deaths = Deaths(pick, odds=0.01 if pick.random() < 0.5 else 0.0, most=math.inf)
        self.num_vms = self.num_crashes = 0
        self.times_continued, self.going_on = 0, False  # whether somebody is about to have it go on
        self._dirty: set[str] = set()

    @property
    def min_workers(self) -> int:
        return self.min_nodes * self.workers_per_node if self.needs_all else 1

    @property
    def agents_wait_s(self) -> float:
        """How long an agent that sees no manager waits before it ends itself."""
        return TIMING.leases.orphan_timeout_s + TIMING.leases.orphan_save_s

    def run(self, limit_s: float = 600.0) -> JobState:
        submitted = JobSubmitted(now=self.now, job="j", spec=self._spec(), bundle_sha256="b0")
        self.handle(submitted)
        while not self.facts:  # the manager died before it acknowledged: the user submits again
            self._restart_manager()
            self.handle(submitted)
        self.after(0.0, self._tick)
        world_faults.schedule(self)
        while self.state.ended is None or self._alive() or self.pending or self.going_on:
            next_ns = self.clock.next_ns
            if next_ns is None or next_ns > to_ns(limit_s * (1 + self.times_continued)):
                raise Broken(f"no end after {limit_s:g} s: {self.state.status}, {self.state.impossible}")
            self.clock.advance()
        check_end(self)
        return self.state

    def _spec(self) -> dict[str, Any]:
        return {
            "name": "history",
            "entrypoint": "train:build",
            "resources": {
                **({"provider": "aws", "instance_type": "small"} if self.rents else {"provider": "local"}),
                "min_nodes": self.min_nodes,
                "max_nodes": self.max_nodes,
                "workers_per_node": self.workers_per_node,
            },
            "training": {"global_batch_size": 8, "steps": self.num_steps},
            "checkpoint": {
                "uri": "file:///c",
                "interval": self.interval,
                "keep_latest_k": self.keep_latest_k,
            },
            "retry": {"max_restarts_on_errors": 0 if self.person.random() < 0.3 else 3},
        }

    # ---- the manager --------------------------------------------------------------------------------------

    def send(self, event: Event) -> None:
        """An event reaches the manager if there is one."""
        if self.manager_up:
            self.handle(event)

    def handle(self, event: Event) -> None:
        num_facts = len(self.facts)
        try:
            super().handle(event)
            world_faults.look_at_end(self, self.facts[num_facts:])
        except Crash:
            self._die()

    def keep(self, decision: Decision) -> None:
        if not decision.facts and not decision.commands:
            super().keep(decision)
            return
        self._may_die("before it is kept")
        self.facts += decision.facts  # one transaction
        self.pending.update({c.key: c for c in decision.commands})
        super().keep(decision)
        check_facts(self, decision.facts)
        self._may_die("after it was kept")

    def perform(self, command: Command) -> None:
        perform(self, command)
        self._may_die(f"after {command.command}")

    def _may_die(self, what: str) -> None:
        if self.now < self.faults_until and self.deaths.strikes(what):
            raise Crash

    def _die(self) -> None:
        self.manager_up = False
        self.num_crashes += 1
        self.after(self.random.uniform(0.1, 4.0), self._restart_manager)

    def kill_manager(self) -> None:
        if self.manager_up:
            self._die()

    def _restart_manager(self) -> None:
        rebuilt = fold(self.facts)
        if rebuilt != self.state:
            raise Broken("the state that the journal tells is not the state before the crash")
        self.manager_up, self.state, self.observations = True, rebuilt, Observations()
        self.handle(ManagerStarted(now=self.now))
        for command in list(self.pending.values()):
            perform(self, command)
        self.give_orders()

    def _tick(self) -> None:
        if self.rents and self.observations.offers is None:
            self.send(OffersSeen(now=self.now, offers=(OFFER,)))
        fresh = tuple(f"v{self.num_vms + n}" for n in range(self.max_nodes))
        self.num_vms += self.max_nodes
        self.send(Tick(now=self.now, new_vms=fresh))
        self.after(1.0, self._tick)

    def give_orders(self) -> None:
        state = self.state
        for name, vm in self.vms.items():
            if vm.alive and vm.connected and self.random.random() > 0.03:
                self.after(self.random.uniform(0.01, 0.3), self._deliver, name, state)

    def _deliver(self, name: str, state: JobState) -> None:
        """Orders reach an agent. Older ones than it has are ignored."""
        vm = self.vms[name]
        if not vm.alive or not vm.connected or vm.stopped or vm.down:
            return
        if vm.orders is not None and state.num_facts <= vm.orders.version:
            return
        vm.orders = orders(state, name)
        if vm.orders.action == "shutdown":
            self.kill_vm(name)
            return
        for trainer in list(vm.trainers):
            obey(self, trainer, vm.orders)

    # ---- machines -----------------------------------------------------------------------------------------

    def changed(self, vm: SimVm) -> None:
        """An agent sends a report soon; changes until then go with it."""
        if vm.name not in self._dirty:
            self._dirty.add(vm.name)
            self.after(0.02, self._report, vm.name)

    def heartbeat(self, name: str) -> None:
        if self.vms[name].alive:
            self._report(name)
            self.after(2.0, self.heartbeat, name)

    def _report(self, name: str) -> None:
        vm, changed = self.vms[name], name in self._dirty
        self._dirty.discard(name)
        if not vm.alive or vm.stopped or vm.down or not vm.connected:
            return
        report = vm.newest_report(self.now_ns, changed=changed)
        odds = self.random.random()
        if odds < 0.97:
            self.after(0.01 + 0.2 * self.random.random() ** 3, self._receive, report)
        if odds > 0.96:  # repeated, late, and out of order; the last 3 in 100 are late only
            self.after(self.random.uniform(0.2, 3.0), self._receive, report)

    def _receive(self, report: Report) -> None:
        if not self.manager_up:
            return
        vm = self.vms[report.vm]
        vm.heard_at = self.now
        self.handle(ReportReceived.model_construct(now=self.now, report=report))
        if self.manager_up:
            check_heard(self, report)
            vm.deaths = [dead for dead in vm.deaths if dead not in report.deaths]  # it has acknowledged them
        if self.manager_up and report.orders_version < self.state.num_facts:
            self.after(0.05, self._deliver, report.vm, self.state)

    def kill_vm(self, name: str, *, told: bool = True) -> None:
        """A VM dies. Its connection closes soon; the cloud says so sooner or later, or never."""
        vm = self.vms.get(name)
        if vm is None or not vm.alive:
            return
        vm.alive = False
        for trainer in vm.trainers:
            die(self, trainer, Failure(kind="killed", message="VM gone"))
        if self.random.random() < 0.7:
            self.after(0.05, self.close_connection, name)
        if told and self.random.random() < 0.7:
            self.after(self.random.uniform(0.1, 4.0), self._tell_terminated, name)

    def close_connection(self, name: str) -> None:
        self.send(ConnectionClosed(now=self.now, vm=name))

    def _tell_terminated(self, name: str) -> None:
        if self.manager_up:
            self.send(VmTerminated(now=self.now, vm=name))
        else:
            self.after(1.0, self._tell_terminated, name)

    def torn_commit(self, group: Group, workers: list[SimTrainer]) -> bool:
        """Now and then a VM dies inside a commit, which then has happened for some survivors only."""
        if self.now > self.faults_until or len(workers) < 2 or self.random.random() > 0.02:
            return False
        victim = self.random.choice(workers)
        for trainer in workers:
            trainer.reduced_in = group.order.number
            if trainer is not victim and self.random.random() < 0.5:
                trainer.commit(group.order.number)
        self.kill_vm(victim.vm.name)
        return True

    def _alive(self) -> bool:
        return any(vm.alive for vm in self.vms.values())
