"""`Calibration`: measured times and sizes of a model on one kind of hardware (Varuna §4.3, Table 2).

It does not depend on P, D or G.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, ModelWrapValidatorHandler, model_validator
from pydantic.dataclasses import dataclass

from ..validation import Count, FieldFaults, FileFault, NotNegative, PositiveCount, Rate, adapter, validated

_CUTS = ("cut_bytes", "grad_cut_bytes")


class InvalidCalibration(FileFault):
    """A calibration that cannot be used; the message names the field and what would be accepted."""


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", defer_build=True))
class Record:
    """A part of a file of measurements. Made in Python, with values that do not fit, it raises pydantic's
    `ValidationError`. Validators are built at their first use, which halves what they add to an import.
    """

    required_in_files: ClassVar[tuple[str, ...]] = ()
    """Fields that have a default in Python and none in a file."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back to an equal record."""
        return adapter(type(self)).dump_python(self, mode="json")

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Read the object (`source_lines.read_json` reads its text). Raises `InvalidCalibration` naming the
        field."""
        return validated(value, cls, InvalidCalibration, "calibration")

    @model_validator(mode="wrap")
    @classmethod
    def _is_whole(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        found = read(value)
        missing = [name for name in cls.required_in_files if isinstance(value, Mapping) and name not in value]
        if missing:
            raise FieldFaults([(name, "is required") for name in missing])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Record):
    """One direction between two workers. A message occupies it for size / bandwidth, then takes the latency
    and a jitter that is exponential with mean `jitter_s`; messages of one kind keep their order.
    """

    latency_s: NotNegative
    bytes_per_s: Rate
    jitter_s: NotNegative = 0.0
    hop_latency_s: NotNegative | None = None
    """Latency, and below bandwidth, of a hop of a ring all-reduce; None: those of a message."""
    hop_bytes_per_s: Rate | None = None

    def occupied_s(self, size_bytes: int) -> float:
        """How long a message occupies the link; excludes the latency, which does not delay the next one."""
        return size_bytes / self.bytes_per_s

    def allreduce_s(self, size_bytes: int, ring: int) -> float:
        """Time of a ring all-reduce over D = `ring` workers: 2(D-1) hops, each carrying 1/D of the bytes. If
        hops were not measured, a hop takes as long as a message, with jitter at its mean."""
        if ring < 2:
            return 0.0
        latency_s = self.latency_s + self.jitter_s if self.hop_latency_s is None else self.hop_latency_s
        return 2 * (ring - 1) * (latency_s + size_bytes / ring / (self.hop_bytes_per_s or self.bytes_per_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedSum(Record):
    """Parameters that exactly these sections use: one all-reduce over all hosts of any of them."""

    sections: tuple[Count, ...]
    """Two or more, ascending."""
    gradient_bytes: Count
    """A part of `Calibration.gradient_bytes` of each of the sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(Record):
    """Times and sizes of one micro-batch of `microbatch_size` samples, per section 0..K-1.

    Lengths agree; numbers are finite and not negative.
    """

    required_in_files: ClassVar[tuple[str, ...]] = ("format", "versions")

    format: Literal[1] = 1
    forward_s: tuple[NotNegative, ...]
    """F_i: forward pass of a section; recomputation costs the same."""
    backward_s: tuple[NotNegative, ...]
    """B_i: backward pass and adding to the gradient sums, without recomputation."""
    optimizer_s: tuple[NotNegative, ...]
    """The end of a step: dividing the section's gradient sums, their norms, and updating its weights."""
    parameter_bytes: tuple[Count, ...]
    gradient_bytes: tuple[Count, ...]
    """Bytes that the section's hosts all-reduce once a step (with `numerics: exact`, 8 per element), those of
    `tied_sums` included."""
    state_bytes: tuple[Count, ...]
    """Resident on every host: weights, optimizer state, buffers and gradient sums."""
    activation_bytes: tuple[Count, ...]
    """Kept between the forward and the backward of one micro-batch without recomputation, including outputs,
    excluding inputs."""
    cut_bytes: tuple[Count, ...]
    """K-1 entries: bytes of one micro-batch that cross the cut after section k, forwards."""
    grad_cut_bytes: tuple[Count, ...]
    """K-1 entries: bytes of the gradients that cross the cut after section k, backwards."""
    inter_vm: Link
    intra_vm: Link
    device_kind: str
    microbatch_size: PositiveCount
    # One entry per section, or empty, which counts as zeros.
    batch_bytes: tuple[Count, ...] = ()
    """A micro-batch's samples, if the section takes any of their entries."""
    forward_peak_bytes: tuple[Count, ...] = ()
    """Peak of a running forward, beyond its inputs."""
    backward_peak_bytes: tuple[Count, ...] = ()
    """Peak of a running backward, beyond what was there when it began."""
    reduced_bytes: tuple[Count, ...] = ()
    """A step's gradients, from the end of their all-reduce until they are applied."""
    update_peak_bytes: tuple[Count, ...] = ()
    """Peak while a step is applied, beyond state and gradients."""
    input_s: tuple[NotNegative, ...] = ()
    """I_i and W_i: a backward in two operations, the gradients of the section's inputs and then those of its
    parameters. A section that cannot be split has its whole backward in I; the first one has it in W, for
    nobody waits for its I. Empty: not measured."""
    weight_s: tuple[NotNegative, ...] = ()
    pending_bytes: tuple[Count, ...] = ()
    """Kept between a micro-batch's I and W, beyond its activations."""
    snapshot_bytes: tuple[Count, ...] = ()
    """A checkpoint's copy of the section, divided among its hosts."""
    optimizer_bytes: tuple[Count, ...] = ()
    """The part of `state_bytes` that is the optimizer's and can lie in host memory instead."""
    tied_sums: tuple[TiedSum, ...] = ()
    """Of tied parameters, where they are used by several sections."""
    # Overhead of the worker's own code, which does not depend on the section.
    operation_s: NotNegative = 0.0
    """Per operation: choosing it, passing on its result, receiving the next one's input."""
    message_s: NotNegative = 0.0
    """Per message, beyond its link: threads at both ends, and waking the receiver."""
    collective_s: NotNegative = 0.0
    """Per all-reduce over two workers or more, beyond its link, and per commit."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    labels: tuple[str, ...] = ()
    """For people: each section's modules, "transformer.h.3 (model.py:88)"; empty if not known."""

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        faults: list[tuple[str, str]] = []
        if not self.forward_s:
            raise FieldFaults([("forward_s", "expected one time for each section, got none")])
        for each in fields(self):
            values, expected = getattr(self, each.name), self.num_sections - (each.name in _CUTS)
            if each.name == "tied_sums" or not isinstance(values, tuple):
                continue
            if len(values) != expected and (values or each.default != ()):
                got = f"expected {expected} entries for K={self.num_sections}, got {len(values)}"
                faults.append((each.name, got))
        if bool(self.input_s) != bool(self.weight_s):
            faults.append(("weight_s", "expected with input_s, or neither: they are one backward's halves"))
        if any(own > whole for own, whole in zip(self.optimizer_bytes, self.state_bytes, strict=False)):
            faults.append(("optimizer_bytes", "they are part of state_bytes and cannot be more"))
        for number, tied in enumerate(self.tied_sums):
            places = tied.sections
            if len(places) < 2 or list(places) != sorted(set(places)) or places[-1] >= self.num_sections:
                expected = f"two or more of the {self.num_sections} sections, ascending"
                faults.append((f"tied_sums[{number}].sections", f"expected {expected}, got {list(places)}"))
        if not faults and min(self.own_gradient_bytes) < 0:
            faults.append(("tied_sums", "they are part of gradient_bytes and cannot be more"))
        if faults:
            raise FieldFaults(faults)
        return self

    @property
    def num_sections(self) -> int:
        return len(self.forward_s)

    @property
    def has_halves(self) -> bool:
        """Whether backwards were measured in two operations."""
        return bool(self.input_s)

    @property
    def own_gradient_bytes(self) -> tuple[int, ...]:
        """`gradient_bytes` without those of `tied_sums`: all-reduced by the hosts of one section."""
        if not self.tied_sums:
            return self.gradient_bytes
        own = list(self.gradient_bytes)
        for tied in self.tied_sums:
            for section in tied.sections:
                own[section] -= tied.gradient_bytes
        return tuple(own)

    @property
    def frozen(self) -> int:
        """How many of the first sections get no gradient: they have none to all-reduce, and receive none."""
        gradients = zip(self.gradient_bytes, self.grad_cut_bytes, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda both: both == (0, 0), gradients))

    @property
    def saved_bytes(self) -> Sequence[int]:
        """Of each section, what a checkpoint or a new host of it needs: its state without gradient sums."""
        # Older calibrations do not say.
        return self.snapshot_bytes or [
            max(0, state - sums) for state, sums in zip(self.state_bytes, self.gradient_bytes, strict=True)
        ]

    def name(self, section: int) -> str:
        """The section's number, with its label if there is one: "section 3, layers.3 (model.py:88),"."""
        return f"section {section}, {self.labels[section]}," if self.labels else f"section {section}"

    def link(self, same_vm: bool) -> Link:
        return self.intra_vm if same_vm else self.inter_vm

    def with_optimizer_on_host(self) -> Calibration:
        """The calibration of workers that keep the optimizer's state, and update, in host memory."""
        own = self.optimizer_bytes or (0,) * self.num_sections
        state_bytes = tuple(map(operator.sub, self.state_bytes, own))
        return replace(self, state_bytes=state_bytes, optimizer_bytes=())
