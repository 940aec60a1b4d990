"""Runs one worker's operations of a step in the dispatcher's order, with tensors to and from its peers."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ...model.data import Sample
from ...pipeline.dispatcher import Dispatcher
from ...pipeline.operations import Kind, Operation
from ...pipeline.plan import Path, Plan, RestOfStep
from ...pipeline.traffic import output_of
from ...protocol.messages import At
from ..progress import ProgressCounters
from ..sections.ranges import Accumulate, RangeOutput, RangeRuntime
from .p2p_channels import P2PChannels, Tensors
from .prefetch import SOON_S, Prefetcher


class Sink:
    """Receives results of operations other than the tensors for further operations; this one ignores them."""

    def forwarded(self, micro_batch: int, output: RangeOutput) -> None:
        """Called after each forward."""

    def gradient(self, micro_batch: int, section: int, name: str, gradient: Tensor) -> None:
        """Called with one micro-batch's gradient of a parameter."""

    def section_done(self, micro_batch: int, section: int) -> None:
        """Called after the gradients of each section in each backward, or W."""


@dataclass
class Work:
    """The times of a step's operations."""

    seconds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(Kind, 0.0))
    counts: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))

    @property
    def forward_s(self) -> float | None:
        """Mean seconds of a micro-batch's forward; None if there was none."""
        return self._per([Kind.FORWARD], self.counts[Kind.FORWARD])

    @property
    def backward_s(self) -> float | None:
        """Mean seconds of a micro-batch's backward, whole or in halves; None if there was none."""
        num = self.counts[Kind.BACKWARD] + self.counts[Kind.INPUT]
        return self._per((Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT), num)

    def _per(self, kinds: Iterable[Kind], num: int) -> float | None:
        return sum(self.seconds[kind] for kind in kinds) / num if num else None


@dataclass(frozen=True, slots=True)
class _Task:
    """An operation's fixed properties. `consumer` needs its output, here or at a peer."""

    start: int
    stop: int
    path: Path
    keeps: bool
    needs_batch: bool
    consumer: Operation | None
    is_local: bool


class Executor:
    """Runs the operations of one rank of a plan, or of the rest of a step, step after step."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        order: Sequence[Operation],
        runtime: RangeRuntime,
        lanes: P2PChannels,
        feed: Prefetcher,
        progress: ProgressCounters | None = None,
    ) -> None:
        self._runtime = runtime
        self._lanes = lanes
        self._feed = feed
        self._samples = batches_of(plan, order, runtime)
        self._samples_then = () if isinstance(plan, RestOfStep) else self._samples
        self._progress = progress or ProgressCounters()
        self._dispatcher = Dispatcher(plan, rank, order)
        self._tasks = {operation: self._task(plan, rank, operation) for operation in order}
        self._inputs: dict[Operation, Tensors] = {}

    def run(self, step: int, sink: Sink) -> Work:
        """Run all operations of `step`. Raises the cause of the channels' interrupt, and users' errors."""
        dispatcher, lanes, inputs, work = self._dispatcher, self._lanes, self._inputs, Work()
        progress = self._progress
        dispatcher.reset()
        inputs.clear()
        self._feed.begin(step, self._samples, self._samples_then)
        lanes.begin_step()
        while dispatcher.remaining:
            for arrived, tensors in lanes.collect():
                inputs[arrived] = tensors
                dispatcher.arrived(arrived)
            operation = dispatcher.next()
            if operation is None:
                arrived, inputs[arrived] = self._wait()
                dispatcher.arrived(arrived)
                continue
            task, kind = self._tasks[operation], operation.kind
            began = time.perf_counter()
            produced = self._perform(step, operation, task, sink)
            work.seconds[kind] += time.perf_counter() - began
            work.counts[kind] += 1
            progress.operations += 1
            if task.consumer is None:
                continue
            if task.is_local:
                inputs[task.consumer] = produced
                dispatcher.arrived(task.consumer)
            else:
                lanes.send(task.consumer, produced)
        return work

    def close(self) -> None:
        """Let the threads of the channels end."""
        self._lanes.close()

    def _wait(self) -> tuple[Operation, Tensors]:
        """Wait for the next arrival; loads samples meanwhile."""
        most_s = SOON_S
        with self._progress.being(At.PEER):
            while True:
                try:
                    return self._lanes.wait(most_s)
                except queue.Empty:
                    most_s = 0.0 if self._feed.load_ahead() else None

    def _perform(self, step: int, operation: Operation, task: _Task, sink: Sink) -> Tensors:
        micro_batch, runtime = operation.micro_batch, self._runtime
        if operation.kind is Kind.RECOMPUTE:
            runtime.recompute(micro_batch, task.start)
            return {}
        if operation.kind in (Kind.BACKWARD, Kind.INPUT):
            gradients = self._inputs.pop(operation._replace(kind=Kind.BACKWARD), {})
            if operation.kind is Kind.INPUT:
                return runtime.input_gradients(micro_batch, task.start, gradients)
            return runtime.backward(micro_batch, task.start, gradients, *_callbacks(sink, micro_batch))
        if operation.kind is Kind.WEIGHT:
            runtime.weight_gradients(micro_batch, task.start, *_callbacks(sink, micro_batch))
            return {}
        tensors = self._inputs.pop(operation, {})
        batch: Sample = self._feed.take(micro_batch) if task.needs_batch else {}
        output = runtime.forward(
            step, micro_batch, task.start, task.stop, tensors, batch, task.keeps, task.path
        )
        sink.forwarded(micro_batch, output)
        return output.values

    def _task(self, plan: Plan, rank: int, operation: Operation) -> _Task:
        path = plan.path_of(operation.micro_batch)
        span = path.hops[operation.stage].range
        target = output_of(plan, operation)
        return _Task(
            start=span.start,
            stop=span.stop,
            path=path,
            keeps=not self._dispatcher.recomputes(operation.micro_batch, operation.stage),
            needs_batch=self._runtime.needs_batch(span.start, span.stop),
            consumer=None if target is None else target[1],
            is_local=target is not None and target[0] == rank,
        )


def _callbacks(sink: Sink, micro_batch: int) -> tuple[Accumulate, Callable[[int], None]]:
    return partial(sink.gradient, micro_batch), partial(sink.section_done, micro_batch)


def batches_of(plan: Plan, order: Sequence[Operation], runtime: RangeRuntime) -> list[int]:
    """The micro-batches whose samples a worker needs, in the order of its forwards."""
    forwards = [task for task in order if task.kind is Kind.FORWARD]
    spans = [plan.path_of(task.micro_batch).hops[task.stage].range for task in forwards]
    return [
        task.micro_batch
        for task, span in zip(forwards, spans, strict=True)
        if runtime.needs_batch(span.start, span.stop)
    ]
