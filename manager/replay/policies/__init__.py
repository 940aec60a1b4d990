"""What a replayed job does when VMs come and go: the product's chooser, and policies to compare it with.

One module a policy. When the planner is asked, and what is made of its answer, is decided by the core's rules
(`core/rules/planning.py`, `growth.py`) under every policy. A policy restricts or replaces the planner's
answer, and says what survivors keep. To add one: a module with a `Policy`, and its name in `POLICIES`.
"""

from .bamboo import BAMBOO
from .fixed import FIXED
from .makara import MAKARA
from .oobleck import OOBLECK
from .policy import Policy, with_depth
from .slipstream import SLIPSTREAM
from .varuna import VARUNA

POLICIES = {policy.name: policy for policy in (MAKARA, VARUNA, OOBLECK, SLIPSTREAM, BAMBOO, FIXED)}

__all__ = ["POLICIES", "Policy", "with_depth"]
