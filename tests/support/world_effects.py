"""What commands do in the simulated world: a cloud that refuses, a planner, a store that goes away."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from makara.manager.core.commands import (
    Command,
    ComputeGrowth,
    ComputePlan,
    DeleteCheckpoint,
    ExportWeights,
    OpenHead,
    ReleaseVm,
    RequestVm,
    StoreCalibration,
    SweepStore,
)
from makara.manager.core.events import (
    AttemptFailed,
    AttemptSucceeded,
    CheckpointDeleted,
    Event,
    HeadOpened,
    HeadSeen,
    JobCommandFailed,
    PlanComputed,
    VmTerminated,
    WeightsExported,
)
from makara.manager.core.facts import RefusalKind
from makara.pipeline import Range, grid
from rented_script import answer
from world_checks import check_lineage
from world_machines import RECIPE, SimTrainer, SimVm
from world_protocol import started

if TYPE_CHECKING:
    from faulty_world import FaultyWorld

_SHAPES = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2), 5: (2, 2), 6: (3, 2)}
_STAGES = {1: [(0, 3)], 2: [(0, 1), (1, 3)], 3: [(0, 1), (1, 2), (2, 3)]}
_PLANS = {
    n: grid([Range(*r) for r in _STAGES[p]], d, RECIPE.num_micro_batches).to_json()
    for n, (p, d) in _SHAPES.items()
}


def perform(world: FaultyWorld, command: Command) -> None:
    delay_s = world.random.uniform(0.05, 0.6)
    match command:
        case RequestVm():
            world.after(world.random.uniform(0.1, 2.0), _boot, world, command)
        case ReleaseVm():
            world.after(world.random.choice((0.1, 0.5, 6.0)), _release, world, command)
        case ComputePlan():
            world.after(delay_s, _plan, world, command)
        case ComputeGrowth():
            late = world.rents and world.random.random() < 0.1
            world.after(12.0 if late else delay_s, _grow, world, command)
        case StoreCalibration():
            world.after(delay_s, _done, world, command)
        case SweepStore():
            wait_s = max(delay_s, command.not_before - world.now, world.store_down_until - world.now)
            world.after(wait_s, _use_store, world, command)
        case OpenHead() | DeleteCheckpoint() | ExportWeights():
            world.after(max(delay_s, world.store_down_until - world.now), _use_store, world, command)


def _done(world: FaultyWorld, command: Command, event: Event | None = None) -> None:
    """A command is marked done once its answer was taken; before that a new manager runs it again."""
    if not world.manager_up or command.key not in world.pending:
        return
    if event is not None:
        world.handle(event)
    if world.manager_up:
        del world.pending[command.key]


def _boot(world: FaultyWorld, command: RequestVm) -> None:
    name, number = command.vm, command.attempt.number if command.attempt is not None else 1
    if name in world.vms or name in world.released:
        _done(world, command)
    elif world.now < world.faults_until and world.random.random() < 0.15:
        kind = RefusalKind.NO_CAPACITY
        if world.rents and world.manager_up:
            world.released.add(name)  # a cloud refuses only where no earlier call can take effect
        refused = AttemptFailed(now=world.now, vm=name, number=number, kind=kind, error="no capacity")
        _done(world, command, refused)
    else:
        vm = world.vms[name] = SimVm(name, [], pace=world.random.choice((1.0, 1.0, world.pace, 2.0)))
        for index in range(world.workers_per_node):
            trainer = SimTrainer(f"{name}.{index}", vm=vm)
            vm.trainers.append(trainer)
            world.after(world.random.uniform(0.2, 2.0), started, world, trainer)
        _done(world, command, AttemptSucceeded(now=world.now, vm=name, number=number, id=f"id of {name}"))
        world.after(0.1, world.heartbeat, name)


def _release(world: FaultyWorld, command: ReleaseVm) -> None:
    world.released.add(command.vm)
    world.kill_vm(command.vm, told=False)
    _done(world, command, VmTerminated(now=world.now, vm=command.vm))


def _plan(world: FaultyWorld, command: ComputePlan) -> None:
    slots = sorted(command.workers, key=lambda slot: slot.slowdown) if world.pace > 1.5 else command.workers
    workers = tuple(slot.worker for slot in slots)
    if len(workers) < world.min_workers:
        answer = PlanComputed(
            now=world.now,
            generation=command.generation,
            asked=command.asked,
            plan=None,
            reason="too little memory",
        )
    else:
        depth, replicas = _SHAPES[len(workers)]
        plan = {**_PLANS[len(workers)], "generation": command.generation}
        used = workers[: depth * replicas]
        answer = PlanComputed(
            now=world.now,
            generation=command.generation,
            asked=command.asked,
            plan=plan,
            workers=used,
            predicted_s=12.0 / prod(_SHAPES[len(workers)]) if world.seems_slow else 1.0,
            current_s=1.0 if command.reconsider else None,
            stays=command.reconsider and world.random.random() < 0.5,
        )
    _done(world, command, answer)


def _grow(world: FaultyWorld, command: ComputeGrowth) -> None:
    def step_s(num_vms: int) -> float | None:
        num_workers = num_vms * world.workers_per_node
        return 6.0 / prod(_SHAPES[num_workers]) if num_workers >= world.min_workers else None

    if world.random.random() < 0.1:
        fault = JobCommandFailed(now=world.now, command=command.command, error="a fault", key=command.key)
        _done(world, command, fault)
    else:
        _done(world, command, answer(command, step_s, world.now))


def _use_store(world: FaultyWorld, command: OpenHead | DeleteCheckpoint | SweepStore | ExportWeights) -> None:
    if world.now < world.store_down_until:
        world.after(1.0, _use_store, world, command)
    elif not world.manager_up:
        return
    elif isinstance(command, OpenHead):
        opened = world.store.open(command.generation)
        listed = tuple(world.store.listed)
        answer = HeadOpened(now=world.now, generation=command.generation, checkpoints=listed)
        _done(world, command, answer if opened else None)
    elif isinstance(command, DeleteCheckpoint):
        world.store.retire(command.checkpoint, world.now)
        retired_at = world.store.retired.get(command.checkpoint, world.now - command.lease_s)
        wait_s = max(command.not_before, retired_at + command.lease_s) - world.now
        if wait_s > 1e-6:
            world.after(wait_s + 1e-6, _use_store, world, command)
            return
        world.store.delete(command.checkpoint, world.now, command.lease_s)
        _done(world, command, CheckpointDeleted(now=world.now, checkpoint=command.checkpoint))
    elif isinstance(command, SweepStore):
        state = world.state
        ended = state.ended is not None
        kept = {*state.published, *([state.base] if state.base is not None and not ended else [])}
        world.store.sweep(kept, state.retired, world.now, command.lease_s, ended=ended)
        seen = HeadSeen(
            now=world.now,
            generation=world.store.generation,
            checkpoints=tuple(world.store.listed),
            leaving=len(world.store.retired),
        )
        _done(world, command, seen)
    else:
        step = command.checkpoint.step
        check_lineage(world.store.parts[command.checkpoint], world.num_steps)
        _done(world, command, WeightsExported(now=world.now, uri="file:///c/export", sha256="5a", step=step))
