"""A journal of before calibrations were generations: it folds, and is shown as it was written.

`journals/calibrated_in_parts.jsonl` has the facts of `makara demo` of November 2026, until its first
generation formed.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from makara.manager.core.facts import Fact, GenerationKind, Obsolete, RecipeFixed, Submitted, VmJoined
from makara.manager.core.facts.old import translated
from makara.manager.core.fold import fold
from makara.manager.core.state import JobState, Status, vm_of
from makara.manager.service.journal import SqliteJournal
from makara.manager.service.journal_text import Unreadable, read_back
from makara.manager.service.pubsub import to_json
from pydantic import TypeAdapter

FACTS: TypeAdapter[Fact] = TypeAdapter(Fact)
WRITTEN = (Path(__file__).parent / "journals" / "calibrated_in_parts.jsonl").read_text().splitlines()


@pytest.fixture
def facts(tmp_path: Path) -> list[Fact]:
    journal = SqliteJournal(tmp_path / "journal.db")
    submitted = Submitted.model_validate_json(WRITTEN[0])
    journal.append(submitted.job, [submitted], [])
    journal.close()
    with sqlite3.connect(tmp_path / "journal.db") as database:
        database.execute("DELETE FROM facts")
        database.executemany(
            "INSERT INTO facts (job, sequence, at, fact) VALUES (?, ?, ?, ?)",
            [(submitted.job, number, json.loads(text)["at"], text) for number, text in enumerate(WRITTEN, 1)],
        )
    journal = SqliteJournal(tmp_path / "journal.db")
    found: list[Fact] = []
    for stored in journal.facts(submitted.job):
        assert not isinstance(stored.fact, Unreadable)
        found.append(stored.fact)
    journal.close()
    return found


def until(facts: list[Fact], name: str) -> JobState:
    """The state right after the first fact that was written under this name."""
    names = [json.loads(text)["fact"] for text in WRITTEN]
    return fold(facts[: names.index(name) + 1])


def test_every_fact_of_it_counts_once(facts: list[Fact]) -> None:
    state = fold(facts)
    assert state.num_facts == len(facts) == len(WRITTEN)
    assert state.status is Status.RUNNING


def test_its_calibration_is_kept_and_its_first_generation_is_number_one(facts: list[Fact]) -> None:
    fixed = next(fact for fact in facts if isinstance(fact, RecipeFixed))
    state = until(facts, "recipe_fixed")
    assert (state.recipe, state.calibration, state.profile) == (fixed.recipe, fixed.calibration, None)
    assert state.profiler is not None
    assert fold(facts).last_generation == 1


@pytest.mark.parametrize(
    "name", ["profiler_chosen", "surveyed", "share_dealt", "sections_measured", "probe_dealt", "probe_ended"]
)
def test_a_calibration_that_was_under_way_begins_again(facts: list[Fact], name: str) -> None:
    state = until(facts, name)
    assert state.status is Status.PROFILING
    assert state.profile is not None
    assert (state.profile.kind, state.profile.opened_at) == (GenerationKind.PROFILE, None)
    assert state.vms[vm_of(state.profile.members[0][0])].joined


def test_what_is_no_more_decided_is_shown_as_it_was_written(facts: list[Fact]) -> None:
    shown = [(to_json(fact), json.loads(text)) for fact, text in zip(facts, WRITTEN, strict=True)]
    obsolete = [number for number, fact in enumerate(facts) if isinstance(fact, Obsolete)]
    assert len(obsolete) > 5
    assert all(shown[number][0] == shown[number][1] for number in obsolete)
    assert any(isinstance(fact, VmJoined) for fact in facts)


@pytest.mark.parametrize(
    "text",
    [
        '{"at":1.0,"fact":"generation_stalled","generation":3,"number":2,"step":7,"silent_s":61.5,"bound_s":60.0,'
        '"standing":{"v0.0":"computing"},"suspects":["v0.0"],"doublings":1}',
        '{"at":1.0,"fact":"worker_failed","worker":"v0.0","incarnation":1,"kind":"killed","message":"x",'
        '"traceback":null,"step":7,"own_steps":null,"counted":true}',
    ],
)
def test_what_earlier_versions_wrote_of_a_stall_and_of_a_death_is_read(text: str) -> None:
    found = read_back(FACTS, 1.0, translated(text))
    assert not isinstance(found, Unreadable | Obsolete)
    assert fold([found]).num_facts == 1
    assert to_json(found) == json.loads(text)


@pytest.mark.parametrize("text", ['{"at":1.0,"fact":"surveyed","wor', '{"at":1.0,"fact":"profiler_chosen"}'])
def test_what_is_damaged_is_kept_as_it_is_and_read_as_such(text: str) -> None:
    found = read_back(FACTS, 1.0, translated(text))
    assert isinstance(found, Unreadable)
    assert found.text == text
