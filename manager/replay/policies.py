"""What a job does when VMs come and go: Varuna's way, and others to compare it with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..spec.job_spec import JobSpec

FixedDepth = Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One way to meet changes. All are driven by the same core; they differ in what it may choose, and in
    what survivors bring along.
    """

    name: str
    about: str
    keeps_state: bool = True
    """Whether survivors go on with what they hold; else all start again from the last checkpoint."""
    depth: int | None = None
    """P, if the policy fixes it."""

    def spec(self, spec: JobSpec) -> JobSpec:
        """The job as this policy has it run."""
        if self.depth is None:
            return spec
        parallelism = spec.parallelism.model_copy(
            update={"pipeline_parallel_degree": self.depth, "data_parallel_degree": None}
        )
        return spec.model_copy(update={"parallelism": parallelism})


def varuna(fixed_depth: FixedDepth) -> Policy:
    """The core as it is: the best P×D for whoever is there, state from survivors where they have it all."""
    return Policy(name="varuna", about="P and D chosen anew at every change; state from peers or the store")


def fixed(fixed_depth: FixedDepth) -> Policy:
    """The naive way: one P for ever, D as many as fit; at every change all start again from the store."""
    depth = fixed_depth()
    about = f"P={depth} for ever, D what fits; every change restarts all from the last checkpoint"
    return Policy(name="fixed", about=about, keeps_state=False, depth=depth)


POLICIES: dict[str, Callable[[FixedDepth], Policy]] = {"varuna": varuna, "fixed": fixed}
"""By name; each is made with a function that tells the depth for those that fix it."""
