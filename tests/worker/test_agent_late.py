"""An agent that stood still, or whose disk does, harms nothing that is healthy."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import pytest
from makara.protocol.messages import Phase
from scripted_manager import TIMEOUT_S, Manager, play, plays

__all__ = ["play"]  # the fixture

Agent = asyncio.Task[None]


async def trains_on(manager: Manager) -> None:
    """Its trainer is the first, and was not told to hold."""
    version = await manager.order("train")
    found = await manager.worker(lambda worker: worker.step == version)
    assert (found.phase, found.incarnation) == (Phase.RUNNING, 1)
    assert not (manager.folder / "held").exists()


@pytest.mark.parametrize("action", ["train", "idle"])
@plays()
async def test_an_agent_that_stood_still_for_longer_than_an_orphan_may_goes_on(
    manager: Manager, agent: Agent, action: str
) -> None:
    manager.heartbeat_s = 0.1
    await manager.drop()
    version = await manager.order(action, orphan_timeout_s=3.0)
    await manager.worker(lambda worker: worker.step == version)
    time.sleep(4.0)  # noqa: ASYNC251  (the agent runs in this process)
    told = len(manager.reports)
    await manager.until(lambda: len(manager.reports) > told + 5)
    await trains_on(manager)
    assert not agent.done()


def test_a_disk_that_hangs_while_a_log_is_bounded_costs_no_trainer(play: Callable[..., None]) -> None:
    """Who opens a pipe to write waits until somebody reads from it."""

    def release(pipe: Path) -> None:
        with pipe.open("rb") as end:
            end.read()

    async def scenario(manager: Manager, _agent: Agent) -> None:
        path, pipe = manager.folder / "v1.0.log", manager.folder / "v1.0.log.1"
        os.mkfifo(pipe)
        version = await manager.order("train", lease_s=3.0, log_bytes=10)
        await manager.worker(lambda worker: worker.step == version)
        releasing = Timer(6.0, release, [pipe])
        releasing.start()
        with path.open("ab") as log:
            log.write(b"x" * 100)
        await asyncio.to_thread(releasing.join, TIMEOUT_S)
        await trains_on(manager)

    play(scenario)
