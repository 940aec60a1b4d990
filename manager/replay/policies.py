"""What a replayed job does when VMs come and go: the core as it is, and baselines to compare it with.

When to change the plan, and to what, is decided by the core's rules (`core/rules/planning.py`, `growth.py`)
and the planner, under every policy. A policy only restricts what they work with.

To add one: a `Policy` in `POLICIES`. A restriction of a new kind is a field, read where it applies: `replay`
(P), `training` and `trace_world` (state).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..spec.job_spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A restriction of the core: whether P may change, and whether survivors keep their state."""

    name: str
    about: str
    keeps_state: bool = True
    """Whether survivors go on with what they hold; else all start again from the last checkpoint."""
    fixes_depth: bool = False
    """Whether P stays what it was at first; D is then what fits."""


def with_depth(spec: JobSpec, depth: int) -> JobSpec:
    """The job with P fixed to `depth`."""
    parallelism = spec.parallelism.model_copy(
        update={"pipeline_parallel_degree": depth, "data_parallel_degree": None}
    )
    return spec.model_copy(update={"parallelism": parallelism})


VARUNA = Policy(name="varuna", about="P and D chosen anew at every change; state from peers or the store")
FIXED = Policy(
    name="fixed",
    about="D as large as fits; every change restarts all from the last checkpoint",
    keeps_state=False,
    fixes_depth=True,
)

POLICIES = {policy.name: policy for policy in (VARUNA, FIXED)}
