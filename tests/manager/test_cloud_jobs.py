"""A manager process of a home with clouds.yaml: VMs are rented for a job, and are gone after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makara.manager.boot.user_data import render
from makara.manager.spec.placement import Attempt
from rented_vms import PUBLIC_URL, Cloud, RentingManager, cloud_of


@pytest.fixture(params=["aws", "azure"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cloud]:
    with cloud_of(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def manager(cloud: Cloud, tmp_path: Path) -> Iterator[RentingManager]:
    made = RentingManager(tmp_path / "manager", cloud)
    made.service.start()
    yield made
    made.close()


def facts(manager: RentingManager, job: str, kind: str) -> list[dict[str, Any]]:
    events = manager.service.client.get(f"/jobs/{job}/events")["events"]
    return [event["fact"] for event in events if event["fact"]["fact"] == kind]


def test_a_job_is_trained_on_rented_vms_and_nothing_is_left(cloud: Cloud, manager: RentingManager) -> None:
    job = manager.service.submit(
        "pass\n",
        resources={**cloud.resources, "min_nodes": 2, "max_nodes": 2},
        training={"global_batch_size": 4, "steps": 20},
    )
    for number in range(2):  # the first VM is rented alone until it joins
        data = manager.await_user_data(cloud, number)
        boot = manager.boot(data)
        attempt = Attempt.model_validate(facts(manager, job, "attempt_made")[number]["attempt"])
        assert data == render(attempt, boot)
        assert (boot.vm, boot.job, boot.manager_url) == (attempt.vm, job, PUBLIC_URL)
        assert boot.ca == (manager.service.home / "ca.pem").read_text()
        assert (boot.notices.kind, boot.ending.kind) == (cloud.name, "power_off")
    manager.service.wait_status(job, "finished")
    manager.await_nothing_billed(cloud)
    assert len(cloud.user_data()) == 2
