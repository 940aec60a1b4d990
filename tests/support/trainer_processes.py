"""Real trainer processes without agents or a manager: a test gives them their orders and reads their reports.

Processes are forked from a server that has imported torch already, so that a trainer starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import math
import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from makara.model.training import Training
from makara.pipeline.plan import Plan
from makara.protocol.messages import (
    CheckpointRef,
    GenerationOrder,
    JobSettings,
    Member,
    Orders,
    Phase,
    Progress,
    Recipe,
    StepMetrics,
    StoreConfig,
    WorkerReport,
)
from makara.worker.execution.commit import Flag

LASTING_BITS = (*range(8, 23), 31)
"""Bits of a float32 whose flips do not vanish in a few steps by rounding, nor end in what is not finite: the
upper part of the mantissa, and the sign."""
TIMEOUT_S = 300.0  # of a wait for what may need an import of torch on a machine that others use as well
BUNDLE = Path(__file__).parent
# The fork server reads its import path from the environment alone, and passes over what it cannot import.
os.environ["PYTHONPATH"] = os.pathsep.join([str(BUNDLE), *filter(None, [os.environ.get("PYTHONPATH")])])
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["warm_imports"])


def settings(folder: Path, **changes: Any) -> JobSettings:
    values: dict[str, Any] = {
        "job": "job",
        "entrypoint": "models:tied_gpt",
        "seed": 7,
        "steps": 6,
        "global_batch_size": 16,
        "microbatch_size": 2,
        "numerics": "exact",
        "store": StoreConfig(uri=f"file://{folder}/store"),
        "bundle_sha256": "0" * 64,
    }
    return JobSettings.model_validate({**values, **changes})


class Fleet:
    """Trainers by name. `close` kills them all."""

    def __init__(
        self,
        folder: Path,
        job: JobSettings,
        recipe: Recipe | None,
        addresses: Mapping[str, str] | None = None,
        namespaces: Mapping[str, int] | None = None,
    ) -> None:
        """`addresses`: of workers that are not on 127.0.0.1. `namespaces`: process ids in whose network
        namespace they live."""
        self.job, self.recipe = job, recipe
        self._addresses, self._namespaces = addresses or {}, namespaces or {}
        self.log = folder / "trainers.log"
        self.reports: dict[str, WorkerReport] = {}
        self.seen: set[tuple[str, Phase]] = set()  # which worker was in which phase
        self.metrics: list[StepMetrics] = []
        self.beats: dict[str, Progress] = {}
        self._changed = threading.Condition()
        self._processes: dict[str, Any] = {}
        self._sockets: dict[str, socket.socket] = {}
        self.hold = False  # of all orders from now on
        self.saves_only = False  # of generations from now on
        self.link_timeout_s = 60.0
        self._version = 0
        self._abandoned = 0
        self._generations: dict[str, GenerationOrder] = {}

    def start(self, *workers: str, fault: str | None = None) -> None:
        """Start trainers; `fault` is what goes wrong inside them, see `_trainer`."""
        for worker in workers:
            ours, theirs = socket.socketpair()
            place = self.address(worker), self._namespaces.get(worker)
            arguments = (theirs, worker, str(self.log), fault, *place)
            process = CONTEXT.Process(target=_trainer, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes[worker], self._sockets[worker] = process, ours
            threading.Thread(target=self._read, args=(worker, ours), daemon=True).start()
            self.send(worker)
        if self.recipe is not None:
            self.wait(lambda: all(self.has(worker, graph_hash=True) for worker in workers))

    def send(self, *workers: str, **changes: Any) -> None:
        for worker in workers:
            self._version += 1
            generation = self._generations.get(worker)
            values: dict[str, Any] = {
                "version": self._version,
                "action": "train" if generation else "idle",
                "job": self.job,
                "recipe": self.recipe,
                "generation": generation,
                "abandoned": self._abandoned,
                "hold": self.hold,
                "link_timeout_s": self.link_timeout_s,
            }
            line = Orders(**{**values, **changes}).model_dump_json().encode() + b"\n"
            self._sockets[worker].sendall(line)

    def prepare(self, plan: Plan, workers: Sequence[str], donors: Sequence[str] = ()) -> None:
        members = [Member(worker=w, address=self.address(w)) for w in [*workers, *donors]]
        order = GenerationOrder.of(members, plan.to_json(), number=plan.generation, phase="prepare")
        for member in members:
            self._generations[member.worker] = order.told_to([member.worker])
            self.send(member.worker)
        self.wait(lambda: all(self.reports[m.worker].prepared >= plan.generation for m in members))

    def go(
        self, number: int, checkpoints: Sequence[CheckpointRef] = (), members: Sequence[str] | None = None
    ) -> None:
        """All members, or these of them, may go to the generation."""
        if members is None:
            members = [w for w, order in self._generations.items() if order.number == number]
        first = self._generations[members[0]].first
        for worker in members:
            order = self._generations[worker].model_copy(
                update={
                    "phase": "go",
                    "endpoint": self.reports[first].endpoint,
                    "checkpoints": list(checkpoints),
                    "saves_only": self.saves_only,
                }
            )
            self._generations[worker] = order
            self.send(worker)

    def form(
        self,
        plan: Plan,
        workers: Sequence[str],
        donors: Sequence[str] = (),
        checkpoints: Sequence[CheckpointRef] = (),
    ) -> None:
        """Prepare, go, and wait until all members have formed it."""
        self.prepare(plan, workers, donors)
        self.go(plan.generation, checkpoints)
        self.wait(lambda: all(self.formed(worker, plan.generation) for worker in [*workers, *donors]))

    def address(self, worker: str) -> str:
        return self._addresses.get(worker, "127.0.0.1")

    def formed(self, worker: str, number: int) -> bool:
        formed = self.reports[worker].formed
        return formed is not None and formed.generation >= number

    def abandon(self, number: int, *workers: str) -> None:
        self._abandoned = number
        self.send(*workers)

    def forget(self, *workers: str) -> None:
        """These are gone: their reports no longer count."""
        for worker in workers:
            self._generations.pop(worker, None)

    def replace(self, dead: str, alive: str) -> None:
        """Start a trainer of the dead one's name, under the orders that `alive` has."""
        self._generations[dead] = self._generations[alive]
        del self.reports[dead]
        self._sockets[dead].close()
        self.start(dead)

    def pid(self, worker: str) -> int:
        return self._processes[worker].pid

    def signal(self, number: int, *workers: str) -> None:
        for worker in workers:
            os.kill(self._processes[worker].pid, number)

    def kill(self, *workers: str) -> None:
        self.signal(signal.SIGKILL, *workers)
        for worker in workers:
            self._processes[worker].join()
            self._generations.pop(worker, None)

    def switch(self, number: int, members: Sequence[str], checkpoints: Sequence[CheckpointRef]) -> None:
        """Have the members go to `number` within a step, one after another in this order, some told of both
        things at once, and some first to go and then that the generation before is abandoned."""
        before = self._abandoned
        for index, worker in enumerate(members):
            self._abandoned = before if index % 2 else number - 1
            self.go(number, checkpoints, [worker])
        self.abandon(number - 1, *members)

    def stand(self, worker: str, operations: int) -> None:
        """Have a trainer started with the fault "dies-when-told" stand still after so many operations from
        the beginning of its next step, or rest of one, until `go_on`: the job does not end meanwhile.

        To be told before its generation goes, so that it does not matter how long the test takes.
        """
        self.tell_to_end(worker, f"{operations} waits")

    def wait_standing(self, worker: str) -> None:
        standing = self.log.with_name(f"{worker}.waits")
        self.wait(standing.exists)

    def go_on(self, worker: str, then: str | None = None) -> None:
        """Have a trainer that stands go on; `then`: where it is to die or stand next, counted from there."""
        standing = self.log.with_name(f"{worker}.waits")
        if then is not None:
            standing.with_suffix(".then").write_text(then)
        standing.unlink()

    def tell_to_end(self, worker: str, what: str) -> Path:
        """Tell a trainer started with the fault "dies-when-told" where to die or wait: see `_die`."""
        path = self.log.with_name(f"{worker}.dies")
        path.with_suffix(".part").write_text(what)
        path.with_suffix(".part").rename(path)
        return path

    def kill_within(self, worker: str, operations: int) -> None:
        """Have a trainer started with the fault "dies-when-told" die by SIGKILL after so many operations from
        the beginning of its next step, or rest of one; returns when it is dead."""
        self.tell_to_end(worker, f"{operations} dies")
        self.await_death(worker)

    def await_death(self, worker: str) -> str:
        """Wait until it is dead; where it died."""
        self._processes[worker].join(TIMEOUT_S)
        assert not self._processes[worker].is_alive(), f"{worker} did not come to where it was to die"
        self._generations.pop(worker, None)
        return self.log.with_name(f"{worker}.died").read_text()

    def has(self, worker: str, **wanted: Any) -> bool:
        report = self.reports.get(worker)
        if report is not None and report.failure is not None:
            raise AssertionError(f"{worker} failed: {report.failure.message}\n{report.failure.traceback}")
        return report is not None and all(
            getattr(report, name) == value or (value is True and bool(getattr(report, name)))
            for name, value in wanted.items()
        )

    def wait(self, predicate: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(predicate, timeout=TIMEOUT_S):
                state = "\n".join(str(report) for report in self.reports.values())
                tail = self.log.read_text()[-4000:] if self.log.exists() else ""
                raise AssertionError(f"nothing came of it within {TIMEOUT_S:g} s:\n{state}\n{tail}")

    def wait_phase(self, phase: Phase, *workers: str) -> None:
        self.wait(lambda: all(self.has(worker, phase=phase) for worker in workers))

    def wait_step(self, step: int, worker: str) -> None:
        self.wait(lambda: self.has(worker) and self.reports[worker].step >= step)

    def wait_lost_commit(self, worker: str) -> None:
        """Until a trainer started with the fault "loses-commit" waits for its lost commit."""
        self.wait(lambda: self.log.with_name(f"{worker}.lost").exists())

    def flip(self, worker: str, kind: str, seed: int, bits: Sequence[int] = LASTING_BITS) -> int:
        """Flip one of these bits of a float32 of `kind`, "weights", "optimizer" or "gradients" (reduced), in
        a trainer with the fault "flips-when-told"; returns the number of steps that were committed before."""
        told, flipped = (self.log.with_name(f"{worker}.{name}") for name in ("flip", "flipped"))
        flipped.unlink(missing_ok=True)
        told.with_suffix(".new").write_text(" ".join(map(str, (kind, seed, *bits))))
        told.with_suffix(".new").rename(told)
        self.wait_file(flipped)
        return int(flipped.read_text())

    def wait_file(self, path: Path) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < deadline, f"{path.name} did not come to be"
            time.sleep(0.01)

    def attempts(self) -> list[tuple[int, int]]:
        """(step, attempt), each counted from 0, as trainers with the fault "tells-attempts" took them."""
        lines = {
            line for path in self.log.parent.glob("*.attempts") for line in path.read_text().splitlines()
        }
        return sorted((int(step), int(attempt)) for step, attempt in map(str.split, lines))

    def losses(self) -> Mapping[int, float]:
        return {metrics.step: metrics.loss for metrics in self.metrics}

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        for connection in self._sockets.values():
            connection.close()

    def _read(self, worker: str, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    self._take(worker, json.loads(line))
        except (OSError, ValueError):
            return  # closed by the test

    def _take(self, worker: str, value: dict[str, Any]) -> None:
        with self._changed:
            if "report" in value:
                self.reports[worker] = WorkerReport.model_validate(value["report"])
                self.seen.add((worker, self.reports[worker].phase))
            elif isinstance(beat := value.get("beat"), dict):
                self.beats[worker] = Progress.model_validate(beat)
            elif "metrics" in value:
                self.metrics.append(StepMetrics.model_validate(value["metrics"]))
            self._changed.notify_all()


def _trainer(
    connection: socket.socket,
    worker: str,
    log: str,
    fault: str | None,
    address: str = "127.0.0.1",
    namespace: int | None = None,
) -> None:
    """`fault` "loses-commit-3": the all-reduce of step 3 happens, but on this worker it never returns.
    "never-collects": Python does not look for reference cycles. "tells-attempts": it writes down the number
    of each attempt at a step, see `Fleet.attempts`. "adds-2-times-in-5": at the first attempt of step 5 a
    backward's gradients are added twice, or "adds-0-times-in-5" never. "miscounts-5": so it seems at every
    attempt at step 5. "blocks-data-FILE": samples of
    `models:blocking_data` do not come while the file exists. "dies-when-told": see `_die`; it dies so too if
    it is "short-of-memory", which has no memory left most times that a generation forms. "flips-when-told":
    see `Fleet.flip`."""
    from makara.worker.trainer import trainer

    if namespace is not None:
        enter_network(namespace)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"{worker} %(asctime)s %(message)s")
    if fault == "never-collects":
        gc.disable()
    elif fault == "tells-attempts":
        _tell_attempts(Path(log).with_name(f"{worker}.attempts"))
    elif fault in ("dies-when-told", "short-of-memory"):
        if fault == "short-of-memory":
            _be_short_of_memory(worker)
        _die(Path(log).with_name(f"{worker}.dies"))
    elif fault == "flips-when-told":
        _flip(Path(log).with_name(f"{worker}.flip"))
    elif fault is not None and fault.startswith("blocks-data-"):
        os.environ["BLOCK_DATA"] = fault.removeprefix("blocks-data-")
    elif fault is not None and fault.startswith("miscounts-"):
        _miscount(int(fault.removeprefix("miscounts-")))
    elif fault is not None and fault.startswith("adds-"):
        times, step = fault.removeprefix("adds-").split("-times-in-")
        _add(int(times), int(step))
    elif fault is not None:
        _lose_commit(int(fault.removeprefix("loses-commit-")), Path(log).with_name(f"{worker}.lost"))
    _use_traces()
    trainer.run(connection, worker, 1, BUNDLE, address)


def _use_traces() -> None:
    """Those that the fork server made: a trainer would take a second of processor time to make the same."""
    from makara.worker.trainer import model, trainer
    from warm_imports import TRACES

    build, trace = trainer.build_model, model.trace

    def build_with_traces(training: Training, job: JobSettings, recipe: Recipe) -> model.Model:
        made = TRACES.get((job.entrypoint, recipe.microbatch_size, job.seed, job.precision))
        model.trace = trace if made is None else lambda *_: made
        return build(training, job, recipe)

    trainer.build_model = build_with_traces


def enter_network(pid: int) -> None:
    """Have this thread, and those that it starts, live in the network namespace of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


PLACES = ("standing", "transfer", "before ready", "after ready", "rest")
"""Where a trainer can die while it forms a generation, and at the beginning of the rest of a step."""


def _die(told: Path) -> None:
    """Has this process die, or wait, where `told` says: after a number of operations, counted from a step's
    start; or die at one of `PLACES`. If it does not come to that place, it dies once the generation has
    formed."""
    from makara.worker.execution.communicator import Communicator
    from makara.worker.execution.executor import Executor
    from makara.worker.recovery import joining
    from makara.worker.trainer import generation

    run, perform, gather = Executor.run, Executor._perform, Communicator.gather
    send, receive, join = joining._send, joining._receive, generation.join_generation
    left: int | None = None
    what = ""

    def die(where: str) -> None:
        told.with_suffix(".died").write_text(where)
        os.kill(os.getpid(), signal.SIGKILL)

    def dies(*places: str) -> bool:
        return told.exists() and told.read_text() in places

    def steps(self: Executor, *args: Any) -> Any:
        if left is None and told.exists() and not dies(*PLACES):
            take(told)
        return run(self, *args)

    def take(order: Path) -> None:
        nonlocal left, what
        number, what = order.read_text().split()
        left = int(number)
        order.unlink()

    def performs(self: Executor, *args: Any) -> Any:
        nonlocal left
        if dies("rest"):
            die("rest" if self._samples is not self._samples_then else "a whole step")
        while left == 0:
            if what == "dies":
                die("a step")
            stand_still()
        if left is not None:
            left -= 1
        return perform(self, *args)

    def stand_still() -> None:
        nonlocal left
        left, standing, then = None, told.with_suffix(".waits"), told.with_suffix(".then")
        standing.touch()
        while standing.exists():
            time.sleep(0.005)
        if then.exists():
            take(then)

    def gathers(self: Communicator, name: str, value: Any) -> list[Any]:
        if name == "ready" and dies("before ready"):
            die("before ready")
        found = gather(self, name, value)
        if dies(name, f"after {name}"):
            die(f"after {name}")
        return found

    def sends(group: Any, payload: bytes, peer: int, number: int, progress: Any) -> None:
        if dies("transfer"):
            group.send(torch.tensor([len(payload)]), peer, 2 * number)
            die("a send")
        send(group, payload, peer, number, progress)

    def receives(group: Any, peer: int, number: int, progress: Any) -> bytes:
        if dies("transfer"):
            group.receive(torch.empty(1, dtype=torch.int64), peer, 2 * number)
            die("a receive")
        return receive(group, peer, number, progress)

    def joins(session: Any, *args: Any) -> Any:
        formed = join(session, *args)
        if dies(*PLACES) and not (session.trains and dies("rest")):
            die("formed")
        return formed

    Executor.run, Executor._perform, Communicator.gather = steps, performs, gathers
    joining._send, joining._receive, generation.join_generation = sends, receives, joins


def _tell_attempts(path: Path) -> None:
    from makara.worker.execution.state import Reduced
    from makara.worker.execution.stepper import Stepper

    original = Stepper._commit

    def commit(self: Stepper, reduced: Reduced, *args: Any) -> Any:
        with path.open("a") as file:
            file.write(f"{reduced.step} {reduced.attempt}\n")
        return original(self, reduced, *args)

    Stepper._commit = commit


def _add(times: int, step: int) -> None:
    """Has the first backward of `step` added so many times."""
    from makara.worker.execution.reduction import Reduction
    from makara.worker.execution.stepper import Stepper

    run, gradient, done = Stepper.step, Reduction.gradient, Reduction.section_done
    planted: tuple[int, int] | None = None  # its micro-batch and first section
    is_near = False

    def steps(self: Stepper, *args: Any) -> Any:
        nonlocal is_near
        is_near = is_near or self._state.applied == step
        return run(self, *args)

    def added(self: Reduction, micro_batch: int, section: int, name: str, value: Any) -> None:
        nonlocal planted
        if is_near and planted is None:
            planted = micro_batch, section
            self.is_planted = True
        is_it = planted == (micro_batch, section) and getattr(self, "is_planted", False)
        for _ in range(times if is_it else 1):
            gradient(self, micro_batch, section, name, value)

    def noted(self: Reduction, micro_batch: int, section: int) -> None:
        is_it = planted == (micro_batch, section) and getattr(self, "is_planted", False)
        held = self._in_flight.parcels._held
        before = {bucket: own.tally for bucket, (own, *_) in held.items()}
        done(self, micro_batch, section)
        if is_it:
            self.is_planted = False
            for bucket, (own, *_) in held.items():
                own.tally = (before[bucket] + times * (own.tally - before[bucket])) % 2**64

    Stepper.step, Reduction.gradient, Reduction.section_done = steps, added, noted


def _be_short_of_memory(worker: str) -> None:
    from makara.worker.trainer import generation

    chance = random.Random(worker)
    generation.free_bytes = lambda *_: chance.choice([math.inf, 0.0, 0.0, 0.0])


def _flip(told: Path) -> None:
    """Has one bit flip in this process, where `told` says: see `Fleet.flip`."""
    from makara.worker.execution.state import ModelState
    from makara.worker.execution.stepper import Stepper

    run, apply = Stepper._run, ModelState.apply

    def flip(tensors: Mapping[str, torch.Tensor], step: int) -> None:
        order = told.read_text()
        draw = random.Random(order)
        name, tensor = draw.choice(sorted((n, t) for n, t in tensors.items() if t.is_floating_point()))
        bit = int(draw.choice(order.split()[2:]))
        flat = tensor.detach().view(-1)
        # In a smaller element the flip may vanish: the next gradient's square may exceed it by its precision.
        sizes = flat.abs()
        large = (sizes >= sizes[sizes > 0].median()).nonzero().flatten().tolist() if sizes.any() else [0]
        flat.view(torch.int32)[draw.choice(large)] ^= -(1 << 31) if bit == 31 else 1 << bit
        logging.info("step %d: bit %d of an element of %s flips", step, bit, name)
        told.unlink()
        told.with_suffix(".flipped").write_text(str(step))

    def runs(self: Stepper, step: int, *args: Any) -> Any:
        kind = told.read_text().split()[0] if told.exists() else ""
        if kind in ("weights", "optimizer") and step:
            sections = self._state.runtime.sections.values()
            held = {f"{s.info.index} {n}": t for s in sections for n, t in s.state()[0].items()}
            flip({n: t for n, t in held.items() if f" {kind}/" in n and t.numel() > 1}, step)
        return run(self, step, *args)

    def applies(self: ModelState, record: Any) -> Any:
        if told.exists() and told.read_text().startswith("gradients") and self.reduced is not None:
            flip(self.reduced.gradients, record.step)
        return apply(self, record)

    Stepper._run, ModelState.apply = runs, applies


def _miscount(step: int) -> None:
    """Has tallies of `step` never be right."""
    from makara.worker.execution.parcels import Parcels

    original = Parcels.tallies

    def tallies(self: Parcels[Any]) -> Any:
        found = original(self)
        wrong = self.of is not None and self.of.step == step
        return {bucket: (tally + wrong) % 2**64 for bucket, tally in found.items()}

    Parcels.tallies = tallies


def _lose_commit(step: int, marker: Path) -> None:
    from makara.worker.execution.state import Reduced
    from makara.worker.execution.stepper import Stepper

    original = Stepper._commit
    lost = False

    def commit(self: Stepper, reduced: Reduced, *args: Any) -> Any:
        nonlocal lost
        record = original(self, reduced, *args)
        redone = record.flags & Flag.OVERFLOW and all(math.isfinite(norm) for norm in record.norms)
        if reduced.step == step and not lost and not redone:
            lost = True
            marker.touch()
            self._session.interrupt.wait_for(lambda: False)
        return record

    Stepper._commit = commit
