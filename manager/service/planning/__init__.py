"""Plans for jobs: questions to `makara.morphing`, what the answers are worth, and why the best one wins.

In: a job's state, and `ComputePlan` or `ComputeGrowth`; out: their answers. When they are computed is for
`service.planner` to say.
"""

from .answers import Choose, compute_plan
from .growth import compute_growth

__all__ = ["Choose", "compute_growth", "compute_plan"]
