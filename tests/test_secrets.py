"""Secrets are kept as long as their job needs them and no longer, wherever a manager dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from makara.checkpoint import CREDENTIALS
from makara.manager.files import JobFiles
from managers import BUNDLE, Manager, job_spec, release_all


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    running = Manager(tmp_path / "home").start()
    running.client.post("/providers/local/capacity", json={"vms": 0})  # no VM: these tests need none
    yield running
    running.stop()
    release_all(running.home)


def submit(manager: Manager, store: Path) -> str:
    spec = json.dumps(job_spec(store) | {"secrets": ["KEY"]})
    return manager.post_job(spec, secrets='{"KEY": "s3cret"}').json()["job"]


def kept(manager: Manager) -> set[str]:
    """Jobs whose secrets are on the disk."""
    return {path.parent.name for path in manager.home.glob("jobs/*/secrets.json")}


def test_secrets_go_when_their_job_ends(manager: Manager, tmp_path: Path) -> None:
    job, other = submit(manager, tmp_path / "store"), submit(manager, tmp_path / "store")
    assert kept(manager) == {job, other}
    manager.client.post(f"/jobs/{job}/stop")
    assert kept(manager) == {other}


def test_what_a_manager_that_died_left_is_swept_by_the_next(manager: Manager, tmp_path: Path) -> None:
    ended, running = submit(manager, tmp_path / "store"), submit(manager, tmp_path / "store")
    manager.client.post(f"/jobs/{ended}/stop")
    manager.kill()
    (manager.home / "jobs" / ended / "secrets.json").write_text('{"KEY": "s3cret"}')  # it had no time to
    (manager.home / "jobs" / "never").mkdir()  # nor to journal this one
    (manager.home / "jobs" / "never" / "secrets.json").write_text('{"KEY": "s3cret"}')
    (manager.home / "jobs" / "never" / "bundle.tar.gz").write_bytes(BUNDLE)
    manager.start()
    assert manager.client.get(f"/jobs/{running}")["job"] == running  # it answers when it has started
    assert kept(manager) == {running}


def test_an_ended_job_keeps_only_the_keys_of_its_store(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    files.store("a", b"", {"KEY": "s3cret", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"})
    files.forget_secrets("a", but=CREDENTIALS)
    assert files.secrets("a") == {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    files.forget_secrets("a")
    assert not (tmp_path / "jobs" / "a" / "secrets.json").exists()
