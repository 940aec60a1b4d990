"""Secrets are kept as long as their job needs them and no longer, wherever a manager dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from core_script import spec
from in_service import desk
from makara.checkpoint import CREDENTIALS
from makara.manager.cli.client import RequestRefused
from makara.manager.cli.main import main
from makara.manager.service.files import JobFiles
from makara.manager.service.job_loop import ManagerFailed
from makara.manager.spec.job_spec import parse_spec
from managers import BUNDLE, Manager, job_spec, release_all

pytestmark = pytest.mark.slow


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    running = Manager(tmp_path / "home").start()
    running.client.post("/providers/local/capacity", json={"vms": 0})  # no VM: these tests need none
    yield running
    running.stop()
    release_all(running.home)


def submit(manager: Manager, store: Path) -> str:
    text = json.dumps(job_spec(store) | {"secrets": ["KEY"]})
    return manager.post_job(text, secrets='{"KEY": "s3cret"}').json()["job"]


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


def test_a_job_that_goes_on_needs_its_secrets_again(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = submit(manager, tmp_path / "store")
    manager.client.post(f"/jobs/{job}/stop")
    login = ["--server", manager.url, "--token", manager.token]
    assert main(["status", job, *login]) == 0
    assert f"makara resume {job}  goes on from step 0 of 20 with up to 2 VMs" in capsys.readouterr().out
    monkeypatch.delenv("KEY", raising=False)
    assert main(["resume", job, *login]) == 2
    assert "KEY is not set in this environment" in capsys.readouterr().err
    with pytest.raises(RequestRefused) as refused:
        manager.client.post(f"/jobs/{job}/resume", json={})
    assert refused.value.errors == [("secrets", "no value was sent for KEY")]
    assert kept(manager) == set()
    monkeypatch.setenv("KEY", "s3cret, the second")
    assert main(["resume", job, *login]) == 0
    assert "sends KEY of your environment again" in capsys.readouterr().out
    assert kept(manager) == {job}
    assert JobFiles(manager.home).secrets(job) == {"KEY": "s3cret, the second"}
    assert main(["resume", job, *login]) == 0, "it goes on as asked already"
    assert kept(manager) == {job}
    with pytest.raises(RequestRefused, match="can be resumed"):
        manager.client.post(f"/jobs/{job}/resume", json={"secrets": {"KEY": "another"}})
    assert main(["resume", job, "--max-nodes", "1", *login]) == 2
    assert "can be resumed" in capsys.readouterr().err
    manager.client.post(f"/jobs/{job}/stop")
    assert kept(manager) == set()


def test_the_secrets_of_a_job_that_is_about_to_go_on_are_not_swept(tmp_path: Path) -> None:
    async def check() -> None:
        async with desk(tmp_path) as at:
            await at.submit("j")
            await at.service.stop("j")
            job, files = at.service.jobs["j"], at.service.files
            store = files.store_secrets

            def swept_meanwhile(name: str, secrets: Mapping[str, str]) -> None:
                store(name, secrets)
                at.service.admission.forget_secrets(job)

            files.store_secrets = swept_meanwhile  # type: ignore[method-assign]
            resources = parse_spec(spec()).resources
            assert await at.service.admission.go_on("j", resources, {"KEY": "s3cret"})
            assert files.secrets("j") == {"KEY": "s3cret"}
            assert not await at.service.admission.go_on("j", resources, {"KEY": "another"})
            assert files.secrets("j") == {"KEY": "s3cret"}

    asyncio.run(check())


def test_a_job_that_goes_on_keeps_its_secrets_though_its_manager_could_not_tell(tmp_path: Path) -> None:
    """Found: the fact was stored, an error followed, and the secrets went: no trainer of it could start."""
    resources = parse_spec(spec()).resources

    async def go_on_and_fail() -> None:
        async with desk(tmp_path) as at:
            await at.submit("j")
            await at.service.stop("j")
            journal = at.service.journal
            append = journal.append

            def fail_after_it(*facts: Any) -> None:
                append(*facts)
                raise OSError("the disk does not answer")

            journal.append = fail_after_it
            with pytest.raises(ManagerFailed):
                await at.service.admission.go_on("j", resources, {"KEY": "s3cret"})

    async def look() -> None:
        async with desk(tmp_path) as at:
            assert at.service.jobs["j"].state.ended is None
            assert at.service.files.secrets("j") == {"KEY": "s3cret"}

    asyncio.run(go_on_and_fail())
    asyncio.run(look())
