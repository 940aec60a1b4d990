"""What the deaths to come cost a plan, beside what its steps take.

While each section has a host among the living, a death costs little: the others go on from what they hold. If
the last host of a section dies, all go back to the newest checkpoint. How likely that is depends on how many
VMs host each section, and on how many VMs are lost at once: clouds take them in groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

from ..pipeline import Plan

_NEGLIGIBLE = 1e-7  # of all losses, those of more VMs than are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """How often VMs are lost, and what going back to a checkpoint costs.

    The number of VMs that are lost at once is taken to be geometrically distributed, and each set of so many
    VMs to be as likely as any other. Raises `ValueError`, naming the field.
    """

    losses_per_s: float
    """Of one VM or of several at once."""
    mean_size: float
    """VMs lost at once, on average; at least 1."""
    redo_s: float
    """From such a death until the steps begin that are to be done again, and what of them is told in seconds:
    half of a checkpoint interval."""
    redo_steps: float
    """And what of them is told in steps."""

    def __post_init__(self) -> None:
        for name in ("losses_per_s", "redo_s", "redo_steps"):
            value: float = getattr(self, name)
            if not value >= 0:
                raise ValueError(f"{name}: {value} is not a number >= 0")
        if not self.mean_size >= 1:
            raise ValueError(f"mean_size: {self.mean_size} is not a number >= 1")

    def lost(self, hosts: Iterable[int], num_vms: int, step_s: float) -> float:
        """Seconds lost to deaths for each second in which steps of `step_s` are done.

        `hosts`: for each set of VMs that host a section, which must all die for it to be lost, their number;
        no VM is in two of them. `num_vms`: all VMs that may be lost, whether the plan uses them or not.
        """
        fatal = _lost_with(num_vms, tuple(sorted(hosts)), self.mean_size)
        return self.losses_per_s * fatal * (self.redo_s + self.redo_steps * step_s)

    def lost_by(self, plan: Plan, vm_of: Sequence[str], num_vms: int, step_s: float) -> float:
        """As `lost`, of a plan on these VMs, by rank. Sets of VMs that have some in common count as apart."""
        sets = {frozenset(vm_of[rank] for rank in plan.hosts(k)) for k in range(plan.num_sections)}
        return self.lost(map(len, sets), num_vms, step_s)


@lru_cache(maxsize=4096)
def _lost_with(num_vms: int, hosts: tuple[int, ...], mean_size: float) -> float:
    """The probability that a loss takes all of one of these sets of VMs, no two of which have one in common.

    By inclusion and exclusion: `signs[s]` is how many of their unions have s VMs, those of an odd number of
    sets taken away.
    """
    again = 1.0 - 1.0 / mean_size  # the probability that one more is lost
    weights, weight = list[float](), 1.0
    while len(weights) < num_vms and weight > _NEGLIGIBLE:
        weights.append(weight)
        weight *= again
    signs = [1] + [0] * len(weights)
    for number in hosts:
        for size in range(len(weights), number - 1, -1):
            signs[size] -= signs[size - number]
    found = 0.0
    for size, weight in enumerate(weights, start=1):
        # In whole numbers, for what is added and taken away is far larger than what remains.
        spared = sum(
            signs[taken] * comb(num_vms - taken, size - taken) for taken in range(size + 1) if signs[taken]
        )
        found += weight * (1.0 - spared / comb(num_vms, size))
    return found / sum(weights)
