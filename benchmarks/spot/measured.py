"""What a real run came to, and what its changes of plan cost, from the manager's views of the job."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from makara.simulator import MorphCosts

from .player import Played


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was done in the window."""

    window_s: float
    steps: int
    useful_s: float
    lost_steps: int
    shapes: tuple[str, ...]
    """Of the plans that formed, in their order, the one at the beginning first."""
    first_extra_s: float
    """By how much the first whole step of a generation takes longer than those after it; the median."""

    @property
    def goodput(self) -> float:
        return self.useful_s / self.window_s


class Start(NamedTuple):
    """When a window began: right after `step`, the first of `generation`."""

    at: float
    """Unix seconds."""
    step: int
    generation: int


def began(view: Mapping[str, Any], nodes: int) -> Start | None:
    """When the first step on so many VMs was done; None: not yet."""
    newest = view["morphs"][-1] if view["morphs"] else None
    if newest is None or "first_step" not in newest["phases_s"]:
        return None
    if len({seat["vm"] for seat in view["placement"]}) < nodes:
        return None
    at = newest["at"] + sum(newest["phases_s"][it] for it in _AFTER_PLANNED)
    return Start(at, newest["step"] + 1, newest["generation"])


_AFTER_PLANNED = ("prepare", "open", "form", "first_step")


def measured(
    view: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], start: Start, window_s: float
) -> Measured:
    """`steps`: those that count in the end, of all generations; those after `start` are the window's.

    A step is useful for the seconds that it took. The first of a generation may have begun in another, and
    its seconds have the change in them: it counts as one of the others.
    """
    rows: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if start.step < step["step"] <= view["step"]:
            rows[step["generation"]].append(step["seconds"])
    formed = {morph["generation"]: morph for morph in view["morphs"] if morph["step"] is not None}
    whole = {number: found if number == start.generation else found[1:] for number, found in rows.items()}
    pace = statistics.median(
        seconds / formed[number]["predicted_s"] for number, found in whole.items() for seconds in found
    )
    useful_s, extra_s = 0.0, list[float]()
    for number, found in rows.items():
        usual_s = statistics.median(whole[number] or [pace * formed[number]["predicted_s"]])
        useful_s += sum(whole[number])
        if number != start.generation:
            useful_s += min(usual_s, found[0])
            if formed[number]["in_flight"] is None and whole[number]:
                extra_s.append(found[0] - usual_s)
    inside = [morph for number, morph in formed.items() if number >= start.generation]
    return Measured(
        window_s=window_s,
        steps=sum(map(len, rows.values())),
        useful_s=useful_s,
        lost_steps=sum(morph["lost_steps"] for morph in inside[1:]),
        shapes=tuple(morph["shape"] for morph in inside),
        first_extra_s=statistics.median(extra_s) if extra_s else 0.0,
    )


def costs(view: Mapping[str, Any], played: Played) -> MorphCosts:
    """What the run's VMs and morphs took, and how soon its manager knew of deaths: means, since what the run
    lost is their sum."""
    boot_s = [
        vm["joined_at"] - played.offered_at[vm["vm"]] for vm in view["vms"] if vm["vm"] in played.offered_at
    ]
    known_s = [
        morph["at"] - morph["phases_s"]["decide"] - played.killed_at[vm]
        for morph in view["morphs"]
        if morph["cause"].startswith("lost ")
        for vm in _vms(morph["cause"])
        if vm in played.killed_at
    ]
    taken = {"boot_s": boot_s, "detect_s": known_s}
    means = {name: max(0.0, statistics.fmean(found)) for name, found in taken.items() if found}
    return replace(MorphCosts.of_job(view, statistics.fmean), **means)


def _vms(cause: str) -> list[str]:
    """Those of the workers `<vm>.<index>` that it names."""
    return [word.rpartition(".")[0] for word in cause.replace(",", " ").split() if "." in word]
