"""What the planner weighed: each plan with what it is worth, in its answer and in the facts."""

from __future__ import annotations

from ..spec.frozen import Frozen


class Alternative(Frozen):
    """One plan that a change could take. What is None was not looked at, since `rejected` says why not."""

    # What kind of plan: "best" of all new ones, "new" for the others of these; "rerouted"; "running";
    # "reformed" around whole pipelines. Where more VMs are thought of: "as many", "2 more".
    name: str
    shape: str
    step_s: float | None = None  # predicted
    begins_s: float | None = None  # until it steps, beyond what all take alike
    changes_per_s: float | None = None  # losses of VMs that it uses
    change_s: float | None = None  # what such a loss costs
    worth: float | None = None  # samples/s
    rejected: str | None = None
