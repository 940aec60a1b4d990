"""Jobs that ended and go on, with real managers and trainers, to the weights of a run that never ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makara.manager.cli.client import RequestRefused
from makara.manager.cli.main import main
from service_process import ServiceProcess, wait_for
from slow_job import BATCH, MODEL, SHAPE, STEPS, reference
from test_end_to_end import DEVICE_MEMORY, formed, submit

pytestmark = pytest.mark.slow

FAILING = """

class Failing(Tokens):
    def __getitem__(self, index):
        if Path(os.environ["FAIL_WHILE"]).exists():
            raise LookupError("the disk of the data is away")
        return super().__getitem__(index)


def failing_data():
    return dataclasses.replace(slow_gpt(), dataset=Failing)
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path)
    process.start()
    yield process
    process.close()


def test_a_stopped_job_goes_on_at_another_number_of_vms_to_the_very_weights(service: ServiceProcess) -> None:
    """On one VM, then on two that only together hold the model, across a death of the manager."""
    job = submit(service, resources={"max_nodes": 1, "min_nodes": 1}, checkpoint={"interval": 5})
    service.wait_step(job, 7)
    service.client.post(f"/jobs/{job}/stop")
    stopped = service.wait_status(job, "stopped")
    newest = stopped["checkpoints"][0]["step"]
    assert newest == stopped["step"] < STEPS
    service.end_naps()
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
    service.end_naps()
    failed = service.wait_status(job, "failed")
    assert "the disk of the data is away" in failed["reason"]
    away.unlink()
    wait_for(lambda: not service.vm_processes(), "all VMs to be released", service.logs)
    service.client.post(f"/jobs/{job}/resume", json={"min_nodes": 3, "max_nodes": 3})
    view = service.wait_status(job, "finished")
    assert formed(view)[-1]["step"] >= failed["checkpoints"][0]["step"]
    assert view["export_sha256"] == reference()
    assert sorted(service.losses(job)) == list(range(1, STEPS + 1))


OTHERS = """

def without_dropout():
    return dataclasses.replace(slow_gpt(), model=lambda: TiedGPT(dropout=0.0, nap_s=NAP_S))


def deeper():
    return dataclasses.replace(slow_gpt(), model=lambda: TiedGPT(layers=5, nap_s=NAP_S))
"""


def test_a_job_whose_managers_home_was_lost_goes_on_as_another_at_another_number_of_vms(
    service: ServiceProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its VM trains on meanwhile, and harms nobody; models that differ are refused with what differs."""
    job = submit(service, resources={"max_nodes": 1}, checkpoint={"interval": 5})
    service.wait(job, lambda view: bool(view["checkpoints"]), "a checkpoint")
    service.kill()  # for ever
    lost = f"{tmp_path}/store/{job}"
    other = ServiceProcess(tmp_path / "other")
    other.start()
    other.end_naps()
    try:
        changes: dict[str, Any] = {
            "parallelism": "auto",
            "resources": {"min_nodes": 2, "max_nodes": 2, "device_memory": DEVICE_MEMORY},
            "checkpoint": {"start_from": f"file://{lost}"},
        }
        next_job = submit(other, **changes)
        view = other.wait_status(next_job, "finished")
        first = formed(view)[0]
        assert first["step"] >= 5
        assert first["rung"] == "store"
        assert view["export_sha256"] == reference()
        assert min(other.losses(next_job)) == first["step"] + 1

        unlike = {**BATCH, "steps": 3, "global_batch_size": 16, "numerics": "exact"}
        threads = {**changes["resources"], "threads": 2}
        with pytest.raises(RequestRefused) as refused:
            submit(other, steps=3, **{**changes, "training": unlike, "resources": threads})
        assert [field for field, _ in refused.value.errors] == [
            "training.global_batch_size",
            "resources.threads",
            "training.steps",
        ]
        with pytest.raises(RequestRefused, match="the job has faults") as refused:
            submit(other, checkpoint={"start_from": f"file://{lost}@3"})
        assert "no checkpoint of step 3: those of steps" in refused.value.errors[0][1]
        check_other_models(other, next_job, lost, capsys)
    finally:
        other.close()


def check_other_models(
    service: ServiceProcess, source: str, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {**BATCH, "steps": STEPS + 10, "numerics": "exact"}
    failing = service.submit(
        MODEL + OTHERS,
        entrypoint="train:without_dropout",
        training=training,
        checkpoint={"start_from": source},  # by its id, of a job that this manager knows
    )
    view = service.wait_status(failing, "failed")
    why = f"checkpoint.start_from: job {source} is of another model: graph hash "
    assert view["reason"].startswith(why)
    folder = service.folder / "mine"
    folder.mkdir()
    (folder / "train.py").write_text(MODEL + OTHERS)
    login = ["--server", service.client.url, "--token", (service.home / "admin.token").read_text().strip()]
    for entrypoint, what in (
        ("deeper", "is of another model: it lacks blocks.4."),
        ("without_dropout", "same names and shapes, but what it computes with them is another"),
    ):
        value = {
            "name": "mine",
            "entrypoint": f"train:{entrypoint}",
            "resources": {"provider": "local", "max_nodes": 1},
            "training": training,
            "checkpoint": {"uri": "./store", "start_from": lost},
        }
        (folder / "job.yaml").write_text(json.dumps(value))
        assert main(["apply", "-f", str(folder / "job.yaml"), "--detach", *login]) == 2
        shown = capsys.readouterr().err
        assert "checkpoint.start_from: step " in shown
        assert what in shown
