"""The modules that a graph's operations belong to: repeated blocks, the user's marks, labels of sections.

Reads `nn_module_stack` and `stack_trace`, which torch.export keeps with every operation: checked with torch
2.13.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from ..errors import UserCodeError

_TORCH = str(Path(torch.__file__).parent)
_COVERS = 0.5  # modules of one class count as blocks if they do at least this part of the model's work
ENOUGH_BLOCKS = 8  # with fewer, a finer structure is sought


@dataclass(frozen=True, slots=True)
class Blocks:
    """Positions of the first and last operation of each instance of the model's repeated block, in order."""

    spans: tuple[tuple[int, int], ...] = ()

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(start for start, _ in self.spans)


@dataclass(slots=True)
class _Instance:
    first: int
    last: int
    work: float


def find_blocks(
    nodes: Sequence[fx.Node], work: Sequence[float], derived: Collection[fx.Node], places: Collection[int]
) -> Blocks:
    """Find the repeated block: modules of one class, run one after the other, with most of the model's work.

    Only modules before which a cut may be (`places`) count. Of several classes (a transformer's blocks, and
    the halves of each), the coarsest with at least 8 instances is taken; if there is none, the one with most
    instances.
    """
    total = sum(work)
    found: list[tuple[int, float, Blocks]] = []
    for instances in _by_class(nodes, work, derived).values():
        spans = sorted((instance.first, instance.last) for instance in instances.values())
        if any(first <= last for (_, last), (first, _) in itertools.pairwise(spans)):
            continue
        covered = sum(instance.work for instance in instances.values())
        usable = sum(first in places for first, _ in spans[1:])
        if covered >= _COVERS * total and usable == len(spans) - 1 > 0:
            found.append((len(spans), covered, Blocks(tuple(spans))))
    enough = [entry for entry in found if entry[0] >= ENOUGH_BLOCKS]
    if enough:
        return min(enough, key=lambda entry: (entry[0], -entry[1]))[2]
    return max(found, key=lambda entry: (entry[0], entry[1]))[2] if found else Blocks()


def marked_positions(
    nodes: Sequence[fx.Node], derived: Collection[fx.Node], marks: Sequence[str]
) -> dict[str, int]:
    """{marked module: position of its first operation}. Raises `UserCodeError` naming an invalid mark."""
    first: dict[str, int] = {}
    for position, node in enumerate(nodes):
        if node not in derived:
            for path, _ in _stack(node):
                first.setdefault(path, position)
    for mark in marks:
        if mark not in first:
            near = difflib.get_close_matches(mark, [path for path in first if path], 3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise UserCodeError(f"Training.cuts: no module {mark!r} runs in the model's forward{hint}")
    return {mark: first[mark] for mark in marks}


def section_labels(
    nodes: Sequence[fx.Node], derived: Collection[fx.Node], spans: Sequence[tuple[int, int]]
) -> list[str]:
    """A label for each section, for example "transformer.h.3 .. transformer.h.4 (model.py:88)": the first and
    the last module within it, and the line of its first operation.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, node in enumerate(nodes):
        if node not in derived:
            for path, _ in _stack(node):
                first.setdefault(path, position)
                last[path] = position
    return [_label(nodes, derived, span, first, last) for span in spans]


def _label(
    nodes: Sequence[fx.Node],
    derived: Collection[fx.Node],
    span: tuple[int, int],
    first: Mapping[str, int],
    last: Mapping[str, int],
) -> str:
    start, stop = span
    own = [node for node in nodes[start:stop] if node not in derived]
    whole = {path for path in first if path and first[path] >= start and last[path] < stop}
    within = next((path for node in own for path, _ in reversed(_stack(node)) if path), "the model")
    begin = next((path for node in own for path, _ in _stack(node) if path in whole), within)
    end = next((path for node in reversed(own) for path, _ in _stack(node) if path in whole), begin)
    lines = (line for node in own if (line := _source(node)) is not None)
    where = next(lines, None)
    name = begin if begin == end else f"{begin} .. {end}"
    return name if where is None else f"{name} ({where})"


def _by_class(
    nodes: Sequence[fx.Node], work: Sequence[float], derived: Collection[fx.Node]
) -> dict[str, dict[str, _Instance]]:
    """{class of module: {path: instance}}, without instances inside another of the same class."""
    found: dict[str, dict[str, _Instance]] = {}
    for position, node in enumerate(nodes):
        if node in derived:
            continue
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
    """file:line of the innermost frame outside torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    outside = [(name, line) for name, line in frames if not name.startswith(_TORCH)]
    if not outside:
        return None
    name, line = outside[-1]
    return f"{Path(name).name}:{line}"
