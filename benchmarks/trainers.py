"""Real trainer processes without agents or a manager: the benchmark gives the orders, reads the reports."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from makara.pipeline.plan import Plan
from makara.protocol.messages import GenerationOrder, JobSettings, Member, Orders, Recipe, WorkerReport

MOST_S = 600.0  # a step of the benchmark that takes longer hangs


class Trainer:
    """One trainer, started as an agent starts it but for what `script` adds; the context manager kills it."""

    def __init__(
        self,
        worker: str,
        job: JobSettings,
        bundle: Path,
        environment: dict[str, str],
        script: str = "slow_trainer.py",
    ) -> None:
        self.worker = worker
        self._job = job
        self._changed = threading.Condition()
        self._report: WorkerReport | None = None
        self._version = 0
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", str(Path(__file__).with_name(script))),
                    *("--worker", worker, "--incarnation", "1", "--fd", str(theirs.fileno())),
                    *("--bundle", str(bundle), "--address", "127.0.0.1"),
                ],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._socket.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, **changes: Any) -> None:
        self._version += 1
        orders = Orders(version=self._version, job=self._job, **{"action": "idle", **changes})
        self._socket.sendall(orders.model_dump_json().encode() + b"\n")

    def wait(self, wanted: Callable[[WorkerReport], object]) -> WorkerReport:
        """Its report once it is as wanted. Raises `RuntimeError` when the trainer fails or takes too long."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure() or self._is(wanted), MOST_S)
            if self._failure() or not self._is(wanted):
                raise RuntimeError(f"trainer {self.worker}: {self._failure() or self._report}")
            assert self._report is not None
            return self._report

    def _is(self, wanted: Callable[[WorkerReport], object]) -> bool:
        return self._report is not None and bool(wanted(self._report))

    def _failure(self) -> str | None:
        failure = None if self._report is None else self._report.failure
        if failure is not None:
            return failure.traceback or failure.message
        code = self._process.poll()
        return None if code is None else f"exit status {code}"

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._take(json.loads(line))
        except OSError:  # the trainer is dead, or we have closed our end
            pass
        with self._changed:
            self._changed.notify_all()

    def _take(self, value: dict[str, Any]) -> None:
        if "report" in value:
            with self._changed:
                self._report = WorkerReport.model_validate(value["report"])
                self._changed.notify_all()


def form(trainers: Sequence[Trainer], plan: Plan, recipe: Recipe) -> None:
    """Order all of them into `plan`; rank r is the r-th."""
    order = GenerationOrder(
        number=plan.generation,
        phase="prepare",
        plan=plan.to_json(),
        members=[Member(worker=trainer.worker, address="127.0.0.1") for trainer in trainers],
    )
    for trainer in trainers:
        trainer.order(action="train", recipe=recipe, generation=order)
    reports = [trainer.wait(lambda report: report.prepared >= plan.generation) for trainer in trainers]
    order = order.model_copy(update={"phase": "go", "endpoint": reports[0].endpoint})
    for trainer in trainers:
        trainer.order(action="train", recipe=recipe, generation=order)
