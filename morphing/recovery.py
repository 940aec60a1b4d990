"""How survivors that disagree about the last commit agree on one state, and who sends which section to whom.

Pure functions of what every member reported: each member computes the same result from the same reports, so
no result is sent. An all-reduce that is killed in the middle can return on some ranks and fail on others;
therefore a member keeps the commit's record until the next one, and its reduced gradients until applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from typing import Literal

from ..pipeline import Range
from ..protocol.messages import CheckpointRef

Rung = Literal["start", "peers", "store"]


class NoReplica(ValueError):
    """No member holds a section that another wants; the message names section and member."""


@dataclass(frozen=True, slots=True, order=True)
class CommitProof:
    """The result of the all-reduce that ended a step; it proves that the step is committed."""

    num_steps: int
    """Number of steps committed, this one included."""
    attempt: int
    generation: int


@dataclass(frozen=True, slots=True)
class MemberState:
    """What one member holds when a generation forms."""

    applied_step: int | None
    """Number of steps applied; None if it holds no state."""
    record: CommitProof | None
    """The newest commit that it saw, applied or not."""
    reduced_step: int | None
    """The step for which it holds reduced gradients, not yet applied."""
    sections: frozenset[int]
    """Sections whose state it holds, at `applied_step`."""
    reduced_by: tuple[int, int] | None = None
    """(generation, attempt) in which those gradients were reduced; None matches any record."""
    branch: int = 0
    """The generation whose commit went into its state last; of a checkpoint, the one that published it."""
    agreed_in: int = 0
    """The newest generation whose members agreed on the state that this one is of."""
    void_until: int = 0
    """The newest generation known in which hosts of a section had different state."""


NOTHING = MemberState(None, None, None, frozenset())
"""Of a member that holds no state."""


@dataclass(frozen=True, slots=True)
class Application:
    """`member` must apply its reduced gradients, with the record that member `record_holder` holds."""

    member: int
    record_holder: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """The state that all members continue from.

    `rung` store: at no single step do living members hold every section, or a checkpoint is newer; `step` is
    None, `apply` is empty and all members drop what they hold. `rung` start: as store, but nothing was
    published. `rung` peers: `keep` are the members at `step` once `apply` is done, `drop` those whose older
    or conflicting state must be dropped, `holders` the members that then hold each section, `record` the
    commit of `step` if any member saw it (every member keeps that record), and `branch` the generation whose
    commit went into the state last.
    """

    rung: Rung
    step: int | None
    record: CommitProof | None
    apply: tuple[Application, ...]
    keep: tuple[int, ...]
    drop: tuple[int, ...]
    holders: Mapping[int, tuple[int, ...]]
    branch: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """Member `source` sends the whole state of `section` to member `destination`."""

    section: int
    source: int
    destination: int


def agree(
    standings: Sequence[MemberState],
    *,
    num_sections: int,
    checkpoints: Iterable[CheckpointRef] = (),
) -> Agreement:
    """Agree on the newest step at which the survivors hold every section.

    Only the newest branch counts; or, where sections are missing there, the branch of those that agreed last.
    A record is valid only if its step is the holder's own or the next. A member one step behind applies the
    step if it has the reduced gradients and some member has the record. So a step that any member applied is
    not lost while the members at it, or able to apply it, hold all sections. Otherwise an older step with all
    sections is taken. `checkpoints` are those that are published; if one of them is newer than the step
    found, it is read instead. A state that was agreed on in a generation up to the greatest `void_until` does
    not count: its hosts differed, and sums of gradients have spread the difference to all of them.
    """
    checkpoints = tuple(checkpoints)
    void = max((standing.void_until for standing in standings), default=0)
    standings = (
        [NOTHING if standing.agreed_in <= void else standing for standing in standings] if void else standings
    )
    found, branch = _newest_branch(standings, num_sections)
    if found is None or _is_overtaken(found, standings, checkpoints):
        found = Agreement("store" if checkpoints else "start", None, None, (), (), (), {})
    held = (member for member, standing in enumerate(standings) if standing.applied_step is not None)
    drop = tuple(member for member in held if member not in found.keep)
    return replace(found, drop=drop, branch=found.record.generation if found.record else branch)


def covers(held: Iterable[Iterable[int]], num_sections: int) -> bool:
    """Whether each section is among what some member holds."""
    return set(range(num_sections)) <= set[int]().union(*held)


def transfers(holders: Mapping[int, Sequence[int]], wanted: Sequence[Range | None]) -> tuple[Transfer, ...]:
    """The transfers after which each member m holds the sections of `wanted[m]` (None: none).

    All members execute them in the one order returned (section, then destination). The source is the holder
    with the fewest transfers so far. Raises `NoReplica` when a wanted section has no holder.
    """
    result: list[Transfer] = []
    load: dict[int, int] = {}
    sections = sorted({section for span in wanted if span is not None for section in span.sections})
    for section in sections:
        sources = frozenset(holders.get(section, ()))
        idlest = [(load.get(member, 0), member) for member in sources]
        heapify(idlest)
        for destination, span in enumerate(wanted):
            if span is None or section not in span or destination in sources:
                continue
            if not sources:
                raise NoReplica(f"section {section}: member {destination} needs it and nobody holds it")
            num_sent, source = idlest[0]
            heapreplace(idlest, (num_sent + 1, source))
            load[source] = num_sent + 1
            result.append(Transfer(section, source, destination))
    return tuple(result)


def _is_current(standing: MemberState, newest: int) -> bool:
    """Whether a member's state is on the branch with which the others continued.

    A worker that was left out of a generation may come back with steps of the one before, even more than the
    others have taken since. That is another branch, which with `numerics: fast` has other values. A member of
    the newest generation that has not applied its commit yet is current.
    """
    if standing.applied_step is None:
        return False
    return standing.branch == newest or (standing.reduced_by is not None and standing.reduced_by[0] == newest)


def _newest_branch(standings: Sequence[MemberState], num_sections: int) -> tuple[Agreement | None, int]:
    """The agreement on the newest branch, and that branch.

    A member that was left out may have seen a commit of which the others, who went on without it, know
    nothing: then the newest branch is its own. Theirs is not given up for it.
    """
    newest = max((standing.branch for standing in standings), default=0)
    agreed = max((standing.agreed_in, standing.branch) for standing in standings)[1] if standings else 0
    for branch in dict.fromkeys((newest, agreed)):
        current = [standing if _is_current(standing, branch) else NOTHING for standing in standings]
        found = _newest(current, num_sections)
        if found is not None:
            return found, branch
    return None, newest


def _newest(standings: Sequence[MemberState], num_sections: int) -> Agreement | None:
    """The newest step that is covered; None: there is none."""
    reachable = {
        step
        for standing in standings
        if standing.applied_step is not None
        for step in (standing.applied_step, standing.applied_step + 1)
    }
    for step in sorted(reachable, reverse=True):
        found = _at(step, standings)
        if covers([found.holders], num_sections):
            return found
    return None


def _is_overtaken(
    found: Agreement, standings: Sequence[MemberState], checkpoints: Iterable[CheckpointRef]
) -> bool:
    """Whether a checkpoint is newer than the state that was found.

    Checkpoints of generations before the one in which its members agreed existed when they did: they
    continued from one, or skipped one that no member could read, which may have a later step than theirs.
    """
    assert found.step is not None, "a state that was found is of a step"
    agreed_in = max((standings[member].agreed_in for member in found.keep), default=0)
    return any(ref.age_rank > (agreed_in, found.step) for ref in checkpoints)


def _at(step: int, standings: Sequence[MemberState]) -> Agreement:
    """The agreement on `step`: which members are at it or can apply it, and which sections they hold."""
    records = [
        standing.record if standing.record is not None and standing.record.num_steps == step else None
        for standing in standings
    ]
    witnesses = [m for m, standing in enumerate(standings) if records[m] and _is_valid(standing)]
    # Two commits of one step happen only if a generation was closed without a member's knowledge.
    # Others have continued from the newer one.
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
    return Agreement("peers", step, record, tuple(apply), tuple(kept), (), dict(sorted(holders.items())))


def _can_apply(standing: MemberState, record: CommitProof) -> bool:
    if standing.applied_step != record.num_steps - 1 or standing.reduced_step != record.num_steps:
        return False
    return standing.reduced_by in (None, (record.generation, record.attempt))


def _is_valid(standing: MemberState) -> bool:
    record, applied = standing.record, standing.applied_step
    return record is not None and applied is not None and record.num_steps in (applied, applied + 1)
