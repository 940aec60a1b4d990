"""A job whose data stops coming on one worker: seen, explained, gone on without, to the reference's end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_process import ServiceProcess
from slow_job import BATCH, MODEL, SHAPE, STEPS, reference

pytestmark = pytest.mark.slow

BOUNDS = ("progress_floor_s=4", "first_step_factor=3", "data_wait_s=6", "left_out_s=8")
CODE = (
    MODEL
    + '''

class BlockedOnce(Tokens):
    """The process that removes the file that `BLOCK` names gets no sample any more."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        try:
            os.unlink(os.environ["BLOCK"])
        except FileNotFoundError:
            return super().__getitem__(index)
        while True:
            time.sleep(1.0)


def blocked_once() -> Training:
    return dataclasses.replace(slow_gpt(), dataset=BlockedOnce)
'''
)


def steps_on_two(view: dict[str, Any]) -> bool:
    return view["step"] >= 5 and len({seat["worker"] for seat in view["placement"]}) == 2


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path, options=tuple(f"--bound={bound}" for bound in BOUNDS))
    process.start()
    yield process
    process.close()


def test_a_worker_whose_data_stops_coming_is_seen_explained_and_replaced(service: ServiceProcess) -> None:
    block = service.folder / "block"
    resources = {"min_nodes": 1, "max_nodes": 2}
    envs = {"BLOCK": str(block)}
    training = {**BATCH, "steps": STEPS, "numerics": "exact"}
    entrypoint = "train:blocked_once"
    job = service.submit(
        CODE, entrypoint=entrypoint, training=training, parallelism=SHAPE, resources=resources, envs=envs
    )
    service.wait(job, steps_on_two, "two workers to step")
    block.touch()
    service.wait(job, lambda view: "waiting for data" in (view["stalled"] or ""), "to be told of it")

    def facts(kind: str) -> list[dict[str, Any]]:
        events = service.client.get(f"/jobs/{job}/events", since=0)["events"]
        return [event["fact"] for event in events if event["fact"]["fact"] == kind]

    service.wait(job, lambda _: bool(facts("worker_failed")), "the stuck trainer to be given up")
    service.end_naps()
    failed = facts("worker_failed")[0]
    # A machine that is busy enough stands still for longer than these bounds, too.
    (stalled,) = [each for each in facts("generation_stalled") if each["suspects"] == [failed["worker"]]]
    assert failed["kind"] == "stuck"
    stacks = {fact["worker"]: fact["text"] for fact in facts("stacks_taken")}
    assert set(stacks) == set(stalled["standing"])
    assert stacks[failed["worker"]].startswith("in __getitem__, train.py line")
    view = service.wait_status(job, "finished")
    assert view["step"] == STEPS
    assert view["export_sha256"] == reference()
