"""`Calibration`: measured times and sizes of a model on one kind of hardware (Varuna §4.3, Table 2).

It does not depend on P, D or G.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .parsing import (
    InvalidCalibration,
    expect_fields,
    expect_numbers,
    expect_object,
    expect_str,
    expect_strs,
    is_finite,
    read_text,
)

FORMAT = 1

_TIMES = ("forward_s", "backward_s", "optimizer_s")
_SIZES = ("parameter_bytes", "gradient_bytes", "state_bytes", "activation_bytes")
_OPTIONAL_SIZES = (
    "batch_bytes",
    "forward_peak_bytes",
    "backward_peak_bytes",
    "reduced_bytes",
    "update_peak_bytes",
    "snapshot_bytes",
    "optimizer_bytes",
)
_CUTS = ("cut_bytes", "grad_cut_bytes")
_EXECUTOR = ("operation_s", "message_s", "collective_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two workers. A message occupies it for size / bandwidth, then takes the latency
    and a jitter that is exponential with mean `jitter_s`; messages of one kind keep their order.
    """

    latency_s: float
    bytes_per_s: float
    jitter_s: float = 0.0
    hop_latency_s: float | None = None
    """Latency, and below bandwidth, of a hop of a ring all-reduce; None: those of a message."""
    hop_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("latency_s", "jitter_s", "hop_latency_s"):
            value = getattr(self, name)
            if value is not None and (not is_finite(value) or value < 0):
                raise InvalidCalibration(f"{name}: {value!r} is not a time in seconds >= 0")
        for name in ("bytes_per_s", "hop_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and (not is_finite(value) or value <= 0):
                raise InvalidCalibration(f"{name}: {value!r} is not a bandwidth > 0")

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
class Calibration:
    """Times and sizes of one micro-batch of `microbatch_size` samples, per section 0..K-1.

    Raises `InvalidCalibration` naming the field when lengths disagree or a number is negative or not finite.
    """

    forward_s: tuple[float, ...]
    """F_i: forward pass of a section; recomputation costs the same."""
    backward_s: tuple[float, ...]
    """B_i: backward pass and adding to the gradient sums, without recomputation."""
    optimizer_s: tuple[float, ...]
    """The end of a step: dividing the section's gradient sums, their norms, and updating its weights."""
    parameter_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    """Bytes that the section's hosts all-reduce once a step (with `numerics: exact`, 8 per element)."""
    state_bytes: tuple[int, ...]
    """Resident on every host: weights, optimizer state, buffers and gradient sums."""
    activation_bytes: tuple[int, ...]
    """Kept between the forward and the backward of one micro-batch without recomputation, including outputs,
    excluding inputs."""
    cut_bytes: tuple[int, ...]
    """K-1 entries: bytes of one micro-batch that cross the cut after section k, forwards."""
    grad_cut_bytes: tuple[int, ...]
    """K-1 entries: bytes of the gradients that cross the cut after section k, backwards."""
    inter_vm: Link
    intra_vm: Link
    device_kind: str
    microbatch_size: int
    # One entry per section, or empty, which counts as zeros.
    batch_bytes: tuple[int, ...] = ()
    """A micro-batch's samples, if the section takes any of their entries."""
    forward_peak_bytes: tuple[int, ...] = ()
    """Peak of a running forward, beyond its inputs."""
    backward_peak_bytes: tuple[int, ...] = ()
    """Peak of a running backward, beyond what was there when it began."""
    reduced_bytes: tuple[int, ...] = ()
    """A step's gradients, from the end of their all-reduce until they are applied."""
    update_peak_bytes: tuple[int, ...] = ()
    """Peak while a step is applied, beyond state and gradients."""
    snapshot_bytes: tuple[int, ...] = ()
    """A checkpoint's copy of the section, divided among its hosts."""
    optimizer_bytes: tuple[int, ...] = ()
    """The part of `state_bytes` that is the optimizer's and can lie in host memory instead."""
    # Overhead of the worker's own code, which does not depend on the section.
    operation_s: float = 0.0
    """Per operation: choosing it, passing on its result, receiving the next one's input."""
    message_s: float = 0.0
    """Per message, beyond its link: threads at both ends, and waking the receiver."""
    collective_s: float = 0.0
    """Per all-reduce over two workers or more, beyond its link, and per commit."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    labels: tuple[str, ...] = ()
    """For people: each section's modules, "transformer.h.3 (model.py:88)"; empty if not known."""

    def __post_init__(self) -> None:
        num_sections = len(self.forward_s)
        if num_sections < 1:
            raise InvalidCalibration("forward_s: expected one time for each section, got none")
        for name in (*_TIMES, *_SIZES, *_CUTS, *_OPTIONAL_SIZES):
            values: tuple[float, ...] = getattr(self, name)
            if name in _OPTIONAL_SIZES and not values:
                continue
            expected = num_sections - 1 if name in _CUTS else num_sections
            if len(values) != expected:
                raise InvalidCalibration(
                    f"{name}: expected {expected} entries for K={num_sections}, got {len(values)}"
                )
            for index, value in enumerate(values):
                if not is_finite(value) or value < 0 or (name not in _TIMES and not isinstance(value, int)):
                    kind = "seconds" if name in _TIMES else "whole bytes"
                    raise InvalidCalibration(f"{name}[{index}]: {value!r} is not a number of {kind} >= 0")
        for name in _EXECUTOR:
            if not is_finite(value := getattr(self, name)) or value < 0:
                raise InvalidCalibration(f"{name}: {value!r} is not a number of seconds >= 0")
        if any(own > whole for own, whole in zip(self.optimizer_bytes, self.state_bytes, strict=False)):
            raise InvalidCalibration("optimizer_bytes: they are part of state_bytes and cannot be more")
        if self.labels and len(self.labels) != num_sections:
            raise InvalidCalibration(
                f"labels: expected none or {num_sections}, one for each section, got {len(self.labels)}"
            )
        if type(self.microbatch_size) is not int or self.microbatch_size < 1:
            raise InvalidCalibration(f"microbatch_size: {self.microbatch_size!r} is not a whole number >= 1")

    @property
    def num_sections(self) -> int:
        return len(self.forward_s)

    @property
    def frozen(self) -> int:
        """How many of the first sections get no gradient: they have none to all-reduce, and receive none."""
        gradients = zip(self.gradient_bytes, self.grad_cut_bytes, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda both: both == (0, 0), gradients))

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

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back to an equal calibration."""
        value: dict[str, Any] = {"format": FORMAT}
        for name in (*_TIMES, *_SIZES, *_CUTS, *_OPTIONAL_SIZES):
            value[name] = list(getattr(self, name))
        value |= {name: getattr(self, name) for name in _EXECUTOR}
        for name in ("inter_vm", "intra_vm"):
            link: Link = getattr(self, name)
            entries = {f.name: getattr(link, f.name) for f in fields(Link)}
            value[name] = {key: number for key, number in entries.items() if number is not None}
        value |= {"device_kind": self.device_kind, "microbatch_size": self.microbatch_size}
        value["versions"] = dict(self.versions)
        value["labels"] = list(self.labels)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> Calibration:
        """Read the object (or its text). Raises `InvalidCalibration` naming an unknown, missing or mistyped
        field (and, in a text, its line)."""
        if isinstance(value, str):
            return read_text(value, cls.from_json)
        optional = {"labels", *_OPTIONAL_SIZES, *_EXECUTOR}
        checked = expect_fields(value, "", {"format", *(f.name for f in fields(cls))}, optional)
        if checked["format"] != FORMAT:
            raise InvalidCalibration(
                f"format: {checked['format']!r} is not {FORMAT}, the one this version reads"
            )
        return cls(
            **{name: expect_numbers(checked[name], name, whole=False) for name in _TIMES},
            **{name: expect_numbers(checked[name], name, whole=True) for name in (*_SIZES, *_CUTS)},
            **{
                name: expect_numbers(checked[name], name, whole=True)
                for name in _OPTIONAL_SIZES
                if name in checked
            },
            **{name: checked[name] for name in _EXECUTOR if name in checked},
            inter_vm=_link(checked, "inter_vm"),
            intra_vm=_link(checked, "intra_vm"),
            device_kind=expect_str(checked["device_kind"], "device_kind"),
            microbatch_size=checked["microbatch_size"],
            versions={
                name: expect_str(text, f"versions.{name}")
                for name, text in expect_object(checked["versions"], "versions").items()
            },
            labels=expect_strs(checked.get("labels", []), "labels"),
        )


def _link(value: Mapping[str, Any], name: str) -> Link:
    optional = {f.name for f in fields(Link)} - {"latency_s", "bytes_per_s"}
    checked = expect_fields(value[name], name, {f.name for f in fields(Link)}, optional)
    try:
        return Link(**checked)
    except InvalidCalibration as error:
        raise error.inside(name) from error
