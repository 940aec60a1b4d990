"""Plans: which worker hosts which sections, and the path that each micro-batch takes through the workers."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any


class InvalidPlan(ValueError):
    """A plan that breaks a rule of its form; the message names the rule, the path and the worker."""


class Schedule(StrEnum):
    """How each worker orders its operations (see `makara.pipeline.schedules`).

    To add one: a member, what the properties say of it, and its order in `schedules.static_order`. Each is an
    exhaustive `match`, so the type checker reports what is missing. It does not report what is for Varuna
    only: narrow windows (`morphing.choose`, `morphing.keeping.instead`), halves (`morphing.search_space`) and
    unequal pipelines (`morphing.unequal_search`). Jobs run Varuna's; the job file chooses none.
    """

    VARUNA = "varuna"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"

    @property
    def forwards_first(self) -> bool:
        """Whether all forwards that fit into the window run before the backwards, so that a path's last hop
        recomputes as well; else it runs each backward right after its forward."""
        match self:
            case Schedule.GPIPE:
                return True
            case Schedule.VARUNA | Schedule.ONE_F_ONE_B:
                return False

    @property
    def limits_itself(self) -> bool:
        """Whether the order itself limits the micro-batches in flight to the hops that are left on the path,
        which a worker may not exceed by running ahead."""
        match self:
            case Schedule.ONE_F_ONE_B:
                return True
            case Schedule.VARUNA | Schedule.GPIPE:
                return False


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """The contiguous sections start, start+1, ..., stop-1."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InvalidPlan(f"range {self.start}..{self.stop}: expected 0 <= start < stop")

    def __contains__(self, section: object) -> bool:
        return isinstance(section, int) and self.start <= section < self.stop

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def sections(self) -> range:
        return range(self.start, self.stop)

    def covers(self, other: Range) -> bool:
        return self.start <= other.start and other.stop <= self.stop


@dataclass(frozen=True, slots=True)
class Hop:
    """One worker's share of a path: the sections it runs for the path's micro-batches."""

    worker: int
    range: Range


@dataclass(frozen=True, slots=True)
class Path:
    """Hops that tile 0..K-1 in order, and the micro-batches that take them.

    `window`: of its workers, in place of the plan's; None: the plan's. Paths that share a worker have the
    same. In the rest of a step, which a whole plan has not: gradients reach no section below `open_from`, and
    of the sections in `held` only those of the inputs are computed.
    """

    hops: tuple[Hop, ...]
    micro_batches: tuple[int, ...]
    open_from: int = 0
    held: frozenset[int] = frozenset()
    window: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether its micro-batches add all their contributions."""
        return not self.open_from and not self.held

    def adds(self, section: int) -> bool:
        """Whether its micro-batches add their contributions of `section` to the sums."""
        return section >= self.open_from and section not in self.held


@dataclass(frozen=True)
class Plan:
    """Ranges + paths + the order of operations; workers are the ranks 0..len(ranges)-1.

    `window` bounds the micro-batches in flight on a worker (forward done, backward not); None is unbounded. A
    path may have a wider one.
    `recompute`: a worker keeps only the inputs of its range and runs the forward again before the backward,
    except at the last hop of a path (Varuna §3.2). `optimizer_on_host`: the optimizer's state lies in host
    memory, and the update runs there. `frozen`: the first `frozen` sections get no gradient; a hop that has
    only such sections is never recomputed, and its backward computes nothing. `halves`: backwards are two
    operations, I and W, except where they are recomputed. Raises `InvalidPlan` naming the rule that the
    values break.
    """

    num_sections: int
    num_micro_batches: int
    ranges: tuple[Range, ...]
    paths: tuple[Path, ...]
    schedule: Schedule = Schedule.VARUNA
    window: int | None = None
    recompute: bool = False
    generation: int = 0
    optimizer_on_host: bool = False
    frozen: int = 0
    halves: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @property
    def has_halves(self) -> bool:
        """Whether some backward is an I and a W. With recomputation a pending W would keep what a
        recomputation has just brought back, so that it follows its I at once: the backward stays whole."""
        return self.halves and not self.recompute

    @property
    def num_workers(self) -> int:
        return len(self.ranges)

    @cached_property
    def _path_by_micro_batch(self) -> dict[int, Path]:
        return {m: path for path in self.paths for m in path.micro_batches}

    def path_of(self, micro_batch: int) -> Path:
        return self._path_by_micro_batch[micro_batch]

    def window_of(self, worker: int) -> int | None:
        """The most micro-batches in flight on a worker; None: any number."""
        own = (path for path in self.paths if path.window is not None)
        visiting = (path.window for path in own for hop in path.hops if hop.worker == worker)
        return next(visiting, self.window)

    def hosts(self, section: int) -> tuple[int, ...]:
        """The workers whose range holds `section`, ascending."""
        return tuple(worker for worker, span in enumerate(self.ranges) if section in span)

    @property
    def shape(self) -> str:
        """`PxD` for a grid of equal ranges, `PxD-n` for one without n workers whose work others do; else the
        workers of the pipelines joined by `+`, or where these share workers, the depths of the paths."""
        return _shape([[(hop.worker, hop.range.start) for hop in path.hops] for path in self.paths])

    def to_json(self) -> dict[str, Any]:
        return {
            "num_sections": self.num_sections,
            "num_micro_batches": self.num_micro_batches,
            "ranges": [[span.start, span.stop] for span in self.ranges],
            "paths": [
                {
                    "hops": [[hop.worker, hop.range.start, hop.range.stop] for hop in path.hops],
                    "micro_batches": list(path.micro_batches),
                }
                | ({} if path.window is None else {"window": path.window})
                for path in self.paths
            ],
            "schedule": self.schedule.value,
            "window": self.window,
            "recompute": self.recompute,
            "generation": self.generation,
            "optimizer_on_host": self.optimizer_on_host,
            "frozen": self.frozen,
            "halves": self.halves,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """The plan that `to_json` wrote. Raises `InvalidPlan` naming what is missing or malformed."""
        try:
            return cls(
                num_sections=int(value["num_sections"]),
                num_micro_batches=int(value["num_micro_batches"]),
                ranges=tuple(Range(int(start), int(stop)) for start, stop in value["ranges"]),
                paths=tuple(
                    Path(
                        tuple(Hop(int(w), Range(int(start), int(stop))) for w, start, stop in path["hops"]),
                        tuple(map(operator.index, path["micro_batches"])),
                        window=None if path.get("window") is None else int(path["window"]),
                    )
                    for path in value["paths"]
                ),
                schedule=Schedule(value["schedule"]),
                window=None if value["window"] is None else int(value["window"]),
                recompute=bool(value["recompute"]),
                generation=int(value["generation"]),
                optimizer_on_host=bool(value.get("optimizer_on_host", False)),
                frozen=int(value.get("frozen", 0)),
                halves=bool(value.get("halves", False)),
            )
        except InvalidPlan:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidPlan(f"malformed plan: {error!r}") from error


class RestOfStep(Plan):
    """What a step that was cut off lacks: some of a plan's micro-batches, each from the lowest section that
    it has still to add to, over paths of the plan's workers. Like a plan in all else."""

    @classmethod
    def of(cls, plan: Plan, paths: tuple[Path, ...]) -> RestOfStep:
        """The rest of a step of `plan` that these paths carry."""
        own: dict[str, Any] = {each.name: getattr(plan, each.name) for each in fields(plan)}
        own["paths"] = paths
        return cls(**own)

    def __post_init__(self) -> None:
        _check_form(self)
        if len(carried := _carried(self)) != len(set(carried)):
            raise InvalidPlan("the paths must carry no micro-batch twice")


def shape_of(value: Mapping[str, Any]) -> str:
    """`Plan.shape` of a plan that `Plan.to_json` wrote, without checking it again."""
    return _shape([[(worker, start) for worker, start, _ in path["hops"]] for path in value["paths"]])


def _shape(pipelines: Sequence[Sequence[tuple[int, int]]]) -> str:
    """`Plan.shape`, given (worker, first section) of each hop of each path."""
    depths = [len(hops) for hops in pipelines]
    used = {worker for hops in pipelines for worker, _ in hops}
    if len(set(depths)) == 1 and len(used) == sum(depths):
        return f"{depths[0]}x{len(depths)}"
    stages = [{worker for worker, _ in stage} for stage in zip(*pipelines, strict=False)]
    are_alike = len({tuple(start for _, start in hops) for hops in pipelines}) == 1
    if are_alike and len(used) == sum(map(len, stages)):  # each worker has one stage
        replicas = max(map(len, stages))
        missing = len(stages) * replicas - len(used)
        return f"{len(stages)}x{replicas}" + (f"-{missing}" if missing else "")
    groups = _unconnected(pipelines)
    counts = [len({worker for worker, _ in hops}) for hops in groups]
    if all(len(hops) == count for hops, count in zip(groups, counts, strict=True)):
        return "+".join(map(str, counts))
    return "+".join(map(str, depths))


def _unconnected(pipelines: Sequence[Sequence[tuple[int, int]]]) -> list[set[tuple[int, int]]]:
    """The (worker, first section) of paths that have workers in common, together."""
    groups: list[set[tuple[int, int]]] = []
    for hops in pipelines:
        group, others = set(hops), list[set[tuple[int, int]]]()
        for other in groups:
            if {worker for worker, _ in other}.isdisjoint(worker for worker, _ in group):
                others.append(other)
            else:
                group |= other
        groups = [*others, group]
    return groups


def _check(plan: Plan) -> None:
    _check_form(plan)
    if sorted(_carried(plan)) != list(range(plan.num_micro_batches)):
        raise InvalidPlan(
            f"the paths must carry each of the {plan.num_micro_batches} micro-batches exactly once"
        )
    if not all(path.is_whole for path in plan.paths):
        raise InvalidPlan("only the rest of a step leaves contributions out")


def _carried(plan: Plan) -> list[int]:
    return [micro_batch for path in plan.paths for micro_batch in path.micro_batches]


def _check_form(plan: Plan) -> None:
    if plan.num_sections < 1 or plan.num_micro_batches < 1 or not plan.ranges:
        raise InvalidPlan("a plan needs at least one section, one micro-batch and one worker")
    for window in (plan.window, *(path.window for path in plan.paths)):
        if window is not None and window < 1:
            raise InvalidPlan(f"window: {window} is not a positive number of micro-batches")
    if not 0 <= plan.frozen < plan.num_sections:
        raise InvalidPlan(f"frozen: {plan.frozen} is not in 0..{plan.num_sections - 1}: the last is trained")
    if plan.halves and plan.schedule is Schedule.GPIPE:
        raise InvalidPlan("halves: GPipe runs all forwards before its backwards, which leaves no gap for a W")
    for worker, span in enumerate(plan.ranges):
        if span.stop > plan.num_sections:
            raise InvalidPlan(
                f"worker {worker}: range {span.start}..{span.stop} passes K={plan.num_sections}"
            )
    for number, path in enumerate(plan.paths):
        _check_path(plan, number, path)
    if any(path.window is not None for path in plan.paths):
        _check_windows(plan)


def _check_windows(plan: Plan) -> None:
    windows: dict[int, int | None] = {}
    for number, path in enumerate(plan.paths):
        if any(windows.setdefault(hop.worker, path.window) != path.window for hop in path.hops):
            raise InvalidPlan(f"path {number}: its window is not that of the other paths of its workers")


def _check_path(plan: Plan, number: int, path: Path) -> None:
    reached, ranges = 0, plan.ranges
    for hop in path.hops:
        if not 0 <= hop.worker < len(ranges):
            raise InvalidPlan(f"path {number}: worker {hop.worker} is not in 0..{len(ranges) - 1}")
        if hop.range.start != reached:
            raise InvalidPlan(f"path {number}: section {reached} is run by no hop or by two")
        if not ranges[hop.worker].covers(hop.range):
            raise InvalidPlan(f"path {number}: worker {hop.worker} does not host the sections of its hop")
        reached = hop.range.stop
    if reached != plan.num_sections:
        raise InvalidPlan(f"path {number}: ends before section {reached} of K={plan.num_sections}")
    if not 0 <= path.open_from <= plan.num_sections:
        raise InvalidPlan(f"path {number}: open from {path.open_from} is not in 0..{plan.num_sections}")
    if any(map(operator.ge, path.micro_batches, path.micro_batches[1:])):
        raise InvalidPlan(f"path {number}: its micro-batches must ascend without repetition")
