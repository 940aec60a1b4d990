"""What simulated trainers do: they keep the wire protocol, form generations, step, commit and publish."""

from __future__ import annotations

from typing import TYPE_CHECKING

from makara.manager.world import begin
from makara.pipeline import Range
from makara.protocol.messages import CheckpointRef, Failure, Formed, Orders, Phase
from world_checks import check_formed, check_rung, lineage_of
from world_machines import GRAPH_HASH, RECIPE, Group, SimTrainer
from world_profiles import measure

if TYPE_CHECKING:
    from faulty_world import FaultyWorld

_IN_GROUP = (Phase.FORMING, Phase.RUNNING, Phase.HELD)


def obey(world: FaultyWorld, trainer: SimTrainer, orders: Orders) -> None:
    """A trainer takes its newest orders."""
    if not trainer.alive:
        return
    trainer.hold = orders.hold
    if trainer.phase in _IN_GROUP and 0 < trainer.generation <= orders.abandoned:
        break_off(world, trainer, ())
        if trainer.phase is Phase.BROKEN and world.random.random() < 0.5:
            trainer.phase = Phase.IDLE  # it was told before it noticed; it keeps its state all the same
    measure(world, trainer, orders)
    if orders.recipe is not None and trainer.graph_hash is None and trainer.phase is Phase.IDLE:
        world.after(0.2, traced, world, trainer)
    order = orders.generation
    if (
        order is None
        or order.kind != "train"
        or trainer.worker not in order.ranks
        or trainer.graph_hash is None
    ):
        return
    if order.number > trainer.prepared:
        trainer.prepared = order.number
        world.changed(trainer.vm)
    if order.phase == "go" and order.number > max(trainer.generation, orders.abandoned):
        trainer.go = order
        if trainer.phase in (Phase.IDLE, Phase.BROKEN, Phase.HELD, Phase.LEFT, Phase.FINISHED):
            enter(world, trainer)


def traced(world: FaultyWorld, trainer: SimTrainer) -> None:
    if trainer.alive and trainer.graph_hash is None:
        trainer.graph_hash = GRAPH_HASH
        world.changed(trainer.vm)
        if trainer.vm.orders is not None:
            obey(world, trainer, trainer.vm.orders)


def enter(world: FaultyWorld, trainer: SimTrainer) -> None:
    """Join the forming of the generation that the orders say to go to."""
    order = trainer.go
    assert order is not None
    trainer.go, trainer.phase, trainer.generation, trainer.lost = None, Phase.FORMING, order.number, ()
    group = world.groups.setdefault(order.number, Group(order))
    group.arrive(trainer, order)
    world.changed(trainer.vm)
    if group.broken:
        world.after(0.1, break_off, world, trainer, ())
    elif group.has_all:
        world.after(world.random.uniform(0.05, 0.5), form, world, group)
    else:
        world.after(4.0, wait_ended, world, group)


def wait_ended(world: FaultyWorld, group: Group) -> None:
    if not group.running and not group.has_all:
        shatter(world, group, [name for name in group.names if name not in group.arrived])


def form(world: FaultyWorld, group: Group) -> None:
    """Survivors agree on the newest state that they hold; else the newest published checkpoint is loaded."""
    members = [group.arrived[name] for name in group.names]
    if group.broken or any(not stands(t, group, Phase.FORMING) for t in members):
        shatter(world, group, [t.worker for t in members if not stands(t, group, Phase.FORMING)])
        return
    number, published = group.order.number, group.order.checkpoints
    hosts = hosts_among(world, members, published)
    begun = begin(members, published, RECIPE.num_sections)
    check_rung(begun, members, hosts, RECIPE.num_sections)
    lineage = lineage_of(world, members, begun)
    group.running = True
    formed = Formed(generation=number, step=len(lineage), rung=begun.rung, phases_s={"load": 0.1})
    for rank, trainer in enumerate(members):
        if rank >= group.num_workers:
            trainer.leave()
        else:
            start, stop = group.order.plan["ranges"][rank]
            trainer.take_part(Range(start, stop), begun.branch, formed)
            trainer.lineage = lineage
        world.changed(trainer.vm)
    check_formed(group, lineage)
    if len(lineage) == world.num_steps or group.order.saves_only:
        start_publishing(world, group)
    world.after(world.step_s, step, world, group)


def hosts_among(
    world: FaultyWorld, members: list[SimTrainer], published: tuple[CheckpointRef, ...]
) -> list[SimTrainer]:
    """The members that hold sections as the newest generation left them; none if a checkpoint is newer."""
    newest = max((number for number, group in world.groups.items() if group.running), default=0)
    hosts = [trainer for trainer in members if trainer.agreed_in == newest]
    step = max((trainer.step for trainer in hosts), default=0)
    return [] if any(ref.age_rank > (newest, step) for ref in published) else hosts


def stands(trainer: SimTrainer, group: Group, phase: Phase) -> bool:
    if not trainer.alive or trainer.stopped or trainer.vm.stopped:
        return False
    return trainer.phase is phase and trainer.generation == group.order.number


def step(world: FaultyWorld, group: Group) -> None:
    """One mini-batch of a generation: commit, then switch, hold, publish, or go on."""
    workers = [group.arrived[name] for name in group.names[: group.num_workers]]
    if group.broken or any(t.generation != group.order.number for t in workers):
        return  # those who held have gone on to another, and do not come back to this one
    if any(t.stopped or t.vm.stopped for t in workers):
        world.after(world.step_s, step, world, group)  # they wait for each other
        return
    if all(t.go is not None for t in workers):
        for trainer in workers:
            enter(world, trainer)
        return
    phases = {t.phase for t in workers}
    if (
        phases == {Phase.RUNNING}
        and workers[0].step < world.num_steps
        and not group.order.saves_only
        and not world.torn_commit(group, workers)
    ):
        for trainer in workers:
            trainer.commit(group.order.number)
            world.changed(trainer.vm)
        done = workers[0].step
        if done % world.interval == 0 or done == world.num_steps or group.holds:
            start_publishing(world, group)
    elif (
        phases == {Phase.RUNNING}
        and not group.publishing
        and (workers[0].step == world.num_steps or group.order.saves_only)
    ):
        start_publishing(world, group)
    world.after(world.step_s, step, world, group)


def start_publishing(world: FaultyWorld, group: Group) -> None:
    if not group.publishing:
        group.publishing = True
        workers = [group.arrived[name] for name in group.names[: group.num_workers]]
        lineage, holding = workers[0].lineage, group.holds
        world.after(world.random.uniform(0.1, 1.0), publish, world, group, lineage, holding)
        if len(lineage) == world.num_steps:
            for trainer in workers[1:]:  # done once their own parts are stored, whatever becomes of rank 0
                world.after(world.random.uniform(0.0, 1.0), finish, world, trainer, group)


def finish(world: FaultyWorld, trainer: SimTrainer, group: Group) -> None:
    if stands(trainer, group, Phase.RUNNING):
        trainer.phase = Phase.FINISHED
        world.changed(trainer.vm)
        if trainer.go is not None:
            enter(world, trainer)


def publish(world: FaultyWorld, group: Group, lineage: tuple[int, ...], holding: bool) -> None:
    """Rank 0 publishes through the head, which refuses it when a newer generation has opened it."""
    workers = [group.arrived[name] for name in group.names[: group.num_workers]]
    group.publishing = False
    if not workers[0].alive or (group.broken and not world.zombies_publish):
        return
    ref = CheckpointRef(step=len(lineage), generation=group.order.number)
    if not world.store.publish(ref, lineage):
        return
    workers[0].published = ref
    if not group.broken:
        if len(lineage) == world.num_steps:
            finish(world, workers[0], group)
        for trainer in workers:
            if holding and trainer.phase is Phase.RUNNING and trainer.step == len(lineage):
                trainer.phase = Phase.HELD
                if trainer.go is not None:
                    enter(world, trainer)
            world.changed(trainer.vm)
    world.changed(workers[0].vm)


def shatter(world: FaultyWorld, group: Group, lost: list[str]) -> None:
    """Everybody who waits in the group's collectives is woken, each a little later than the last."""
    if group.broken:
        return
    group.broken = True
    for trainer in group.arrived.values():
        if trainer.worker not in lost:
            world.after(world.random.uniform(0.02, 0.4), break_off, world, trainer, tuple(lost))


def break_off(world: FaultyWorld, trainer: SimTrainer, lost: tuple[str, ...]) -> None:
    group = world.groups.get(trainer.generation)
    if not trainer.alive or trainer.phase not in _IN_GROUP:
        return
    if group is not None and not group.broken:
        shatter(world, group, [trainer.worker])
    trainer.phase, trainer.lost = Phase.BROKEN, lost
    world.changed(trainer.vm)
    if trainer.go is not None and trainer.go.number > trainer.generation:
        enter(world, trainer)


def die(world: FaultyWorld, trainer: SimTrainer, failure: Failure) -> None:
    """The process ends; its agent reports it and starts the next incarnation."""
    if not trainer.alive:
        return
    trainer.alive, trainer.failure, trainer.phase = False, failure, Phase.EXITED
    trainer.vm.deaths.append(trainer.report())
    group = world.groups.get(trainer.generation)
    if group is not None and group.arrived.get(trainer.worker) is trainer:
        shatter(world, group, [trainer.worker])
    world.changed(trainer.vm)
    if trainer.vm.alive:
        world.after(world.random.uniform(0.3, 1.5), restart, world, trainer)


def restart(world: FaultyWorld, trainer: SimTrainer) -> None:
    vm = trainer.vm
    if vm.alive and trainer in vm.trainers:
        again = SimTrainer(trainer.worker, trainer.incarnation + 1, vm=vm)
        vm.trainers[vm.trainers.index(trainer)] = again
        world.after(world.random.uniform(0.2, 1.0), started, world, again)
        world.changed(vm)


def started(world: FaultyWorld, trainer: SimTrainer) -> None:
    if trainer.alive and trainer.phase is Phase.STARTING:
        trainer.phase = Phase.IDLE
        world.changed(trainer.vm)
        if trainer.vm.orders is not None:
            obey(world, trainer, trainer.vm.orders)
