"""Forms a generation: exchanges records, agrees on one state, and fetches missing sections."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TypeVar

import torch
from pydantic import TypeAdapter

from ...checkpoint import (
    CheckpointError,
    Corrupt,
    Manifest,
    NotFound,
    Store,
    load_manifest,
    read_parts,
    retrying,
)
from ...checkpoint.tensors import unpack
from ...model.errors import WorkerError
from ...model.partition.partition import Section
from ...morphing.recovery import Agreement, MemberState, Rung, Transfer, agree, transfers
from ...protocol.messages import At, CheckpointRef, DamagedCheckpoint, Formed
from ..execution.buckets import Bucket
from ..execution.commit import CommitRecord
from ..execution.gloo import ProcessGroup
from ..execution.session import Session
from ..execution.state import ModelState
from ..progress import ProgressCounters
from ..sections.state import entry_owner, group_owner
from .kept_step import KeptStep, Shown, keep_step, settle_step, show
from .store_trouble import StoreTrouble

log = logging.getLogger("makara.joining")

V = TypeVar("V")

_MEMBER_STATE = TypeAdapter(MemberState)
_PIECE_BYTES = 16 << 20  # in which a section is sent to a peer; each received piece is progress


class NoCheckpoint(WorkerError):
    """Checkpoints are published, but none of them can be read; the message says why for each."""


class MembersDisagree(WorkerError):
    """Members of a generation chose different states to continue from, or different ways to get there."""


@dataclass(frozen=True)
class CheckpointLocation:
    """Where a job's checkpoints are. `on_trouble` gets the store's message while calls are retried, and an
    empty text when that is over."""

    store: Store
    job: str
    on_trouble: Callable[[str], None] = lambda _: None


class Phases:
    """Seconds spent in each phase, in order."""

    def __init__(self, rendezvous_s: float) -> None:
        self.seconds = {"rendezvous": rendezvous_s}
        self._since = time.monotonic()

    def end(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = now - self._since
        self._since = now


def join_generation(
    session: Session,
    state: ModelState,
    source: CheckpointLocation,
    buckets: Sequence[Bucket],
    free: Callable[[], float] = lambda: math.inf,
) -> Formed:
    """Bring this member, which has met the others, to the generation's first step.

    Afterwards it holds exactly its range, in the agreed state, and what counts of the step in flight. `free`:
    bytes of memory that it may still take.

    Its previous state is kept until all members have what they need, so that a failure before loses nothing.
    Raises `Interrupted`, `MembersDisagree` before anything is sent, `NoCheckpoint`, and what loading raises.
    """
    phases = Phases(session.rendezvous_s)
    agreement, shown = _agree(session, state, buckets, free)
    moves = _moves(session, agreement)
    state.origins = _origins(session, agreement, moves)
    kept = None if agreement.step is None else keep_step(session, state, agreement, shown, buckets)
    phases.end("agree")
    with session.progress.being(At.MEMBERS):
        kept = _compare(session, agreement, moves, kept)
        session.link(_neighbours(session, moves, kept))
        phases.end("links")
        session.open_groups(buckets)
        phases.end("groups")
    rung, step, loaded_branch, skipped = _load(session, state, source, agreement, moves, kept)
    phases.end("load")
    # Before telling the others: after that a donor may drop sections that only this member has as well.
    state.applied = step
    state.branch = agreement.branch if loaded_branch is None else loaded_branch
    state.agreed_in = session.number
    state.reduced = None  # they are applied, or the state agreed on is without them
    session.gather("ready", None)
    state.keep_only(session.wanted)
    settle_step(session, state, kept)
    phases.end("ready")
    formed = Formed(generation=session.number, step=step, rung=rung, phases_s=phases.seconds, skipped=skipped)
    return formed if kept is None else formed.model_copy(update={"in_flight": kept.counts})


def _agree(
    session: Session, state: ModelState, buckets: Sequence[Bucket], free: Callable[[], float]
) -> tuple[Agreement, Sequence[Shown]]:
    """Exchange states; apply or drop as agreed. Returns what each member has of the step in flight, too."""
    record = state.record
    reports = session.gather(
        "standing",
        {
            "standing": _MEMBER_STATE.dump_python(state.standing(), mode="json"),
            "record": None if record is None else record.to_json(),
            "in_flight": show(session, state, buckets, free),
            "bits": state.bits,
            "origins": state.origins,
        },
    )
    session.bits = [report["bits"] for report in reports]
    session.origins = [{int(n): worker for n, worker in report["origins"].items()} for report in reports]
    standings = [_MEMBER_STATE.validate_python(report["standing"]) for report in reports]
    state.void_until = max(standing.void_until for standing in standings)
    agreement = agree(
        standings,
        num_sections=session.plan.num_sections,
        checkpoints=session.checkpoints,
    )
    if session.rank not in agreement.keep:
        state.forget()
    for application in agreement.apply:
        if application.member == session.rank:
            state.apply(CommitRecord.from_json(reports[application.record_holder]["record"]))
    shown = [Shown.from_json(report["in_flight"]) for report in reports]
    return agreement, [one if rank in agreement.keep else one.forgotten() for rank, one in enumerate(shown)]


def _compare(
    session: Session, agreement: Agreement, moves: Sequence[Transfer], kept: KeptStep | None
) -> KeptStep | None:
    """Compare what all members are about to do. Where they differ about the step in flight alone, nothing of
    it is kept."""
    state = repr((agreement.step, agreement.branch, agreement.keep, agreement.apply, moves))
    mine = [hashlib.sha256(state.encode()).hexdigest(), "" if kept is None else kept.digest]
    choices = session.introduce(mine)
    others = [rank for rank, (chosen, _) in enumerate(choices) if chosen != mine[0]]
    if others:
        raise MembersDisagree(
            f"generation {session.number}: rank {session.rank} and ranks {others} do not agree on the state"
            f" to continue from; this one chose step {agreement.step} of generation {agreement.branch}"
        )
    if len({step for _, step in choices}) == 1:
        return kept
    log.error("generation %d: members disagree on what is kept: the step begins again", session.number)
    return None


def _moves(session: Session, agreement: Agreement) -> tuple[Transfer, ...]:
    """The sections that members copy from each other."""
    if agreement.step is None:
        return ()
    wanted = [*session.plan.ranges, *([None] * (len(session.members) - session.plan.num_workers))]
    return transfers(agreement.holders, wanted)


def _origins(session: Session, agreement: Agreement, moves: Sequence[Transfer]) -> dict[int, str]:
    """Note for all members whose state they will hold; returns this member's entry."""
    if agreement.step is None:  # each loads its own
        session.origins = [{} for _ in session.members]
    for move in moves:
        before, worker = session.origins[move.source], session.members[move.source]
        before.setdefault(move.section, worker)
        session.origins[move.destination][move.section] = before[move.section]
    return session.origins[session.rank]


def _neighbours(session: Session, moves: Sequence[Transfer], kept: KeptStep | None) -> list[int]:
    """The members with which this one shares a group, since gloo connects all members of a group."""
    workers = set(range(session.plan.num_workers))
    groups = [workers, _involved(moves, kept)]
    return sorted(set().union(*(group for group in groups if session.rank in group)) - {session.rank})


def _involved(moves: Sequence[Transfer], kept: KeptStep | None) -> set[int]:
    sections = {rank for move in moves for rank in (move.source, move.destination)}
    parcels = () if kept is None else kept.step.moves
    return sections | {rank for move in parcels for rank in (move.member, move.destination)}


def _load(
    session: Session,
    state: ModelState,
    source: CheckpointLocation,
    agreement: Agreement,
    moves: Sequence[Transfer],
    kept: KeptStep | None,
) -> tuple[Rung, int, int | None, list[DamagedCheckpoint]]:
    """(rung, step, the branch if it is another than the agreement's, checkpoints that cannot be read)."""
    if agreement.step is not None:
        _copy_from_peers(session, state, moves, kept)
        return "peers", agreement.step, None, []
    if session.checkpoints:
        loaded, skipped = _load_from_store(session, state, source)
        return "store", loaded.step, loaded.generation, skipped
    for index in session.wanted:
        state.runtime.host(index)
        session.progress.operations += 1
    return "start", 0, 0, []


def _copy_from_peers(
    session: Session, state: ModelState, moves: Sequence[Transfer], kept: KeptStep | None
) -> None:
    """Execute the transfers, which all members do in one order, so that they cannot deadlock: sections, then
    partial sums of the step in flight."""
    involved = sorted(_involved(moves, kept))
    if session.rank not in involved:
        return
    progress = session.progress
    with progress.being(At.PEER):
        group = session.group("transfer", involved)

        def send(number: int, payload: bytes, peer: int) -> None:
            session.courier.call(partial(_send, group, payload, peer, number, progress), [peer])

        def receive(number: int, peer: int) -> bytes:
            return session.courier.call(partial(_receive, group, peer, number, progress), [peer])

        for number, move in enumerate(moves):
            if move.source == session.rank:
                send(number, state.pack_section(move.section), move.destination)
            elif move.destination == session.rank:
                state.unpack_section(move.section, receive(number, move.source))
        if kept is None:
            return
        parcels = state.in_flight.parcels
        for number, move in enumerate(kept.step.moves, len(moves)):
            if move.member == session.rank:
                send(number, parcels.sum_of(move.number).pack(), move.destination)
            elif move.destination == session.rank:
                bucket, shown = kept.bucket_of(move), kept.shown[move.member].parcels[move.number]
                payload = receive(number, move.member)
                state.in_flight.receive(move, shown, bucket, payload, state.scales())


def _send(group: ProcessGroup, payload: bytes, peer: int, number: int, progress: ProgressCounters) -> None:
    group.send(torch.tensor([len(payload)], dtype=torch.int64), peer, 2 * number)
    for piece in torch.frombuffer(bytearray(payload), dtype=torch.uint8).split(_PIECE_BYTES):
        group.send(piece, peer, 2 * number + 1)
        progress.loaded += 1


def _receive(group: ProcessGroup, peer: int, number: int, progress: ProgressCounters) -> bytes:
    size = torch.empty(1, dtype=torch.int64)
    group.receive(size, peer, 2 * number)
    data = torch.empty(int(size), dtype=torch.uint8)
    for piece in data.split(_PIECE_BYTES):
        group.receive(piece, peer, 2 * number + 1)
        progress.loaded += 1
    return data.numpy().tobytes()


def _load_from_store(
    session: Session, state: ModelState, source: CheckpointLocation
) -> tuple[CheckpointRef, list[DamagedCheckpoint]]:
    """Load the newest checkpoint that every member can read; returns it, and those that were tried before."""
    skipped: list[DamagedCheckpoint] = []
    for number, checkpoint in enumerate(session.checkpoints):
        fault = None
        try:
            _read_range(session, state, source, checkpoint)
        except (Corrupt, NotFound) as error:
            fault = str(error)
        outcomes: list[str | None] = session.gather(f"loaded/{number}", fault)
        why = next((outcome for outcome in outcomes if outcome is not None), None)
        if why is None:
            return checkpoint, skipped
        log.error("checkpoint %s is damaged: %s", checkpoint, why)
        skipped.append(DamagedCheckpoint(checkpoint=checkpoint, why=why))
        state.forget()
    reasons = "; ".join(f"that of step {found.checkpoint.step}: {found.why}" for found in skipped)
    raise NoCheckpoint(f"none of the checkpoints of job {source.job} can be read: {reasons}")


def _read_range(
    session: Session, state: ModelState, source: CheckpointLocation, checkpoint: CheckpointRef
) -> None:
    if not session.wanted:
        return
    chain = state.runtime.chain
    owned = {name for index in session.wanted for name in _state_names(chain.sections[index])}
    cancel = Event()
    trouble = StoreTrouble("loading a checkpoint", source.on_trouble)

    def read() -> tuple[Manifest, dict[tuple[int, int], bytes]]:
        manifest = retry(lambda: load_manifest(source.store, source.job, checkpoint))
        parts = [part for part in manifest.parts if any(entry_owner(name) in owned for name in part.tensors)]
        return manifest, read_parts(source.store, parts, retry=retry, on_read=on_read)

    def retry(call: Callable[[], V]) -> V:
        return retrying(call, patience_s=float("inf"), cancel=cancel, refusals=True, on_retry=on_retry)

    def on_read() -> None:
        session.progress.loaded += 1
        trouble.tell("")

    def on_retry(error: CheckpointError, _delay_s: float) -> None:
        trouble.tell(str(error))

    try:
        with session.progress.being(At.STORE):
            manifest, parts = session.courier.call(read)
    finally:
        cancel.set()  # if interrupted: let the abandoned read end
        trouble.close()
    tensors: dict[str, torch.Tensor] = {}
    for payload in parts.values():
        tensors |= unpack(payload)[0]
    scalars = {name: value for values in manifest.metadata.values() for name, value in values.items()}
    for index in session.wanted:
        own = _state_names(chain.sections[index])
        state.load_section(index, _only(tensors, own), _only(scalars, own))


def _state_names(section: Section) -> set[str]:
    # "": what belongs to the job as a whole
    return {"", group_owner(section.index), *section.parameters, *section.buffers}


def _only(values: Mapping[str, V], names: set[str]) -> dict[str, V]:
    return {entry: value for entry, value in values.items() if entry_owner(entry) in names}
