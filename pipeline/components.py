"""The independent parts of a plan: groups of paths that share no worker, directly or indirectly."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

from .plan import Hop, Path, Plan


@dataclass(frozen=True, slots=True)
class Component:
    """Paths that share workers, and the workers that they visit, ascending; the rest is the plan's.

    `window`: the most micro-batches in flight on each worker; None: any number.
    """

    paths: tuple[Path, ...]
    workers: tuple[int, ...]
    window: int | None = None
    frozen: int = 0
    has_halves: bool = False

    @property
    def by_first_visit(self) -> tuple[int, ...]:
        """The workers in the order in which the paths first visit them."""
        return tuple(dict.fromkeys(hop.worker for path in self.paths for hop in path.hops))

    @property
    def signature(self) -> Hashable | None:
        """A key: components with equal keys have equal schedules, up to names of workers and micro-batches.

        None if the component has several paths, because then the micro-batches' own numbers matter.
        """
        if len(self.paths) != 1:
            return None
        path = self.paths[0]
        num_frozen = sum(self.is_frozen(path, hop) for hop in path.hops)
        return self.visits, len(path.micro_batches), num_frozen, self.window

    def is_frozen(self, path: Path, hop: Hop) -> bool:
        """Whether gradients reach none of the hop's sections, so that its backwards compute nothing."""
        return hop.range.stop <= max(self.frozen, path.open_from)

    @property
    def visits(self) -> tuple[int, ...]:
        """For each hop, the index of its worker in `by_first_visit`."""
        num_hops = sum(len(path.hops) for path in self.paths)
        if num_hops == len(self.workers):  # each worker is visited once
            return tuple(range(num_hops))
        first: dict[int, int] = {}
        return tuple(first.setdefault(hop.worker, len(first)) for path in self.paths for hop in path.hops)


def components(plan: Plan) -> tuple[Component, ...]:
    """Group the plan's paths that carry micro-batches; groups are in the order of their first path."""
    used = [path for path in plan.paths if path.micro_batches]
    visited = [[hop.worker for hop in path.hops] for path in used]
    if len(set(itertools.chain.from_iterable(visited))) == sum(map(len, visited)):
        groups = [[number] for number in range(len(used))]  # as in every grid
    else:
        groups = _groups(plan.num_workers, visited)
    return tuple(
        Component(
            tuple(used[number] for number in group),
            tuple(sorted({worker for number in group for worker in visited[number]})),
            plan.window if used[group[0]].window is None else used[group[0]].window,
            plan.frozen,
            plan.has_halves,
        )
        for group in groups
    )


def _groups(num_workers: int, visited: list[list[int]]) -> list[list[int]]:
    """Groups of indices of paths that share workers, directly or indirectly (union-find)."""
    root = list(range(num_workers))

    def find(worker: int) -> int:
        while root[worker] != worker:
            root[worker] = root[root[worker]]
            worker = root[worker]
        return worker

    for workers in visited:
        for worker in workers:
            root[find(worker)] = find(workers[0])
    groups: dict[int, list[int]] = {}
    for number, workers in enumerate(visited):
        groups.setdefault(find(workers[0]), []).append(number)
    return list(groups.values())
