"""What a VM's disk without a free byte costs: a log's end at most, and no trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from makara.protocol.messages import Credential, Phase
from makara.worker.agent.logs import bound
from scripted_manager import TIMEOUT_S, Manager, play, plays, running

__all__ = ["play"]  # the fixture

FULL = Path("/dev/full")  # whatever is written there finds no space

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")


async def trains_on(manager: Manager) -> None:
    """It hears orders, on its first connection, and its trainer is the first."""
    version = await manager.order("train")
    found = await manager.worker(lambda worker: worker.step == version)
    assert (found.phase, found.incarnation) == (Phase.RUNNING, 1)
    assert len(manager.tokens) == 1


def test_a_log_whose_end_cannot_be_moved_away_is_emptied_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 100)
    path.with_name("a.log.1").symlink_to(FULL)
    with pytest.raises(OSError, match="No space left"):
        bound(path, 10)
    assert path.stat().st_size == 0


@plays()
async def test_a_full_disk_when_a_log_is_too_long_ends_nothing(
    manager: Manager, agent: asyncio.Task[None]
) -> None:
    await running(manager)
    path = manager.folder / "v1.0.log"
    (manager.folder / "v1.0.log.1").symlink_to(FULL)
    await manager.order("train", log_bytes=10)
    with path.open("ab") as log:
        log.write(b"x" * 100)
    async with asyncio.timeout(TIMEOUT_S):
        while path.stat().st_size > 10 and not agent.done():  # noqa: ASYNC110  (the agent looks now and then)
            await asyncio.sleep(0.01)
    assert not agent.done()
    await trains_on(manager)


@plays()
async def test_a_token_that_cannot_be_written_is_shown_all_the_same_and_written_later(
    manager: Manager,
) -> None:
    await running(manager)
    (manager.folder / "worker.new").symlink_to(FULL)
    await manager.send(Credential(token="second", valid_for_s=60.0))
    await trains_on(manager)
    assert not (manager.folder / "worker.token").exists()
    (manager.folder / "worker.new").unlink()  # there is space again
    await manager.drop()
    await manager.until(lambda: len(manager.tokens) == 2)
    assert manager.tokens[-1] == "second"
    await manager.order("train")
    await manager.until_file("worker.token")
    assert (manager.folder / "worker.token").read_text() == "second"
