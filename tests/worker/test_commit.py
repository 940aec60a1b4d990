"""The commit record: what ranks add up, and what survivors compare."""

import math
from dataclasses import replace

import pytest
from makara.worker.execution.commit import CommitRecord, Flag, InvalidCommit, Vote, tallies_of

NONE = Flag(0)


def summed(votes: list[Vote], num_ranks: int, num_parameters: int) -> list[float]:
    vectors = [vote.vector(num_ranks, num_parameters) for vote in votes]
    return [sum(column) for column in zip(*vectors, strict=True)]


def vote(rank: int, step: int = 7, attempt: int = 0, prepared: int = 3, flags: Flag = NONE) -> Vote:
    return Vote(rank, step, attempt, prepared, flags, norms={rank: 0.1 * (rank + 1)}, tallies=[rank])


def test_record_holds_the_least_prepared_generation_all_flags_and_each_norm_once() -> None:
    votes = [vote(0, prepared=5, flags=Flag.SAVE), vote(1, prepared=4, flags=Flag.HOLD), vote(2, prepared=5)]
    record = CommitRecord.from_vector(4, 3, 3, summed(votes, 3, 3))
    assert (record.generation, record.step, record.attempt, record.voters) == (4, 7, 0, 3)
    assert record.prepared == 4
    assert record.flags == Flag.SAVE | Flag.HOLD
    assert record.norms == (0.1, 0.2, 0.1 * 3)


def test_tallies_add_up_beyond_what_a_float_holds() -> None:
    tallies = [[2**64 - 1, 5], [2**63 + 7, 0], [3, 2**64 - 4]]
    votes = [replace(vote(rank), tallies=own) for rank, own in enumerate(tallies)]
    vector = summed(votes, 3, 3)
    assert tallies_of(vector, 2) == [sum(column) % 2**64 for column in zip(*tallies, strict=True)]
    assert CommitRecord.from_vector(4, 3, 3, vector).norms == (0.1, 0.2, 0.1 * 3)


def test_missing_vote_is_no_commit() -> None:
    with pytest.raises(InvalidCommit, match="2 of 3 votes"):
        CommitRecord.from_vector(4, 3, 3, summed([vote(0), vote(1)], 3, 3))


def test_votes_on_different_attempts_are_no_commit() -> None:
    with pytest.raises(InvalidCommit, match=r"\(7, 0\), \(7, 1\)"):
        CommitRecord.from_vector(4, 2, 2, summed([vote(0), vote(1, attempt=1)], 2, 2))


def test_record_survives_json_bit_for_bit_even_with_infinite_norms() -> None:
    record = CommitRecord.from_vector(
        1, 1, 2, Vote(0, 0, 0, 1, Flag(0), {0: math.inf, 1: 0.1}, []).vector(1, 2)
    )
    assert CommitRecord.from_json(record.to_json()) == record


def test_malformed_record_names_what_is_wrong() -> None:
    value = CommitRecord.from_vector(1, 1, 1, vote(0).vector(1, 1)).to_json()
    with pytest.raises(InvalidCommit, match="voters"):
        CommitRecord.from_json({**value, "voters": "three"})
