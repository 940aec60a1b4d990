"""What is replayed: a job, the calibration of its model, and who came and went."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...protocol.messages import DeviceInfo, Recipe
from ...simulator import Calibration, MorphCosts, NodeChange, TraceEvent
from ..core import Timing
from ..core.strikes.table import Kind
from ..spec.job_spec import JobSpec
from .fleet import GRAPH_HASH

# Every death is told in the replay, and nobody is ever merely silent: so no heartbeat needs to be simulated,
# and VMs that only wait cost nothing. A request waits until the trace has a node, as it does at a cloud that
# has no capacity; a real manager asks anew every quarter of an hour, which changes nothing. Its market takes
# VMs, not the job's code: no person is asked why they are lost.
TIMING = Timing(  # what is replayed tells nothing in between, and never stands still
    vm_lease_s=math.inf,
    request_timeout_s=math.inf,
    form_timeout_s=math.inf,
    progress_floor_s=math.inf,
    start_wait_s=math.inf,
    profile_wait_s=math.inf,
).with_row(Kind.LOST_VM, limit=math.inf)
EPOCH_S = 1e6  # the core's clock at the start of the trace: times of zero would look like none at all
_NO_CAP_BYTES = 2**53 - 1  # the largest size that a report may state


class ReplayError(ValueError):
    """Job file, calibration and trace do not go together; the message names the field to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The input of a replay. Raises `ReplayError` when its parts contradict each other."""

    spec: JobSpec
    """With an absolute `checkpoint.uri`, which is never opened."""
    calibration: Calibration
    trace: Sequence[TraceEvent]
    costs: MorphCosts = field(default_factory=MorphCosts)
    hours: float | None = None
    """How long is replayed; None: until the trace's last event."""
    notice_s: float = 0.0
    """How long before a removal the cloud says so. Traces hold no notices: this one is made up."""
    noticed: Collection[str] | None = None
    """The nodes whose removal the cloud announces; None: all."""

    def __post_init__(self) -> None:
        if not self.trace:
            raise ReplayError("trace: it has no events")
        if self.hours is not None and not (math.isfinite(self.hours) and self.hours > 0):
            raise ReplayError(f"hours: {self.hours:g} is not a number > 0")
        if not (math.isfinite(self.notice_s) and self.notice_s >= 0):
            raise ReplayError(f"notice: {self.notice_s:g} is not a number of seconds >= 0")
        if self.end_ns <= 0:
            raise ReplayError("trace: all its events are at its start; say with `hours` how long to replay")
        batch, m = self.spec.training.global_batch_size, self.calibration.microbatch_size
        if batch % m:
            raise ReplayError(
                f"training.global_batch_size: {batch} is not divisible by the calibration's "
                f"microbatch_size ({m})"
            )
        parallelism = self.spec.parallelism
        wanted = {"microbatch_size": m, "num_sections": self.calibration.num_sections}
        for name, known in wanted.items():
            given = getattr(parallelism, name)
            if given is not None and given != known:
                raise ReplayError(f"parallelism.{name}: {given}, but the calibration is for {known}")
        if self.calibration.device_kind not in ("cpu", "cuda"):
            raise ReplayError(f"device_kind: {self.calibration.device_kind!r} is neither cpu nor cuda")

    @property
    def end_ns(self) -> int:
        if self.hours is not None:
            return round(self.hours * 3600e9)
        return self.trace[-1].time_ms * 1_000_000

    @property
    def device(self) -> DeviceInfo:
        kind = "cuda" if self.calibration.device_kind == "cuda" else "cpu"
        memory_bytes = self.spec.resources.device_memory or _NO_CAP_BYTES
        return DeviceInfo(kind=kind, name="replayed", memory_bytes=memory_bytes)

    @property
    def recipe(self) -> Recipe:
        calibration = self.calibration
        return Recipe(
            microbatch_size=calibration.microbatch_size,
            num_micro_batches=self.spec.training.global_batch_size // calibration.microbatch_size,
            cuts=list(range(1, calibration.num_sections)),
            graph_hash=GRAPH_HASH,
            threads=self.spec.resources.threads,
            device_kind=self.device.kind,
            torch_version=calibration.versions.get("torch", ""),
            bundle_sha256="",
        )

    def removals(self) -> dict[int, int]:
        """For each event of the trace that brings a node, by index: when that node goes again, in ms."""
        since: dict[str, int] = {}
        found: dict[int, int] = {}
        for index, event in enumerate(self.trace):
            if event.change is NodeChange.ADD:
                since[event.node] = index
            else:
                found[since[event.node]] = event.time_ms
        return found
