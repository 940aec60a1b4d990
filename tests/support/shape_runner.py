"""The process that `shapes.Forge` starts: reads folders from its input, and forks what answers the question
in each. Run as a script."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import frozen_models  # noqa: F401
import models
import torch
import user_models
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training
from makara.pipeline.plan import Hop, Plan, Range, Schedule
from makara.pipeline.plan import Path as Route
from makara.protocol.messages import GenerationOrder, Member
from makara.worker.execution.gloo import Listener
from makara.worker.sections.ranges import configure_torch
from shape_ranks import run_eager, run_rank, run_reference_process
from shapes import EAGER, REFERENCE, Question, Shape

_HANGS_S = 900.0  # then a process prints where its threads are, and ends


def main() -> None:
    torch.set_num_threads(1)
    # Imported once for all forks: torch.export, and the libraries of the models.
    trace(models.untied_mlp(), 1)
    for build in user_models.ZOO.values():
        build(0.1)
    gc.freeze()  # as `makara.worker.start` does
    # Only this process answers; whatever the models print goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        _alone()
        folder = Path(line.strip())
        child = _fork(folder / "model" / "model.fault", partial(_answer, folder))
        _, status = os.waitpid(child, 0)
        answers.write("done\n" if status == 0 else "failed\n")
        answers.flush()


def _alone() -> None:
    """A fork copies the calling thread only: locks that another one holds would stay locked for ever."""
    tasks = os.listdir("/proc/self/task") if sys.platform == "linux" else threading.enumerate()
    assert len(tasks) == 1, f"about to fork with {len(tasks)} threads: {threading.enumerate()}"


def _answer(folder: Path) -> None:
    question = Question.from_json((folder / "question.json").read_text())
    module, _, function = question.entry.partition(":")
    training: Training = getattr(importlib.import_module(module), function)(**question.given)
    configure_torch(1, question.numerics)
    traced = trace(training, question.microbatch_size, question.seed, question.precision)
    chain = split(traced, choose_cuts(traced, question.num_sections))
    gc.freeze()
    _alone()
    yardsticks: dict[str, Callable[[Path], None]] = {
        REFERENCE: partial(run_reference_process, question, training, chain),
        EAGER: partial(run_eager, question, training, chain),
    }
    children = Children()
    for name in question.yardsticks:
        children.start(folder / name / "0", yardsticks[name])
    for shape in question.shapes:
        _start_ranks(children, folder, question, training, chain, shape)
    children.join()


def _start_ranks(
    children: Children, folder: Path, question: Question, training: Training, chain: Sections, shape: Shape
) -> None:
    members = [Member(worker=f"w{rank}", address="127.0.0.1") for rank in range(shape.workers)]
    listener = Listener("127.0.0.1")  # bound here, so that all know where; served by rank 0
    order = GenerationOrder.of(
        members,
        plan_of(shape, chain, question.num_micro_batches).to_json(),
        number=1,
        phase="go",
        endpoint=listener.endpoint,
    )
    for rank in range(shape.workers):
        run = partial(run_rank, question, training, chain, order, rank, listener if rank == 0 else None)
        children.start(folder / str(shape) / str(rank), run)
    listener.close()


def plan_of(shape: Shape, chain: Sections, num_micro_batches: int) -> Plan:
    """Of generation 1; a pipeline's stages hold as nearly equal numbers of sections as can be."""
    ranges: list[Range] = []
    paths: list[Route] = []
    for replica, depth in enumerate(shape.depths):
        bounds = [chain.num_sections * stage // depth for stage in range(depth + 1)]
        stages = [Range(start, stop) for start, stop in pairwise(bounds)]
        hops = tuple(Hop(len(ranges) + stage, span) for stage, span in enumerate(stages))
        paths.append(Route(hops, tuple(range(replica, num_micro_batches, shape.replicas))))
        ranges += stages
    return Plan(
        num_sections=chain.num_sections,
        num_micro_batches=num_micro_batches,
        ranges=tuple(ranges),
        paths=tuple(paths),
        schedule=Schedule(shape.schedule),
        window=shape.window,
        recompute=shape.recompute,
        halves=shape.halves,
        generation=1,
        frozen=chain.frozen if shape.told else 0,
    )


class Children:
    """Processes that run beside each other; the first that fails ends them all."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        # Closed when all are done: a rank that left early would take the rendezvous with it.
        self._gate, self._key = os.pipe()
        self._done, self._tell = os.pipe()

    def start(self, path: Path, run: Callable[[Path], None]) -> None:
        """Fork a process that runs `run(path)`, says so, and waits for the others."""
        self._running.add(_fork(path.with_suffix(".fault"), partial(self._live, run, path)))

    def join(self) -> None:
        for end in (self._tell, self._gate):
            os.close(end)
        reported = b""
        while len(reported) < len(self._running):
            more = os.read(self._done, 64)
            if not more or b"!" in more:
                break
            reported += more
        if len(reported) < len(self._running):
            for child in self._running:
                os.kill(child, 9)
        os.close(self._key)
        statuses = [os.waitpid(child, 0)[1] for child in self._running]
        if any(statuses):
            raise RuntimeError(f"{sum(map(bool, statuses))} of {len(statuses)} processes failed")

    def _live(self, run: Callable[[Path], None], path: Path) -> None:
        os.close(self._key)
        faulthandler.dump_traceback_later(_HANGS_S, exit=True)
        try:
            run(path)
        except BaseException:
            _tell_fault(path.with_suffix(".fault"))
            os.write(self._tell, b"!")  # after that the parent may end this process
            os._exit(1)
        os.write(self._tell, b".")
        os.read(self._gate, 1)  # end of file: the parent let go of its key


def _fork(fault: Path, run: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        _be(fault, run)
    return child


def _be(fault: Path, run: Callable[[], None]) -> NoReturn:
    fault.parent.mkdir(parents=True, exist_ok=True)
    try:
        run()
    except BaseException:
        _tell_fault(fault)
        os._exit(1)
    # Not an orderly exit: helper threads may still be blocked in a group.
    os._exit(0)


def _tell_fault(path: Path) -> None:
    """What is being handled, whole before anyone can read it."""
    path.with_suffix(".part").write_text(f"{path}:\n{traceback.format_exc()}")
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()
