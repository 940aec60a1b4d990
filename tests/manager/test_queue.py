"""Two jobs of one manager on machines that are enough for one of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from managers import Manager, release_all


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    started = Manager(tmp_path / "home").start()
    try:
        yield started
    finally:
        started.stop()
        release_all(tmp_path / "home")


def live(job: dict[str, Any]) -> list[str]:
    return [vm["vm"] for vm in job["vms"] if vm["status"] == "joined"]


def test_a_job_that_trains_hands_over_a_vm_to_one_that_waits_and_has_another_after_it(
    manager: Manager, tmp_path: Path
) -> None:
    manager.client.post("/providers/local/capacity", json={"vms": 2})
    first = manager.submit(tmp_path / "first", training={"steps": 100_000}).json()["job"]
    manager.wait(first, lambda seen: seen["step"] > 0 and len(live(seen)) == 2)
    second = manager.submit(tmp_path / "second", training={"steps": 5}).json()["job"]
    assert manager.wait(second, lambda seen: seen["status"] in ("finished", "failed"))["status"] == "finished"
    seen = manager.wait(first, lambda seen: len(live(seen)) == 2)
    assert seen["status"] in ("running", "morphing")
    given = [vm for vm in seen["vms"] if vm["status"] == "ended"]
    assert [vm["detail"] for vm in given] == ["given up for jobs that wait"]
    manager.client.post(f"/jobs/{first}/stop")
