"""A whole job, replayed over an availability trace in virtual time.

In: a job, the calibration of its model, a trace of nodes that come and go, and what morphs cost. Out: for
each policy an `Outcome`: how much of the time was useful, what morphs and deaths cost, and what it all costs
in money; and a picture of it. The decisions are those of the manager's own core and planner; only the cloud,
the store and the trainers are simulated, and between two decisions the clock jumps.
"""

from .outcome import Morph, Outcome, Prices
from .policies import POLICIES, Policy
from .replay import replay
from .scenario import ReplayError, Scenario

__all__ = [
    "POLICIES",
    "Morph",
    "Outcome",
    "Policy",
    "Prices",
    "ReplayError",
    "Scenario",
    "replay",
]
