"""The ledger of failures: those that come together are one, progress forgives, the page shows the table."""

from __future__ import annotations

from dataclasses import fields

import pytest
from makara.manager.bounds import OF_STRIKES, bounds_of
from makara.manager.core import Timing
from makara.manager.core.strikes.ledger import JOB, Ledger, forgive_on_progress, strike
from makara.manager.core.strikes.page import PAGE, with_table
from makara.manager.core.strikes.table import TABLE, Kind, Progress, Row


def test_the_page_of_faults_shows_the_table_of_the_code() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "python -m makara.manager.core.strikes.page writes it"


def test_failures_of_others_shortly_after_each_other_are_one_strike() -> None:
    ledger = strike(Ledger(), Kind.INTERNAL_ERROR, JOB, 1.0, by=["a"])
    ledger = strike(ledger, Kind.INTERNAL_ERROR, JOB, 9.0, by=["b"])
    ledger = strike(ledger, Kind.INTERNAL_ERROR, JOB, 10.5, by=["c"])
    assert ledger.count(Kind.INTERNAL_ERROR) == 1
    assert ledger.of(Kind.INTERNAL_ERROR).by == {"a", "b", "c"}
    assert strike(ledger, Kind.INTERNAL_ERROR, JOB, 10.8, by=["c"]).count(Kind.INTERNAL_ERROR) == 2
    assert strike(ledger, Kind.INTERNAL_ERROR, JOB, 11.0, by=["d"]).count(Kind.INTERNAL_ERROR) == 2
    assert strike(ledger, Kind.INTERNAL_ERROR, JOB, 0.5, by=["d"]).count(Kind.INTERNAL_ERROR) == 2


@pytest.mark.parametrize("gap_s", [3.0, 9.0])
@pytest.mark.parametrize("kind", [kind for kind in Kind if TABLE[kind].together_s])
def test_failures_that_go_on_and_on_are_a_strike_each_time_that_the_first_is_long_past(
    kind: Kind, gap_s: float
) -> None:
    ledger, began, expected = Ledger(), -1e9, 0
    for number in range(30):
        at = number * gap_s
        subject = f"v{number}" if TABLE[kind].joint else JOB
        ledger = strike(ledger, kind, subject, at, by=[f"w{number}"])
        if at - began >= TABLE[kind].together_s:
            began, expected = at, expected + 1
    assert (ledger.total(kind) if TABLE[kind].joint else ledger.count(kind)) == expected


def test_failures_in_two_generations_are_two_strikes() -> None:
    ledger = strike(Ledger(), Kind.USER_ERROR, JOB, 1.0, by=["a"], generation=4)
    assert strike(ledger, Kind.USER_ERROR, JOB, 2.0, by=["b"], generation=4).count(Kind.USER_ERROR) == 1
    assert strike(ledger, Kind.USER_ERROR, JOB, 2.0, by=["b"], generation=5).count(Kind.USER_ERROR) == 2


def test_a_failure_that_takes_several_vms_is_one_strike_of_the_job_and_one_of_each_vm() -> None:
    ledger = Ledger()
    for at, vm in ((1.0, "v1"), (2.0, "v2"), (60.0, "v1"), (61.0, "v2"), (62.0, "v2")):
        for kind in (Kind.DEATH, Kind.VM_DEATH):
            ledger = strike(ledger, kind, vm, at, by=[f"{vm}.0"])
    assert ledger.total(Kind.DEATH) == 3
    assert ledger.all(Kind.DEATH).keys() == {"v1", "v2"}
    assert (ledger.count(Kind.VM_DEATH, "v1"), ledger.count(Kind.VM_DEATH, "v2")) == (2, 3)


@pytest.mark.parametrize(
    ("forgiven", "left"), [(["v1"], 2), (["v2"], 3), (["v1", "v2"], 1), (["v1", "v3"], 2)]
)
def test_a_strike_that_several_vms_share_counts_for_as_long_as_one_of_them_has_it(
    forgiven: list[str], left: int
) -> None:
    ledger = Ledger()
    for at, vm in ((1.0, "v1"), (2.0, "v2"), (60.0, "v1"), (61.0, "v2"), (62.0, "v3"), (90.0, "v1")):
        ledger = strike(ledger, Kind.DEATH, vm, at, by=[f"{vm}.0"])
    assert ledger.total(Kind.DEATH) == 3
    for vm in forgiven:
        ledger = forgive_on_progress(ledger, Progress.VM_LOST, {vm})
    assert ledger.total(Kind.DEATH) == left
    assert strike(ledger, Kind.DEATH, "v2", 120.0, by=["v2.0"]).total(Kind.DEATH) == left + 1


def test_a_later_step_than_at_the_last_strike_forgives_where_a_step_does() -> None:
    ledger = strike(Ledger(), Kind.BREAK, JOB, 1.0, step=5)
    again = strike(ledger, Kind.BREAK, JOB, 60.0, step=5)
    assert again.count(Kind.BREAK) == 2
    assert strike(again, Kind.BREAK, JOB, 120.0, step=6).count(Kind.BREAK) == 1


def test_one_generation_stalls_once() -> None:
    ledger = strike(Ledger(), Kind.STALL, JOB, 10.0, by=[1])
    again = strike(ledger, Kind.STALL, JOB, 500.0, by=[1])
    assert (again.count(Kind.STALL), again.of(Kind.STALL).since) == (1, 500.0)
    assert strike(again, Kind.STALL, JOB, 500.0, by=[2]).count(Kind.STALL) == 2


def test_progress_forgives_the_subjects_that_made_it() -> None:
    ledger = strike(strike(Ledger(), Kind.CORRUPT_STATE, "v1", 1.0), Kind.CORRUPT_STATE, "v2", 1.0)
    assert forgive_on_progress(ledger, Progress.VM_ENDED, {"v1"}).all(Kind.CORRUPT_STATE).keys() == {"v2"}
    assert forgive_on_progress(ledger, Progress.STEP) is ledger
    ledger = strike(ledger, Kind.INTERNAL_ERROR, JOB, 1.0, by=["a"])
    assert not forgive_on_progress(ledger, Progress.STEP).count(Kind.INTERNAL_ERROR)


def test_pauses_grow_to_the_longest() -> None:
    row = Row(what="", follows="", first_s=5.0, longest_s=300.0, num_free=1)
    assert [row.pause_s(count) for count in range(9)] == [0.0, 0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0]
    assert row.pause_s(10**9) == 300.0


def test_the_numbers_of_a_row_are_set_as_bounds() -> None:
    timing = bounds_of(["death.limit=20"])
    assert timing.strikes[Kind.DEATH].limit == 20
    assert timing == Timing().with_row(Kind.DEATH, limit=20)
    assert TABLE[Kind.DEATH].limit == 9


@pytest.mark.parametrize("name", sorted({it.name for it in fields(Row)} - set(OF_STRIKES)))
def test_a_bound_sets_nothing_by_which_the_fold_counts(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        Timing().with_row(Kind.USER_ERROR, **{name: 1.0})


@pytest.mark.parametrize("kind", list(Kind))
def test_each_kind_has_a_row_that_says_what_follows(kind: Kind) -> None:
    row = TABLE[kind]
    assert row.what
    assert row.follows
    assert row.longest_s >= row.first_s
