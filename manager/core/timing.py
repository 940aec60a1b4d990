"""The bounds that the rules keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .orders import Leases
from .strikes.table import TABLE, Kind, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The core's bounds, in seconds."""

    vm_lease_s: float = 15.0  # a VM silent for this long is planned around; see `silence`
    request_timeout_s: float = 1800.0  # a VM that has not joined so long after it was made never will
    join_grace_s: float = 300.0  # ... but for so long after a manager began it is waited for all the same
    release_s: float = 120.0  # what the release of VMs may take; kept in reserve of a budget
    slowest_release_s: float = 3600.0  # ... and as long as one has been refused, but no longer than this
    note_every_s: float = 300.0  # the journal tells so often that time passes, while VMs are paid for
    least_use_s: float = 600.0  # no VM is asked for that a budget cannot pay for so long
    console_s: float = 30.0  # what the last of those wrote is waited for before a person is asked
    unused_s: float = 600.0  # a VM of a cloud without work in the plan is a reserve for so long
    grow_again_s: float = 3600.0  # after that no more VMs are asked for than the plan uses for so long
    fewer_copies_s: float = 120.0  # a reroute may leave sections on fewer VMs than could be had for so long
    settle_s: float = 3.0  # newcomers are gathered for this long before a plan takes them in
    suspect_grace_s: float = 1.5  # a closed connection, or a broken generation without a known death
    drift: float = 1.25  # a calibration that is wrong by this factor is changed
    drift_s: float = 60.0  # after so long, and so many steps that were looked at, of one plan
    drift_steps: int = 10
    recalibrate_s: float = 600.0  # at most once in so long
    slow: float = 1.25  # of a worker, compared with its peers
    recovered: float = 1.1
    worth_it: float = 0.05  # part of what it does that another plan must be worth more, since paces are noisy
    grow_worth_it: float = 0.01  # ... and that more VMs of a cloud must be, since they are paid for
    least_morph_s: float = 5.0  # what a change costs, at least
    between_losses_s: float = 3600.0  # of VMs, as long as nothing is known of it
    planning_timeout_s: float = 120.0
    replan_s: float = 30.0  # an impossible plan is tried again
    prepare_timeout_s: float = 120.0
    form_timeout_s: float = 180.0  # without progress of any member; see `stalls` for all that follow
    progress_floor_s: float = 60.0  # a generation without progress of any member gets at least this long
    progress_factor: float = 10.0  # ... and so many steps, as predicted and as measured
    first_step_factor: float = 10.0  # ... and so many times more until its first step is done
    data_wait_s: float = 600.0  # without progress while a member waits for samples
    store_wait_s: float = 1800.0  # without progress while a member waits for the store
    stacks_s: float = 5.0  # stacks that were asked for are waited for
    start_wait_s: float = 1800.0  # a trainer that starts for longer (setup, imports, trace) is replaced
    profile_wait_s: float = 1800.0  # one that looks at the model for longer is replaced
    left_out_s: float = 30.0  # members that are not prepared in time, or are suspected of a stall
    stop_timeout_s: float = 300.0  # without progress of any member
    max_stop_changes: int = 5  # a job that is to stop, and lost so many generations since, ends after that
    delete_after_s: float = 60.0  # a checkpoint's parts outlive their place in the head
    sweep_s: float = 1800.0  # the store is looked through for what nobody needs any more
    keep_waiting_s: float = 600.0  # a job that waits for a person keeps its VMs for so long
    leases: Leases = field(default_factory=Leases)  # what agents are told
    strikes: Mapping[Kind, Row] = field(default_factory=lambda: TABLE)  # what follows from failures

    def with_row(
        self,
        kind: Kind,
        *,
        limit: float | None = None,
        first_s: float | None = None,
        longest_s: float | None = None,
    ) -> Timing:
        """With these numbers in the row of a kind of failures: those by which rules judge its strikes.

        How strikes are counted is in the fold, which must be the same for every manager of a journal.
        """
        given = {"limit": limit, "first_s": first_s, "longest_s": longest_s}
        changes = {name: number for name, number in given.items() if number is not None}
        return replace(self, strikes={**self.strikes, kind: replace(self.strikes[kind], **changes)})

    @property
    def least_paid_s(self) -> float:
        """For how long a budget must pay for a VM that is asked for, and for all beside it."""
        return self.least_use_s + self.stop_timeout_s + self.end_reserve_s

    @property
    def end_reserve_s(self) -> float:
        """For how long VMs may still be paid for after a job has ended, or its manager is lost."""
        return self.given_up_after_s + self.release_s

    @property
    def unjoined_after_s(self) -> float:
        """A VM that never joined has ended itself this long after it was asked for: its first script does, by
        a timer, once it has booted."""
        return self.request_timeout_s + self.join_grace_s

    @property
    def given_up_after_s(self) -> float:
        """A VM that was silent for this long has ended itself: its agent saw no manager for the orphan
        timeout, then waited for its checkpoint; a lease more for what was on its way."""
        return self.leases.orphan_timeout_s + self.leases.orphan_save_s + self.vm_lease_s
