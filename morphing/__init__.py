"""Morphing: chooses the next plan, and brings its members to one state. Pure functions; no I/O.

`choose`: from the available workers, the model's calibration and the sections that workers hold, to the plan
with the least predicted time per step, or the reason why there is none. `rerouted`: the plan of before
without the workers that are gone; `reformed`: plans around the pipelines that are whole; `worths`: what each
is worth. `agree` and `transfers`: from what each member of a forming generation holds and what is published,
to the newest state that covers all sections, who must still apply its last step, and who sends which section
to whom (what a section's state is: `worker.sections.state`). `in_flight`: from the partial sums that each
member shows of the step after that state, to those that count, and what of the step is missing.
"""

from .balance import balance
from .choose import choose
from .copies import copies_in, copies_of, least_vms
from .failures import FailurePlan, failure_plans, least_bounds_s
from .infeasible import too_deep
from .keeping.instead import Before, loading_s, prospect_of, rerouted
from .keeping.reforming import reformed
from .placement import Roster, Slot, place, place_in
from .recovery import (
    NOTHING,
    Agreement,
    Application,
    CommitProof,
    MemberState,
    NoReplica,
    Rung,
    Transfer,
    agree,
    covers,
    transfers,
)
from .request import Candidate, Choice, Infeasible, Request
from .reroute import Rerouted, reroute
from .risk import Prospect, Risk, prospect, worths
from .stages import stage_table
from .templates import Template, TemplateStage, templates
from .unequal import plan_of

__all__ = [
    "NOTHING",
    "Agreement",
    "Application",
    "Before",
    "Candidate",
    "Choice",
    "FailurePlan",
    "Infeasible",
    "NoReplica",
    "CommitProof",
    "Request",
    "Risk",
    "Rerouted",
    "Prospect",
    "Roster",
    "Rung",
    "Slot",
    "MemberState",
    "Template",
    "TemplateStage",
    "Transfer",
    "agree",
    "balance",
    "choose",
    "copies_in",
    "copies_of",
    "covers",
    "failure_plans",
    "least_bounds_s",
    "least_vms",
    "loading_s",
    "prospect_of",
    "place",
    "place_in",
    "plan_of",
    "prospect",
    "reformed",
    "reroute",
    "rerouted",
    "stage_table",
    "templates",
    "too_deep",
    "transfers",
    "worths",
]
