"""How to choose the next plan, and how survivors come to one state; no I/O.

In: the workers there are, the calibration of the model on them, what they hold already. Out: the plan with
the least predicted time per step, or the reason why there is none (`choose`). And in: what every member of a
forming generation holds. Out: the step that all go on from, who must still apply it, and who sends which
section to whom (`agree`, `transfers`).
"""

from .balance import balance
from .choose import choose
from .infeasible import too_deep
from .placement import Roster, Slot, place
from .recovery import Agreement, Application, MemberState, NoReplica, Record, Transfer, agree, transfers
from .request import Candidate, Choice, Infeasible, Request
from .stages import stage_table

__all__ = [
    "Agreement",
    "Application",
    "Candidate",
    "Choice",
    "Infeasible",
    "NoReplica",
    "Record",
    "Request",
    "Roster",
    "Slot",
    "MemberState",
    "Transfer",
    "agree",
    "balance",
    "choose",
    "place",
    "stage_table",
    "too_deep",
    "transfers",
]
