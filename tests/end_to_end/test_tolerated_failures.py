"""A job that tolerates the death of any VM, on real processes: the store is not needed for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_process import ServiceProcess
from slow_job import BATCH, MODEL, SHAPE, STEPS, reference

pytestmark = pytest.mark.slow

# Less than training takes on one worker (2.3 MB): two VMs hold the model, so four hold two copies.
DEVICE_MEMORY = "1800KB"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path)
    process.start()
    yield process
    process.close()


def test_a_death_costs_no_step_though_there_is_no_checkpoint(service: ServiceProcess) -> None:
    """Of four VMs one dies, and nothing is published before the end; the weights are the reference's."""
    job = service.submit(
        MODEL,
        entrypoint="train:slow_gpt",
        training={**BATCH, "steps": STEPS, "numerics": "exact"},
        parallelism=SHAPE,
        resources={"min_nodes": 2, "max_nodes": 4, "device_memory": DEVICE_MEMORY},
        resilience={"tolerated_failures": 1},
        checkpoint={"interval": 10 * STEPS},
    )
    service.wait(job, lambda view: view["shape"] == "2x2" and view["step"] > 1, "two copies to train")
    service.set_capacity(3)
    victim = service.live(job)[-1]
    service.kill_vm(victim)
    view = service.wait(job, goes_on, "the others to go on with one copy")
    assert "4 like these would do" in view["notes"][-1]
    assert view["checkpoints"] == []
    service.set_capacity(4)
    service.wait(job, lambda view: view["shape"] == "2x2" and not few(view), "two copies again")
    service.end_naps()
    view = service.wait_status(job, "finished")
    formed = [morph for morph in view["morphs"] if morph["step"] is not None]
    assert [morph["rung"] for morph in formed] == ["start", *["peers"] * (len(formed) - 1)]
    assert len(formed) >= 3
    assert view["export_sha256"] == reference()
    assert sorted(service.losses(job)) == list(range(1, STEPS + 1))
    events = service.client.get(f"/jobs/{job}/events")["events"]
    copies = [event["fact"] for event in events if event["fact"]["fact"] == "copies_changed"]
    # Were the last of the VMs late, the job began with one copy.
    assert [(fact["copies"], fact["enough_vms"]) for fact in copies][-2:] == [(1, 4), (2, None)]


def goes_on(view: dict[str, Any]) -> bool:
    used = {seat["worker"] for seat in view["placement"]}  # rerouted, one is on several paths
    return view["status"] == "running" and len(used) < 4 and few(view)


def few(view: dict[str, Any]) -> bool:
    return any("tolerated_failures" in note for note in view["notes"])
