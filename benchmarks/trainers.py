"""Real trainer processes without agents or a manager: the benchmark gives the orders, reads the reports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from makara.checkpoint import open_generation, open_store, read_head
from makara.model.training import load_entrypoint
from makara.pipeline.plan import Plan
from makara.protocol.messages import (
    GenerationOrder,
    JobSettings,
    Member,
    Orders,
    Profile,
    Recipe,
    StoreConfig,
    WorkerReport,
)
from makara.worker.agent.trainer_process import ALLOCATOR
from makara.worker.profiling.profiling import profile

from .emulated.fleet import in_fresh_process

BUNDLE = Path(__file__).parent
MOST_S = 600.0  # a step of the benchmark that takes longer hangs


class Trainer:
    """One trainer, started as an agent starts it; the context manager kills it.

    `script` is run in place of the trainer, and reads `variables` from the environment.
    """

    def __init__(
        self,
        worker: str,
        job: JobSettings,
        script: str,
        variables: Mapping[str, str],
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
                    *("--bundle", str(BUNDLE), "--address", "127.0.0.1"),
                ],
                pass_fds=[theirs.fileno()],
                env={**ALLOCATOR, **os.environ, **variables},
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


def job_settings(
    entrypoint: str, folder: str | Path, m: int, num_micro_batches: int, **others: Any
) -> JobSettings:
    """A job of a model in this folder, whose store is in `folder`."""
    return JobSettings(
        job="job",
        entrypoint=entrypoint,
        seed=3,
        global_batch_size=m * num_micro_batches,
        microbatch_size=m,
        store=StoreConfig(uri=f"file://{folder}/store"),
        bundle_sha256="0" * 64,
        **others,
    )


def profiled(job: JobSettings, **options: Any) -> Profile:
    """What a first worker finds that is alone, in a process of its own."""
    return in_fresh_process(_profile, job, options, environment=ALLOCATOR)


def _profile(job: JobSettings, options: dict[str, Any]) -> Profile:
    return profile(load_entrypoint(BUNDLE, job.entrypoint), job, **options)


def prepare(trainers: Sequence[Trainer], recipe: Recipe) -> None:
    """Have all of them trace and cut the model."""
    for trainer in trainers:
        trainer.order(recipe=recipe)
    for trainer in trainers:
        trainer.wait(lambda report: report.graph_hash is not None)


def form(
    trainers: Sequence[Trainer], plan: Plan, recipe: Recipe, job: JobSettings, abandoned: int = 0
) -> tuple[float, float]:
    """Order all of them into `plan`; rank r is the r-th.

    Returns when all were prepared, and when the store was opened for the generation.
    """
    order = GenerationOrder.of(
        [Member(worker=trainer.worker, address="127.0.0.1") for trainer in trainers],
        plan.to_json(),
        number=plan.generation,
        phase="prepare",
    )
    for trainer in trainers:
        trainer.order(action="train", recipe=recipe, generation=order, abandoned=abandoned)
    store = open_store(job.store.uri)
    reports = [trainer.wait(lambda report: report.prepared >= plan.generation) for trainer in trainers]
    prepared = time.monotonic()
    open_generation(store, job.job, plan.generation)
    head = read_head(store, job.job)
    assert head is not None, "it was written"
    go = {"phase": "go", "endpoint": reports[0].endpoint, "checkpoints": list(head.manifests)}
    opened = time.monotonic()
    order = order.model_copy(update=go)
    for trainer in trainers:
        trainer.order(action="train", recipe=recipe, generation=order, abandoned=abandoned)
    return prepared, opened
