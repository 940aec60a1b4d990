"""`makara drain`: a person has a VM hand over, and gets another in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makara.manager.cli import main as cli
from managers import Manager, release_all


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    started = Manager(tmp_path / "home").start()
    try:
        yield started
    finally:
        started.stop()
        release_all(tmp_path / "home")


def drain(manager: Manager, vm: str) -> int:
    return cli.main(["drain", vm, "--server", manager.url, "--token", manager.token])


def runs_on(job: dict[str, Any]) -> list[str]:
    return [seat["worker"].rpartition(".")[0] for seat in job["placement"]] if job["step"] else []


def test_a_drained_vm_hands_over_and_another_takes_its_place(
    manager: Manager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = manager.submit(tmp_path / "store", training={"steps": 100_000})
    job = answer.json()["job"]
    both = runs_on(manager.wait(job, lambda seen: len(runs_on(seen)) == 2))
    assert drain(manager, both[1]) == 0
    assert capsys.readouterr().out == f"{both[1]} drained\n"
    seen = manager.wait(job, lambda seen: len(runs_on(seen)) == 2 and both[1] not in runs_on(seen))
    ended = next(vm for vm in seen["vms"] if vm["vm"] == both[1])
    assert (ended["status"], ended["reason"], ended["detail"]) == ("ended", "released", "drained")
    assert drain(manager, both[1]) == cli.MISTAKE
    assert f"{both[1]} has ended" in capsys.readouterr().err
    manager.client.post(f"/jobs/{job}/stop")
    assert drain(manager, both[0]) == cli.MISTAKE


def test_a_vm_that_no_job_has_is_not_drained(manager: Manager, capsys: pytest.CaptureFixture[str]) -> None:
    assert drain(manager, "nobodys") == cli.MISTAKE
    assert "no job has a VM 'nobodys'" in capsys.readouterr().err
