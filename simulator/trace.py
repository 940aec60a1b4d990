"""Availability traces: when nodes came and went, as CSV in one of two forms.

Rows `ms_since_start,add|remove,node`, without a header; or rows `seconds,count`, perhaps with a header, which
say how many nodes there are from then on.
"""

from __future__ import annotations

import csv
import difflib
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from .validation import FileFault, shown


class InvalidTrace(FileFault):
    """A malformed or inconsistent trace; the message names the line, its text, and what would be accepted."""


class NodeChange(StrEnum):
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True, order=True)
class TraceEvent:
    """At `time_ms` milliseconds after the start, `node` comes or goes."""

    time_ms: int
    change: NodeChange
    node: str


def read_availability(text: str, *, seed: int = 0) -> tuple[TraceEvent, ...]:
    """Read a trace in either form, recognised by the columns of the first row.

    Raises `InvalidTrace`, also for a trace without any event.
    """
    first = next(_rows(text), None)
    events = read_counts(text, seed=seed) if first is not None and len(first[1]) == 2 else read_trace(text)
    if not events:
        raise InvalidTrace(f"the trace is empty; expected rows {_EVENTS}, or {_COUNTS}", 1)
    return events


def read_trace(text: str) -> tuple[TraceEvent, ...]:
    """Read rows `ms,add|remove,node` in file order. Blank lines are skipped.

    Raises `InvalidTrace` when a row has another shape, time runs backwards, a live node is added again or an
    absent one is removed.
    """
    events: list[TraceEvent] = []
    since: dict[str, tuple[NodeChange, int]] = {}  # a node's last change, and its line
    before = 0
    for line, row in _rows(text):
        event = _event(row, line)
        if events and event.time_ms < events[-1].time_ms:
            raise InvalidTrace(
                f"{event.time_ms} ms comes after {events[-1].time_ms} ms (line {before}); "
                "rows must be in the order of their times",
                line,
            )
        _check_turn(event, since.get(event.node), line)
        since[event.node] = event.change, line
        before = line
        events.append(event)
    return tuple(events)


def read_counts(text: str, *, seed: int = 0) -> tuple[TraceEvent, ...]:
    """Read rows `seconds,count`. Added nodes have new names; which nodes go is drawn from `seed`.

    Raises `InvalidTrace` when a row has another shape or time does not increase.
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
            at, last = f"{time_ms / 1000:g} s", f"{before / 1000:g} s"
            raise InvalidTrace(f"{at} does not come after {last}; expected one row for each time", line)
        before = time_ms
        while len(live) > count:
            gone = live.pop(draw.randrange(len(live)))
            events.append(TraceEvent(time_ms, NodeChange.REMOVE, gone))
        while len(live) < count:
            named += 1
            live.append(f"node{named}")
            events.append(TraceEvent(time_ms, NodeChange.ADD, live[-1]))
    return tuple(events)


_EVENTS = "ms,add|remove,node"
_COUNTS = "seconds,count"
_MOST_NODES = 100_000  # more is a typing error, and each node would get a name


def _rows(text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text))
    try:
        for row in reader:
            if len(row) > 1 or any(cell.strip() for cell in row):
                yield reader.line_num, row
    except csv.Error as error:
        raise InvalidTrace(f"not CSV: {error}", reader.line_num) from error


def _event(row: list[str], line: int) -> TraceEvent:
    time, change, node = _cells(row, 3, _EVENTS, line)
    if not (time.isascii() and time.isdigit() and len(time) < 18):
        raise InvalidTrace(f"{shown(time)} is not a whole number of milliseconds >= 0", line)
    if change not in list(NodeChange):
        close = difflib.get_close_matches(change.lower(), list(NodeChange), 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InvalidTrace(f"{shown(change)} is neither add nor remove{hint}", line)
    if not node:
        raise InvalidTrace("the node has no name; expected one in the third column", line)
    return TraceEvent(int(time), NodeChange(change), node)


def _check_turn(event: TraceEvent, last: tuple[NodeChange, int] | None, line: int) -> None:
    """Raise `InvalidTrace` unless additions and removals of a node alternate."""
    node = shown(event.node)
    if event.change is NodeChange.ADD and last is not None and last[0] is NodeChange.ADD:
        raise InvalidTrace(
            f"{node} is added, but is there already, since line {last[1]}; expected its removal before", line
        )
    if event.change is NodeChange.REMOVE and (last is None or last[0] is NodeChange.REMOVE):
        why = "was never added" if last is None else f"went in line {last[1]}"
        raise InvalidTrace(f"{node} is removed, but {why}; expected a node that is there", line)


def _count(row: list[str], line: int) -> tuple[int, int]:
    time, count = _cells(row, 2, _COUNTS, line)
    try:
        seconds = float(time)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e12:
        raise InvalidTrace(f"{shown(time)} is not a number of seconds >= 0", line)
    if not (count.isascii() and count.isdigit() and len(count) < 18) or int(count) > _MOST_NODES:
        raise InvalidTrace(f"{shown(count)} is not a number of nodes from 0 to {_MOST_NODES}", line)
    return round(seconds * 1000), int(count)


def _cells(row: list[str], number: int, form: str, line: int) -> list[str]:
    cells = [cell.strip() for cell in row]
    text = ",".join(cells)
    if line == 1 and not any(character.isdigit() for character in text):
        header = f", or the header {_COUNTS}" if form == _COUNTS else ""
        raise InvalidTrace(f"{shown(text)}: expected rows {form}{header}", line)
    if len(cells) != number:
        raise InvalidTrace(f"{shown(text)}: expected {number} columns ({form}), got {len(cells)}", line)
    return cells
