"""Whole runs of real managers, local VMs and trainers, harmed on the way; the end is the reference's."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from azurite_server import AzuriteServer
from makara.checkpoint import load_manifest, open_store, read_head, read_parts
from makara.checkpoint.tensors import unpack
from makara.model.training import Training
from makara.protocol.instruction_sets import environment_of, processor_flags
from makara.protocol.messages import CheckpointRef
from makara.simulator import Link, Measurements
from s3_server import S3Server
from service_process import ServiceProcess, wait_for
from slow_job import BATCH, MODEL, SHAPE, STEPS, reference
from trainer_processes import settings
from uninterrupted import uninterrupted
from weight_hashes import tensors_sha256

pytestmark = pytest.mark.slow

# Less than training takes on one worker (2.3 MB), so that the planner must use depth.
DEVICE_MEMORY = "1800KB"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path)
    process.start()
    yield process
    process.close()


def submit(service: ServiceProcess, *, steps: int = STEPS, **sections: Any) -> str:
    """One whose steps are slow until `end_naps`."""
    values: dict[str, Any] = {
        "entrypoint": "train:slow_gpt",
        "training": {**BATCH, "steps": steps, "numerics": "exact"},
        "parallelism": SHAPE,
        **sections,
    }
    return service.submit(MODEL, **values)


def reference_state(
    training: Training, steps: int, numerics: str = "exact"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, state) of the uninterrupted run in this process."""
    job = settings(Path("/unused"), **BATCH, **SHAPE, numerics=numerics)
    return uninterrupted(training, job, steps)


def formed(view: dict[str, Any]) -> list[dict[str, Any]]:
    return [morph for morph in view["morphs"] if morph["step"] is not None]


def shapes(view: dict[str, Any]) -> set[str]:
    return {morph["shape"] for morph in formed(view)}


@pytest.mark.parametrize("numerics", ["exact", pytest.param("fast", marks=pytest.mark.soak)])
def test_vms_killed_at_random_instants_change_nothing_in_the_result(
    service: ServiceProcess, numerics: str
) -> None:
    """Whole VMs die while the market shrinks from 5 to 2 and grows again; then the job is stopped.

    However many steps it took until then, on whatever machine: its state is that of the uninterrupted run.
    """
    seed = int(os.environ.get("MAKARA_SEED") or random.randrange(1 << 32))
    print(f"MAKARA_SEED={seed}")
    chance = random.Random(seed)
    pause = threading.Event()
    slow = partial(
        submit,
        service,
        training={**BATCH, "steps": 100_000, "numerics": numerics},
        checkpoint={"interval": 3},
    )
    calibrate_as_if_alone(service, slow(resources={"max_nodes": 1}))
    job = slow(resources={"min_nodes": 2, "max_nodes": 5, "device_memory": DEVICE_MEMORY})
    # Workers that train before the next deaths (4 of 5 VMs may be as good as 5); deaths; VMs to be had then.
    kills = 0
    for workers, deaths, offered in ((4, 2, 3), (3, 1, 2), (2, 1, 3), (3, 1, 4), (4, 2, 2)):
        service.wait(job, partial(trains_on, service, workers), f"{workers} workers to train")
        service.set_capacity(offered)
        for _ in range(deaths):
            pause.wait(chance.uniform(0.0, 0.5))  # the second may fall into the morph after the first
            service.kill_vm(chance.choice(service.vms_alive()))
            kills += 1
    service.wait(job, partial(trains_on, service, 2), "the survivors to train")
    service.client.post(f"/jobs/{job}/stop")
    view = service.wait_status(job, "stopped")
    print(f"{view['step']} steps, {kills} kills, shapes {[morph['shape'] for morph in formed(view)]}")
    assert kills >= 5
    assert len(shapes(view)) >= 3
    assert {2, 3} <= {int(shape.split("x")[0]) for shape in shapes(view)}
    losses, state = reference_state(models.slow_gpt(nap_s=0.0), view["step"], numerics)
    found = service.losses(job)
    assert sorted(found) == list(range(1, len(losses) + 1))
    if numerics == "exact":
        assert [found[step + 1] for step in range(len(losses))] == losses
        assert tensors_sha256(checkpoint_state(service, view)) == tensors_sha256(state)
    else:
        assert [found[step + 1] for step in range(len(losses))] == pytest.approx(losses, abs=1e-4)


def calibrate_as_if_alone(service: ServiceProcess, job: str) -> None:
    """Have `job` measured, and end it; jobs to come find its calibration with the times of an idle machine.

    Which plan wins for so many VMs is then no matter of what else the machine does.
    """
    folder = service.folder / "store" / "calibrations"
    wait_for(lambda: any(folder.glob("*.json")), "a calibration", service.logs)
    service.client.post(f"/jobs/{job}/stop")
    service.wait_status(job, "stopped")
    (file,) = folder.glob("*.json")
    measured = Measurements.from_json(json.loads(file.read_text()))
    (row,) = measured.rows
    calm = replace(
        row.calibration,
        forward_s=(models.NAP_S,) * SHAPE["num_sections"],
        backward_s=(models.NAP_S,) * SHAPE["num_sections"],
        inter_vm=Link(latency_s=1e-4, bytes_per_s=1e9),
        intra_vm=Link(latency_s=1e-4, bytes_per_s=1e9),
        **dict.fromkeys(("operation_s", "message_s", "collective_s"), 1e-4),
    )
    file.write_text(replace(measured, rows=(replace(row, calibration=calm),)).to_text())


def checkpoint_state(service: ServiceProcess, view: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Everything that the newest checkpoint holds: weights, optimizer, scales, buffers."""
    newest = view["checkpoints"][0]
    assert newest["step"] == view["step"]
    store = open_store(f"file://{service.folder}/store")
    checkpoint = CheckpointRef(step=newest["step"], generation=newest["generation"])
    files = read_parts(store, load_manifest(store, view["job"], checkpoint).parts)
    return {name: tensor for data in files.values() for name, tensor in unpack(data)[0].items()}


def trains_on(service: ServiceProcess, workers: int, view: dict[str, Any]) -> bool:
    """Whether the job runs on at least so many workers, none of whose VMs was killed."""
    running = view["status"] == "running" and view["step"] > 1 and len(view["placement"]) >= workers
    return running and {seat["vm"] for seat in view["placement"]} <= set(service.vms_alive())


def test_a_job_of_a_fixed_grid_is_rerouted_around_a_dead_vm(service: ServiceProcess) -> None:
    """Its peer takes the dead worker's micro-batches until another VM can be had, which does not come."""
    job = submit(
        service,
        resources={"min_nodes": 2, "max_nodes": 4},
        parallelism={**SHAPE, "pipeline_parallel_degree": 2, "data_parallel_degree": 2},
    )
    service.wait(job, partial(trains_on, service, 4), "four workers to train")
    service.set_capacity(3)
    service.kill_vm(service.live(job)[-1])
    service.wait(job, lambda view: "2x2-1" in shapes(view), "the others to go on")
    service.end_naps()
    view = service.wait_status(job, "finished")
    assert shapes(view) == {"2x2", "2x2-1"}
    assert view["export_sha256"] == reference()
    assert sorted(service.losses(job)) == list(range(1, STEPS + 1))


def test_steps_go_on_while_the_manager_is_dead_and_a_death_meanwhile_is_handled(
    service: ServiceProcess,
) -> None:
    job = submit(
        service,
        resources={"min_nodes": 2, "max_nodes": 3, "device_memory": DEVICE_MEMORY},
        checkpoint={"interval": 3},
    )
    before = service.wait_step(job, 5)["step"]
    service.kill()
    store = open_store(f"file://{service.folder}/store")

    def newest() -> int:
        head = read_head(store, job)
        return head.manifests[0].step if head is not None and head.manifests else 0

    wait_for(lambda: newest() >= before + 9, "checkpoints to be published without a manager", service.logs)
    victim = next(
        p.cmdline()[-1].split("/")[-2]
        for p in service.vm_processes()
        if p.cmdline()[-1].endswith("boot.json")
    )
    service.kill_vm(victim)
    service.start()

    def ended(view: dict[str, Any]) -> dict[str, str]:
        return {vm["vm"]: vm["reason"] for vm in view["vms"] if vm["status"] == "ended"}

    service.wait(job, lambda view: victim in ended(view), "the death to be known")
    service.end_naps()
    view = service.wait_status(job, "finished")
    assert ended(view)[victim] in ("preempted", "lease_expired", "peers_lost_it")
    assert view["export_sha256"] == reference()
    assert sorted(service.losses(job)) == list(range(1, STEPS + 1))


def test_a_stopped_trainer_is_replaced_and_a_stopped_vm_takes_part_again_when_it_wakes(
    service: ServiceProcess,
) -> None:
    """The trainer is noticed by its lease; the VM is silent, and is planned around meanwhile."""
    job = submit(service, resources={"min_nodes": 2, "max_nodes": 2, "device_memory": DEVICE_MEMORY})
    service.wait_step(job, 5)
    trainer = service.trainer(service.live(job)[0])
    trainer.send_signal(signal.SIGSTOP)
    replaced = service.wait(
        job, lambda view: view["status"] == "running" and len(formed(view)) >= 2, "another trainer to train"
    )
    assert not trainer.is_running()
    assert len(replaced["vms"]) == 2  # the VM itself was kept
    asleep = service.live(job)[1]
    service.signal_vm(asleep, signal.SIGSTOP)

    def left_out(view: dict[str, Any]) -> bool:
        silent = {vm["vm"] for vm in view["vms"] if vm["detail"] == "silent"}
        return silent == {asleep} and view["morphs"][-1]["ended"] is not None

    service.wait(job, left_out, "the silent VM to be left out")
    service.signal_vm(asleep, signal.SIGCONT)
    service.end_naps()
    view = service.wait_status(job, "finished")
    assert [vm["reason"] for vm in view["vms"]] == ["released", "released"]
    assert view["export_sha256"] == reference()


@pytest.mark.parametrize("kind", ["s3_server", pytest.param("azurite", marks=pytest.mark.soak)])
def test_the_store_goes_away_and_comes_back_during_a_run(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    server: S3Server | AzuriteServer = request.getfixturevalue(kind)
    service = ServiceProcess(tmp_path)
    service.start()
    try:
        uri = server.uri("end-to-end")
        address = {"uri": uri, "endpoint": server.endpoint, "interval": 3}
        job = submit(
            service,
            secrets=server.environment,
            resources={"min_nodes": 2, "max_nodes": 3, "device_memory": DEVICE_MEMORY},
            checkpoint=address,
        )
        service.wait(job, lambda view: bool(view["checkpoints"]), "a first checkpoint")
        stopping = threading.Thread(target=server.stop)  # it refuses at once, and takes seconds to end
        stopping.start()
        try:
            service.wait_step(job, service.job(job)["step"] + 6)  # training goes on
            service.kill_vm(service.live(job)[0])
            service.wait(job, lambda view: bool(view["trouble"]), "the status to tell of the store")
            service.end_naps()
        finally:
            stopping.join()
            server.start()
        view = service.wait_status(job, "finished")
        assert view["export_uri"].startswith(uri)
        assert view["export_sha256"] == reference()
    finally:
        service.close()


@pytest.mark.parametrize(
    ("resources", "sections"),
    [({"min_nodes": 1, "max_nodes": 1}, 8), ({"min_nodes": 3, "max_nodes": 3}, 2)],
    ids=["one VM only", "more VMs than sections"],
)
def test_any_number_of_vms_runs_the_whole_batch(
    service: ServiceProcess, resources: dict[str, Any], sections: int
) -> None:
    service.end_naps()
    job = submit(
        service,
        steps=6,
        resources=resources,
        training={**BATCH, "steps": 6, "numerics": "exact", "global_batch_size": 6},
        parallelism={"microbatch_size": 2, "num_sections": sections},
    )
    view = service.wait_status(job, "finished")
    assert view["num_micro_batches"] == 3
    assert sorted(service.losses(job)) == [1, 2, 3, 4, 5, 6]


def test_a_job_held_to_an_instruction_set_trains_as_a_process_that_is(service: ServiceProcess) -> None:
    training = {**BATCH, "steps": 6, "numerics": "exact", "instruction_set": "avx2"}
    service.end_naps()
    job = submit(service, training=training, resources={"min_nodes": 2, "max_nodes": 2})
    view = service.wait_status(job, "finished")
    facts = [entry["fact"] for entry in service.client.get(f"/jobs/{job}/events")["events"]]
    (shown,) = [fact for fact in facts if fact["fact"] == "bits_fixed"]
    assert len(shown["workers"]) == 2
    held = subprocess.run(
        [sys.executable, "-c", "import slow_job; print(slow_job.reference(6))"],
        env={
            **os.environ,
            **environment_of("avx2", processor_flags()),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert view["export_sha256"] == held.stdout.strip()


def test_code_that_fails_only_on_the_vm_fails_the_job_with_its_traceback(service: ServiceProcess) -> None:
    code = "import os\ndef build():\n    raise LookupError('no data on ' + os.environ['HOSTNAME_OF_TEST'])\n"
    job = service.submit(
        code,
        envs={"HOSTNAME_OF_TEST": "this-vm"},
        training={**BATCH, "steps": 5},
        retry={"max_restarts_on_errors": 0},
    )
    view = service.wait(job, lambda view: view["status"] == "failed", "the job to fail")
    assert "no data on this-vm" in view["reason"]
    assert "LookupError" in view["traceback"]
    assert "line 3, in build" in view["traceback"]
    wait_for(lambda: not service.vm_processes(), "all VMs to be released", service.logs)


def test_stop_publishes_a_checkpoint_of_the_last_step_and_releases_all(service: ServiceProcess) -> None:
    job = submit(service, steps=100000, resources={"min_nodes": 2, "max_nodes": 2})
    service.wait_step(job, 5)
    service.client.post(f"/jobs/{job}/stop")
    view = service.wait_status(job, "stopped")
    assert view["checkpoints"][0]["step"] == view["step"]
    wait_for(lambda: not service.vm_processes(), "all VMs to be released", service.logs)
