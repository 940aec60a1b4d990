"""The P×D sweep: simulates the shapes that fit, and takes the best with what deaths cost (Varuna §4.4).

`manager/service/planning/present_plan.py` decides whether a running job changes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..pipeline import Plan, Schedule, grid
from .copies import copies_in_grid, demands
from .infeasible import degrees_impossible, nothing_fits
from .packing import Work
from .placement import Slot
from .request import Candidate, Choice, Infeasible, Request
from .search_space import Option, Options, megabytes
from .unequal_search import unequal

_AS_FAST = 1.01  # what is simpler is taken if the predicted step is at most 1 % longer: a narrower window,
# whole backwards, a grid
_SURELY_AS_FAST = 1.05  # a plan that one death sends back to a checkpoint must be faster by this, beyond what
# deaths cost: predictions are wrong by up to 3 % each (docs/predictions.md), the rate of deaths is a guess
_WINDOWS = (2, 3, 4)  # times P (the paper's range for its networks); a window of P would not absorb jitter
_TRIES = 3  # stop trying other D for a P after this many in a row that are not better
# What a sweep spends at most beyond its first simulation, so that an answer for any number of workers takes
# less than 2 s. A count, not a time: every machine finds the same.
_ARRANGED = 300_000  # workers in places, where some are slow: 2 us each
_SIMULATED = 450_000  # micro-batches, and 4 for each worker of a plan: 1.5 us each
_NOT_LOOKED_INTO = "shapes with lower bounds took all the work that a choice may take"
_ROUNDING = 1 + 1e-6  # a simulation rounds each operation to nanoseconds, a bound does not


def choose(request: Request) -> Choice | Infeasible:
    """Choose the plan with the least expected time per step, or say why there is none.

    That is the predicted time, and what deaths are expected to cost meanwhile (`Request.risk`). Where deaths
    are weighed, a plan with a section on one VM alone is taken only where it costs 5 % less than all others.

    P runs over 1..min(K, G), and D over the useful values up to G // P and N. Stages are balanced by measured
    time among those that fit the memory of the workers used; less so where that lets more micro-batches be in
    flight, and pass faster. Slow workers are left out, get one stage in every pipeline to themselves, or
    pipelines with fewer micro-batches, whichever is fastest. With recompute `auto`, recomputation is tried
    only where memory bounds the plan without it. A shape whose lower bound exceeds the best time is not
    simulated. The best shape gets the narrowest window that costs at most 1 %.
    Unequal pipelines are taken where they cost 1 % less than the best grid.
    Where `tolerated_failures` asks for more copies of a section than the workers allow, plans have fewer.
    If no plan fits, the workers with least memory are left out; with offload `auto`, optimizer state goes to
    the host if that does not help either.
    """
    if not request.workers:
        return Infeasible("there is no worker")
    if reason := degrees_impossible(request):
        return Infeasible(reason)
    looked_at: list[Candidate] = []
    for demanded, on_host, memory_bytes in _offers(request):
        workers = [slot for slot in request.workers if slot.memory_bytes >= memory_bytes]
        sweep = _Sweep(Options(replace(demanded, workers=workers), on_host), looked_at)
        best = sweep.fastest()
        if best is not None:
            best = sweep.placed(sweep.narrowed(best))
            names = tuple(slot.worker for slot in best.placed)
            choice = Choice(best.plan, names, best.predicted_s, best.candidate)
            for other in unequal(sweep.options, sweep.cost_s(best.candidate) / _AS_FAST):
                looked_at.append(other.candidate)
                less = sweep.cost_s(other.candidate) * _AS_FAST < sweep.cost_s(choice.candidate)
                if other.candidate.rejected is None and less:
                    choice = other
            looked_at.sort(key=_order)
            return replace(choice, candidates=tuple(looked_at))
    return Infeasible(nothing_fits(request, looked_at), tuple(looked_at))


def _offers(request: Request) -> list[tuple[Request, bool, int]]:
    """(what is demanded, whether optimizer state lies on the host, the least memory of the workers used), the
    best first."""
    places = {"on": (True,), "off": (False,), "auto": (False, True)}[request.optimizer_offload]
    if request.calibration.device_kind == "cpu":
        places = (False,)  # the device's memory is the host's: offloading would gain nothing
    sizes = sorted({slot.memory_bytes for slot in request.workers})
    return [
        (demanded, on_host, memory_bytes)
        for demanded in demands(request)
        for on_host in places
        for memory_bytes in sizes
    ]


@dataclass(frozen=True, slots=True)
class _Found:
    option: Option
    plan: Plan
    candidate: Candidate
    placed: Sequence[Slot] = ()

    @property
    def predicted_s(self) -> float:
        assert self.candidate.predicted_s is not None, "what is found was played"
        return self.candidate.predicted_s


class _Sweep:
    """The search over one set of workers. Every shape simulated or ruled out is appended to `looked_at`."""

    def __init__(self, options: Options, looked_at: list[Candidate]) -> None:
        self.options = options
        self._request = options.request
        self._looked_at = looked_at
        self._best: _Found | None = None
        self._num_vms = len({slot.vm for slot in options.request.workers})
        self._arranging, self._simulating = Work(_ARRANGED), Work(_SIMULATED)
        self._above: dict[tuple[bool, bool], float] = {}
        """By kind of backwards: what the last simulation took, for each second of its bound."""

    def fastest(self) -> _Found | None:
        """Try every P with its most promising D, then other D where they may be faster."""
        options, fitting = self.options, list[Option]()
        first = [(depth, replicas) for depth in options.depths for replicas in options.replicas(depth)]
        for shape in sorted(first, key=lambda shape: (options.least_s(*shape), shape)):
            for found in self._looked_into(*shape, noted=True):
                if isinstance(found, Candidate):
                    self._looked_at.append(found)
                else:
                    fitting.append(found)
        self._play_all(fitting, noted=True)
        if self._best is not None and self._request.data_parallel_degree is None:
            in_vain: dict[int, int] = {}
            for _, depth, replicas in sorted(self._others()):
                if (depth, replicas) not in first and in_vain.get(depth, 0) < _TRIES:
                    before = self._best
                    found = self._looked_into(depth, replicas)
                    self._play_all([option for option in found if isinstance(option, Option)])
                    in_vain[depth] = 0 if self._best is not before else in_vain.get(depth, 0) + 1
        return self._best

    def _looked_into(self, depth: int, replicas: int, *, noted: bool = False) -> Sequence[Option | Candidate]:
        """The options of a shape, unless the work is used up; `noted`: then a candidate says so."""
        if not self._arranging.is_used_up or not self.options.mixed(depth * replicas):
            found = self.options.of(depth, replicas)
            placed = (one for one in found if isinstance(one, Option) and one.arranged is not None)
            self._arranging.take(sum(one.candidate.used for one in placed))
            return found
        row = Candidate(depth, replicas, recompute=False, rejected=_NOT_LOOKED_INTO)
        return [row] if noted else []

    def narrowed(self, best: _Found) -> _Found:
        """The same shape with a narrower window, which needs less memory, if it is as fast."""
        if self._request.schedule is not Schedule.VARUNA:
            return best
        row = best.candidate
        widest = row.window or max(len(path.micro_batches) for path in best.plan.paths)
        for times in _WINDOWS:
            window = times * row.pipeline_parallel_degree
            if window >= widest:
                break
            found = self._play(best.option, window)
            if found.predicted_s <= _AS_FAST * best.predicted_s:
                self._looked_at.append(found.candidate)
                return found
            why = f"the best plan takes {best.predicted_s:.3g} s"
            self._looked_at.append(replace(found.candidate, rejected=why))
        return best

    def placed(self, best: _Found) -> _Found:
        """The plan with each worker placed where it keeps most of what it holds.

        Slow workers may change places by this, so such a plan is simulated again.
        """
        placed = self.options.placed(best.candidate.used, best.option.split, keeping=True)
        candidate = best.candidate
        if best.option.arranged is not None:
            step = self._request.simulated(best.plan, self.options.calibration, placed)
            found = replace(
                candidate,
                predicted_s=step.time_s,
                pipeline_s=step.pipeline_s,
                lost=self._lost(candidate, placed, step.time_s),
                copies=self._copies(candidate, placed),
            )
            self._looked_at[self._looked_at.index(candidate)] = found
            candidate = found
        return _Found(best.option, best.plan, candidate, placed)

    def cost_s(self, row: Candidate) -> float:
        """What is compared: a step's predicted time with what deaths cost, times how much faster such a plan
        must be."""
        assert row.predicted_s is not None, "what is compared was simulated"
        return row.predicted_s * (1.0 + row.lost) * self._handicap(row)

    def _handicap(self, row: Candidate) -> float:
        alone = self._request.risk is not None and row.copies == 1
        return (_AS_FAST if row.halves else 1.0) * (_SURELY_AS_FAST if alone else 1.0)

    def _rank(self, found: _Found) -> tuple[float, int, int, bool, bool]:
        row = found.candidate
        slow = row.slow_stage is not None
        return self.cost_s(row), row.used, row.pipeline_parallel_degree, row.recompute, slow

    def _others(self) -> Iterator[tuple[float, int, int]]:
        """(least seconds, P, D) of every shape that could still beat the best."""
        assert self._best is not None, "there is something to beat"
        best_s = self.cost_s(self._best.candidate)
        for depth in self.options.depths:
            for replicas, step_s in self.options.every_useful(depth, best_s):
                cost_s = step_s * (1.0 + self._least_lost(depth, replicas, step_s))
                if cost_s <= best_s:
                    yield cost_s, depth, replicas

    def _play_all(self, options: Iterable[Option], *, noted: bool = False) -> None:
        """Simulate the options, the most promising first; `noted`: record those not simulated as well."""
        left = [(self._least_cost_s(option), option) for option in options]
        while left:
            place = min(range(len(left)), key=lambda place: self._expected_s(*left[place]))
            least_s, option = left.pop(place)
            if self._best is not None:
                why = self._passed_over(option, least_s, self._best)
                if why is not None:
                    if noted:
                        self._looked_at.append(replace(option.candidate, rejected=why))
                    continue
            found = self._play(option, option.candidate.window)
            self._looked_at.append(found.candidate)
            self._above[_kind(option)] = found.predicted_s / option.least_s
            if found.candidate.rejected is None and (
                self._best is None or self._rank(found) < self._rank(self._best)
            ):
                self._best = found

    def _expected_s(self, least_s: float, option: Option) -> float:
        """Its bound, times how far above its own the last option of its kind was: where memory lets few
        micro-batches be in flight, bounds are low."""
        return least_s * self._above.get(_kind(option), 1.0)

    def _passed_over(self, option: Option, least_s: float, best: _Found) -> str | None:
        """Why the option is not simulated; None: it is."""
        if least_s > self.cost_s(best.candidate) * _ROUNDING:
            why = f"its work alone takes {option.least_s:.3g} s"
            return f"{why}, the best plan {best.predicted_s:.3g} s"
        deals = 1 if option.arranged is None else len(option.arranged.deals)
        if not self._simulating.take(deals * (4 * option.candidate.used + self._request.num_micro_batches)):
            return _NOT_LOOKED_INTO
        return None

    def _play(self, option: Option, window: int | None) -> _Found:
        """Simulate an option, with the fastest split of its micro-batches."""
        arranged = option.arranged
        if arranged is None:
            return self._dealt(option, window, self._any_placement(option), None)
        found = [self._dealt(option, window, arranged.slots, shares) for shares in arranged.deals]
        return min(found, key=lambda one: (one.candidate.rejected is not None, one.predicted_s))

    def _dealt(
        self, option: Option, window: int | None, slots: Sequence[Slot] | None, shares: Sequence[int] | None
    ) -> _Found:
        candidate, request = replace(option.candidate, window=window), self._request
        plan = grid(
            option.split.stages,
            candidate.data_parallel_degree,
            request.num_micro_batches,
            schedule=request.schedule,
            window=window,
            recompute=candidate.recompute,
            halves=candidate.halves,
            generation=request.generation,
            optimizer_on_host=candidate.optimizer_on_host,
            frozen=self.options.calibration.frozen,
            shares=shares,
        )
        step = request.simulated(plan, self.options.calibration, slots)
        peak = max(step.peak_bytes)
        short = peak > option.capacity
        why = f"it needs {megabytes(peak)}, the workers have {megabytes(option.capacity)}" if short else None
        lost, copies = self._lost(candidate, slots, step.time_s), self._copies(candidate, slots)
        return _Found(
            option, plan, replace(candidate.with_step(step), rejected=why, lost=lost, copies=copies)
        )

    def _least_cost_s(self, option: Option) -> float:
        row = option.candidate
        least_lost = self._least_lost(row.pipeline_parallel_degree, row.data_parallel_degree, option.least_s)
        at_least = replace(row, copies=1 if row.data_parallel_degree == 1 else None)
        return option.least_s * (1.0 + least_lost) * self._handicap(at_least)

    def _lost(self, row: Candidate, slots: Sequence[Slot] | None, step_s: float) -> float:
        """What deaths cost a grid on these workers (see `Candidate.lost`)."""
        depth = row.pipeline_parallel_degree
        if self._request.risk is None or slots is None:
            return self._least_lost(depth, row.data_parallel_degree, step_s)
        hosts = [frozenset(slot.vm for slot in slots[stage::depth]) for stage in range(depth)]
        return self._request.risk.lost_with(hosts, self._num_vms, step_s)

    def _copies(self, row: Candidate, slots: Sequence[Slot] | None) -> int:
        if slots is None:  # each on a VM of its own
            return row.data_parallel_degree
        return copies_in_grid(slots, row.pipeline_parallel_degree)

    def _least_lost(self, depth: int, replicas: int, step_s: float) -> float:
        """Of a grid whose workers are not placed: exact if no two share a VM, else not looked at."""
        if self._request.risk is None or not self.options.apart:
            return 0.0
        return self._request.risk.lost([replicas] * depth, self._num_vms, step_s)

    def _any_placement(self, option: Option) -> Sequence[Slot] | None:
        """The option's workers as they will be placed, up to interchangeable ones.

        None if each is on a VM of its own and as fast as calibrated, because then all are interchangeable.
        """
        roster, used = self.options.roster, option.candidate.used
        if self.options.apart and roster.fastest == roster.slowdown(used) == 1.0:
            return None
        return self.options.placed(used, option.split, keeping=False)


def _kind(option: Option) -> tuple[bool, bool]:
    return option.candidate.recompute, option.candidate.halves


def _order(row: Candidate) -> tuple[int, int, bool, bool, bool, int]:
    slow = -1 if row.slow_stage is None else row.slow_stage
    return (
        row.pipeline_parallel_degree,
        row.data_parallel_degree,
        row.recompute,
        row.optimizer_on_host,
        row.halves,
        slow,
    )
