"""The ledger of failures: those that come together are one, progress forgives, the page shows the table."""

from __future__ import annotations

import pytest
from makara.manager.bounds import bounds_of
from makara.manager.core import Timing
from makara.manager.core.strike_page import PAGE, with_table
from makara.manager.core.strike_table import TABLE, Kind, Progress, Row
from makara.manager.core.strikes import JOB, Ledger, forgive_on_progress, strike


def test_the_page_of_faults_shows_the_table_of_the_code() -> None:
    page = PAGE.read_text()
    assert with_table(page) == page, "python -m makara.manager.core.strike_page writes it"


def test_failures_of_others_shortly_after_each_other_are_one_strike() -> None:
    ledger = strike(Ledger(), Kind.INTERNAL_ERROR, JOB, 1.0, by=["a"])
    ledger = strike(ledger, Kind.INTERNAL_ERROR, JOB, 9.0, by=["b"])
    ledger = strike(ledger, Kind.INTERNAL_ERROR, JOB, 17.0, by=["c"])
    assert ledger.count(Kind.INTERNAL_ERROR) == 1
    assert ledger.of(Kind.INTERNAL_ERROR).by == {"a", "b", "c"}
    assert strike(ledger, Kind.INTERNAL_ERROR, JOB, 18.0, by=["c"]).count(Kind.INTERNAL_ERROR) == 2
    assert strike(ledger, Kind.INTERNAL_ERROR, JOB, 28.0, by=["d"]).count(Kind.INTERNAL_ERROR) == 2
    assert strike(ledger, Kind.INTERNAL_ERROR, JOB, 16.0, by=["d"]).count(Kind.INTERNAL_ERROR) == 2


def test_a_failure_that_takes_several_vms_is_one_strike_of_the_job_and_one_of_each_vm() -> None:
    ledger = Ledger()
    for at, vm in ((1.0, "v1"), (2.0, "v2"), (60.0, "v1"), (61.0, "v2"), (62.0, "v2")):
        for kind in (Kind.DEATH, Kind.VM_DEATH):
            ledger = strike(ledger, kind, vm, at, by=[f"{vm}.0"])
    assert sum(found.count for found in ledger.all(Kind.DEATH).values()) == 3
    assert ledger.all(Kind.DEATH).keys() == {"v1", "v2"}
    assert (ledger.count(Kind.VM_DEATH, "v1"), ledger.count(Kind.VM_DEATH, "v2")) == (2, 3)


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


@pytest.mark.parametrize("kind", list(Kind))
def test_each_kind_has_a_row_that_says_what_follows(kind: Kind) -> None:
    row = TABLE[kind]
    assert row.what
    assert row.follows
    assert row.longest_s >= row.first_s
