"""What goes wrong in a simulated history: chosen from the seed, played until `faults_until`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from makara.manager.core.events import ContinueRequested, DrainRequested, StopRequested
from makara.manager.core.facts import Fact, JobEnded
from makara.protocol.messages import INCARNATIONS, Failure, Phase
from makara.simulator import to_ns
from makara.worker.agent.starts import REPORTS, last_of
from world_machines import SimTrainer, SimVm
from world_protocol import die, restart, shatter

if TYPE_CHECKING:
    from faulty_world import FaultyWorld


def schedule(world: FaultyWorld) -> None:
    """Faults at a rate of this history's own; some histories have none."""
    world.after(world.random.uniform(0.5, 3.0), _strike, world, world.random.uniform(0.5, 6.0))
    if world.cloud.random() < 0.6:
        world.after(world.cloud.uniform(0.5, 6.0), _say, world, world.cloud.uniform(0.5, 8.0))
    if world.random.random() < 0.08:
        world.after(world.random.uniform(1.0, 30.0), _ask_to_stop, world)
    if world.person.random() < 0.2:
        world.after(world.person.uniform(1.0, 30.0), _ask_to_stop, world)


def _strike(world: FaultyWorld, mean_s: float) -> None:
    if world.now > world.faults_until:
        return
    alive = [vm for vm in world.vms.values() if vm.alive]
    if alive:
        fault = world.random.choices(_FAULTS, _ODDS)[0]
        fault(world, world.random.choice(alive))
    world.after(world.random.expovariate(1.0 / mean_s), _strike, world, mean_s)


def _say(world: FaultyWorld, mean_s: float) -> None:
    """What a cloud and a person say of VMs, and reboots."""
    if world.now > world.faults_until:
        return
    alive = [vm for vm in world.vms.values() if vm.alive]
    if alive:
        said = world.cloud.choices(_SAID, (3, 3, 1, 1, 2))[0]
        said(world, world.cloud.choice(alive))
    world.after(world.cloud.expovariate(1.0 / mean_s), _say, world, mean_s)


def _notice_withdrawn(world: FaultyWorld, vm: SimVm) -> None:
    if vm.deadline_ns is None:
        vm.deadline_ns = world.now_ns + to_ns(8.0)
        world.changed(vm)
        world.after(world.cloud.uniform(0.05, 5.0), _withdraw, world, vm)


def _withdraw(world: FaultyWorld, vm: SimVm) -> None:
    vm.deadline_ns = None
    world.changed(vm)


def _drain(world: FaultyWorld, vm: SimVm) -> None:
    names = list(world.state.vms.live)
    if world.state.active and names:
        world.send(DrainRequested(now=world.now, vm=world.cloud.choice(names)))


def _notice_all(world: FaultyWorld, vm: SimVm) -> None:
    for one in world.vms.values():
        if one.alive and one.deadline_ns is None:
            one.deadline_ns = world.now_ns + to_ns(world.cloud.choice((2.0, 8.0, 60.0)))
            world.at(one.deadline_ns, world.kill_vm, one.name)
            world.changed(one)


def _risk(world: FaultyWorld, vm: SimVm) -> None:
    vm.at_risk = not vm.at_risk
    world.changed(vm)


def _reboot(world: FaultyWorld, vm: SimVm) -> None:
    if vm.down:
        return
    vm.down = True
    for trainer in vm.trainers:
        trainer.alive, trainer.phase = False, Phase.EXITED
        group = world.groups.get(trainer.generation)
        if group is not None and group.arrived.get(trainer.worker) is trainer:
            shatter(world, group, [trainer.worker])
    if world.cloud.random() < 0.7:
        world.after(0.05, world.close_connection, vm.name)
    world.after(world.cloud.uniform(0.5, 9.0), _up, world, vm)


def _up(world: FaultyWorld, vm: SimVm) -> None:
    if not vm.alive:
        return
    vm.starts += 1
    vm.down, vm.orders, vm.sequence = False, None, vm.starts * REPORTS
    vm.reported = []
    vm.deaths = [last_of(trainer.worker, vm.starts) for trainer in vm.trainers]
    vm.trainers = [SimTrainer(t.worker, vm.starts * INCARNATIONS, vm=vm) for t in vm.trainers]
    for trainer in vm.trainers:
        world.after(world.cloud.uniform(0.1, 1.0), restart, world, trainer)
    world.changed(vm)


_SAID = (_notice_withdrawn, _drain, _notice_all, _risk, _reboot)


def _kill(world: FaultyWorld, vm: SimVm) -> None:
    world.kill_vm(vm.name)


def _kill_two(world: FaultyWorld, vm: SimVm) -> None:
    world.kill_vm(vm.name)
    others = [other for other in world.vms.values() if other.alive]
    if others:
        world.kill_vm(world.random.choice(others).name)


def _notice(world: FaultyWorld, vm: SimVm) -> None:
    if vm.deadline_ns is None:
        vm.deadline_ns = world.now_ns + to_ns(world.random.uniform(1.0, 8.0))
        world.at(vm.deadline_ns, world.kill_vm, vm.name)
        world.changed(vm)


def _silence(world: FaultyWorld, vm: SimVm) -> None:
    """SIGSTOP of a whole VM: it says nothing, comes back as a zombie, or stays so until it is released."""
    vm.stopped = True
    awake_in_s = world.random.choice((1.0, 3.0, 15.0, None))
    if awake_in_s is not None:
        world.after(awake_in_s, _wake, world, vm)


def _wake(world: FaultyWorld, vm: SimVm) -> None:
    vm.stopped = False
    world.changed(vm)


def _cut_off(world: FaultyWorld, vm: SimVm) -> None:
    """The VM trains on, but the manager cannot hear it."""
    vm.connected = False
    if world.random.random() < 0.5:
        world.close_connection(vm.name)
    world.after(world.random.choice((0.5, 2.0, 12.0)), _reconnect, world, vm)


def _reconnect(world: FaultyWorld, vm: SimVm) -> None:
    vm.connected = True
    world.changed(vm)


def _isolate_manager(world: FaultyWorld, _: SimVm) -> None:
    """Everybody trains on, but the manager hears nobody; sooner or later they return, one after the other."""
    away = [vm for vm in world.vms.values() if vm.alive]
    silence_s = world.random.choice((1.0, 7.0, 11.0))
    for vm in away:
        vm.connected = False
        if world.random.random() < 0.5:
            world.close_connection(vm.name)
        world.after(silence_s + world.random.uniform(0.0, 3.0), _reconnect, world, vm)


def _kill_trainer(world: FaultyWorld, vm: SimVm) -> None:
    die(world, world.random.choice(vm.trainers), Failure(kind="killed", message="SIGKILL"))


def _stop_trainer(world: FaultyWorld, vm: SimVm) -> None:
    trainer = world.random.choice(vm.trainers)
    trainer.stopped = True
    world.after(4.0, _end_lease, world, trainer)


def _end_lease(world: FaultyWorld, trainer: SimTrainer) -> None:
    die(world, trainer, Failure(kind="lease", message="no beat for 4 s"))


def _raise_in_user_code(world: FaultyWorld, vm: SimVm) -> None:
    die(
        world,
        world.random.choice(vm.trainers),
        Failure(kind="user", message="boom", traceback="Traceback: boom"),
    )


def _fail_inside(world: FaultyWorld, vm: SimVm) -> None:
    die(world, world.random.choice(vm.trainers), Failure(kind="internal", message="fault of ours"))


def _stop_store(world: FaultyWorld, _: SimVm) -> None:
    world.store_down_until = world.now + world.random.uniform(0.5, 6.0)


def _kill_manager(world: FaultyWorld, _: SimVm) -> None:
    world.kill_manager()


def _ask_to_stop(world: FaultyWorld) -> None:
    if world.manager_up:
        world.send(StopRequested(now=world.now))
    else:
        world.after(1.0, _ask_to_stop, world)


def look_at_end(world: FaultyWorld, facts: list[Fact]) -> None:
    """Now and then somebody has a job go on that was stopped or failed, at once or when all is quiet."""
    ended = any(isinstance(fact, JobEnded) and fact.status != "finished" for fact in facts)
    if ended and world.times_continued < 2 and world.person.random() < 0.8:
        world.times_continued += 1
        world.going_on = True
        most = 6 // world.workers_per_node
        max_nodes = world.person.randint(1, min(most, 5))
        nodes = world.person.randint(1, max_nodes), max_nodes
        world.after(world.person.choice((0.1, 2.0, 30.0)), _have_it_go_on, world, *nodes)


def _have_it_go_on(world: FaultyWorld, min_nodes: int, max_nodes: int) -> None:
    """Asked again until it is acknowledged: the manager may be away, or die meanwhile."""
    world.min_nodes, world.max_nodes = min_nodes, max_nodes
    world.send(ContinueRequested(now=world.now, min_nodes=min_nodes, max_nodes=max_nodes))
    if world.state.ended is not None:
        world.after(1.0, _have_it_go_on, world, min_nodes, max_nodes)
        return
    world.going_on = False
    if world.now > world.faults_until:
        world.faults_until = world.now + world.person.uniform(0.0, 20.0)
        schedule(world)


_ODDS = (6, 2, 5, 2, 3, 2, 3, 2, 1, 1, 1, 3)
_FAULTS = (
    _kill,
    _kill_two,
    _notice,
    _silence,
    _cut_off,
    _isolate_manager,
    _kill_trainer,
    _stop_trainer,
    _raise_in_user_code,
    _fail_inside,
    _stop_store,
    _kill_manager,
)
