"""Twelve kinds of faults, done to a running job: what is done, and by which sign it is noticed.

A fault is a context manager of a scene: it has been done when it yields, and is over when it ends.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from fault_scene import INTERVAL, Scene, full_disk
from fault_signs import (
    LEFT_S,
    LINK_S,
    LISTED_S,
    PROGRESS_S,
    REPORTED_S,
    REQUEST_S,
    TRAINER_LEASE_S,
    VM_LEASE_S,
    Play,
    Played,
    agent_lost_manager,
    first_of,
    isolation_shown,
    peer_lost,
    silent,
    stalled_by,
    store_trouble,
    vm_ended,
    worker_failed,
)
from service_process import wait_for

# ---- a trainer ---------------------------------------------------------------------------------------------


def by_own_code(order: str, kind: str, bound_s: float) -> Play:
    """A trainer's own process does the harm, in the middle of a step."""

    @contextmanager
    def play(scene: Scene) -> Iterator[Played]:
        at, worker = scene.order(order)
        yield Played(at, worker_failed(worker, kind), bound_s)

    return play


def signal_to_trainer(number: signal.Signals, kind: str, bound_s: float) -> Play:
    @contextmanager
    def play(scene: Scene) -> Iterator[Played]:
        vm = scene.some_vm()
        trainer = scene.service.trainer(vm)
        trainer.send_signal(number)
        yield Played(time.time(), worker_failed(f"{vm}.0", kind), bound_s)

    return play


@contextmanager
def hangs(scene: Scene) -> Iterator[Played]:
    """An operation never returns, and keeps nothing from beating."""
    at, worker = scene.order("hang")
    yield Played(at, stalled_by(worker), PROGRESS_S)


# ---- a VM --------------------------------------------------------------------------------------------------


def signal_to_agent(number: signal.Signals, bound_s: float) -> Play:
    @contextmanager
    def play(scene: Scene) -> Iterator[Played]:
        vm = scene.some_vm()
        scene.service.agent(vm).send_signal(number)
        yield Played(time.time(), vm_ended(vm, "preempted", "left"), bound_s)

    return play


def stopped(which: Callable[[Scene, str], list[psutil.Process]]) -> Play:
    """Processes of a VM stand still until the job goes on without it, and then wake: zombies do no harm."""

    @contextmanager
    def play(scene: Scene) -> Iterator[Played]:
        vm = scene.some_vm()
        processes = which(scene, vm)
        for process in processes:
            process.suspend()
        yield Played(time.time(), silent(vm), VM_LEASE_S)
        for process in processes:
            if process.is_running():
                process.resume()
        serves_again(scene, vm)

    return play


def serves_again(scene: Scene, vm: str) -> None:
    """A VM that was silent is like any other."""

    def back() -> bool:
        shown = next(one for one in scene.view()["vms"] if one["vm"] == vm)
        return shown["status"] == "joined" and not shown["detail"] and bool(shown["workers"])

    wait_for(back, "a VM that was silent to serve again", scene.service.logs)
    ended = [fact for fact in scene.facts() if fact["fact"] == "vm_ended"]
    assert not ended, f"silence is no death: {ended}"


def the_agent(scene: Scene, vm: str) -> list[psutil.Process]:
    return [scene.service.agent(vm)]


def the_whole_vm(scene: Scene, vm: str) -> list[psutil.Process]:
    return scene.service.vm_processes(vm)


# ---- networks ----------------------------------------------------------------------------------------------


@contextmanager
def workers_cut_off(scene: Scene) -> Iterator[Played]:
    """Two workers reach the manager, the store and everyone else, but not each other."""
    one, other = neighbours(scene)
    scene.network.cut(one, scene.network.address(other))
    at = time.time()
    yield Played(at, peer_lost(one, other, at), LINK_S)
    generation_over(scene)
    scene.network.heal()


@contextmanager
def half_open_between_workers(scene: Scene) -> Iterator[Played]:
    """All packets of the connections between two workers vanish, as behind a router that forgot them."""
    one, other = neighbours(scene)
    cut_connections(scene, one, scene.service.trainer(one), scene.network.address(other))
    at = time.time()
    yield Played(at, peer_lost(one, other, at), LINK_S)
    generation_over(scene)
    scene.network.heal()


@contextmanager
def half_open_to_manager(scene: Scene) -> Iterator[Played]:
    """All packets of one agent's connection vanish; a new one would work."""
    vm = scene.some_vm()
    cut_connections(scene, vm, scene.service.agent(vm), scene.network.host)
    at = time.time()
    yield Played(at, first_of(agent_lost_manager(vm, at), silent(vm)), LINK_S)
    serves_again(scene, vm)
    scene.network.heal()


def generation_over(scene: Scene) -> None:
    """What lost its link has been closed, or was superseded: a moment after its workers noticed."""

    def over() -> bool:
        return any(fact["fact"] in ("generation_closed", "generation_formed") for fact in scene.facts())

    wait_for(over, "the generation to be over", scene.service.logs)


def cut_connections(scene: Scene, vm: str, process: psutil.Process, other: str) -> None:
    """Those that there are; a fault before may have ended the last ones, which are made again in seconds."""
    found: list[tuple[int, int]] = []

    def connected() -> bool:
        found.extend(scene.network.connections(vm, process.pid, other))
        return bool(found)

    what = f"process {process.pid} of VM {vm} to be connected to {other}"
    wait_for(connected, what, scene.service.logs)
    for port, other_port in found:
        scene.network.cut_connection(vm, port, other, other_port)


def neighbours(scene: Scene) -> tuple[str, str]:
    """Two VMs whose workers send each other activations."""
    vms = scene.vms()
    first = scene.chance.randrange(len(vms) - 1)
    return vms[first], vms[first + 1]


# ---- disks -------------------------------------------------------------------------------------------------


@contextmanager
def store_full(scene: Scene) -> Iterator[Played]:
    with full_disk(scene.service.folder / "s3"):
        yield Played(time.time(), store_trouble, next_save_s(scene))
    published_again(scene)


@contextmanager
def vm_full(scene: Scene) -> Iterator[Played]:
    """Nothing can be written on a VM, and its trainer dies: the next one starts all the same."""
    vm = scene.some_vm()
    with full_disk(scene.service.vm_file(vm, ".")):
        scene.service.trainer(vm).kill()
        yield Played(time.time(), worker_failed(f"{vm}.0", "killed"), REPORTED_S)


# ---- the store ---------------------------------------------------------------------------------------------


@contextmanager
def store_refuses(scene: Scene) -> Iterator[Played]:
    scene.store.stop(kill=True)
    yield Played(time.time(), store_trouble, next_save_s(scene))
    scene.store.start()
    published_again(scene)


@contextmanager
def store_hangs(scene: Scene) -> Iterator[Played]:
    """Requests are taken and never answered."""
    scene.store.pause()
    yield Played(time.time(), store_trouble, next_save_s(scene) + REQUEST_S)
    scene.store.go_on()
    published_again(scene)


def next_save_s(scene: Scene) -> float:
    """Until the next checkpoint is to be saved, and what the store says to that is reported."""
    return INTERVAL * float(scene.view()["seconds_per_step"]) + REPORTED_S


def published_again(scene: Scene) -> None:
    """A checkpoint newer than now."""
    step = scene.view()["step"]

    def newer(view: dict[str, Any]) -> bool:
        return any(checkpoint["step"] > step for checkpoint in view["checkpoints"])

    scene.service.wait(scene.job, newer, "a checkpoint after the store came back")


# ---- clocks ------------------------------------------------------------------------------------------------


def clock_jumps(ahead_s: float) -> Play:
    """The manager's wall clock jumps, then a VM falls silent: it alone is noticed, as fast as ever. The clock
    jumps back before steps are waited for, because S3 refuses what is signed at another hour."""

    @contextmanager
    def play(scene: Scene) -> Iterator[Played]:
        scene.service.set_clock(ahead_s)
        vm = scene.some_vm()
        processes = scene.service.vm_processes(vm)
        for process in processes:
            process.suspend()
        yield Played(time.time(), silent(vm), VM_LEASE_S, lambda: scene.service.set_clock(0.0))
        for process in processes:
            process.resume()
        serves_again(scene, vm)

    return play


# ---- the manager -------------------------------------------------------------------------------------------


@contextmanager
def manager_killed(scene: Scene) -> Iterator[Played]:
    vm = scene.some_vm()
    at = time.time()
    scene.service.kill()
    yield Played(at, agent_lost_manager(vm, at), LISTED_S)
    threading.Event().wait(at + 20 - time.time())
    scene.service.start()


@contextmanager
def manager_isolated(scene: Scene) -> Iterator[Played]:
    """The manager runs, and no packet passes between it and any VM."""
    at = time.time()
    for vm in scene.service.live(scene.job):
        scene.network.cut(vm, scene.network.host)
    yield Played(at, isolation_shown, VM_LEASE_S)
    threading.Event().wait(at + 30 - time.time())
    scene.network.heal()
    steps = len(scene.applied())
    wait_for(lambda: len(scene.applied()) > steps + 5, "steps", scene.service.logs)
    changed = [fact for fact in scene.facts() if fact["fact"] in ("vm_ended", "generation_closed")]
    assert not changed, f"an isolated manager changes nothing: {changed}"


@dataclass(frozen=True)
class Fault:
    name: str
    play: Play


FAULTS = (
    Fault("exception: the job's data", by_own_code("data", "user", REPORTED_S)),
    Fault("exception: the model's operation", by_own_code("operation", "user", REPORTED_S)),
    Fault("exception: our code", by_own_code("internal", "internal", REPORTED_S)),
    Fault("SIGKILL: trainer", signal_to_trainer(signal.SIGKILL, "killed", REPORTED_S)),
    Fault("SIGTERM: trainer", signal_to_trainer(signal.SIGTERM, "killed", REPORTED_S)),
    Fault("SIGSTOP: trainer", signal_to_trainer(signal.SIGSTOP, "lease", TRAINER_LEASE_S)),
    Fault("abort", by_own_code("abort", "killed", REPORTED_S)),
    Fault("interpreter lock held", by_own_code("lock", "lease", TRAINER_LEASE_S)),
    Fault("operation that never returns", hangs),
    Fault("SIGKILL: agent", signal_to_agent(signal.SIGKILL, LISTED_S)),
    Fault("SIGTERM: agent", signal_to_agent(signal.SIGTERM, LEFT_S)),
    Fault("SIGSTOP: agent", stopped(the_agent)),
    Fault("SIGSTOP: whole VM, woken later", stopped(the_whole_vm)),
    Fault("network cut between two workers", workers_cut_off),
    Fault("half-open: worker to worker", half_open_between_workers),
    Fault("half-open: agent to manager", half_open_to_manager),
    Fault("full disk: store", store_full),
    Fault("full disk: VM", vm_full),
    Fault("clock an hour ahead", clock_jumps(3600.0)),
    Fault("clock an hour back", clock_jumps(-3600.0)),
    Fault("manager killed for 20 s", manager_killed),
    Fault("manager isolated for 30 s", manager_isolated),
    Fault("store refuses connections", store_refuses),
    Fault("store hangs", store_hangs),
)
