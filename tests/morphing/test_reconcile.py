"""Survivors of any mix of standings come to one state, and the sections find their way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makara.morphing import Application, CommitProof, MemberState, NoReplica, agree, covers, transfers
from makara.pipeline import Range
from makara.protocol.messages import CheckpointRef

K = 4
COMMIT = CommitProof(num_steps=7, attempt=0, generation=2)


def standing(
    applied: int | None, sections: str, record: CommitProof | None = None, reduced: int | None = None
) -> MemberState:
    return MemberState(applied, record, reduced, frozenset(map(int, sections)))


def test_who_saw_no_commit_applies_with_the_record_of_who_did() -> None:
    found = agree(
        [standing(6, "01", None, 7), standing(6, "23", COMMIT, 7), standing(7, "23", COMMIT)],
        num_sections=K,
    )
    assert (found.rung, found.step, found.record) == ("peers", 7, COMMIT)
    assert found.apply == (Application(0, 1), Application(1, 1))
    assert (found.keep, found.drop) == ((0, 1, 2), ())
    assert found.holders == {0: (0,), 1: (0,), 2: (1, 2), 3: (1, 2)}


def test_a_step_that_nobody_saw_committed_is_discarded_by_all() -> None:
    found = agree([standing(6, "01", None, 7), standing(6, "23", None, 7)], num_sections=K)
    assert (found.step, found.apply, found.keep) == (6, (), (0, 1))


def test_a_record_that_cannot_be_is_none() -> None:
    record = replace(COMMIT, num_steps=9)
    found = agree([standing(6, "0123", record, 7), standing(6, "0123", None, 7)], num_sections=K)
    assert (found.step, found.apply) == (6, ())


def test_gradients_of_another_attempt_are_not_applied() -> None:
    stale = replace(standing(6, "0123", None, 7), reduced_by=(2, 1))
    found = agree([stale, standing(7, "0123", COMMIT)], num_sections=K)
    assert (found.keep, found.drop) == ((1,), (0,))


def test_of_rival_commits_the_newer_generation_counts() -> None:
    rival = CommitProof(num_steps=7, attempt=0, generation=1)
    found = agree([standing(7, "0123", rival), standing(7, "0123", COMMIT)], num_sections=K)
    assert (found.record, found.keep, found.drop) == (COMMIT, (1,), (0,))


def test_without_a_holder_for_each_section_the_store_is_next() -> None:
    found = agree([standing(7, "01", COMMIT), standing(None, "")], num_sections=K)
    assert (found.rung, found.step, found.keep, found.drop) == ("start", None, (), (0,))
    published = [CheckpointRef(step=5, generation=1)]
    found = agree([standing(7, "01", COMMIT)], num_sections=K, checkpoints=published)
    assert (found.rung, found.step, found.keep, found.drop) == ("store", None, (), (0,))
    assert agree([standing(None, ""), standing(None, "")], num_sections=K).rung == "start"


def test_an_older_step_that_is_covered_comes_before_the_store() -> None:
    found = agree([standing(7, "01"), standing(6, "0123")], num_sections=K)
    assert (found.rung, found.step, found.keep, found.drop) == ("peers", 6, (1,), (0,))


def test_a_member_that_was_left_out_brings_no_steps_of_an_older_branch() -> None:
    left_out = replace(standing(9, "0123"), branch=1, agreed_in=1)
    found = agree([left_out, replace(standing(7, "0123"), branch=2, agreed_in=2)], num_sections=K)
    assert (found.step, found.keep, found.drop, found.branch) == (7, (1,), (0,), 2)


def test_an_older_branch_does_not_stand_in_for_sections_that_the_newest_has_lost() -> None:
    left_out = replace(standing(7, "0123"), branch=1)
    found = agree([left_out, replace(standing(7, "01"), branch=2)], num_sections=K)
    assert (found.rung, found.step, found.drop) == ("start", None, (0, 1))


def test_who_was_left_out_with_a_commit_takes_nothing_from_those_who_went_on_without_it() -> None:
    """Found: it alone was on the newest branch, so that all dropped what the others hold of every section."""
    left_out = replace(standing(7, "01", COMMIT), branch=1, agreed_in=1)
    went_on = [replace(standing(6, held, None, 7), reduced_by=(2, 0), agreed_in=2) for held in ("012", "3")]
    found = agree([left_out, *went_on], num_sections=K)
    assert (found.rung, found.step, found.keep, found.drop) == ("peers", 6, (1, 2), (0,))
    assert (found.branch, found.record, found.apply) == (0, None, ())


def test_who_is_yet_to_apply_the_newest_branchs_commit_is_not_left_out() -> None:
    behind = replace(standing(6, "01", None, 7), reduced_by=(2, 0), branch=1)
    found = agree([behind, replace(standing(7, "23", COMMIT), branch=2)], num_sections=K)
    assert (found.step, found.keep, found.apply) == (7, (0, 1), (Application(0, 1),))


def test_the_branch_is_that_of_a_commit_which_all_apply() -> None:
    saw = replace(standing(6, "0123", COMMIT, 7), branch=1)
    found = agree([saw], num_sections=K)
    assert (found.step, found.branch) == (7, COMMIT.generation)


@pytest.mark.parametrize(
    ("step", "generation", "overtakes"),
    [(8, 2, True), (7, 2, False), (3, 3, True), (9, 1, False)],
    ids=["a later step", "the same step", "a later generation", "was there when they agreed"],
)
def test_a_checkpoint_counts_if_it_is_newer_than_what_its_holders_agreed_on(
    step: int, generation: int, overtakes: bool
) -> None:
    published = [CheckpointRef(step=step, generation=generation)]
    held = replace(standing(7, "0123"), branch=1, agreed_in=2)
    found = agree([held], num_sections=K, checkpoints=published)
    assert (found.rung, found.step) == (("store", None) if overtakes else ("peers", 7))
    assert found.drop == ((0,) if overtakes else ())


def test_states_up_to_a_generation_that_was_found_corrupt_count_no_more_for_anybody() -> None:
    everything = frozenset({0, 1})
    found_it = MemberState(None, None, None, frozenset(), void_until=3)
    died_while_it_was_found = MemberState(9, None, None, everything, branch=3, agreed_in=3)
    left_out_before = MemberState(6, None, None, everything, branch=2, agreed_in=2)
    for published, rung in (([CheckpointRef(step=5, generation=3)], "store"), ([], "start")):
        agreed = agree(
            [found_it, died_while_it_was_found, left_out_before], num_sections=2, checkpoints=published
        )
        assert (agreed.rung, agreed.step, agreed.keep, agreed.apply) == (rung, None, (), ())
    since = MemberState(8, None, None, everything, branch=4, agreed_in=4)
    agreed = agree([found_it, since, left_out_before], num_sections=2)
    assert (agreed.rung, agreed.step, agreed.keep) == ("peers", 8, (1,))


def test_sections_are_covered_when_each_is_held_by_somebody() -> None:
    assert covers([range(2), range(1, 4)], K)
    assert not covers([range(2), range(3, 4)], K)
    assert not covers([], K)


sections = st.frozensets(st.integers(0, K - 1))


@st.composite
def survivors(draw: st.DrawFn) -> list[MemberState]:
    """Members of one generation at the commit of step 7, members left behind, and newcomers."""
    result: list[MemberState] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["applied", "saw", "reduced", "before", "behind", "new"]))
        held = draw(sections)
        result.append(
            {
                "applied": MemberState(7, COMMIT, None, held),
                "saw": MemberState(6, COMMIT, 7, held),
                "reduced": MemberState(6, None, 7, held),
                "before": MemberState(6, None, None, held),
                "behind": MemberState(draw(st.integers(0, 5)), None, None, held),
                "new": MemberState(None, None, None, frozenset()),
            }[kind]
        )
    return result


@given(survivors())
def test_every_survivor_ends_at_one_state_or_drops_its_own(standings: list[MemberState]) -> None:
    found = agree(standings, num_sections=K)
    with_state = {m for m, one in enumerate(standings) if one.applied_step is not None}
    assert set(found.keep) | set(found.drop) == with_state
    assert not set(found.keep) & set(found.drop)
    applying = {application.member for application in found.apply}
    for member in found.keep:
        assert standings[member].applied_step == (found.step or 0) - (member in applying)
    for application in found.apply:
        assert standings[application.member].reduced_step == found.step
        assert standings[application.record_holder].record == found.record
    if found.rung == "peers":
        assert set(found.holders) == set(range(K))
    for section, holders in found.holders.items():
        assert all(section in standings[member].sections and member in found.keep for member in holders)


@given(survivors())
def test_a_step_that_some_member_applied_is_not_lost_while_it_is_covered(
    standings: list[MemberState],
) -> None:
    committed = any(one.record == COMMIT for one in standings)
    there = [one for one in standings if one.applied_step == 7 or (committed and one.reduced_step == 7)]
    covered = frozenset().union(*(one.sections for one in there)) == frozenset(range(K))
    found = agree(standings, num_sections=K)
    assert (found.step == 7) == (committed and covered)


wanted_ranges = st.lists(
    st.none() | st.sampled_from([Range(0, 2), Range(2, 4), Range(0, 4)]), min_size=1, max_size=6
)


@given(st.dictionaries(st.integers(0, K - 1), st.sets(st.integers(0, 5), min_size=1)), wanted_ranges)
def test_transfers_bring_each_member_what_it_lacks(
    held: dict[int, set[int]], wanted: list[Range | None]
) -> None:
    holders = {section: tuple(sorted(held.get(section, {0}))) for section in range(K)}
    sent = transfers(holders, wanted)
    assert list(sent) == sorted(sent, key=lambda one: (one.section, one.destination))
    load = Counter[int]()
    for one in sent:
        assert one.source == min(holders[one.section], key=lambda member: (load[member], member))
        load[one.source] += 1
    lacking = {
        (section, member)
        for member, span in enumerate(wanted)
        if span is not None
        for section in span.sections
        if member not in holders[section]
    }
    assert sorted((one.section, one.destination) for one in sent) == sorted(lacking)


def test_sources_share_the_load() -> None:
    sent = transfers({section: (0, 1) for section in range(K)}, [None, None, Range(0, 4)])
    assert sorted(one.source for one in sent) == [0, 0, 1, 1]


def test_a_section_that_nobody_holds_is_named() -> None:
    with pytest.raises(NoReplica, match="section 1: member 0"):
        transfers({0: (0,)}, [Range(0, 2)])
