"""A job on machines that joined by themselves: real managers, machines and trainers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from joined_machine import JoinedMachine
from service_process import ServiceProcess, wait_for
from slow_job import BATCH, MODEL, SHAPE, STEPS, reference

pytestmark = pytest.mark.slow


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path, options=("--tls",))
    process.start()
    yield process
    process.close()


@pytest.fixture
def grace_s() -> float:
    """What a machine gives its VM to hand over: longer than any test waits for it."""
    return 3600.0


@pytest.fixture
def machines(service: ServiceProcess, grace_s: float) -> Iterator[list[JoinedMachine]]:
    """Two that joined."""
    token = service.client.post("/tokens", json={"name": "lab", "scope": "machine", "uses": 2})["token"]
    url, ca_file = service.client.url, service.home / "ca.pem"
    options = ("--grace", str(grace_s))
    made = [JoinedMachine(service.folder / f"lab{n}", url, token, ca_file, options) for n in range(2)]
    for machine in made:
        machine.start()
    yield made
    for machine in made:
        machine.stop()
        assert machine.vms() == []
        assert machine.vm_processes() == []


def submit(service: ServiceProcess, *, min_nodes: int = 1, interval: int = 5) -> str:
    return service.submit(
        MODEL,
        entrypoint="train:slow_gpt",
        training={**BATCH, "steps": STEPS, "numerics": "exact"},
        parallelism=SHAPE,
        resources={"provider": "static", "min_nodes": min_nodes, "max_nodes": 2},
        checkpoint={"interval": interval},
    )


def pool(service: ServiceProcess) -> dict[str, str | None]:
    """By name of a connected machine, which VM it is."""
    found = service.client.get("/machines")["machines"]
    return {machine["name"]: machine["vm"] for machine in found if machine["connected"]}


def logs(service: ServiceProcess, machines: list[JoinedMachine]) -> Callable[[], str]:
    return lambda: "\n".join([service.logs(), *(machine.log() for machine in machines)])


def test_a_machine_that_is_killed_and_comes_back_changes_nothing_in_the_result(
    service: ServiceProcess, machines: list[JoinedMachine]
) -> None:
    job = submit(service)
    both_train(service, job)
    before = pool(service)["lab1"]
    machines[1].kill()
    machines[1].start()

    def is_another_vm() -> bool:
        return pool(service).get("lab1") not in (None, before)

    wait_for(is_another_vm, "the machine to be leased again", logs(service, machines))
    service.end_naps()
    view = service.wait_status(job, "finished")
    assert view["export_sha256"] == reference()
    assert sorted(service.losses(job)) == list(range(1, STEPS + 1))
    wait_for(lambda: pool(service) == {"lab0": None, "lab1": None}, "a free pool", logs(service, machines))
    assert [machine.vms() for machine in machines] == [[], []]


def test_neither_the_manager_nor_makara_join_is_needed_for_steps(
    service: ServiceProcess, machines: list[JoinedMachine]
) -> None:
    job = submit(service)
    view = service.wait(job, lambda view: view["step"] >= 5 and len(view["placement"]) == 2, "both to train")
    before = pool(service)
    agents = {process.pid for machine in machines for process in machine.vm_processes()}
    service.kill()
    machines[0].kill(with_vm=False)
    service.start()
    machines[0].start()
    wait_for(lambda: pool(service) == before, "both to be the same VMs again", logs(service, machines))
    assert agents <= {process.pid for process in psutil.process_iter()}
    service.end_naps()
    view = service.wait_status(job, "finished")
    assert len(view["vms"]) == 2
    assert view["export_sha256"] == reference()


def both_train(service: ServiceProcess, job: str) -> None:
    service.wait(job, lambda view: view["step"] >= 5 and len(view["placement"]) == 2, "both to train")


def vm_of(service: ServiceProcess, job: str, vm: str | None) -> dict[str, Any]:
    return next(each for each in service.job(job)["vms"] if each["vm"] == vm)


def lost(view: dict[str, Any]) -> int:
    return sum(morph["lost_steps"] for morph in view["morphs"])


def assert_preempted(service: ServiceProcess, job: str, vm: str | None) -> None:
    """Of a VM that was thought to be silent, the reason would be another."""
    service.wait(job, lambda view: vm_of(service, job, vm)["status"] == "ended", "the VM to be ended")
    assert vm_of(service, job, vm)["reason"] == "preempted"


def test_a_machine_that_is_told_to_end_hands_over_first(
    service: ServiceProcess, machines: list[JoinedMachine]
) -> None:
    """Found: its VM died without notice, and the steps since the last checkpoint were not saved."""
    job = submit(service, interval=1000)
    both_train(service, job)
    left = pool(service)["lab1"]
    machines[1].signal(signal.SIGTERM)
    assert machines[1].wait() == 0
    wait_for(lambda: pool(service).keys() == {"lab0"}, "it to be away", logs(service, machines))
    seen = vm_of(service, job, left)
    assert (seen["status"], seen["detail"]) == ("ended", "handed over before its notice ran out")
    service.end_naps()
    assert machines[1].vms() == []
    view = service.wait_status(job, "finished")
    assert lost(view) == 0
    assert view["export_sha256"] == reference()
    assert sorted(service.losses(job)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("grace_s", [1.0])
def test_a_machine_that_cannot_hand_over_in_time_goes_and_its_vm_is_not_waited_for(
    service: ServiceProcess, machines: list[JoinedMachine]
) -> None:
    job = submit(service, min_nodes=2)
    both_train(service, job)
    left = pool(service)["lab1"]
    machines[1].signal(signal.SIGTERM)
    assert machines[1].wait() == 0
    assert_preempted(service, job, left)
    assert machines[1].vms() == []
    service.end_naps()
    machines[1].start()
    view = service.wait_status(job, "finished")
    assert view["export_sha256"] == reference()


def test_a_second_signal_ends_a_machine_at_once_and_its_vm_is_not_waited_for(
    service: ServiceProcess, machines: list[JoinedMachine]
) -> None:
    job = submit(service, min_nodes=2)
    both_train(service, job)
    left = pool(service)["lab1"]
    machines[1].signal(signal.SIGINT)
    service.wait(job, lambda view: vm_of(service, job, left)["status"] == "noticed", "the notice")
    machines[1].signal(signal.SIGINT)
    assert machines[1].wait() == 0
    assert_preempted(service, job, left)
    assert machines[1].vms() == []
