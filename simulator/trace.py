"""Availability traces: when nodes came and went.

Two forms, none with a header but that the second may have one: rows `ms_since_start,add|remove,node`, and
rows `seconds,count`, which say how many nodes there are from then on.
"""

from __future__ import annotations

import csv
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class InvalidTrace(ValueError):
    """A trace that breaks the form or contradicts itself; the message names the line."""


class Change(StrEnum):
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, order=True)
class TraceEvent:
    """At `time_ms` milliseconds after the start, `node` comes or goes."""

    time_ms: int
    change: Change
    node: str


def read_availability(text: str, *, seed: int = 0) -> tuple[TraceEvent, ...]:
    """The events of a trace in either form, told apart by the columns of the first row.

    Raises `InvalidTrace`, also for a trace without any event.
    """
    first = next(_rows(text), None)
    events = read_counts(text, seed=seed) if first is not None and len(first[1]) == 2 else read_trace(text)
    if not events:
        raise InvalidTrace("line 1: the trace is empty")
    return events


def read_trace(text: str) -> tuple[TraceEvent, ...]:
    """The events `ms,add|remove,node` in file order. Blank lines are skipped.

    Raises `InvalidTrace` when a row has another shape, time runs backwards, a live node is added again or an
    absent one is removed.
    """
    events: list[TraceEvent] = []
    live: set[str] = set()
    for line, row in _rows(text):
        event = _event(row, line)
        if events and event.time_ms < events[-1].time_ms:
            raise InvalidTrace(f"line {line}: {event.time_ms} ms comes after {events[-1].time_ms} ms")
        if (event.node in live) == (event.change is Change.ADD):
            state = "already live" if event.node in live else "not live"
            raise InvalidTrace(f"line {line}: {event.change} {event.node}: the node is {state}")
        live ^= {event.node}
        events.append(event)
    return tuple(events)


def read_counts(text: str, *, seed: int = 0) -> tuple[TraceEvent, ...]:
    """The events of a series `seconds,count`: nodes that come are new ones; which go is drawn from `seed`.

    Raises `InvalidTrace` when a row has another shape or time does not move on.
    """
    draw = random.Random(seed)
    events: list[TraceEvent] = []
    live: list[str] = []
    named, before = 0, -1
    for number, (line, row) in enumerate(_rows(text)):
        if number == 0 and [cell.strip() for cell in row] == ["seconds", "count"]:
            continue
        time_ms, count = _count(row, line)
        if time_ms <= before:
            raise InvalidTrace(f"line {line}: {time_ms / 1000:g} s does not come after {before / 1000:g} s")
        before = time_ms
        while len(live) > count:
            gone = live.pop(draw.randrange(len(live)))
            events.append(TraceEvent(time_ms, Change.REMOVE, gone))
        while len(live) < count:
            named += 1
            live.append(f"node{named}")
            events.append(TraceEvent(time_ms, Change.ADD, live[-1]))
    return tuple(events)


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text))
    try:
        for row in reader:
            if len(row) > 1 or any(cell.strip() for cell in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise InvalidTrace(f"line {reader.line_num}: not CSV: {error}") from error


def _event(row: list[str], line: int) -> TraceEvent:
    if len(row) != 3:
        raise InvalidTrace(f"line {line}: expected 3 columns (ms, add|remove, node), got {len(row)}")
    time, change, node = (cell.strip() for cell in row)
    if not (time.isascii() and time.isdigit() and len(time) < 18):
        raise InvalidTrace(f"line {line}: {time!r} is not a whole number of milliseconds >= 0")
    if change not in ("add", "remove"):
        raise InvalidTrace(f"line {line}: {change!r} is neither add nor remove")
    if not node:
        raise InvalidTrace(f"line {line}: the node has no name")
    return TraceEvent(int(time), Change(change), node)


def _count(row: list[str], line: int) -> tuple[int, int]:
    if len(row) != 2:
        raise InvalidTrace(f"line {line}: expected 2 columns (seconds, count), got {len(row)}")
    time, count = (cell.strip() for cell in row)
    try:
        seconds = float(time)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e12:
        raise InvalidTrace(f"line {line}: {time!r} is not a number of seconds >= 0")
    if not (count.isascii() and count.isdigit() and len(count) < 18) or int(count) > _MOST_NODES:
        raise InvalidTrace(f"line {line}: {count!r} is not a number of nodes from 0 to {_MOST_NODES}")
    return round(seconds * 1000), int(count)


_MOST_NODES = 100_000  # more is a slip of the pen, and would be named one by one
