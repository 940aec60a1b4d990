"""A step in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

The format's fields: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ...pipeline import Kind, Operation, output_of
from ..spans import Span
from .lanes import Lane, Pipeline, Timeline

_MOST_OPERATIONS = 150_000  # about 45 MB, which viewers still open; beyond, pipelines are left out
_MOST_ARROWS = 20_000
_NS_PER_US = 1000
_CATEGORIES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradients",
    Kind.WEIGHT: "weight gradients",
}

Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> str:
    """Write the JSON text. Processes are pipelines; each worker is two threads, one of operations and one of
    all-reduces, and a counter of the bytes that it holds. Arrows are messages, unless there are too many.
    Times are in microseconds from the start of the step."""
    shown = _bounded(timeline)
    events: list[Event] = []
    for index, pipeline in enumerate(shown.pipelines):
        events += _pipeline(pipeline, index)
    threads = {
        lane.worker: _place(index, n)
        for index, p in enumerate(shown.pipelines)
        for n, lane in enumerate(p.lanes)
    }
    if _num_operations(shown) <= _MOST_ARROWS:
        events += _arrows(shown, threads)
    about = {"title": shown.title, "about": shown.about, "workers_not_shown": _num_hidden(shown)}
    value = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(value, separators=(",", ":")) + "\n"


def _bounded(timeline: Timeline) -> Timeline:
    num_operations = _num_operations(timeline)
    if num_operations <= _MOST_OPERATIONS:
        return timeline
    return timeline.folded(max(1, len(timeline.lanes) * _MOST_OPERATIONS // num_operations))


def _num_operations(timeline: Timeline) -> int:
    return sum(len(lane.operations) for lane in timeline.lanes)


def _num_hidden(timeline: Timeline) -> int:
    return timeline.num_left_out + sum(p.alike * len(p.lanes) for p in timeline.pipelines)


def _place(pipeline: int, lane: int) -> Event:
    """Process and thread of a worker's operations; its all-reduces are the next thread."""
    return {"pid": pipeline + 1, "tid": 2 * lane + 1}


def _pipeline(pipeline: Pipeline, index: int) -> Iterator[Event]:
    alike = f" (and {pipeline.alike} more like it)" if pipeline.alike else ""
    process = {"pid": index + 1, "ph": "M"}
    yield {**process, "name": "process_name", "args": {"name": pipeline.name + alike}}
    yield {**process, "name": "process_sort_index", "args": {"sort_index": index}}
    for number, lane in enumerate(pipeline.lanes):
        yield from _lane(lane, _place(index, number))


def _lane(lane: Lane, place: Event) -> Iterator[Event]:
    beside = {**place, "tid": place["tid"] + 1}
    where = f" on {lane.vm}" if lane.vm else ""
    for thread, name in ((place, f"{lane.name}{where}"), (beside, f"{lane.name}: sums")):
        yield {**thread, "ph": "M", "name": "thread_name", "args": {"name": name}}
        yield {**thread, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": thread["tid"]}}
    sections = f"{lane.sections.start}..{lane.sections.stop - 1}"
    for span in lane.operations:
        operation = span.operation
        yield {
            **place,
            **_complete(span.start_s, span.stop_s),
            "name": f"{operation.kind.value}{operation.micro_batch}",
            "cat": _CATEGORIES[operation.kind],
            "args": {"micro_batch": operation.micro_batch, "stage": operation.stage, "sections": sections},
        }
    for closing in lane.closings:
        yield {
            **(beside if closing.kind.is_beside else place),
            **_complete(closing.start_s, closing.stop_s),
            "name": closing.kind.value + ("" if closing.section is None else f" section {closing.section}"),
            "cat": closing.kind.value,
        }
    for at_s, size_bytes in lane.memory:
        yield {
            "pid": place["pid"],
            "ph": "C",
            "ts": _us(at_s),
            "name": f"memory of {lane.name}",
            "args": {"bytes": size_bytes},
        }


def _complete(start_s: float, stop_s: float) -> Event:
    start_us = _us(start_s)
    return {"ph": "X", "ts": start_us, "dur": round(_us(stop_s) - start_us, 3)}


def _us(at_s: float) -> float:
    """Microseconds, rounded to the nanosecond, the simulator's resolution."""
    return round(at_s * 1e6, 3)


def _arrows(timeline: Timeline, threads: dict[int, Event]) -> Iterator[Event]:
    """An arrow for each message, from the end of an operation to the start of the one that it feeds."""
    by_task: dict[Operation, Span] = {
        span.operation: span for lane in timeline.lanes for span in lane.operations
    }
    number = 0
    for span in by_task.values():
        target = output_of(timeline.plan, span.operation)
        if target is None or target[0] == span.worker:
            continue
        fed = by_task.get(target[1]) or by_task.get(target[1]._replace(kind=Kind.INPUT))
        if fed is None:  # its worker is not shown
            continue
        number += 1
        name = "activations" if span.operation.kind is Kind.FORWARD else "gradients"
        message = {"name": name, "cat": "message", "id": number}
        # An arrow belongs to the slice that contains its time; a slice's end is outside it.
        yield {
            **threads[span.worker],
            **message,
            "ph": "s",
            "ts": round(_us(span.stop_s) - 1 / _NS_PER_US, 3),
        }
        yield {**threads[fed.worker], **message, "ph": "f", "bp": "e", "ts": _us(fed.start_s)}
