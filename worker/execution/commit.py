"""The commit rule: a small all-reduce ends each step; its result is the record that survivors compare.

Each rank contributes a vector of float64; the sum over ranks is the record. A rank contributes only once it
holds its reduced gradients of the step, so whoever holds a record knows that every rank can apply it: the
step counts if a survivor holds its record. Nothing changes weights before. Each entry is contributed by one
rank (the others add zero) or is a small integer, so the sum is exact in any order.

Layout, for G ranks, Q parameters, B buckets and K sections of the model: `[voters] + G x [step, attempt,
prepared, flags] + Q x [norm] + B x [a bucket's tally] + K x [a section's term]`, tallies and terms in four
parts each. A tally says which contributions are in a rank's part of a sum (`pipeline.contributions`); the sum
over ranks shows whether each is in it exactly once. Terms add up to zero where the section's hosts have the
same state (`replicas`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ...morphing.recovery import CommitProof
from ...pipeline.contributions import WORD

ANY_GENERATION = 1 << 52  # the vote of a rank that is not in the next generation; exact as a float64
_SLOTS = 4
_PARTS, _PART_BITS = 4, 16  # of a tally: sums over 2^37 ranks of such a part are exact as float64


class Flag(IntFlag):
    """A rank's requests to all; the record holds the union."""

    OVERFLOW = 1  # its gradients overflowed the fixed point: redo the step as the next attempt
    SAVE = 2  # a checkpoint is due after this step
    HOLD = 4  # publish a checkpoint after this step and stop
    BUSY = 8  # its last snapshot is still being stored: there is no room for another
    MISCOUNT = 16  # no vote: some contribution is in the sums twice, or not at all; redo the step


class InvalidCommit(RuntimeError):
    """A vote is missing, or ranks voted on different steps or attempts."""


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's contribution to the commit of a step."""

    rank: int
    step: int
    attempt: int
    prepared: int
    flags: Flag
    # {index of the parameter in the model: norm}, for parameters whose norms this rank contributes.
    norms: Mapping[int, float]
    # Of its part of each bucket's sum, and then of each section; 0 for those that it does not host.
    tallies: Sequence[int]

    def vector(self, num_ranks: int, num_parameters: int) -> list[float]:
        values = [0.0] * (1 + _SLOTS * num_ranks + num_parameters)
        values[0] = 1.0
        at = 1 + _SLOTS * self.rank
        values[at : at + _SLOTS] = map(float, (self.step, self.attempt, self.prepared, self.flags))
        for index, norm in self.norms.items():
            values[1 + _SLOTS * num_ranks + index] = norm
        mask = (1 << _PART_BITS) - 1
        for tally in self.tallies:
            values += [float(tally >> _PART_BITS * part & mask) for part in range(_PARTS)]
        return values


def tallies_of(vector: Sequence[float], num_tallies: int) -> list[int]:
    """The tallies' sums over all ranks modulo 2^64, from the summed vector."""
    parts = [int(part) for part in vector[len(vector) - _PARTS * num_tallies :]]
    return [
        sum(part << _PART_BITS * place for place, part in enumerate(parts[first : first + _PARTS])) & WORD
        for first in range(0, len(parts), _PARTS)
    ]


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The result of one commit, equal on every rank that holds it. `step` counts from 0."""

    generation: int
    step: int
    attempt: int
    voters: int
    prepared: int  # the newest generation for which every rank is prepared
    flags: Flag
    norms: tuple[float, ...]  # one per parameter of the model, in its order

    @classmethod
    def from_vector(
        cls, generation: int, num_ranks: int, num_parameters: int, vector: Sequence[float]
    ) -> CommitRecord:
        """Parse the summed vector. Raises `InvalidCommit` if a vote is missing or ranks disagree."""
        slots = [vector[1 + _SLOTS * rank : 1 + _SLOTS * (rank + 1)] for rank in range(num_ranks)]
        steps = {(int(slot[0]), int(slot[1])) for slot in slots}
        if int(vector[0]) != num_ranks or len(steps) != 1:
            raise InvalidCommit(
                f"generation {generation}: {vector[0]:.0f} of {num_ranks} votes, on {sorted(steps)}"
            )
        step, attempt = steps.pop()
        flags = Flag(0)
        for slot in slots:
            flags |= Flag(int(slot[3]))
        return cls(
            generation=generation,
            step=step,
            attempt=attempt,
            voters=num_ranks,
            prepared=min(int(slot[2]) for slot in slots),
            flags=flags,
            norms=tuple(vector[1 + _SLOTS * num_ranks :][:num_parameters]),
        )

    @property
    def proof(self) -> CommitProof:
        """What members compare when a generation forms; it counts committed steps."""
        return CommitProof(self.step + 1, self.attempt, self.generation)

    def to_json(self) -> dict[str, Any]:
        return TypeAdapter(CommitRecord).dump_python(self, mode="json")

    @classmethod
    def from_json(cls, value: Any) -> CommitRecord:
        """Read what `to_json` wrote. Raises `InvalidCommit` naming what is malformed."""
        try:
            return TypeAdapter(cls).validate_python(value)
        except ValidationError as error:
            raise InvalidCommit(f"malformed commit record: {error}") from error
