"""The kinds of failures that are counted: for each what a strike is, what follows, and what forgives.

A new kind needs a row here, a `strike` where the fact about it is folded (`Context.strike` if it is in memory
only), and a rule that does what `follows`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """The kinds of failures."""

    BREAK = "break"
    COMMAND = "command"
    CORRUPT_STATE = "corrupt_state"
    CUT = "cut"
    DEATH = "death"
    DIFFERENCE = "difference"
    HOUSEKEEPING = "housekeeping"
    INTERNAL_ERROR = "internal_error"
    LIMITED = "limited"
    LOCAL_REQUEST = "local_request"
    LOST_VM = "lost_vm"
    NOT_JOINED = "not_joined"
    OUTDATED = "outdated"
    PROFILE = "profile"
    PROTOCOL = "protocol"
    REFUSED = "refused"
    REQUEST = "request"
    SHORT = "short"
    SLOW = "slow"
    STALL = "stall"
    TAKEN_VM = "taken_vm"
    UNDECIDED = "undecided"
    UNFIT_VM = "unfit_vm"
    USER_ERROR = "user_error"
    VM_DEATH = "vm_death"
    WORN_VM = "worn_vm"


class Progress(StrEnum):
    """The progress that forgives strikes. All that is journalled is forgiven when a user resumes the job."""

    CREATED = "a VM that is created there"  # of VMs that were taken back: one that joins
    FORMED = "a generation that forms with both"
    JOINED = "a VM of it that joins"
    NEWER_FORMED = "a generation that forms with a newer VM"
    NEWER_STEPPED = "a checkpoint by a generation with a newer VM"
    NEXT_STEP = "a step after the one at which it came"
    DONE = "success"
    OWN_STEP = "a step that is committed with it"
    SAVED = "a checkpoint that is newer than all others"
    STEP = "a new step of the job"
    PERSON = "a person who has the job go on"
    NONE_FIT = "the end of the last VM that was fit"
    VM_ENDED = "the end of the VM"
    VM_LOST = "a notice for the VM, or its end for another reason: that is what ended its trainers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of strike, and its consequence."""

    what: str  # the failure
    subject: str = "the job"  # whose strikes are counted
    follows: str  # at `limit` strikes
    limit: int | None = None  # None: never, or as the job file says
    first_s: float = 0.0  # the subject is left alone for so long after the first strike
    factor: float = 2.0  # ... and for so many times longer after each further one
    longest_s: float = 0.0  # ... but no longer than this
    num_free: int = 0  # strikes after which there is no pause
    together_s: float = 0.0  # failures of others so soon after the first are the same strike
    under_way: bool = False  # what was under way at the newest strike is part of it, whenever it fails
    seen_again: bool = False  # a failure of those in the newest strike is that strike, seen again
    joint: bool = False  # ... at whichever subject: a strike that several share counts once for the job
    forgiven_by: frozenset[Progress] = frozenset()
    forgotten_s: float = math.inf  # strikes are forgotten when none has come for so long
    journalled: bool = True  # else in memory only: it means nothing to the next manager
    is_fixed: bool = False  # its numbers are no settings

    def pause_s(self, count: int) -> float:
        """For how long the subject is left alone after so many strikes in a row."""
        if count <= self.num_free:
            return 0.0
        return min(
            self.first_s * self.factor ** min(count - self.num_free - 1, _MOST_DOUBLINGS), self.longest_s
        )

    def is_reached(self, count: int) -> bool:
        """Whether what `follows` is due."""
        return self.limit is not None and count >= self.limit


_MOST_DOUBLINGS = 32  # beyond any `longest_s`; a float holds 2^32 exactly

_TOGETHER_S = 10.0  # peers see each other die within the link timeout

TABLE: Mapping[Kind, Row] = MappingProxyType(
    {
        Kind.USER_ERROR: Row(
            what="an error of the job's own code ends trainers",
            follows="the job fails: after more than `retry.max_restarts_on_errors`",
            together_s=_TOGETHER_S,
        ),
        Kind.INTERNAL_ERROR: Row(
            what="an error of Makara's code ends trainers, or one starts or profiles for too long",
            limit=5,
            follows="the job fails",
            together_s=_TOGETHER_S,
            forgiven_by=frozenset({Progress.STEP}),
        ),
        Kind.VM_DEATH: Row(
            what="a signal, its lease, or not leaving a closed generation ends its trainer, before any step",
            subject="the VM",
            limit=3,
            follows="the VM is replaced",
            together_s=_TOGETHER_S,
            forgiven_by=frozenset({Progress.OWN_STEP, Progress.VM_ENDED, Progress.VM_LOST}),
        ),
        Kind.DEATH: Row(
            what="a signal or its lease ends a trainer",
            subject="the VM; they are added up",
            limit=9,
            follows="the job fails",
            together_s=_TOGETHER_S,
            joint=True,
            forgiven_by=frozenset({Progress.STEP, Progress.OWN_STEP, Progress.VM_LOST}),
        ),
        Kind.BREAK: Row(
            what="a generation breaks, for no reason that is known",
            follows="longer pauses before the next generation; none once a member of it is gone",
            first_s=5.0,
            longest_s=300.0,
            num_free=1,  # mended at once, as if a death were about to be reported
            forgiven_by=frozenset({Progress.NEXT_STEP}),
            journalled=False,
        ),
        Kind.STALL: Row(
            what="a generation makes no progress; twice its bound is given to the next",
            limit=5,
            follows="a person is asked: what hangs there hangs on any VM",
            seen_again=True,
            forgiven_by=frozenset({Progress.NEXT_STEP, Progress.PERSON}),
        ),
        Kind.CUT: Row(
            what="two members cannot reach each other; plans leave out one of them meanwhile",
            subject="the two",
            limit=6,
            follows="the VM of the one is replaced",
            first_s=30.0,
            longest_s=960.0,
            forgiven_by=frozenset({Progress.FORMED}),
            journalled=False,
        ),
        Kind.PROTOCOL: Row(
            what="a generation of trainers of one version makes no step; they lose ties meanwhile",
            subject="the trainers' protocol",
            follows="longer pauses",
            first_s=300.0,
            longest_s=86400.0,
            seen_again=True,
            forgiven_by=frozenset({Progress.OWN_STEP}),
            journalled=False,
        ),
        Kind.REQUEST: Row(
            what="a VM that was requested never came, for a reason that is of no place",
            follows="longer pauses before the next request",
            under_way=True,
            first_s=5.0,
            longest_s=300.0,
            forgiven_by=frozenset({Progress.JOINED}),
        ),
        Kind.REFUSED: Row(
            what="a cloud has no VM, the credentials fail, or it took a VM back before that joined",
            subject="the place: type, market and zone, or region",
            follows="longer pauses before the next request there",
            under_way=True,
            first_s=5.0,
            longest_s=300.0,
            forgiven_by=frozenset({Progress.CREATED, Progress.JOINED, Progress.PERSON}),
        ),
        Kind.LIMITED: Row(
            what="a cloud gives no VM: a quota is used up, or a right is missing",
            subject="the place",
            follows="a pause in which a person may change that",
            under_way=True,
            first_s=300.0,
            longest_s=300.0,
            factor=1.0,
            forgiven_by=frozenset({Progress.CREATED, Progress.PERSON}),
        ),
        Kind.NOT_JOINED: Row(
            what="a VM of a cloud was created and did not join",
            subject="cloud, image, and the manager's address",
            limit=3,
            follows="no more are requested there; a person is asked where nothing else is left",
            under_way=True,
            forgiven_by=frozenset({Progress.JOINED, Progress.PERSON}),
        ),
        Kind.UNFIT_VM: Row(
            what="a VM is ended since none of its workers meets the recipe",
            limit=5,
            follows="a person is asked, if no VM that lives is fit; longer pauses before the next request",
            together_s=_TOGETHER_S,
            first_s=5.0,
            longest_s=300.0,
            forgiven_by=frozenset({Progress.NEWER_FORMED, Progress.NONE_FIT, Progress.PERSON}),
        ),
        Kind.WORN_VM: Row(
            what="a VM is ended for the deaths of its trainers",
            follows="longer pauses before the next request",
            first_s=5.0,
            longest_s=300.0,
            forgiven_by=frozenset({Progress.NEWER_STEPPED}),
        ),
        Kind.LOST_VM: Row(
            what="a VM that had joined is lost, and no cloud says that it took it",
            limit=6,
            follows="a person is asked: a sample may end any machine; longer pauses before the next request",
            first_s=5.0,
            longest_s=300.0,
            num_free=1,
            together_s=60.0,  # as VMs that are lost together are one loss
            forgiven_by=frozenset({Progress.NEXT_STEP, Progress.PERSON}),
        ),
        Kind.TAKEN_VM: Row(
            what="a cloud takes a VM back that had joined, before a step is made with it",
            subject="the place: type, market and zone",
            follows="longer pauses before the next request there",
            first_s=5.0,
            longest_s=300.0,
            together_s=60.0,
            forgiven_by=frozenset({Progress.NEXT_STEP, Progress.PERSON}),
        ),
        Kind.SHORT: Row(
            what="VMs of clouds, fewer than `min_nodes`, have waited for others for too much money",
            follows="they save and are released; longer pauses before clouds are asked again",
            first_s=300.0,
            longest_s=14400.0,
            forgiven_by=frozenset({Progress.NEXT_STEP}),
            journalled=False,
        ),
        Kind.SLOW: Row(
            what="a worker is slower than its peers",
            subject="the worker",
            follows="longer pauses before one that no plan uses counts as any other again",
            first_s=1800.0,
            longest_s=115200.0,
            forgiven_by=frozenset({Progress.VM_ENDED}),
        ),
        Kind.OUTDATED: Row(
            what="a trainer is ended for being of an older version than its peers",
            subject="the worker",
            limit=1,
            follows="its next trainer is not ended for that",
            forgiven_by=frozenset({Progress.VM_ENDED}),
        ),
        Kind.PROFILE: Row(
            what="a generation of several that measures the model and its links breaks",
            limit=2,
            follows="one worker measures the rest alone",
        ),
        Kind.UNDECIDED: Row(
            what="deciding about a job raises an error: the job is set aside",
            follows="longer pauses before it is taken up again",
            first_s=10.0,
            longest_s=600.0,
            forgotten_s=1200.0,
            journalled=False,
        ),
        Kind.COMMAND: Row(
            what="a call of a cloud or a store fails; up to half of each pause is left out at random",
            subject="the command",
            follows="longer pauses before the next attempt",
            first_s=0.2,
            longest_s=10.0,
            forgiven_by=frozenset({Progress.DONE}),
            journalled=False,
            is_fixed=True,
        ),
        Kind.LOCAL_REQUEST: Row(
            what="as `command`, for a VM on machines of one's own",
            subject="the command",
            follows="longer pauses before the next attempt",
            first_s=0.2,
            longest_s=1.0,
            forgiven_by=frozenset({Progress.DONE}),
            journalled=False,
            is_fixed=True,
        ),
        Kind.HOUSEKEEPING: Row(
            what="as `command`, for what no job waits for: deletions, sweeps, stored calibrations",
            subject="the command",
            follows="longer pauses before the next attempt",
            first_s=0.2,
            longest_s=300.0,
            forgiven_by=frozenset({Progress.DONE}),
            journalled=False,
            is_fixed=True,
        ),
        Kind.CORRUPT_STATE: Row(
            what="the state of its worker differs from that of another host of the same section",
            subject="the VM",
            limit=2,
            follows="the VM is replaced; at once if most hosts agree that it is wrong",
            seen_again=True,
            forgiven_by=frozenset({Progress.VM_ENDED}),
        ),
        Kind.DIFFERENCE: Row(
            what="hosts of a section hold different state, in one generation",
            limit=4,  # the second replaces VMs: it has come again on others
            follows="a person is asked: perhaps the optimizer or a kernel is not deterministic",
            seen_again=True,
            forgiven_by=frozenset({Progress.SAVED, Progress.PERSON}),
        ),
    }
)
