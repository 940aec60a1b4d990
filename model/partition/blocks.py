"""The modules that a graph's operations belong to: repeated blocks, the user's marks, labels of sections.

Reads `nn_module_stack` and `stack_trace`, which torch.export keeps with every operation: checked with torch
2.13.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from ..errors import UserCodeError
from ..tracing.source import stack_place

_COVERS = 0.5  # modules of one class count as blocks if they do at least this part of the model's work
ENOUGH_BLOCKS = 8  # with fewer, a finer structure is sought


Span = tuple[int, int]
"""Positions of the first and last operation of a module."""


@dataclass(slots=True)
class _Instance:
    first: int
    last: int
    work: float


def find_blocks(
    own: Mapping[int, fx.Node], work: Sequence[float], places: Collection[int]
) -> tuple[Span, ...]:
    """Find the repeated block: modules of one class, run one after the other, with most of the model's work.

    Returns the span of each instance, in order. `own`: the operations by position, derived ones left out.

    Only modules before which a cut may be (`places`) count. Of several classes (a transformer's blocks, and
    the halves of each), the coarsest with at least 8 instances is taken; if there is none, the one with most
    instances.
    """
    total = sum(work)
    found: list[tuple[int, float, tuple[Span, ...]]] = []
    for instances in _by_class(own, work).values():
        spans = sorted((instance.first, instance.last) for instance in instances.values())
        if any(first <= last for (_, last), (first, _) in itertools.pairwise(spans)):
            continue
        covered = sum(instance.work for instance in instances.values())
        usable = sum(first in places for first, _ in spans[1:])
        if covered >= _COVERS * total and usable == len(spans) - 1 > 0:
            found.append((len(spans), covered, tuple(spans)))
    enough = [entry for entry in found if entry[0] >= ENOUGH_BLOCKS]
    if enough:
        return min(enough, key=lambda entry: (entry[0], -entry[1]))[2]
    return max(found, key=lambda entry: (entry[0], entry[1]))[2] if found else ()


def marked_positions(own: Mapping[int, fx.Node], marks: Sequence[str]) -> dict[str, int]:
    """{marked module: position of its first operation}. Raises `UserCodeError` naming an invalid mark."""
    spans = _spans(own)
    for mark in marks:
        if mark not in spans:
            near = difflib.get_close_matches(mark, [path for path in spans if path], 3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise UserCodeError(f"Training.cuts: no module {mark!r} runs in the model's forward{hint}")
    return {mark: spans[mark][0] for mark in marks}


def section_labels(own: Mapping[int, fx.Node], sections: Sequence[tuple[int, int]]) -> list[str]:
    """A label for each section, for example "transformer.h.3 .. transformer.h.4 (model.py:88)": the first and
    the last module within it, and the line of its first operation. `sections`: (start, stop) of each.
    """
    spans = _spans(own)
    return [_label(own, start, stop, spans) for start, stop in sections]


def _label(own: Mapping[int, fx.Node], start: int, stop: int, spans: Mapping[str, Span]) -> str:
    nodes = [node for position, node in own.items() if start <= position < stop]
    whole = {path for path, (first, last) in spans.items() if path and start <= first and last < stop}
    within = next((path for node in nodes for path, _ in reversed(_stack(node)) if path), "the model")
    begin = next((path for node in nodes for path, _ in _stack(node) if path in whole), within)
    end = next((path for node in reversed(nodes) for path, _ in _stack(node) if path in whole), begin)
    where = next(filter(None, map(_source, nodes)), None)
    name = begin if begin == end else f"{begin} .. {end}"
    return name if where is None else f"{name} ({where})"


def _spans(own: Mapping[int, fx.Node]) -> dict[str, Span]:
    """{path of a module: its span}."""
    found: dict[str, Span] = {}
    for position, node in own.items():
        for path, _ in _stack(node):
            found[path] = found.get(path, (position, position))[0], position
    return found


def _by_class(own: Mapping[int, fx.Node], work: Sequence[float]) -> dict[str, dict[str, _Instance]]:
    """{class of module: {path: instance}}, without instances inside another of the same class."""
    found: dict[str, dict[str, _Instance]] = {}
    for position, node in own.items():
        seen: set[str] = set()
        for path, kind in _stack(node):
            if kind in seen:
                continue
            seen.add(kind)
            instance = found.setdefault(kind, {}).setdefault(path, _Instance(position, position, 0.0))
            instance.last = position
            instance.work += work[position]
    return found


def _stack(node: fx.Node) -> list[tuple[str, str]]:
    """[(path, class)] of the modules that contain `node`, outermost first; a module that runs more than once
    has a path for each run ("layer@1")."""
    entries: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    return [(path, kind if isinstance(kind, str) else repr(kind)) for path, kind in entries.values()]


def _source(node: fx.Node) -> str | None:
    """file:line of the user's code that made `node`."""
    place = stack_place(node)
    return None if place is None else f"{Path(place[0]).name}:{place[1]}"
