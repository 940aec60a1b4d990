"""How a VM ends itself when its manager has no more use for it, or is gone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from http_answers import Answer
from makara.protocol.messages import VmEnding
from makara.worker.agent import ending as vm_ending
from metadata import AzureMetadata, serving
from scripted_manager import Manager, ends, play, running

__all__ = ["play"]  # the fixture

Agent = asyncio.Task[None]


async def until(predicate: Callable[[], bool]) -> None:
    """Wait for what another process or thread does; the test's own bound ends it."""
    while not predicate():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def power_off_shim(folder: Path, monkeypatch: pytest.MonkeyPatch, failures: int = 0) -> Path:
    """A `systemctl` that fails so many times, then leaves its arguments in the file that is returned."""
    done, failed = folder / "done", folder / "failed"
    shim = folder / "bin" / "systemctl"
    shim.parent.mkdir()
    count = f'[ "$(cat {failed} 2>/dev/null | wc -l)" -lt {failures} ] && echo x >> {failed} && exit 1'
    shim.write_text(f'#!/bin/sh\n{count}\nls {folder} > {done}.seen; echo "$@" > {done}\n')
    shim.chmod(0o700)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    return done


POWER_OFF = VmEnding(kind="power_off")


def test_an_orphan_saves_and_then_powers_its_vm_off(
    play: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = power_off_shim(tmp_path, monkeypatch)

    async def scenario(manager: Manager, agent: Agent) -> None:
        await running(manager)
        await manager.order("train", orphan_timeout_s=0.5)
        await manager.close()
        await ends(agent)
        assert done.read_text() == "poweroff\n"
        assert "held" in done.with_name("done.seen").read_text().split()  # it had saved before

    play(scenario, ending=POWER_OFF)


def test_a_vm_that_is_released_ends_itself(
    play: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manager may be lost right after the order, and nobody else would end it."""
    done = power_off_shim(tmp_path, monkeypatch)

    async def scenario(manager: Manager, agent: Agent) -> None:
        await manager.order("shutdown")
        await ends(agent)
        assert done.exists()

    play(scenario, ending=POWER_OFF)


def test_a_power_off_that_fails_is_tried_again(
    play: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vm_ending, "_FIRST_RETRY_S", 0.01)
    done = power_off_shim(tmp_path, monkeypatch, failures=2)

    async def scenario(manager: Manager, agent: Agent) -> None:
        manager.refuse()
        await ends(agent)
        assert done.exists()

    play(scenario, ending=POWER_OFF)


def test_an_agent_that_a_person_ends_leaves_its_machine_on(
    play: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = power_off_shim(tmp_path, monkeypatch)

    async def scenario(manager: Manager, agent: Agent) -> None:
        await running(manager)
        os.kill(os.getpid(), 15)
        await ends(agent)
        assert not done.exists()

    play(scenario, ending=POWER_OFF)


def azure_ending(service: AzureMetadata, client_id: str = "") -> VmEnding:
    return VmEnding(kind="azure", metadata_url=service.url, management_url=service.url, client_id=client_id)


def test_an_orphan_on_azure_deletes_itself_by_its_own_identity(play: Callable[..., None]) -> None:
    service = AzureMetadata()

    async def scenario(manager: Manager, _agent: Agent) -> None:
        await running(manager)
        await manager.order("train", orphan_timeout_s=0.5)
        await manager.close()
        await until(lambda: bool(service.deleted))
        assert service.deleted == [f"/subscriptions/s/resourceGroups/g/{service.name}"]
        assert (manager.folder / "held").exists()

    with serving(service):
        play(scenario, ending=azure_ending(service))


@pytest.mark.parametrize("refusal", [Answer(403, "no right"), Answer(429), Answer(503, "<html>")])
def test_a_deletion_that_azure_refuses_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, refusal: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vm_ending, "_FIRST_RETRY_S", 0.01)
    service = AzureMetadata(deletions=[refusal, refusal])

    async def run() -> None:
        running = asyncio.create_task(vm_ending.end_vm(azure_ending(service)))
        await until(lambda: bool(service.deleted))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with serving(service):
        asyncio.run(run())
    assert f"HTTP {refusal.status}" in caplog.text
    assert service.token not in caplog.text


def test_of_several_identities_the_one_named_is_used() -> None:
    service = AzureMetadata(client_id="mine")

    async def run() -> None:
        running = asyncio.create_task(vm_ending.end_vm(azure_ending(service, "mine")))
        await until(lambda: bool(service.deleted))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with serving(service):
        asyncio.run(run())
