"""What must hold in a simulated world, whatever happens to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from makara.manager.core.facts import (
    EndReason,
    Fact,
    GenerationFormed,
    GenerationKind,
    GenerationOpened,
    GenerationPlanned,
    GenerationPrepared,
    VmEnded,
    VmRequested,
)
from makara.manager.core.fold import fold
from makara.manager.core.state import Incarnation, order_of, vm_of
from makara.morphing import covers
from makara.pipeline import Range
from makara.protocol.messages import INCARNATIONS, CheckpointRef
from world_machines import RECIPE

if TYPE_CHECKING:
    from faulty_world import FaultyWorld
    from makara.manager.world import Beginning, Trainer
    from makara.protocol.messages import Report
    from world_machines import Group, SimTrainer


class Broken(AssertionError):
    """An invariant does not hold."""


def check_facts(world: FaultyWorld, facts: tuple[Fact, ...]) -> None:
    """After each decision."""
    state = world.state
    counted, alive = {vm.vm for vm in state.counted_vms}, {vm.name for vm in world.vms.values() if vm.alive}
    if len(counted) > world.max_nodes and any(isinstance(fact, VmRequested) for fact in facts):
        raise Broken(f"{len(counted)} VMs, max_nodes is {world.max_nodes}")  # which may be less than before
    if not alive <= counted:
        raise Broken(f"{sorted(alive)} are there, {sorted(counted)} are counted")
    if state.planned and state.current and state.planned.number <= state.current.number:
        raise Broken("a planned generation is older than the open one")
    for fact in facts:
        _check_fact(world, fact)
    for ref in world.store.listed:
        if ref not in world.store.parts:
            raise Broken(f"{ref} is published without its parts")


def _check_fact(world: FaultyWorld, fact: Fact) -> None:
    match fact:
        case GenerationPlanned() if len(dict(fact.members)) < len(fact.members):
            raise Broken(f"a worker is twice in generation {fact.number}")
        case GenerationPlanned(kind=GenerationKind.TRAIN):
            _check_hosts(world, fact)
        case GenerationPrepared():
            planned = world.state.planned
            waiting = dict(planned.members) if planned else {}
            for trainer in (t for vm in world.vms.values() for t in vm.trainers):
                if waiting.get(trainer.worker) == trainer.incarnation and trainer.prepared < fact.number:
                    raise Broken(f"generation {fact.number} is prepared, but not by {trainer.worker}")
        case GenerationOpened(kind="train") if fact.number != world.store.generation:
            raise Broken(f"generation {fact.number} goes, but the head is open at {world.store.generation}")
        case VmEnded(reason=EndReason.LEASE_EXPIRED) if fact.vm in world.vms:
            silent_s = world.now - world.vms[fact.vm].heard_at
            if silent_s < world.agents_wait_s:
                raise Broken(f"{fact.vm} is ended for a silence of {silent_s:.1f} s: its agent still waits")
        case GenerationFormed() if fact.lost_steps > world.num_steps:
            raise Broken(f"{fact.lost_steps} steps lost of {world.num_steps}")
        case _:
            pass


def _check_hosts(world: FaultyWorld, fact: GenerationPlanned) -> None:
    """If each section has a host that the manager can count on, each has one among the members."""
    members = {Incarnation(*member) for member in fact.members}
    hosts = {host: Range(*span) for host, span in world.state.hosts.items()}
    living = {host: span for host, span in hosts.items() if _can_be_counted_on(world, host)}
    num_sections = RECIPE.num_sections
    if _cover(living.values(), num_sections):
        among = [span for host, span in living.items() if host in members]
        if not _cover(among, num_sections):
            raise Broken(
                f"generation {fact.number} leaves out hosts of sections that no member has: {living}"
            )


def _can_be_counted_on(world: FaultyWorld, host: Incarnation) -> bool:
    """Whether it lives and is heard, and its newest report says that it holds what it hosted."""
    vm, seen = world.vms[vm_of(host.worker)], world.observations
    if vm.name not in world.state.vms.live:
        return False
    trainer = next((t for t in vm.trainers if (t.worker, t.incarnation) == host), None)
    if trainer is None or not (vm.alive and trainer.alive and trainer.span) or vm.name in seen.unheard:
        return False
    report = seen.last_reports.get(vm.name)
    told = [w for w in report.report.workers if (w.worker, w.incarnation) == host] if report else []
    newest = max((number for number, group in world.groups.items() if group.running), default=0)
    return (
        trainer.agreed_in == newest
        and any(w.generation == newest for w in told)
        and host not in seen.left_out
    )


def check_heard(world: FaultyWorld, report: Report) -> None:
    """After a report: whoever runs again has been counted as dead."""
    last_report, vm = world.observations.last_reports.get(report.vm), world.state.vms.get(report.vm)
    if (
        world.state.ended
        or vm is None
        or not vm.live
        or last_report is None
        or last_report.report is not report
    ):
        return
    for worker in report.workers:
        before = worker.incarnation - 1
        if before and before % INCARNATIONS == 0:
            before -= 1  # what the agent before told last
        if before > 0 and world.state.failed.get(worker.worker, 0) < before:
            raise Broken(f"{worker.worker} died before incarnation {worker.incarnation}: not counted")


def lineage_of(world: FaultyWorld, members: list[SimTrainer], begun: Beginning) -> tuple[int, ...]:
    """The one history that members go on from, with as many steps as they agree on."""
    if begun.kept:
        lineages = {trainer.lineage for trainer in members if trainer.worker in begun.kept}
    elif begun.rung == "store":
        ref = CheckpointRef(step=begun.step, generation=begun.branch)
        lineages = {world.store.parts[ref]} if ref in world.store.parts else set[tuple[int, ...]]()
    else:
        lineages = {()}
    if {len(lineage) for lineage in lineages} != {begun.step} or len(lineages) > 1:
        raise Broken(f"from {begun.rung} at step {begun.step}, but of these histories: {lineages}")
    return min(lineages)


def check_formed(group: Group, lineage: tuple[int, ...]) -> None:
    """When a generation begins: its history has each step once, and goes back no further than its base."""
    check_lineage(lineage, len(lineage))
    base = group.order.checkpoints[0] if group.order.checkpoints else None
    if base is not None and len(lineage) < base.step:
        raise Broken(f"generation {group.order.number} begins at {len(lineage)}, before its base {base.step}")


def check_rung(
    begun: Beginning, members: Iterable[Trainer], hosts: Iterable[Trainer], num_sections: int
) -> None:
    """The members begin from the store, or anew, when and only when some section has no host: of those that
    live, as the newest generation that formed left them, `hosts`."""
    if begun.rung == "peers":
        kept = [trainer.span for trainer in members if trainer.worker in begun.kept]
        if not _cover(kept, num_sections):
            raise Broken(f"state from peers that hold {kept} alone")
    elif _cover(held := [trainer.span for trainer in hosts], num_sections):
        raise Broken(f"state from {begun.rung}, though there are hosts of all sections: {held}")


def _cover(spans: Iterable[Range | None], num_sections: int) -> bool:
    return covers((span.sections for span in spans if span is not None), num_sections)


def check_lineage(lineage: tuple[int, ...], num_steps: int) -> None:
    if len(lineage) != num_steps or list(lineage) != sorted(lineage):
        raise Broken(f"steps twice, skipped or out of order: {lineage}")


def check_end(world: FaultyWorld) -> None:
    """When the job has ended and all is quiet."""
    if fold(world.facts) != world.state:
        raise Broken("the journal tells another state")
    state = world.state
    for ref in world.store.listed:
        gone = order_of(ref) <= state.retired and ref not in state.published
        if gone and world.store.listed != [ref]:
            raise Broken(f"{ref} was published and never retired")
    if world.store.retired:
        raise Broken(f"{', '.join(map(str, world.store.retired))} left the head, and nobody deletes it")
    if len(state.published) > world.keep_latest_k:
        raise Broken(f"{len(state.published)} checkpoints are kept")
    if world.state.counted_vms or world.state.current or world.state.planned:
        raise Broken("something of the job outlives it")
