"""Jobs that ended and go on, with real managers and trainers, to the weights of a run that never ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from service_process import ServiceProcess, wait_for
from test_end_to_end import BATCH, DEVICE_MEMORY, MODEL, SHAPE, STEPS, formed, reference, submit

FAILING = """

class Failing(Tokens):
    def __getitem__(self, index):
        if Path(os.environ["FAIL_WHILE"]).exists():
            raise LookupError("the disk of the data is away")
        return super().__getitem__(index)


def failing_data():
    return dataclasses.replace(tied_gpt(), dataset=Failing)
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path)
    process.start()
    yield process
    process.close()


def test_a_stopped_job_goes_on_at_another_number_of_vms_to_the_very_weights(service: ServiceProcess) -> None:
    """On one VM, then on two that only together hold the model, across a death of the manager."""
    job = submit(service, resources={"max_nodes": 1, "min_nodes": 1}, checkpoint={"interval": 10})
    service.wait_step(job, 15)
    service.client.post(f"/jobs/{job}/stop")
    stopped = service.wait_status(job, "stopped")
    newest = stopped["checkpoints"][0]["step"]
    assert newest == stopped["step"] < STEPS
    service.kill()
    service.start()
    service.client.post(f"/jobs/{job}/resume", json={"min_nodes": 2, "max_nodes": 2})
    view = service.wait_status(job, "finished")
    assert [morph["step"] for morph in formed(view)][-1] == newest
    assert formed(view)[-1]["rung"] == "store"
    assert len(view["vms"]) == 3
    assert view["export_sha256"] == reference()
    assert sorted(service.losses(job)) == list(range(1, STEPS + 1))


def test_a_failed_job_goes_on_once_its_cause_is_gone(service: ServiceProcess, tmp_path: Path) -> None:
    away = tmp_path / "away"
    job = service.submit(
        MODEL + FAILING,
        entrypoint="train:failing_data",
        training={**BATCH, "steps": STEPS, "numerics": "exact"},
        parallelism=SHAPE,
        envs={"FAIL_WHILE": str(away)},
        resources={"min_nodes": 2, "max_nodes": 2, "device_memory": DEVICE_MEMORY},
        checkpoint={"interval": 5},
    )
    service.wait(job, lambda view: bool(view["checkpoints"]), "a checkpoint")
    away.touch()
    failed = service.wait_status(job, "failed")
    assert "the disk of the data is away" in failed["reason"]
    away.unlink()
    wait_for(lambda: not service.vm_processes(), "all VMs to be released", service.logs)
    service.client.post(f"/jobs/{job}/resume", json={"min_nodes": 3, "max_nodes": 3})
    view = service.wait_status(job, "finished")
    assert formed(view)[-1]["step"] >= failed["checkpoints"][0]["step"]
    assert view["export_sha256"] == reference()
    assert sorted(service.losses(job)) == list(range(1, STEPS + 1))
