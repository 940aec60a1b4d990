"""Simulated VMs and trainers: what they hold, and what they report of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...morphing import NOTHING, CommitProof, MemberState
from ...pipeline import Range
from ...protocol.messages import (
    TRAINER_PROTOCOL,
    CheckpointRef,
    DeviceInfo,
    Formed,
    Phase,
    Profile,
    Profiling,
    Report,
    WorkerReport,
)

# Reports are copies of these with fields set: many thousands are made, of values that are known to be valid.
# (pydantic's `model_construct` inspects the factory of each default: a replay would take thrice as long.)
_ANY_WORKER = WorkerReport(worker="", phase=Phase.STARTING)
_ANY_REPORT = Report.model_construct(
    vm="", sequence=0, orders_version=0, address="127.0.0.1", devices=[], workers=[]
)


@dataclass(eq=False)
class Trainer:
    """One incarnation of one worker. Its sections are as of `step`, and nobody simulates their weights."""

    worker: str
    incarnation: int = 1
    phase: Phase = Phase.STARTING
    generation: int = 0
    prepared: int = 0
    graph_hash: str | None = None
    step: int = 0
    span: Range | None = None
    """The sections that it holds; None: none."""
    branch: int = 0
    """The generation whose commit went into them last, or that published the checkpoint they are from."""
    agreed_in: int = 0
    """The generation that formed with them last."""
    record: CommitProof | None = None
    """Of the newest commit that it saw, in a world in which others may not have."""
    reduced_in: int = 0
    """The generation of gradients that it holds for the next step; 0: it holds none."""
    formed: Formed | None = None
    published: CheckpointRef | None = None
    profiling: Profiling | None = None
    profile: Profile | None = None
    trainer_protocol: int = TRAINER_PROTOCOL

    def commit(self, generation: int) -> None:
        """Take a step that this generation committed."""
        self.step += 1
        self.branch, self.reduced_in = generation, 0
        self.record = CommitProof(num_steps=self.step, attempt=0, generation=generation)

    def standing(self) -> MemberState:
        """What it holds, as the others are told when a generation forms."""
        if self.span is None:
            return NOTHING
        return MemberState(
            applied_step=self.step,
            record=self.record,
            reduced_step=self.step + 1 if self.reduced_in else None,
            sections=frozenset(self.span.sections),
            reduced_by=(self.reduced_in, 0) if self.reduced_in else None,
            branch=self.branch,
            agreed_in=self.agreed_in,
        )

    def take_part(self, span: Range, branch: int, formed: Formed) -> None:
        """The generation that it was forming has formed: it runs, with these sections."""
        self.phase, self.formed, self.span, self.step = Phase.RUNNING, formed, span, formed.step
        self.branch, self.agreed_in, self.record, self.reduced_in = branch, formed.generation, None, 0

    def leave(self) -> None:
        """It has handed over what it held, and takes no part."""
        self.phase, self.span, self.step = Phase.LEFT, None, 0

    def report(self) -> WorkerReport:
        return _ANY_WORKER.model_copy(update=self.told())

    def told(self) -> dict[str, Any]:
        """The fields of its report."""
        return {
            "worker": self.worker,
            "incarnation": self.incarnation,
            "phase": self.phase,
            "generation": self.generation,
            "prepared": self.prepared,
            "endpoint": f"{self.worker}:{self.prepared}" if self.prepared else None,
            "graph_hash": self.graph_hash,
            "step": self.step,
            "formed": self.formed,
            "published": self.published,
            "profiling": self.profiling,
            "profile": self.profile,
            "trainer_protocol": self.trainer_protocol,
        }


AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


@dataclass(eq=False)
class Vm(Generic[AnyTrainer]):
    """A VM with its agent and its trainers."""

    name: str
    trainers: list[AnyTrainer]
    alive: bool = True
    deadline_ns: int | None = None
    """When the cloud takes it, if it said so."""
    sequence: int = 0

    def report(self, now_ns: int, devices: Sequence[DeviceInfo], version: int) -> Report:
        """Its newest report, of an agent that has seen orders of this version."""
        self.sequence += 1
        left_s = None if self.deadline_ns is None else max(0, self.deadline_ns - now_ns) / 1e9
        known = {"vm": self.name, "sequence": self.sequence, "orders_version": version, "devices": devices}
        return _ANY_REPORT.model_copy(update=known | {"notice_deadline_s": left_s} | self.told())

    def told(self) -> dict[str, Any]:
        """More fields of its report."""
        return {"workers": [trainer.report() for trainer in self.trainers]}
