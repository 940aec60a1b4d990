"""What the journal keeps reads back as it was written; what does not is refused, or named where it lies."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from core_script import RECIPE
from makara.manager.core.commands import RequestVm
from makara.manager.core.facts import GenerationPlanned, RecipeFixed, StopOrdered, VmNoticed, VmRequested
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.journal_text import NotReadable, Unreadable


def planned(plan: dict[str, Any]) -> GenerationPlanned:
    return GenerationPlanned(
        at=1.0, number=1, cause="", plan=plan, members=(), predicted_s=None, detected_at=1.0, decided_s=0.0
    )


@pytest.mark.parametrize(
    "fact",
    [
        VmNoticed.model_construct(at=1.0, vm="v", deadline=math.inf),
        VmNoticed.model_construct(at=1.0, vm="v", deadline=math.nan),
        VmNoticed.model_construct(at=1.0, vm=7, deadline=1.0),
        RecipeFixed(at=1.0, recipe=RECIPE, calibration={"forward_s": [math.inf]}),
        planned({"latency_s": math.nan}),
        planned({"by_size": {1: "a key that JSON has not"}}),
    ],
)
def test_a_fact_that_would_not_read_back_is_refused_and_nothing_is_stored(tmp_path: Path, fact) -> None:
    journal = SqliteJournal(tmp_path / "journal.db")
    with pytest.raises(NotReadable, match="cannot be stored"):
        journal.append("a", [StopOrdered(at=1.0), fact], [RequestVm(key="k", vm="v")])
    assert (journal.facts("a"), journal.pending_commands()) == ([], [])
    journal.close()


def test_a_tuple_reads_back_as_the_list_that_it_is_in_json(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db")
    journal.append("a", [RecipeFixed(at=1.0, recipe=RECIPE, calibration={"forward_s": (0.5, 1.0)})], [])
    assert len(journal.facts("a")) == 1
    journal.close()


def test_what_cannot_be_read_is_named_where_it_lies(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal.db")
    vm, command = VmRequested(at=1.0, vm="v"), RequestVm(key="k", vm="v")
    journal.append("a", [vm, VmNoticed(at=2.0, vm="v", deadline=3.0), vm], [command])
    journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as database:
        database.execute("UPDATE facts SET fact = replace(fact, '3.0', 'null') WHERE sequence = 2")
        database.execute("UPDATE commands SET command = '{}'")
    journal = SqliteJournal(tmp_path / "journal.db")
    first, second, third = journal.facts("a")
    assert (first.fact, third.fact, third.sequence) == (vm, vm, 3)
    assert isinstance(second.fact, Unreadable)
    assert "deadline" in second.fact.error
    assert (second.fact.at, "vm_noticed" in second.fact.text) == (2.0, True)
    (pending,) = journal.pending_commands()
    assert (pending.job, isinstance(pending.command, Unreadable)) == ("a", True)
    journal.close()
