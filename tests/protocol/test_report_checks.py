"""What a VM reports is checked whole before anything believes it: numbers, names, sizes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from core_script import RECIPE
from makara.protocol.frames import read_report
from makara.protocol.messages import (
    DeviceInfo,
    Failure,
    Formed,
    Phase,
    Profile,
    Report,
    StepMetrics,
    WorkerReport,
)
from makara.worker.agent.reports import encode
from makara.worker.trainer.trainer import failure_of
from pydantic import ValidationError


def report(**changes: Any) -> dict[str, Any]:
    """A report of VM v1 with one worker, as JSON values."""
    value = Report(
        vm="v1",
        sequence=1,
        orders_version=1,
        address="10.0.0.1",
        devices=[DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1 << 30)],
        workers=[WorkerReport(worker="v1.0", incarnation=1, phase=Phase.IDLE)],
    )
    return {**value.model_dump(mode="json"), **changes}


def worker(**changes: Any) -> dict[str, Any]:
    return {**report()["workers"][0], **changes}


def read(value: dict[str, Any]) -> Report:
    """As from the wire, where 1e999 is how JSON says infinity."""
    return Report.model_validate_json(json.dumps(value).replace("Infinity", "1e999"))


FORMED = Formed(generation=1, step=0, rung="start", phases_s={"load": 0.5}).model_dump()


def profile(calibration: dict[str, Any]) -> dict[str, Any]:
    return {**Profile(recipe=RECIPE, calibration={}).model_dump(), "calibration": calibration}


@pytest.mark.parametrize(
    "changes",
    [
        {"notice_deadline_s": math.inf},
        {"workers": [worker(forward_s=math.inf)]},
        {"workers": [worker(backward_s=-1.0)]},
        {"workers": [worker(formed={**FORMED, "phases_s": {"load": math.inf}})]},
        {"workers": [worker(profile=profile({"forward_s": [0.1, math.inf]}))]},
        {"workers": [worker(step=-1)]},
        {"workers": [worker(step=10**30)]},
    ],
)
def test_a_number_that_would_not_read_back_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read(report(**changes))


def test_a_vm_without_a_device_is_refused() -> None:
    with pytest.raises(ValidationError, match="devices"):
        read(report(devices=[]))


@pytest.mark.parametrize("name", ["v2.0", "v1", "v1.", "v1.x", "v1.01", "v1.-1", "v1.9999", "v1.0.0", "v1.²"])
def test_a_worker_is_named_after_its_own_vm(name: str) -> None:
    with pytest.raises(ValidationError, match="worker"):
        read(report(workers=[worker(worker=name)]))


def test_a_worker_is_reported_once() -> None:
    with pytest.raises(ValidationError, match="once"):
        read(report(workers=[worker(), worker(incarnation=2)]))


@pytest.mark.parametrize(
    "changes",
    [
        {"devices": report()["devices"] * 1000},
        {"workers": [worker(worker=f"v1.{index}") for index in range(1000)]},
        {"address": "a" * 10_000},
        {"workers": [worker(endpoint="a" * 10_000)]},
        {"workers": [worker(lost=["v2.0"] * 200_000)]},
        {"workers": [worker(formed={**FORMED, "phases_s": {str(n): 0.0 for n in range(1000)}})]},
        {"workers": [worker(profile=profile({"deep": json.loads("[" * 100 + "]" * 100)}))]},
    ],
)
def test_sizes_are_bounded(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read(report(**changes))


def test_a_loss_that_is_no_number_is_kept_as_it_is() -> None:
    for loss, norm in ((math.nan, math.inf), (-math.inf, math.nan)):
        metrics = StepMetrics(step=1, generation=1, loss=loss, grad_norm=norm, seconds=0.1, samples=4)
        told = read(report(metrics=[metrics.model_dump()])).metrics[0]
        assert str(told) == str(metrics)


def test_a_long_traceback_is_shortened_where_it_is_made_and_not_refused() -> None:
    failure = Failure(kind="user", message="boom", traceback="begin" + "x" * 10**6 + "end")
    assert failure.traceback is not None
    assert failure.traceback.startswith("begin")
    assert failure.traceback.endswith("end")
    assert "characters are left out" in failure.traceback
    assert len(failure.traceback) < 40_000
    told = read(report(workers=[worker(failure=failure.model_dump())]))
    assert told.workers[0].failure == failure


def test_text_that_is_no_utf_8_is_escaped_where_it_is_made() -> None:
    """Found: a file name in a user's error ended the agent, and VM after VM was bought."""
    failure = failure_of(ValueError("cannot read caf\udce9.jpg"))
    assert failure.message.endswith("cannot read caf\\udce9.jpg")
    told = Report.model_validate(
        report(workers=[worker(failure=failure.model_dump(), lost=["v\udce9.0", "vé.0"])])
    )
    assert told.workers[0].lost == ["v?.0", "vé.0"]
    assert read_report(told.model_dump_json()) == told


def test_a_worker_whose_part_cannot_be_written_fails_and_the_others_are_reported() -> None:
    whole = read(report(workers=[worker(), worker(worker="v1.1", phase="profiling")]))
    survey = Profile(recipe=RECIPE, calibration={"labels": ["caf\udce9"]})
    workers = [whole.workers[0].model_copy(update={"profile": survey}), whole.workers[1]]
    encoded = encode(whole.model_copy(update={"workers": workers}), 1 << 16)
    assert list(encoded.failed) == ["v1.0"]
    told = read_report(encoded.text).workers
    assert told[0].failure == encoded.failed["v1.0"]
    assert told[1] == whole.workers[1]
