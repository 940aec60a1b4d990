"""A trainer tells its agent what it does, and never waits for an agent that does not read."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from makara.protocol.messages import Phase, StepMetrics, WorkerReport
from makara.worker.trainer.agent_pipe import AGENT_GONE, AgentPipe
from trainer_processes import CONTEXT, TIMEOUT_S

STEPS = 5000  # ten times as much as a socket holds


def _steps(connection: socket.socket, done: Connection) -> None:
    """Be a trainer that reports steps, and then its end."""
    control = AgentPipe(connection, WorkerReport(worker="v.0", phase=Phase.RUNNING), lambda _: None)
    control.start()
    for step in range(1, STEPS + 1):
        control.report(step=step)
        numbers = {"loss": 1.0, "grad_norm": 1.0, "seconds": 1.0}
        control.metrics(StepMetrics(step=step, generation=1, samples=1, **numbers))
    done.send("stepped")
    control.report(phase=Phase.EXITED)
    control.flush(TIMEOUT_S)
    done.send("flushed")
    done.recv()


class Trainer:
    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(TIMEOUT_S)
        self.done, done = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_steps, args=(theirs, done), daemon=True)
        self.process.start()
        theirs.close()

    def says(self) -> str | None:
        return self.done.recv() if self.done.poll(TIMEOUT_S) else None

    def lines(self) -> Iterator[dict[str, Any]]:
        with self.socket.makefile("rb") as stream:
            for line in stream:
                yield json.loads(line)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.socket.close()
    made.process.kill()
    made.process.join()


def test_steps_go_on_while_the_agent_is_stopped_and_it_hears_the_newest_of_each_kind(
    trainer: Trainer,
) -> None:
    assert trainer.says() == "stepped"
    reports, told, beat = list[dict[str, Any]](), list[int](), False
    for line in trainer.lines():
        if "report" in line:
            reports.append(line["report"])
        elif "metrics" in line:
            told.append(line["metrics"]["step"])
        beat = beat or "beat" in line
        if reports and reports[-1]["phase"] == "exited" and told and told[-1] == STEPS and beat:
            break
    assert reports[-1]["step"] == STEPS
    assert len(reports) < STEPS  # those that newer ones replaced are not told
    assert told == list(range(1, STEPS + 1))
    assert trainer.says() == "flushed"


def test_a_trainer_ends_when_its_agent_is_gone(trainer: Trainer) -> None:
    assert trainer.says() == "stepped"
    trainer.socket.close()
    trainer.process.join(TIMEOUT_S)
    assert trainer.process.exitcode == AGENT_GONE
