"""How to choose the next plan, and how survivors come to one state; no I/O.

In: the workers there are, the calibration of the model on them, what they hold already. Out: the plan with
the least predicted time per step, or the reason why there is none (`choose`). And in: what every member of a
forming generation holds. Out: the step that all go on from, who must still apply it, and who sends which
section to whom (`agree`, `transfers`).
"""

from .balance import balance
from .choose import choose
from .placement import Roster, Slot, place
from .reconcile import Agreement, Application, NoHolder, Record, Standing, Transfer, agree, transfers
from .refusal import too_deep
from .request import Candidate, Choice, Impossible, Request
from .stages import stage_table

__all__ = [
    "Agreement",
    "Application",
    "Candidate",
    "Choice",
    "Impossible",
    "NoHolder",
    "Record",
    "Request",
    "Roster",
    "Slot",
    "Standing",
    "Transfer",
    "agree",
    "balance",
    "choose",
    "place",
    "stage_table",
    "too_deep",
    "transfers",
]
