"""What odd trainers cost their agent: nothing."""

from __future__ import annotations

import asyncio
import signal

from makara.protocol.messages import Phase
from scripted_manager import Manager, play, plays, running

__all__ = ["play"]  # the fixture

Agent = asyncio.Task[None]


@plays(mode="real-time")
async def test_a_death_by_a_signal_without_a_name_is_told_by_its_number(manager: Manager) -> None:
    await manager.order()
    dead = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
    assert dead.failure is not None
    number = signal.SIGRTMIN + 3
    assert (dead.failure.kind, dead.failure.exit_code) == ("killed", -number)
    assert dead.failure.message.startswith(f"ended by signal {number}; ")
    await manager.worker(lambda worker: worker.incarnation == 2)


@plays(mode="scalar")
async def test_a_trainer_that_tells_what_is_no_object_is_replaced(manager: Manager) -> None:
    await manager.order()
    dead = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
    assert dead.failure is not None
    assert (dead.failure.kind, dead.incarnation) == ("internal", 1)
    assert "its report cannot be read" in dead.failure.message
    await manager.worker(lambda worker: worker.incarnation == 2 and worker.phase is Phase.IDLE)


@plays()
async def test_stacks_of_a_trainer_whose_log_was_removed_say_so(manager: Manager) -> None:
    await running(manager)
    (manager.folder / "v1.0.log").unlink()
    await manager.order("train", stacks=3)
    shown = await manager.report(lambda report: bool(report.stacks))
    assert "No such file" in shown.stacks[0].text
    version = await manager.order("train", stacks=3)
    found = await manager.worker(lambda worker: worker.step == version)
    assert found.incarnation == 1


@plays(mode="crowded")
async def test_stacks_show_the_main_thread_beside_any_number_of_others(manager: Manager) -> None:
    await running(manager)
    await manager.order("train", stacks=3)
    shown = await manager.report(lambda report: bool(report.stacks))
    assert "in main\n" in shown.stacks[0].text


@plays()
async def test_a_trainer_that_cannot_be_started_is_dead_and_its_vm_goes_on(
    manager: Manager, agent: Agent
) -> None:
    log = manager.folder / "v1.0.log"
    log.mkdir()  # nothing can be written there
    await manager.order()
    dead = await manager.worker(lambda worker: worker.phase is Phase.EXITED)
    assert dead.failure is not None
    assert (dead.failure.kind, dead.incarnation) == ("killed", 1)
    assert dead.failure.message.startswith("it could not be started: ")
    await manager.worker(lambda worker: worker.phase is Phase.EXITED and worker.incarnation == 2)
    log.rmdir()
    await manager.worker(lambda worker: worker.phase is Phase.IDLE)
    assert not agent.done()
    told = [death.incarnation for report in manager.reports for death in report.deaths]
    assert {1, 2} <= set(told)
