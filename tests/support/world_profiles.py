"""What simulated trainers do before there is a recipe: they meet in generations of kind `profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from makara.protocol.messages import GenerationOrder, Orders, Phase
from world_machines import PROFILE, Meeting, SimTrainer, measured_profile

if TYPE_CHECKING:
    from faulty_world import FaultyWorld

_SECTIONS = 6  # 3 for each of two m


def measure(world: FaultyWorld, trainer: SimTrainer, orders: Orders) -> None:
    """Get ready for the one that is ordered, go into it, and leave one that is not wanted any more."""
    order = orders.generation
    wanted = orders.recipe is None and order is not None and order.kind == "profile"
    if order is None or not wanted or trainer.worker not in order.ranks:
        leave(world, trainer)
        return
    if order.phase == "prepare":
        if order.number > trainer.profiling.prepared:
            tell(world, trainer, prepared=order.number, endpoint=f"{trainer.worker}:1")
        return
    if order.number > trainer.profiling.generation:
        leave(world, trainer)
        if trainer.phase is Phase.IDLE and order.number == trainer.profiling.prepared:
            enter(world, trainer, order)


def tell(world: FaultyWorld, trainer: SimTrainer, **changes: Any) -> None:
    trainer.profiling = trainer.profiling.model_copy(update=changes)
    world.changed(trainer.vm)


def leave(world: FaultyWorld, trainer: SimTrainer) -> None:
    if trainer.phase is Phase.PROFILING:
        trainer.phase = Phase.IDLE
        world.changed(trainer.vm)


def enter(world: FaultyWorld, trainer: SimTrainer, order: GenerationOrder) -> None:
    trainer.phase, trainer.profile = Phase.PROFILING, None
    tell(world, trainer, generation=order.number, broken="")
    group = world.profiles.setdefault(order.number, Meeting(order))
    group.arrive(trainer, order)
    if group.has_all:
        world.after(world.random.uniform(0.1, 1.0), survey, world, group)


def is_whole(world: FaultyWorld, group: Meeting) -> bool:
    """Whether all members are in it still; else the others notice, sooner or later."""
    members = list(group.arrived.values())
    inside = [
        t
        for t in members
        if t.alive and t.phase is Phase.PROFILING and t.profiling.generation == group.order.number
    ]
    if len(inside) == len(members):
        return True
    for trainer in inside:
        world.after(world.random.uniform(0.1, 0.5), break_off, world, trainer, group)
    return False


def break_off(world: FaultyWorld, trainer: SimTrainer, group: Meeting) -> None:
    if trainer.phase is Phase.PROFILING and trainer.profiling.generation == group.order.number:
        trainer.phase = Phase.IDLE
        tell(world, trainer, broken="it lost a peer")


def survey(world: FaultyWorld, group: Meeting) -> None:
    """Rank 0 looks at the model, or in the store; then all measure their shares."""
    if again_later(world, survey, group) or not is_whole(world, group):
        return
    if not world.surveys:
        finish(world, group)
        return
    for trainer in group.arrived.values():
        tell(world, trainer, stage="sections", total=_SECTIONS)
    world.after(world.random.uniform(0.1, 2.0), links, world, group)


def links(world: FaultyWorld, group: Meeting) -> None:
    """Now and then it comes to nothing."""
    if again_later(world, links, group) or not is_whole(world, group):
        return
    for trainer in group.arrived.values():
        tell(world, trainer, stage="links" if len(group.arrived) > 1 else "sections", done=_SECTIONS)
    if len(group.arrived) > 1 and world.random.random() < 0.1:
        for trainer in group.arrived.values():
            world.after(world.random.uniform(0.1, 0.5), break_off, world, trainer, group)
    else:
        world.after(world.random.uniform(0.1, 1.0), finish, world, group)


def finish(world: FaultyWorld, group: Meeting) -> None:
    if again_later(world, finish, group) or not is_whole(world, group):
        return
    first, *others = (group.arrived[name] for name in group.names)
    first.profile = measured_profile(links=bool(others)) if world.surveys else PROFILE
    for trainer in (first, *others):
        leave(world, trainer)


def again_later(world: FaultyWorld, call: Any, group: Meeting) -> bool:
    """Whether one of them is stopped: they wait for each other."""
    stopped = any(t.alive and (t.stopped or t.vm.stopped) for t in group.arrived.values())
    if stopped:
        world.after(0.5, call, world, group)
    return stopped
