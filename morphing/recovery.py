"""How survivors who may disagree about the last commit come to one state, and who sends which section to
whom.

Pure functions of what every member reported: each member computes the same answer from the same reports, so
no decision travels. An all-reduce killed in the middle can return on some ranks and fail on others; therefore
a member keeps the commit's record until the next one, and its reduced gradients until they are applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..pipeline import Range


class NoReplica(ValueError):
    """A section that a member wants is held by nobody; the message names both."""


@dataclass(frozen=True, slots=True, order=True)
class Record:
    """What the all-reduce that ended a step said: proof that the step committed, at every rank or at none."""

    step: int
    """Steps committed once this one is applied."""
    attempt: int
    voters: int
    generation: int


@dataclass(frozen=True, slots=True)
class MemberState:
    """Where one member is when a generation forms."""

    applied_step: int | None
    """Steps committed and applied; None if it holds no state."""
    record: Record | None
    """The newest commit it saw, whether applied yet or not."""
    reduced_step: int | None
    """The step for which it holds reduced gradients, not yet applied."""
    sections: frozenset[int]
    """Sections whose state it holds, at `applied_step`."""
    reduced_by: tuple[int, int] | None = None
    """(generation, attempt) in which those gradients were reduced; None is taken on trust."""


@dataclass(frozen=True, slots=True)
class Application:
    """`member` must apply its reduced gradients, with the record that member `record_holder` holds."""

    member: int
    record_holder: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """The state that all members go on from.

    `rung` store: some section has no living holder at any one step, so `step` is None, nobody applies
    anything and everyone drops what it holds. `rung` peers: `keep` are the members that are at `step` once
    `apply` is done, `drop` those that hold an older or a rival state and must forget it, `holders` who has
    each section then, and `record` the commit of `step` if anyone saw it, which every member should keep from
    now on.
    """

    rung: Literal["peers", "store"]
    step: int | None
    record: Record | None
    apply: tuple[Application, ...]
    keep: tuple[int, ...]
    drop: tuple[int, ...]
    holders: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """Member `source` sends the whole state of `section` to member `destination`."""

    section: int
    source: int
    destination: int


def agree(
    standings: Sequence[MemberState],
    expected_voters_by_generation: Mapping[int, int] | None = None,
    *,
    num_sections: int,
) -> Agreement:
    """The newest step at which the survivors hold every section, counting a commit that any of them saw.

    A record counts only if its voters are the workers of its generation (where given; a generation that is
    not in the mapping has none) and its step is the holder's own or the next. A member at the step before
    applies if it has the reduced gradients and somebody has the record. A step that some member applied is
    therefore never lost while the members that are at it, or can get there, cover all sections. If they do
    not, an older step that is covered is taken; the caller compares it with the newest checkpoint, which may
    be newer still.
    """
    reachable = {
        step
        for standing in standings
        if standing.applied_step is not None
        for step in (standing.applied_step, standing.applied_step + 1)
    }
    for step in sorted(reachable, reverse=True):
        found = _at(step, standings, expected_voters_by_generation)
        if all(found.holders.get(section) for section in range(num_sections)):
            return found
    everyone = tuple(m for m, standing in enumerate(standings) if standing.applied_step is not None)
    return Agreement("store", None, None, apply=(), keep=(), drop=everyone, holders={})


def transfers(holders: Mapping[int, Sequence[int]], wanted: Sequence[Range | None]) -> tuple[Transfer, ...]:
    """What must be sent so that each member m holds the sections of `wanted[m]` (None: it wants none).

    One global order (section, then destination) that all members follow; sources share the load, the least
    loaded first. Raises `NoReplica` when a wanted section has no holder.
    """
    result: list[Transfer] = []
    load: dict[int, int] = {}
    sections = sorted({section for span in wanted if span is not None for section in span.sections})
    for section in sections:
        sources = holders.get(section, ())
        for destination, span in enumerate(wanted):
            if span is None or section not in span or destination in sources:
                continue
            if not sources:
                raise NoReplica(f"section {section}: member {destination} needs it and nobody holds it")
            source = min(sources, key=lambda member: (load.get(member, 0), member))
            load[source] = load.get(source, 0) + 1
            result.append(Transfer(section, source, destination))
    return tuple(result)


def _at(step: int, standings: Sequence[MemberState], expected: Mapping[int, int] | None) -> Agreement:
    """What holds if `step` is the one: who is there, who can get there, and which sections they cover."""
    records = [
        standing.record if standing.record is not None and standing.record.step == step else None
        for standing in standings
    ]
    witnesses = [m for m, standing in enumerate(standings) if records[m] and _is_valid(standing, expected)]
    # Two commits of one step can only come from a generation that was closed without its
    # member's knowledge. The newer one is what others have built upon.
    record = max(
        (r for m in witnesses if (r := records[m])), key=lambda r: (r.generation, r.attempt), default=None
    )
    agreeing = [m for m in range(len(standings)) if None in (record, records[m]) or records[m] == record]
    keep = [m for m in agreeing if standings[m].applied_step == step]
    apply: list[Application] = []
    if record is not None:
        witness = min(m for m in witnesses if records[m] == record)
        apply = [Application(m, witness) for m in agreeing if _can_apply(standings[m], record)]
    kept = sorted(keep + [application.member for application in apply])
    holders: dict[int, tuple[int, ...]] = {}
    for member in kept:
        for section in standings[member].sections:
            holders[section] = (*holders.get(section, ()), member)
    dropped = (
        m for m, standing in enumerate(standings) if standing.applied_step is not None and m not in kept
    )
    return Agreement(
        "peers", step, record, tuple(apply), tuple(kept), tuple(dropped), dict(sorted(holders.items()))
    )


def _can_apply(standing: MemberState, record: Record) -> bool:
    if standing.applied_step != record.step - 1 or standing.reduced_step != record.step:
        return False
    return standing.reduced_by in (None, (record.generation, record.attempt))


def _is_valid(standing: MemberState, expected: Mapping[int, int] | None) -> bool:
    record, applied = standing.record, standing.applied_step
    if record is None or applied is None or record.step not in (applied, applied + 1):
        return False
    return expected is None or expected.get(record.generation) == record.voters
